"""The real program in a pseudo-terminal: its output byte for byte, and keys and clicks to it."""

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

from tests.support.programs import Program, start

ROWS, COLUMNS = 36, 120


class Terminal:
    """A `segapp` at a pseudo-terminal of some columns and rows; `cwd` is the folder of its settings too.

    It is forked with its imports done, unless it `is_fresh` or another `program`.
    """

    def __init__(
        self,
        *words: str | Path,
        cwd: Path,
        size: tuple[int, int] = (COLUMNS, ROWS),
        program: tuple[str, ...] = ("-m", "segapp"),
        is_fresh: bool = False,
        **env: str,
    ) -> None:
        self.output = b""
        self._status: int | None = None
        self._forked: Program | None = None
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
        self.modes_before = self.modes()
        self._theirs = theirs  # kept open: the last output and the modes stay readable
        variables = {"TERM": "xterm-256color", "XDG_CONFIG_HOME": str(cwd), **env}
        if not is_fresh and program == ("-m", "segapp"):
            own: dict[str, Any] = {"NO_COLOR": None, **variables}
            self._forked = start(*words, cwd=cwd, logs=cwd, terminal=os.ttyname(theirs), **own)
            self.pid = self._forked.pid
        elif (pid := os.fork()) == 0:
            os.close(self._terminal)
            os.login_tty(theirs)
            os.chdir(cwd)
            os.environ.pop("NO_COLOR", None)
            os.environ.update(OMP_NUM_THREADS="1", **variables)
            os.execv(sys.executable, [sys.executable, *program, *map(str, words)])
        else:
            self.pid = pid

    def modes(self) -> list[Any]:
        return termios.tcgetattr(self._terminal)

    def read(self, for_s: float = 0.1) -> None:
        deadline_s = time.monotonic() + for_s
        is_open = self._terminal >= 0
        while (left_s := deadline_s - time.monotonic()) > 0:
            if select.select([self._terminal] * is_open, [], [], min(left_s, 0.1))[0]:
                self.output += os.read(self._terminal, 2**16)

    def wait_for(self, wanted: str, timeout_s: float = 60) -> None:
        """Waits until the output holds a text."""
        deadline_s = time.monotonic() + timeout_s
        while wanted.encode() not in self.output:
            assert time.monotonic() < deadline_s, self.output[-2000:]
            assert self.returncode is None, self.output[-2000:]
            self.read()

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def click(self, column: int, row: int) -> None:
        """Clicks at a column and row, counted from 1 (SGR mouse mode)."""
        self.type(f"\x1b[<0;{column};{row}M\x1b[<0;{column};{row}m")

    def send(self, number: int) -> None:
        """Sends a signal unless the program has ended."""
        if self.returncode is None:
            os.kill(self.pid, number)

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the number of the signal; None while it runs."""
        if self._forked is not None:
            return self._forked.returncode
        if self._status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status

    def wait(self, timeout_s: float = 30) -> int:
        """Waits for the end and returns the exit code."""
        deadline_s = time.monotonic() + timeout_s
        while self.returncode is None:
            assert time.monotonic() < deadline_s, "the program did not end"
            self.read()
        self.read()
        return self.returncode

    def peak_mib(self) -> float:
        """Returns the peak resident memory so far, MiB."""
        return peak_mib(self.pid)

    def hang_up(self, timeout_s: float = 60) -> int:
        """Closes the terminal, waits for the end of the program and returns the exit code."""
        os.close(self._terminal)
        os.close(self._theirs)
        self._terminal = self._theirs = -1
        return self.wait(timeout_s)

    def close(self) -> None:
        """Kills the program and closes the terminal."""
        self.send(signal.SIGKILL)
        if self._terminal >= 0:
            self.wait()
            os.close(self._terminal)
            os.close(self._theirs)


@contextlib.contextmanager
def terminal(*words: str | Path, cwd: Path, **options: Any) -> Iterator[Terminal]:
    """A `segapp` at a pseudo-terminal; killed at the end of the block."""
    shown = Terminal(*words, cwd=cwd, **options)
    try:
        yield shown
    finally:
        shown.close()


def peak_mib(pid: int) -> float:
    """Returns the peak resident memory of a process, MiB; 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    return 0.0
