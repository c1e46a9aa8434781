"""The whole screen in Textual's test driver: its texts at every size, and the effect of its keys on a run folder."""

from __future__ import annotations

import itertools
import math
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from textual import events
from textual.pilot import Pilot

from segapp.run.commands import drain_commands
from segapp.run.events import CommandAnswer
from segapp.tui import keys
from segapp.tui.app import HOLD_S, TYPING_S, MonitorApp
from segapp.tui.layout import plan_layout
from segapp.view.source import LiveSource
from tests.support.recorded_runs import CAMVID, Clock, RecordedRun, live_run
from tests.support.screens import press, run_screen, said, screen_rows, screen_text, settle

REAL_S = (HOLD_S, TYPING_S)
SIZES = [(120, 36), (100, 30), (80, 24), (60, 15), (40, 10)]


def check_regions(app: MonitorApp) -> None:
    """Check that every visible widget lies inside the screen, and that no two panes overlap."""
    width, height = app.size
    panes = []
    for widget in app.screen.walk_children():
        if widget.display and all(parent.display for parent in widget.ancestors if hasattr(parent, "display")):
            region = widget.region
            if region.area and (widget.has_class("pane") or widget.id in ("head", "progress", "keys")):
                assert region.x >= 0, widget
                assert region.y >= 0, widget
                assert region.right <= width, (widget, region)
                assert region.bottom <= height, (widget, region)
                panes.append((widget.id, region))
    for (one, a), (other, b) in itertools.combinations(panes, 2):
        assert not a.overlaps(b), (one, other, a, b)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = live_run(tmp_path_factory.mktemp("screen") / "camvid-042")
    yield run
    run.folder.release()


def sent(run: RecordedRun) -> list[str]:
    return [received.text for received in drain_commands(run.folder.path)]


# --- its texts --------------------------------------------------------------------------------------------------------


def test_wide_screen_shows_every_key_value(live: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        for wanted in (
            "camvid-042", "LIVE train", "epoch 13/20", "step 38/60", "lr 4.1e-3", "ETA", "mean e13 0.", "smoothed 0.",
            "val 0.",
            "5 img", "9 img", "71°", "15.8/22.0 GiB", "5 → 6", "PENDING: epoch 14", "split 5·9·9·9 → 6·9·9·8",
            "mIoU 0.557", "img/s", "waiting for data 4%", "pole", "bicyclist", "alice@box: set gpu0_bsz=6 accepted",
            "q Leave", "? Help",
        ):  # fmt: skip
            assert wanted in text, (wanted, text)
        assert not re.search(r"\ds ago|pid", text)  # fresh
        assert re.search("[⠁-⣿]", text)
        rows = text.splitlines()
        assert len(rows) == 36
        worst_first = [re.search(rf"│{name} ", text).start() for name in ("pole", "sign", "car", "road")]  # type: ignore[union-attr]
        assert worst_first == sorted(worst_first)
        check_regions(app)

    run_screen(live, act)


@pytest.mark.parametrize("size", SIZES)
def test_screen_at_named_sizes_has_its_panes(live: RecordedRun, size: tuple[int, int]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "LIVE" in text
        assert "camvid-042" in text
        check_regions(app)
        if size == (40, 10):
            assert "needs 60x15, has 40x10" in text
            assert "13/20" in text
        else:
            assert "epoch 13/20" in text
            assert "PENDING" in text or size[0] < 100
            assert "? Help" in text

    run_screen(live, act, size)


@pytest.mark.slow
def test_panes_stay_inside_the_screen_at_any_size(live: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for width, height in [(200, 60), (140, 20), (100, 15), (99, 40), (60, 60), (61, 16), (59, 30), (20, 5), (8, 3),
                              (1, 1), (120, 22), (101, 29), (300, 90), (80, 24)]:  # fmt: skip
            await pilot.resize_terminal(width, height)
            await settle(app, pilot)
            check_regions(app)
            assert app.layout_plan == plan_layout(width, height)
            if width >= 8 and height > 1:
                assert "LIVE" in screen_text(app), (width, height)

    run_screen(live, act)


CASES: dict[str, Callable[[Path], RecordedRun]] = {}


def case(make: Callable[[Path], RecordedRun]) -> Callable[[Path], RecordedRun]:
    CASES[make.__name__] = make
    return make


@case
def finished(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20, epochs=3)
    for _ in range(3):
        run.epoch()
    run.end()
    return run


@case
def failed(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20, epochs=3)
    run.epoch()
    run.end("failed", "device 0 ran out of memory: use a smaller batch_size")
    return run


@case
def eight_gpus(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20, num_devices=8, batch_size=64)
    run.epoch()
    return run


@case
def many_classes(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20, classes=[f"class number {i}" for i in range(150)], num_devices=1)
    run.epoch()
    run.epoch()
    return run


@case
def one_class_on_a_cpu(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20, classes=["road"], num_devices=1, device="cpu")
    run.epoch()
    return run


@case
def nan_losses(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20)
    run.train(30)
    run.train(10, loss=math.nan)
    run.train(20)
    return run


@case
def only_nan(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20)
    run.train(5, loss=math.nan)
    return run


@case
def nothing_yet(path: Path) -> RecordedRun:
    return RecordedRun(path)


@case
def odd_names(path: Path) -> RecordedRun:
    names = [
        "[/] [bold red]",
        "[@click=app.exit]x[/]",
        "\x1b[2J\x1b]0;title\x07",
        "日本語の道路標識と信号機",
        "a" * 300,
        "$error\u202e",
    ]
    run = RecordedRun(path, classes=names, steps_per_epoch=20)
    run.epoch()
    run.alert("oom", "[red]alert[/red] \x1b[31m and [/]")
    run.write(CommandAnswer(id="f" * 12, command="set [/]", by="[/]@\x1b[1m", status="rejected", reason="[b]"))
    return run


EXPECTED = {
    "finished": ["FINISHED", "finished: 20 epochs"],
    "failed": ["FAILED", "ran out of memory"],
    "eight_gpus": ["n=8", "split 8·8·8·8·8·8·8·8"],
    "many_classes": ["class number"],
    "one_class_on_a_cpu": ["road", "2 Memory", "CPU0", "812 MiB"],
    "nan_losses": ["×", "not finite"],
    "only_nan": ["no finite value yet"],
    "nothing_yet": ["STARTING", "starting: first step, 0s"],
    "odd_names": ["[/] [bold red]", "[@click=app.exit", r"\x1b[2J", "[red]alert[/red]"],
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted(CASES))
@pytest.mark.parametrize("size", [(120, 36), pytest.param((80, 24), marks=pytest.mark.slow)])
def test_unusual_runs_are_shown_with_their_state(tmp_path: Path, name: str, size: tuple[int, int]) -> None:
    run = CASES[name](tmp_path / "run")
    if name == "eight_gpus":
        run.gpu0_bsz = 8

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        found = ""
        for pane in "1234":
            await press(app, pilot, pane)
            found += screen_text(app)
            check_regions(app)
        for wanted in EXPECTED[name]:
            if wanted != "split 8·8·8·8·8·8·8·8" and wanted != "n=8":
                assert wanted in found, (wanted, found)
        assert "\x1b" not in found
        assert ("gpu0_bsz" in found.replace("b gpu0_bsz", "")) == (run.num_devices > 1 and name != "nothing_yet")

    run_screen(run, act, size)


def test_each_of_eight_gpus_has_a_line(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", num_devices=8, batch_size=64, gpu0_bsz=8, steps_per_epoch=20)
    run.epoch()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert text.count("8 img") == 8
        assert "split 8·8·8·8·8·8·8·8" in text

    run_screen(run, act)


def test_crash_is_shown_with_the_next_move(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20)
    run.epoch()
    run.folder.run_json.write_text(run.folder.run_json.read_text().replace('"pid": ', '"pid": 99'))
    text = run.folder.run_json.read_text()
    run.folder.run_json.write_text(re.sub(r'("pid"\s*:\s*)\d+', r"\g<1>4194000", text))

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "CRASHED" in text
        assert f"segapptrain--resume{run.folder.path}" in "".join(text.split())
        await press(app, pilot, "c")
        assert sent(run) == []
        assert "the run has ended" in said(app)

    run_screen(run, act)


def test_removed_folder_is_reported_and_the_view_kept(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        shutil.rmtree(fresh.folder.path)
        assert isinstance(app.shown.source, LiveSource)
        app.shown.source._trainer = None
        await settle(app, pilot)
        text = screen_text(app)
        assert "GONE" in text
        assert "the run folder was removed" in text
        assert "epoch 2/8" in text

    run_screen(fresh, act)
    fresh.folder.path.mkdir()


def test_reverted_change_stays_on_screen_until_seen(fresh: RecordedRun) -> None:
    fresh.alert("reverted", "gpu0_bsz=6 ran out of memory: back to 4")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "reverted: gpu0_bsz=6 ran out of memory: back to 4  a dismiss" in screen_text(app)
        await press(app, pilot, "a")
        assert "a dismiss" not in screen_text(app)

    run_screen(fresh, act)


# --- its keys ---------------------------------------------------------------------------------------------------------


def test_gpu0_bsz_is_changed_and_undone_with_one_key(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "b")
        assert "gpu0_bsz is 4" in screen_text(app)
        await press(app, pilot, "5")
        text = screen_text(app)
        assert "split 5·9·9·9" in text
        assert "peaks" in text
        await press(app, pilot, "enter")
        assert sent(fresh) == ["set gpu0_bsz=5"]
        received = drain_commands(fresh.folder.path)[0]
        fresh.change_gpu0(5, apply=False, command_id=received.id)
        await settle(app, pilot)
        assert "4 → 5  PENDING: epoch 3" in screen_text(app)
        await press(app, pilot, "u")
        assert sent(fresh)[-1] == f"cancel {received.id}"
        fresh.change_gpu0(5, command_id=received.id)
        await settle(app, pilot)
        assert "set gpu0_bsz=5 applied" in said(app)
        assert "applied at epoch" in screen_text(app)
        await press(app, pilot, "u")
        assert sent(fresh)[-1] == "set gpu0_bsz=4"

    run_screen(fresh, act)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("typed", "word", "is_sent"),
    [
        (["3", "enter"], "", "set gpu0_bsz=3"),
        (["3", "3", "enter"], "refused", None),
        (["0", "enter"], "", "set gpu0_bsz=0"),
        (["9", "enter"], "not sent: won't fit", None),
        (["1", "2", "backspace", "backspace", "3", "enter"], "", "set gpu0_bsz=3"),
        (["9", "escape"], "", None),
        (["enter"], "or even", None),
        ([*"even"], "tight", None),
        ([*"even", "enter"], "", "set gpu0_bsz=none"),
    ],
)
def test_split_editor_accepts_and_rejects_values(
    fresh: RecordedRun, typed: list[str], word: str, is_sent: str | None
) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "b", *typed)
        assert sent(fresh) == ([] if is_sent is None else [is_sent])
        assert (len(app.screen_stack) > 1) == bool(word)
        if word:
            assert word in screen_text(app)

    run_screen(fresh, act)


def test_pause_resume_and_checkpoint_keys_send_commands(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "space", "p", "c")
        assert sent(fresh) == ["pause", "checkpoint"]
        first = drain_commands(fresh.folder.path)[0]
        fresh.write(CommandAnswer(id=first.id, command="pause", by="a@b", status="applied"))
        fresh.beat("paused", 0.0)
        await settle(app, pilot)
        assert "PAUSED" in screen_text(app)
        assert "p Resume" in screen_text(app)
        await press(app, pilot, "space", "p")
        assert sent(fresh) == ["pause", "checkpoint", "resume"]

    run_screen(fresh, act)


@pytest.mark.parametrize(
    ("pressed", "wanted"),
    [
        ("n", []), ("enter", []), ("escape", []), ("q", []), ("space", []),
        ("e", ["stop epoch"]), ("x", ["stop"]), ("down enter", ["stop epoch"]), ("down down enter", ["stop"]),
    ],
)  # fmt: skip
def test_stopping_is_a_list_that_begins_with_training_on(fresh: RecordedRun, pressed: str, wanted: list[str]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        app.view.at_step = 93  # of a heartbeat after the last logged step, 25
        await press(app, pilot, "S")
        text = screen_text(app)
        assert re.search(
            r"Keep training +esc, n.*\n.*After this epoch, ~32s +e .*\n.*Now: saves about step 93 +x ", text
        )
        await press(app, pilot, *pressed.split())
        assert sent(fresh) == wanted

    run_screen(fresh, act)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock by which commands are held and keys are typed."""
    found = Clock(1000.0)
    monkeypatch.setattr("segapp.tui.app.monotonic", found)
    return found


def test_command_can_be_taken_back_for_three_seconds(fresh: RecordedRun, clock: Clock) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        async def after(seconds: float, *names: str) -> list[str]:
            clock.now_s += seconds
            await press(app, pilot, *names)
            return sent(fresh)

        assert await after(1, "p") == []
        assert said(app) == "pause in 3 s: u undoes it"
        assert await after(2.9) == []
        assert await after(0, "u") == []
        assert said(app) == "pause: taken back, not sent"
        assert await after(10) == []
        await after(1, "S")
        await after(1, "x")
        assert await after(2.9) == []
        assert await after(0.2) == ["stop"]
        await after(1, "c")
        await after(1, "R")
        assert await after(3) == ["stop", "checkpoint"], "the list of runs does not keep it"
        await after(1, "escape")
        await after(1, "c")
        assert await after(1, "q") == ["stop", "checkpoint", "checkpoint"], "leaving sends it"

    run_screen(fresh, act, seconds=REAL_S)


TEXTS = ["reboot the server now", "See the notes", "pause", "Stop x", "p", "cd runs; cp a b2\nls", "S", "b2", "pl"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("is_pasted", [False, True])
def test_typed_text_sends_nothing(fresh: RecordedRun, clock: Clock, text: str, end: str, is_pasted: bool) -> None:
    """Text is typed, or arrives at once without brackets; only a lone key of a command sends, and without enter."""
    sends = {("p", False): ["pause"], ("p", True): ["pause"], ("b2\n", False): ["set gpu0_bsz=2"]}

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        theme = app.theme
        for char in text + end:
            clock.now_s += 0.0 if is_pasted else 0.3
            name = {" ": "space", "\n": "enter", ";": "semicolon"}.get(char, char)
            app.post_message(events.Key(name, char))
            if not is_pasted:
                await settle(app, pilot)
        await settle(app, pilot)
        clock.now_s += 5
        await settle(app, pilot)
        assert sent(fresh) == sends.get((text + end, is_pasted), [])
        assert app.is_running
        assert app.theme == theme

    fresh.change_gpu0(5)
    run_screen(fresh, act, seconds=REAL_S)


def test_keys_of_the_run_do_nothing_in_the_list(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "R", "p", "c", "space", "b", "u", "S", "x")
        assert sent(fresh) == []
        assert len(app.screen_stack) == 2

    run_screen(fresh, act)


@pytest.mark.parametrize(
    ("pressed", "has", "lacks"),
    [
        ("1", "show the next metric", "open the selected one"),
        ("R", "open the selected one", "pause, or resume"),
        ("S", "stop after this epoch, with a checkpoint", "Run: save a checkpoint"),
        ("b", "close; nothing is sent", "open the selected one"),
    ],
)
def test_help_shows_the_keys_of_the_open_screen(fresh: RecordedRun, pressed: str, has: str, lacks: str) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, pressed, "f1" if pressed == "b" else "question_mark")
        assert "─ Keys ─" in screen_text(app)
        assert has in screen_text(app)
        assert lacks not in screen_text(app)
        await press(app, pilot, "question_mark")
        assert "─ Keys ─" not in screen_text(app)

    run_screen(fresh, act)


@pytest.mark.parametrize("first", ["R", "S", "question_mark", "d"])
def test_dialogs_close_once_for_keys_that_come_together(fresh: RecordedRun, first: str) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, first)
        for _ in range(3):
            app.post_message(events.Key("enter", "\r"))
        await settle(app, pilot)
        assert app.is_running
        assert sent(fresh) == []

    run_screen(fresh, act)


def test_keys_below_can_be_clicked(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        async def click(label: str) -> None:
            row = screen_text(app).splitlines()[-1]
            await pilot.click(offset=(row.index(label) + 1, app.size.height - 1))
            await settle(app, pilot)

        await click("Save")
        assert sent(fresh) == ["checkpoint"]
        await click("Stop")
        assert "Keep training" in screen_text(app)
        await pilot.click(offset=(60, screen_text(app).splitlines().index(row_with(app, "After this epoch"))))
        await settle(app, pilot)
        assert sent(fresh) == ["checkpoint", "stop epoch"]
        await click("Menu")
        await press(app, pilot, "escape")
        await click("Runs")
        await click("Help")
        assert "open the selected one" in screen_text(app)

    run_screen(fresh, act)


def row_with(app: MonitorApp, text: str) -> str:
    return next(row for row in screen_text(app).splitlines() if text in row)


def test_rejected_command_is_shown_with_its_reason(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "c")
        received = drain_commands(fresh.folder.path)[0]
        answer = CommandAnswer(
            id=received.id, command="checkpoint", by="x", status="rejected", reason="[b]the disk is full"
        )
        fresh.write(answer)
        await settle(app, pilot)
        assert "checkpoint rejected: [b]the disk is full" in said(app)

    run_screen(fresh, act)


def test_read_only_screen_offers_and_sends_no_command(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "p", "c", "u", "S", "b", "enter")
        assert sent(fresh) == []
        text = screen_text(app)
        assert "read-only" in text
        for label in ("Pause", "Save", "Stop"):
            assert label not in text.splitlines()[-1]
        await press(app, pilot, "question_mark")
        assert "save a checkpoint" not in screen_text(app)
        assert "show the next metric" in screen_text(app)

    run_screen(fresh, act, readonly=True)


def test_unwritable_inbox_is_reported(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        shutil.rmtree(fresh.folder.commands)
        await press(app, pilot, "c")
        assert "cannot send" in said(app)

    run_screen(fresh, act)


PANES = {"loss": "1", "gpu": "2", "classes": "3", "events": "4", "pictures": "5"}
PRESSED_BEFORE = {"select": ["down"], "app.escape": ["f"]}
WITHOUT_EFFECT = {"image", "move", "app.redraw"}
"""The run has no pictures, and the screen is drawn as it was."""


def drawn(app: MonitorApp) -> tuple[Any, ...]:
    """Return all that a user notices: cells with their styles, dialogs, messages, clipboard, theme."""
    cells = [[(segment.text, segment.style) for segment in row] for row in screen_rows(app)]
    return cells, len(app.screen_stack), app.clipboard, app.theme


@pytest.mark.slow
def test_every_key_of_the_table_has_an_effect(live: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    # As in a process group without a shell: ctrl+z says so, instead of stopping pytest.
    monkeypatch.setattr(os, "getsid", lambda pid: os.getpgrp())

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        idle, shown = set(), drawn(app)
        await settle(app, pilot)
        assert drawn(app) == shown, "without a key nothing changes, so that a change is the key's"
        for key in keys.available(keys.KEYS, sends=False):
            for name in key.keys.split(",") if key.keys and key.action not in ("app.runs", "app.detach") else ():
                first = [PANES[key.panes.split()[0]]] if key.panes and app.pane not in key.panes.split() else []
                if first or key.action in PRESSED_BEFORE:
                    await press(app, pilot, *first, *PRESSED_BEFORE.get(key.action, []))
                before = drawn(app)
                await press(app, pilot, name)
                if drawn(app) == before:
                    idle.add(key.action)
                check_regions(app) if len(app.screen_stack) == 1 else await press(app, pilot, "escape")
        assert idle == WITHOUT_EFFECT

    run_screen(live, act, readonly=True)


@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
def test_help_has_every_key_and_is_not_cut(live: RecordedRun, size: tuple[int, int]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        missing = {key.help for key in keys.KEYS if key.keys}
        for pane in "12345":
            await press(app, pilot, pane, "question_mark")
            text = ""
            while text != (text := " ".join(screen_text(app).replace("│", " ").split())):
                assert "ctl" not in text.split("─ Keys ─")[1].split("╰")[0]
                missing -= {each for each in missing if each in text}
                await press(app, pilot, *["down"] * 4)
            await press(app, pilot, "escape")
        assert not missing

    run_screen(live, act, size)


def test_zoom_filter_and_chart_keys_act_on_their_panes(live: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "3", "f")
        assert "Classes" in screen_text(app)
        assert "last 0." not in screen_text(app)
        await press(app, pilot, "f", "slash", *"BUILD", "enter")
        text = screen_text(app)
        assert "building" in text
        assert "pavement" not in text
        await press(app, pilot, "escape")
        assert "pavement" in screen_text(app)
        await press(app, pilot, "1", "y")
        assert " log " in screen_text(app)
        await press(app, pilot, "y")
        assert " log " not in screen_text(app)

    run_screen(live, act, (120, 40))


@pytest.mark.parametrize("is_ascii", [False, True])
def test_menu_is_short_and_begins_with_actions(tmp_path: Path, is_ascii: bool) -> None:
    run = many_classes(tmp_path / "run")
    run.folder.acquire()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "ctrl+p")
        dialog = re.split("[─-] Menu [─-]", screen_text(app))[1].splitlines()
        entries = [match.groups() for row in dialog if (match := re.search(r"(\w+): (\S.*?) {2,}(\S*) ?[│|]", row))]
        assert 12 <= len(entries) <= 18
        assert [group for group, _, _ in entries[:5]] == ["Run"] * 5
        assert ("Run", "pause, or resume", "p") in entries
        assert "class number" not in " ".join(text for _, text, _ in entries)
        assert screen_text(app).isascii() or not is_ascii
        width = app.screen.query_one(".dialog").region.width
        assert 0.6 < width / app.size.width < 0.7
        for words, title in (("quit", "leave"), ("resume", "pause"), ("cancel", "take back"), ("predict", "sample")):
            await press(app, pilot, *words)
            assert f": {title}" in screen_text(app), words
            await press(app, pilot, *["backspace"] * len(words))
        await press(app, pilot, *"metr", "enter", *"number 149", "enter")
        assert "IoU class number 149" in screen_text(app)
        await press(app, pilot, "ctrl+p", *"light", "enter", *"segapp-light", "enter")
        assert app.theme == "segapp-light"
        await press(app, pilot, "ctrl+p", *"checkp", "enter")
        assert sent(run) == ["checkpoint"]

    run_screen(run, act, ascii_only=is_ascii)
    run.folder.release()


def test_screen_without_colour_has_no_colour_codes(live: RecordedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "i", "1", "b")
        text = screen_text(app)
        assert "LIVE" in text
        assert "5 → 6" in text

    run_screen(live, act)


@pytest.mark.parametrize(
    "size", [(80, 24), *(pytest.param(size, marks=pytest.mark.slow) for size in ((120, 36), (60, 15)))]
)
def test_ascii_mode_shows_only_ascii_on_every_page(live: RecordedRun, size: tuple[int, int]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for keys_pressed in (["1"], ["2"], ["3"], ["4"], ["i"], ["b"], ["escape", "question_mark"], ["escape", "S"]):
            await press(app, pilot, *keys_pressed)
            assert screen_text(app).isascii(), (keys_pressed, [c for c in screen_text(app) if not c.isascii()][:9])

    run_screen(live, act, size, ascii_only=True)


def test_sample_images_are_shown_and_damaged_ones_reported(fresh: RecordedRun) -> None:
    import cv2
    import numpy as np

    image = np.zeros((20, 60, 3), np.uint8)
    image[:, 20:40] = (0, 0, 255)
    cv2.imwrite(str(fresh.folder.samples / "e0001_0.png"), image)

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "i")
        text = screen_text(app)
        assert "e0001_0.png  evaluation 1 of 1" in text
        assert text.count("▀") > 200
        (fresh.folder.samples / "e0002_[b].png").write_bytes(b"\x89PNG no")
        await settle(app, pilot)
        assert "cannot be shown" in screen_text(app)
        await press(app, pilot, "left")
        assert "e0001_0.png  evaluation 1 of 2" in screen_text(app)
        await press(app, pilot, "i")
        assert "smoothed " in screen_text(app)

    run_screen(fresh, act)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("second", "wanted"), [("ctrl+c", ["stop"]), ("n", []), ("escape", [])])
def test_ctrl_c_asks_how_to_stop(fresh: RecordedRun, second: str, wanted: list[str]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "ctrl+c")
        assert "Stop the training?" in screen_text(app)
        assert not sent(fresh)
        await press(app, pilot, second)
        assert app.is_running
        assert sent(fresh) == wanted

    run_screen(fresh, act)


def test_ctrl_c_stops_nothing_in_a_readonly_view(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "ctrl+c", "ctrl+c")
        assert said(app) == "press q to leave"
        assert not sent(fresh)

    run_screen(fresh, act, readonly=True)


def test_every_class_of_the_recorded_run_has_a_row(live: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert all(name in text for name in CAMVID)

    run_screen(live, act)


def test_screen_says_what_run_it_is_and_shows_its_config(fresh: RecordedRun) -> None:
    config = ["name: a", "data:", "  format: folder", "  root: \"/data/wheat\\x9b-2026\"", "model:",
              "  name: DeepLabV3Plus",
              "optim:", "  name: adamw", "  lr: 0.014", "parallel:", "  gpu0_bsz: 4",
              "log:", "  mlflow: http://bob:secret@box/x"]  # fmt: skip
    fresh.folder.write_config("\n".join(config) + "\n")
    changes = ({"gpu0_bsz": 6}, {"lr_factor": 0.5}, {"lr_factor": 0.25})
    for i, change in enumerate(changes):
        text = ",".join(f"{name}={value}" for name, value in change.items())
        fresh.write(CommandAnswer(id=f"{i:012}", command=f"set {text}", by="alice@box", status="applied", step=70 + i,
                                  changes=change))  # fmt: skip

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert r"DeepLabV3Plus · wheat\x9b-2026 · adamw 0.014" in screen_text(app).splitlines()[0]
        app.view.gpu0.value = 5  # auto has changed it since
        await press(app, pilot, "C")
        text = screen_text(app)
        for wanted in ("format: folder", "gpu0_bsz: 4  # now gpu0_bsz: 5, by alice@box at step 70",
                       "# now lr_factor: 0.25, by alice@box at step 72", "http://box/x"):  # fmt: skip
            assert wanted in text, text
        assert "secret" not in text
        assert "\x9b" not in text
        await press(app, pilot, "escape")
        fresh.folder.config_yaml.unlink()
        await press(app, pilot, "C")
        assert "config.yaml cannot be read: No such file" in screen_text(app)

    run_screen(fresh, act)
