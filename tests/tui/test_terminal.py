"""The screen at a real pseudo-terminal: start, exit, and end with its terminal."""

from __future__ import annotations

import io
import locale
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from segapp.__main__ import main
from segapp.errors import ConfigError
from segapp.run.commands import drain_commands
from segapp.tui import terminal as product
from segapp.tui.app import TYPING_S
from tests.support.recorded_runs import RecordedRun
from tests.support.terminals import terminal

LEAVES = "\x1b[?1049l"
"""Switches to the screen of the shell."""
DEAF = "import signal\nsignal.signal(signal.SIGHUP, signal.{})\n{}"
MAIN = "import sys\nfrom segapp.__main__ import main\nmain(sys.argv[1:])"
WAITING = (
    "import queue\nfrom segapp.tui.terminal import end_with_terminal\nend_with_terminal(0.2)\n"
    "print('LIVE', flush=True)\nqueue.Queue().get()"  # as for a place in the queue of a writer that has ended
)


def test_q_exits_with_attach_hint_and_restores_the_terminal(fresh: RecordedRun, tmp_path: Path) -> None:
    with terminal("attach", fresh.folder.path, cwd=tmp_path, NO_COLOR="1") as shown:
        shown.wait_for("Leave")
        fresh.clock.now_s = time.time()  # its start may have taken longer than a run without events is live
        fresh.train(1)
        shown.wait_for("LIVE")
        shown.type("\x1a")
        shown.wait_for("needs a shell")  # ctrl+z without one does not stop the screen
        shown.type("c")
        shown.wait_for("u takes it back")
        time.sleep(2 * TYPING_S)  # faster keys are typed text
        shown.type("q")
        shown.wait_for("segapp attach")
        assert shown.wait() == 0
        assert shown.modes() == shown.modes_before
        text = shown.output.decode()
    assert LEAVES in text
    assert " (checkpoint sent); to see it again" in text
    assert [received.text for received in drain_commands(fresh.folder.path)] == ["checkpoint"]
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", text) for code in found.split(";")}
    assert {"49"} <= codes <= {"", "0", "1", "2", "7", "39", "49"}  # weight, reverse, and the terminal's own colors


def test_ctrl_z_returns_to_the_shell_until_fg(fresh: RecordedRun, tmp_path: Path) -> None:
    titles = ("LIVE", "Loss", "Classes", "Events", "Leave")  # most of them never change
    bash = ("-c", "import os\nos.execvp('bash', ['bash', '--norc', '-i'])")
    with terminal(cwd=tmp_path, program=bash, PYTHON=sys.executable, RUN=str(fresh.folder.path)) as shell:
        shell.type('"$PYTHON" -m segapp attach "$RUN"\n')
        for title in titles:
            shell.wait_for(title)
        shell.output = b""
        shell.type("\x1a")
        shell.wait_for("Stopped")
        assert LEAVES in shell.output.decode()
        shell.type("stty -a\n")
        shell.wait_for(" icanon")
        shell.wait_for(" echo ")
        assert b"-icanon" not in shell.output
        shell.output = b""
        shell.type("fg\n")
        shell.wait_for("\x1b[?1049h")
        for title in titles:
            shell.wait_for(title)
        shell.type("q")
        shell.wait_for("segapp attach")


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
    assert product.is_ascii_only() == is_ascii
    monkeypatch.setattr(sys, "__stderr__", io.TextIOWrapper(io.BytesIO(), "latin-1"))
    assert product.is_ascii_only()


@pytest.mark.parametrize(
    "code", [DEAF.format("SIG_DFL", MAIN), DEAF.format("SIG_IGN", MAIN), DEAF.format("SIG_IGN", WAITING)],
    ids=["hears of it", "does not hear of it", "waits for it"],
)  # fmt: skip
def test_closed_terminal_ends_the_screen(fresh: RecordedRun, tmp_path: Path, code: str) -> None:
    with terminal("attach", fresh.folder.path, cwd=tmp_path, program=("-c", code)) as shown:
        shown.wait_for("LIVE")
        shown.read(0.5)
        assert shown.returncode is None
        shown.hang_up(20)


def test_sigterm_ends_the_screen_and_restores_the_terminal(fresh: RecordedRun, tmp_path: Path) -> None:
    with terminal("attach", fresh.folder.path, cwd=tmp_path) as shown:
        shown.wait_for("LIVE")
        shown.send(signal.SIGTERM)
        assert shown.wait() == 0
        assert LEAVES in shown.output.decode()
        assert shown.modes() == shown.modes_before


def test_attach_without_terminal_is_refused(
    fresh: RecordedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(SystemExit) as ended:
        main(["attach", str(fresh.folder.path)])
    assert ended.value.code == 2
    assert "is not a terminal: `segapp status RUN`" in capsys.readouterr().err


@pytest.mark.parametrize("term", ["dumb", "", "unknown"])
def test_dumb_terminal_is_refused(monkeypatch: pytest.MonkeyPatch, term: str) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr(os, "isatty", lambda fd: True)
    with pytest.raises(ConfigError, match="does not support the TUI"):
        product.check_terminal()
