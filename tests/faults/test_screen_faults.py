"""The screen is killed, fails, and is shown hostile names and files; the training does not notice (S08 to S11)."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from segapp.run.commands import parse_command, send_command
from segapp.run.events import Device, DeviceMemory, Memory, RunStart
from tests.support.fault_runs import FaultRun, Invariants, case, some
from tests.support.hostile_files import is_inert
from tests.support.recorded_runs import RecordedRun
from tests.support.terminals import COLUMNS, ROWS, Terminal, terminal

NewRun = Callable[..., FaultRun]
Note = Callable[[str, object], None]
SHOWN = "1 Loss"
LEFT = "segapp attach"
"""What is said when the screen was left."""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def attach(run: FaultRun, **env: str) -> Terminal:
    shown = Terminal("attach", "run", cwd=run.work, **env)
    shown.wait_for(SHOWN)
    return shown


def leave(shown: Terminal) -> None:
    shown.type("q")
    shown.wait_for(LEFT)
    assert shown.wait() == 0
    shown.close()


@pytest.mark.faults_long
@case("S08", how="screens killed while they show and in mid-command, 20 in and out, two at once", passes="exact")
def test_killed_screens_leave_the_training_exact(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run()

    def applied(count: int) -> None:
        run.wait_for(lambda: [e["status"] for e in run.events("command")].count("applied") == count, program)

    program = run.start(failpoints="train.step=sleep:0.2")
    run.wait_for_step(2, program)
    send_command(run.folder, parse_command("pause"))  # else it would end before the screens are there
    first, second = Terminal("attach", "run", cwd=run.work), attach(run, SEGAPP_FAILPOINTS="command.before_rename=kill")
    first.wait_for(SHOWN)
    applied(1)
    first.send(signal.SIGKILL)
    second.type(" ")
    for shown in (first, second):
        assert shown.wait() == -signal.SIGKILL, "the second with its command half way to the inbox"
        shown.close()
    for _ in range(20):
        leave(attach(run))
    third, fourth = Terminal("attach", "run", cwd=run.work), attach(run)
    third.wait_for(SHOWN)
    applied(1)
    third.type(" ")
    applied(2)
    for shown in (third, fourth):
        leave(shown)
    assert run.ended(program).returncode == 0
    invariants.check(run)


@pytest.mark.faults
@case("S10", how="failpoint tui.tick: an exception in the screen", passes="exit 1, terminal as before, trainer goes on")
def test_screen_exception_restores_terminal_and_spares_trainer(new_run: NewRun) -> None:
    run = new_run(train={"epochs": 100_000})
    program = run.start()
    run.wait_for_step(2, program)
    with terminal("attach", "run", cwd=run.work, SEGAPP_FAILPOINTS="tui.tick=3:raise:ZeroDivisionError") as shown:
        assert shown.wait(60) == 1
        assert shown.modes() == shown.modes_before
        after = shown.output.rpartition(b"\x1b[?1049l")[2].decode()
        assert shown.output.count(b"\x1b[?1049h") == shown.output.count(b"\x1b[?1049l") == 1
        for mode in ("1000", "1003", "1006", "2004"):  # mouse, pasting
            assert shown.output.rfind(f"\x1b[?{mode}l".encode()) >= shown.output.rfind(f"\x1b[?{mode}h".encode())
        assert shown.output.rfind(b"\x1b[?25h") > shown.output.rfind(b"\x1b[?25l"), "the cursor is there again"
    assert "error: " in after
    assert "failpoint tui.tick" in after
    assert "Traceback" not in after
    at = run.events("step")[-1]["step"]
    run.wait_for_step(at + 3, program)
    program.send(signal.SIGTERM)
    assert run.ended(program).returncode == 75


POINTER = re.compile(rb"\x1b\]22;[a-z-]+\x07")
"""Textual sets the shape of the mouse pointer."""
HOSTILE = (
    "\x1b[2JEVIL",
    "\x1b]52;c;b3duZWQ=\x07EVIL",
    "\x1b]8;;http://evil\x1b\\EVIL\x1b]8;;\x1b\\",
    "\x1bP$qEVIL\x1b\\",
    "\x9b31mEVIL",
    "\x07\x08\rEVIL",
    "\u202eEVIL",
    "[/EVIL",
    "[red]EVIL[/red]",
    "[@click=app.quit]EVIL[/]",
    "EVIL" * 2500,
)


def hostile_run(work: Path) -> RecordedRun:
    """A run in which every word from outside is hostile."""
    words = iter(HOSTILE * 9)
    run = RecordedRun(work / "[@click=app.quit]\x1b[2JEVIL", classes=HOSTILE, num_devices=3)
    devices = [Device(device=next(words), name=next(words), uuid=next(words), total_mib=9) for _ in range(3)]
    run.write(
        RunStart(
            classes=list(HOSTILE), num_params=7, batch_size=8, epochs=9, steps_per_epoch=60, devices=devices,
            split=[2, 3, 3],
        )
    )  # fmt: skip
    for _ in range(2):
        run.epoch()
    memory = [DeviceMemory(device=next(words), uuid=next(words), used_mib=5, phase=next(words)) for _ in range(3)]
    run.write(Memory(devices=memory))
    for word in HOSTILE:
        run.alert(word, f"{word} RuntimeError: {word}")
        run.beat(word)
    (run.folder.path / "samples").mkdir(exist_ok=True)
    for word in HOSTILE[:-1]:
        (run.folder.path / "samples" / f"{word.replace('/', '_')}.png").write_bytes(b"\x89PNG\r\n\x1a\nEVIL")
    run.end("failed", HOSTILE[1])
    return run


TITLE = re.compile(rb"\x1b\]2;[^\x00-\x1f\x7f]*\x07|\x1b\[2[23];2t")
"""The screen sets the terminal's title, to printable characters only, and gives the old one back."""


def payloads_in(output: bytes) -> list[str]:
    """What of the hostile words has reached the terminal as it was."""
    output = TITLE.sub(b"", POINTER.sub(b"", output))
    begins = [b"\x1b[2JEVIL", b"\x1b]", b"http://evil\x1b", b"\x1bP$q", b"\x07", b"\x08", "\x9b".encode()]
    return [repr(begin) for begin in (*begins, "\u202e".encode()) if begin in output]


@pytest.mark.faults
@case("S09", how="the screen of hostile names, alerts, devices, files; clicks", passes="no payload byte; alive")
def test_hostile_names_are_inert_on_the_screen(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    with terminal("attach", run.folder.path, cwd=tmp_path) as shown:
        shown.wait_for("FAILED")
        for key in ("1", "2", "f", "f", "3", "f", "o", "f", "4", "f", "f", "5", "?", "\x1b"):
            shown.type(key)
            shown.read(0.1)
        for row in range(1, ROWS - 1, 3):
            for column in range(2, COLUMNS, 11):
                shown.click(column, row)
            shown.read(0.02)
        shown.read(1)
        assert shown.returncode is None, "a click has ended it"
        for key in ("\x1b", "\x1b", "q"):  # what a click has opened takes keys
            shown.type(key)
            shown.read(0.5)
        assert shown.wait() == 0
    assert payloads_in(shown.output) == []
    assert b"EVIL" in shown.output
    assert b"[@click=app" in shown.output, "markup is shown as it is written"


@case("S11", how="the screen on events with a hole of NUL, NaN, torn, cut, replaced", passes="alive; < 200 MiB")
@case("S11", how="the same with a hole of 2 GB", passes="alive; < 200 MiB")
@pytest.mark.parametrize("hole_bytes", some([2**28, 2**31], 2**28))
def test_screen_reads_on_after_damaged_events(tmp_path: Path, record_property: Note, hole_bytes: int) -> None:
    run = RecordedRun(tmp_path / "run", num_devices=2)
    for _ in range(3):
        run.epoch()
    run.end()
    events = run.folder.events
    whole = events.read_bytes()
    last = whole.rstrip(b"\n").rpartition(b"\n")[2]
    with events.open("r+b") as file:
        file.truncate(len(whole) + hole_bytes)
        file.seek(0, os.SEEK_END)
        file.write(b'\n{"v":1,"seq":NaN,"t":Infinity,"type":"step"}\n' + b"\xff\xfe\n" + last + b'\n{"v":1,"se')
    with terminal("attach", "run", cwd=tmp_path, is_fresh=True) as shown:  # its memory is measured
        shown.wait_for("FINISHED", 120)
        events.write_bytes(whole[: len(whole) // 2])  # cut
        shown.read(1)
        events.rename(events.with_suffix(".1"))
        shown.read(1)
        events.write_bytes(whole)
        shown.read(1)
        assert shown.returncode is None
        peak = shown.peak_mib()
        shown.type("q")
        assert shown.wait() == 0
    text = TITLE.sub(b"", POINTER.sub(b"", shown.output)).decode().replace("\r", "")
    assert text.count("\x07") <= 1, "the bell rings once for the end of the run, which was read a second time"
    text = text.replace("\x07", "")
    assert is_inert(re.sub(r"\x1b(\[[0-?]*[ -/]*[@-~]|[>=78]|_G[^\x1b]*\x1b\\)", "", text))
    record_property("figure", f"screen {peak:.0f} MiB")
    assert peak < 200
