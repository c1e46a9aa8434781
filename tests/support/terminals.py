"""The real program in a pseudo-terminal: what it writes there, byte for byte, and keys and clicks for it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROWS, COLUMNS = 36, 120


class Terminal:
    """A `segapp` at a pseudo-terminal.

    Args:
        *words: its command line.
        cwd: its working directory; its settings lie there too.
        **env: variables to set.
    """

    def __init__(self, *words: str | Path, cwd: Path, **env: str) -> None:
        self.output = b""
        self._status: int | None = None
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.modes_before = self.modes()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._terminal)
            os.login_tty(theirs)
            os.chdir(cwd)
            os.environ.update(TERM="xterm-256color", XDG_CONFIG_HOME=str(cwd), OMP_NUM_THREADS="1", **env)
            os.environ.pop("NO_COLOR", None)
            os.execv(sys.executable, [sys.executable, "-m", "segapp", *map(str, words)])
        self._theirs = theirs  # kept open: what was written last can be read, and the modes are still there

    def modes(self) -> list[Any]:
        """How the terminal treats what is typed (termios)."""
        return termios.tcgetattr(self._terminal)

    def read(self, for_s: float = 0.1) -> None:
        """Takes in what was written, for some time."""
        deadline_s = time.monotonic() + for_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], min(left_s, 0.1))[0]:
                self.output += os.read(self._terminal, 2**16)

    def wait_for(self, wanted: str, timeout_s: float = 60) -> None:
        """Waits until something was written."""
        deadline_s = time.monotonic() + timeout_s
        while wanted.encode() not in self.output:
            assert time.monotonic() < deadline_s, self.output[-2000:]
            assert self.returncode is None, self.output[-2000:]
            self.read()

    def type(self, keys: str) -> None:
        """Types some keys."""
        os.write(self._terminal, keys.encode())

    def click(self, column: int, row: int) -> None:
        """Clicks at a place, counted from 1 (SGR mouse mode)."""
        self.type(f"\x1b[<0;{column};{row}M\x1b[<0;{column};{row}m")

    def send(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    @property
    def returncode(self) -> int | None:
        """None while it runs."""
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout_s: float = 30) -> int:
        """Its exit code, once it has ended."""
        deadline_s = time.monotonic() + timeout_s
        while self.returncode is None:
            assert time.monotonic() < deadline_s, "it did not end"
            self.read()
        self.read()
        return self.returncode

    def peak_mib(self) -> float:
        """The most memory that it has held so far."""
        return peak_mib(self.pid)

    def close(self) -> None:
        """Ends it, whatever it does."""
        self.send(signal.SIGKILL)
        self.wait()
        os.close(self._terminal)
        os.close(self._theirs)


@contextlib.contextmanager
def terminal(*words: str | Path, cwd: Path, **env: str) -> Iterator[Terminal]:
    """A `segapp` at a pseudo-terminal, ended at the end of the block."""
    shown = Terminal(*words, cwd=cwd, **env)
    try:
        yield shown
    finally:
        shown.close()


def peak_mib(pid: int) -> float:
    """The most resident memory that a process has held so far, MiB; 0 where it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0
