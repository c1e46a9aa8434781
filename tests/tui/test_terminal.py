"""`run_ui` at a real pseudo-terminal: start, exit, and end with its terminal."""

from __future__ import annotations

import fcntl
import io
import locale
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import Any

import pytest

from segapp.errors import ConfigError
from segapp.run.commands import drain_commands
from segapp.tui import terminal
from segapp.tui.app import TYPING_S, run_ui
from tests.support.recorded_runs import RecordedRun, live_run

SHOW = "import sys\nfrom segapp.tui.app import run_ui\nsys.exit(run_ui(sys.argv[1]))"


class Terminal:
    """A child process at a pseudo-terminal."""

    def __init__(self, run: RecordedRun, home: Path, *, ignores_hangup: bool = False, code: str = SHOW) -> None:
        self.output = b""
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm-256color", XDG_CONFIG_HOME=str(home), OMP_NUM_THREADS="1")
            os.environ.pop("NO_COLOR", None)
            if ignores_hangup:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            os.execv(sys.executable, [sys.executable, "-c", code, str(run.folder.path)])
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))

    def read_until(self, wanted: bytes, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while wanted not in self.output:
            assert time.monotonic() < deadline, self.output[-3000:]
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.output += os.read(self.fd, 65536)
                except OSError:
                    break
        assert wanted in self.output, self.output[-3000:]

    def wait(self, timeout_s: float = 60.0) -> int:
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        raise AssertionError("the screen did not end")


@pytest.fixture
def run(tmp_path: Path) -> Any:
    run = live_run(tmp_path / "run", steps_per_epoch=10)
    yield run
    run.folder.release()


def test_q_exits_with_attach_hint_and_restores_the_terminal(run: RecordedRun, tmp_path: Path) -> None:
    shown = Terminal(run, tmp_path)
    shown.read_until(b"LIVE")
    os.write(shown.fd, b"c")
    shown.read_until(b"u undoes it")
    time.sleep(2 * TYPING_S)  # faster keys are typed text
    os.write(shown.fd, b"q")
    shown.read_until(b"segapp attach")
    assert shown.wait() == 0
    assert b"\x1b[?1049l" in shown.output
    assert b" (sent: checkpoint); to see it again" in shown.output
    assert [received.text for received in drain_commands(run.folder.path)] == ["checkpoint"]


def test_ctrl_z_returns_to_the_shell_until_fg(run: RecordedRun, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    shell = Terminal(run, tmp_path, code="import os\nos.execvp('bash', ['bash', '--norc', '-i'])")
    os.write(shell.fd, f"{sys.executable} {tmp_path}/show.py {run.folder.path}\n".encode())
    titles = (b"LIVE", b"Loss", b"Classes", b"Events", b"Leave")  # most of them never change
    for title in titles:
        shell.read_until(title)
    shell.output = b""
    os.write(shell.fd, b"\x1a")
    shell.read_until(b"Stopped")
    assert b"\x1b[?1049l" in shell.output  # the screen of the shell
    os.write(shell.fd, b"stty -a\n")
    shell.read_until(b" icanon")
    shell.read_until(b" echo ")
    assert b"-icanon" not in shell.output
    shell.output = b""
    os.write(shell.fd, b"fg\n")
    shell.read_until(b"\x1b[?1049h")
    for title in titles:
        shell.read_until(title)
    os.write(shell.fd, b"q")
    shell.read_until(b"segapp attach")
    os.write(shell.fd, b"exit\n")
    shell.wait()


def test_ctrl_z_without_a_shell_does_not_stop_the_screen(run: RecordedRun, tmp_path: Path) -> None:
    shown = Terminal(run, tmp_path)
    shown.read_until(b"LIVE")
    os.write(shown.fd, b"\x1a")
    shown.read_until(b"needs a shell")
    os.write(shown.fd, b"q")
    assert shown.wait() == 0


def test_no_color_leaves_the_colors_of_the_terminal(run: RecordedRun, tmp_path: Path) -> None:
    shown = Terminal(run, tmp_path, code=f"import os\nos.environ['NO_COLOR'] = '1'\n{SHOW}")
    shown.read_until(b"LIVE")
    shown.read_until(b"Leave")
    os.write(shown.fd, b"q")
    shown.read_until(b"segapp attach")
    codes = {code for found in re.findall(rb"\x1b\[([\d;]*)m", shown.output) for code in found.split(b";")}
    assert codes <= {b"", b"0", b"1", b"2", b"7", b"39", b"49"}  # weight, reverse, and the terminal's own colors
    assert b"49" in codes


@pytest.mark.parametrize(
    ("names", "encoding", "is_ascii"),
    [
        ({"LANG": "de_DE.UTF-8"}, "UTF-8", False),
        ({"LC_ALL": "C"}, "ANSI_X3.4-1968", True),
        ({"LANG": "de_DE.ISO-8859-1"}, "ISO-8859-1", True),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, "UTF-8", True),  # Python has set LC_CTYPE
        ({"LANG": "POSIX", "LC_CTYPE": "C.UTF-8"}, "UTF-8", True),
        ({"LC_CTYPE": "C.UTF-8"}, "UTF-8", False),  # no locale at all, as in a container
        ({"LANG": "C", "LC_CTYPE": "de_DE.UTF-8"}, "UTF-8", False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8", "LC_ALL": "C.UTF-8"}, "UTF-8", False),
    ],
)
def test_ascii_follows_the_locale(
    names: dict[str, str], encoding: str, is_ascii: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        monkeypatch.setenv(name, names.get(name, ""))
    monkeypatch.setattr(locale, "getencoding", lambda: encoding)
    monkeypatch.setattr(sys, "__stderr__", io.TextIOWrapper(io.BytesIO(), "utf-8"))
    assert terminal.is_ascii_only() == is_ascii
    monkeypatch.setattr(sys, "__stderr__", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert terminal.is_ascii_only()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ignores_hangup", [False, True])
def test_closed_terminal_ends_the_screen(run: RecordedRun, tmp_path: Path, ignores_hangup: bool) -> None:
    shown = Terminal(run, tmp_path, ignores_hangup=ignores_hangup)
    shown.read_until(b"LIVE")
    os.close(shown.fd)
    shown.wait()


def test_closed_terminal_ends_a_screen_that_waits_for_it(run: RecordedRun, tmp_path: Path) -> None:
    waiting = (
        "import queue, signal\nfrom segapp.tui.terminal import end_with_terminal\n"
        "signal.signal(signal.SIGHUP, lambda *_: None)\nend_with_terminal(0.2)\n"
        "print('LIVE', flush=True)\nqueue.Queue().get()"  # as for a place in the queue of a writer that has ended
    )
    shown = Terminal(run, tmp_path, code=waiting)
    shown.read_until(b"LIVE")
    time.sleep(0.5)
    assert os.waitpid(shown.pid, os.WNOHANG) == (0, 0)
    os.close(shown.fd)
    assert shown.wait(20) == 0


def test_sigterm_ends_the_screen_and_restores_the_terminal(run: RecordedRun, tmp_path: Path) -> None:
    shown = Terminal(run, tmp_path)
    shown.read_until(b"LIVE")
    os.kill(shown.pid, signal.SIGTERM)
    shown.read_until(b"\x1b[?1049l")
    assert shown.wait() == 0


def test_attach_without_terminal_is_refused(run: RecordedRun) -> None:
    code = (
        "import sys\nfrom segapp.tui.app import run_ui\n"
        "try:\n run_ui(sys.argv[1])\nexcept Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(run.folder.path)], stdin=subprocess.DEVNULL, capture_output=True,
        text=True, timeout=60, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    assert "ConfigError stdin is not a terminal: `segapp status RUN`" in done.stdout


@pytest.mark.parametrize("term", ["dumb", "", "unknown"])
def test_dumb_terminal_is_refused(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    with pytest.raises(ConfigError, match="does not support the TUI"):
        terminal.check_terminal()


def test_user_errors_of_attach_are_named(tmp_path: Path, run: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no such run"):
        run_ui(tmp_path / "nothing")
