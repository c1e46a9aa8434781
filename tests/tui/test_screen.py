"""The whole screen in Textual's test driver: its panes at every size, and the effect of its keys on a run folder."""

from __future__ import annotations

import itertools
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from textual import events
from textual.pilot import Pilot
from textual.widgets import OptionList

from segapp.run.commands import drain_commands
from segapp.run.events import CommandAnswer
from segapp.tui import keys
from segapp.tui.app import HOLD_S, TYPING_S, MonitorApp
from segapp.tui.layout import plan_layout
from tests.support.recorded_runs import Clock, RecordedRun
from tests.support.screens import press, run_screen, said, screen_text, settle

REAL_S = (HOLD_S, TYPING_S)


def check_regions(app: MonitorApp) -> None:
    """Check that every visible widget lies inside the screen, and that no two panes overlap."""
    width, height = app.size
    panes = []
    for widget in app.screen.walk_children():
        if widget.display and all(parent.display for parent in widget.ancestors if hasattr(parent, "display")):
            region = widget.region
            if region.area and (widget.has_class("pane") or widget.id in ("head", "progress", "keys")):
                assert min(region.x, region.y) >= 0 <= min(width - region.right, height - region.bottom), widget
                panes.append((widget.id, region))
    for (one, a), (other, b) in itertools.combinations(panes, 2):
        assert not a.overlaps(b), (one, other, a, b)


def sent(run: RecordedRun) -> list[str]:
    return [received.text for received in drain_commands(run.folder.path)]


def test_panes_stay_inside_the_screen_at_any_size(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for width, height in [(200, 60), (100, 15), (99, 40), (61, 16), (59, 30), (20, 5), (1, 1), (101, 29), (80, 24)]:
            await pilot.resize_terminal(width, height)
            await settle(app, pilot)
            check_regions(app)
            assert app.layout_plan == plan_layout(width, height)
            if width > 1:
                assert "LIVE" in screen_text(app), (width, height)

    run_screen(fresh, act)


def odd_names(path: Path) -> RecordedRun:
    names = [
        "[/] [bold red]", "[@click=app.exit]x[/]", "\x1b[2J\x1b]0;title\x07", "日本語の道路標識と信号機", "a" * 300,
        "$error\u202e",
    ]  # fmt: skip
    run = RecordedRun(path, classes=names, steps_per_epoch=20)
    run.epoch()
    run.alert("oom", "[red]alert[/red] \x1b[31m and [/]")
    run.write(CommandAnswer(id="f" * 12, command="set [/]", by="[/]@\x1b[1m", status="rejected", reason="[b]"))
    return run


def only_nan(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20)
    run.train(5, loss=math.nan)
    return run


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (only_nan, ["no finite value yet", "gpu0_bsz"]),
        (RecordedRun, ["STARTING", "starting: first step, 0s"]),
        (odd_names, ["[/] [bold red]", "[@click=app.exit", r"\x1b[2J", "[red]alert[/red]"]),
    ],
    ids=["only_nan", "nothing_yet", "odd_names"],
)
def test_unusual_runs_are_shown_with_their_state(
    tmp_path: Path, make: Callable[[Path], RecordedRun], expected: list[str]
) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        found = ""
        for pane in "1234":
            await press(app, pilot, pane)
            found += screen_text(app)
            check_regions(app)
        assert [wanted for wanted in expected if wanted not in found] == []
        assert "\x1b" not in found

    run_screen(make(tmp_path / "run"), act, (80, 24))


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


def test_split_editor_accepts_and_rejects_values(fresh: RecordedRun) -> None:
    cases = [
        ("3 enter", "", "set gpu0_bsz=3"),
        ("3 3 enter", "refused", None),
        ("0 enter", "", "set gpu0_bsz=0"),
        ("9 enter", "not sent: won't fit", None),
        ("1 2 backspace backspace 3 enter", "", "set gpu0_bsz=3"),
        ("9 escape", "", None),
        ("enter", "or auto", None),
        ("e v e n", "tight", None),
        ("e v e n enter", "", "set gpu0_bsz=none"),
    ]

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        wanted = []
        for typed, word, is_sent in cases:
            await press(app, pilot, "b", *typed.split())
            wanted += [is_sent] if is_sent is not None else []
            assert sent(fresh) == wanted, typed
            assert (len(app.screen_stack) > 1) == bool(word), typed
            assert word in screen_text(app), typed
            await press(app, pilot, *(["escape"] if word else []))

    run_screen(fresh, act)


def test_pause_resume_and_checkpoint_keys_send_commands(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "space", "p", "c")
        assert sent(fresh) == ["pause", "checkpoint"]
        pause, save = drain_commands(fresh.folder.path)
        fresh.write(CommandAnswer(id=pause.id, command="pause", by="a@b", status="applied"))
        fresh.beat("paused", 0.0)
        fresh.write(CommandAnswer(id=save.id, command="checkpoint", by="x", status="rejected", reason="[b]disk full"))
        await settle(app, pilot)
        assert "PAUSED" in screen_text(app)
        assert "p Resume" in screen_text(app)
        assert "checkpoint rejected: [b]disk full" in said(app)
        await press(app, pilot, "space", "p")
        assert sent(fresh) == ["pause", "checkpoint", "resume"]
        shutil.rmtree(fresh.folder.commands)
        await press(app, pilot, "c")
        assert "cannot send" in said(app)

    run_screen(fresh, act)


def test_stopping_is_a_list_that_begins_with_training_on(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        app.view.at_step = 93  # of a heartbeat after the last logged step, 25
        wanted = []
        for pressed, is_sent in [
            ("n", None), ("enter", None), ("escape", None), ("q", None), ("space", None), ("e", "stop epoch"),
            ("x", "stop"), ("down enter", "stop epoch"), ("down down enter", "stop"),
        ]:  # fmt: skip
            await press(app, pilot, "S")
            shown = r"Keep training +esc, n.*\n.*After this epoch, ~32s +e .*\n.*Now: saves about step 93 +x "
            assert re.search(shown, screen_text(app))
            await press(app, pilot, *pressed.split())
            wanted += [is_sent] if is_sent is not None else []
            assert sent(fresh) == wanted, pressed
            assert len(app.screen_stack) == 1
        await press(app, pilot, "ctrl+c")
        assert "Stop the training?" in screen_text(app)
        await press(app, pilot, "n", "ctrl+c")
        assert sent(fresh) == wanted
        await press(app, pilot, "ctrl+c")
        assert sent(fresh) == [*wanted, "stop"]
        assert app.is_running

    run_screen(fresh, act)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Return the clock by which commands are held and keys are typed."""
    found = Clock(1000.0)
    monkeypatch.setattr("segapp.tui.app.monotonic", found)  # the keys of a pilot come as fast as those of a paste
    return found


def test_command_can_be_taken_back_for_three_seconds(fresh: RecordedRun, clock: Clock) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        async def after(seconds: float, *names: str) -> list[str]:
            clock.now_s += seconds
            await press(app, pilot, *names)
            return sent(fresh)

        assert await after(1, "p") == []
        name = app.shown.name
        assert said(app) == f"{name}: pause in 3 s: u takes it back"
        assert await after(2.9) == []
        assert await after(0, "u") == []
        assert said(app) == f"{name}: pause: taken back, not sent"
        assert await after(10) == []
        await after(1, "p")
        assert await after(1, "p") == [], "the second key wants the opposite of what is held"
        assert said(app) == f"{name}: pause: taken back, not sent"
        for shown in ("R", "question_mark"):
            await after(1, "c")
            await after(1, shown)
            await after(0.9, "u")
            await after(1, "escape")
            assert said(app) == f"{name}: checkpoint: taken back, not sent", shown
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
        assert await after(0.1, "q") == ["stop", "checkpoint", "checkpoint"], "leaving sends it, also at once"

    run_screen(fresh, act, seconds=REAL_S)


@pytest.mark.parametrize("is_pasted", [False, True])
def test_typed_text_sends_nothing(fresh: RecordedRun, clock: Clock, is_pasted: bool) -> None:
    """Text is typed, or arrives at once without brackets; only a lone key of a command sends, and without enter."""
    texts = ["the server now", "See the", "pause", "Stop x", "cd runs; cp a b2\nls", "S", "pl", "p", "b2"]
    sends = {("p", False): "pause", ("p", True): "pause", ("b2\n", False): "set gpu0_bsz=2"}

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        theme, wanted = app.theme, []
        for text in (text + end for text in texts for end in ("\n", "")):
            for char in text:
                clock.now_s += 0.0 if is_pasted else 0.3
                name = {" ": "space", "\n": "enter", ";": "semicolon"}.get(char, char)
                app.post_message(events.Key(name, char))
                if not is_pasted:
                    await pilot.pause()
            await settle(app, pilot)
            clock.now_s += 5.0
            await settle(app, pilot)
            wanted += [sends[text, is_pasted]] if (text, is_pasted) in sends else []
            assert sent(fresh) == wanted, text
            assert app.is_running
            assert app.theme == theme
            while len(app.screen_stack) > 1:
                clock.now_s += 1.0
                await press(app, pilot, "escape")

    fresh.change_gpu0(5)
    run_screen(fresh, act, (60, 16), seconds=REAL_S)


def test_help_shows_the_keys_of_the_open_screen(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for pressed, has, lacks in [
            ("1", "show the next metric", "open the selected one"),
            ("R", "open the selected one", "pause, or resume"),
            ("S", "stop after this epoch, with a checkpoint", "Run: save a checkpoint"),
            ("b", "close; nothing is sent", "open the selected one"),
        ]:
            await press(app, pilot, pressed, "f1" if pressed == "b" else "question_mark")
            assert "─ Keys ─" in screen_text(app)
            assert has in screen_text(app)
            assert lacks not in screen_text(app)
            await press(app, pilot, "question_mark")
            assert "─ Keys ─" not in screen_text(app)
            if pressed == "R":
                await press(app, pilot, "p", "c", "space", "b", "u", "S", "x")
                assert (sent(fresh), len(app.screen_stack)) == ([], 2), "keys of the run do nothing in the list"
            await press(app, pilot, "escape")

    run_screen(fresh, act)


def test_dialogs_open_and_close_once_for_what_comes_together(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for first in ("R", "S", "question_mark", "d"):
            await press(app, pilot, first)
            for _ in range(3):
                app.post_message(events.Key("enter", "\r"))
            await settle(app, pilot)
            assert app.is_running, first
            assert sent(fresh) == [], first
            await press(app, pilot, "escape")
        await press(app, pilot, "4", "up", "up")
        for _ in range(3):
            app.query_one("#event-lines", OptionList).action_select()
        await settle(app, pilot)
        assert len(app.screen_stack) == 2
        assert "Event: " in screen_text(app)
        await press(app, pilot, "escape")
        assert len(app.screen_stack) == 1

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
        rows = screen_text(app).splitlines()
        (stop_epoch,) = (i for i, row in enumerate(rows) if "After this epoch" in row)
        await pilot.click(offset=(60, stop_epoch))
        await settle(app, pilot)
        assert sent(fresh) == ["checkpoint", "stop epoch"]
        await click("Menu")
        await press(app, pilot, "escape")
        await click("Runs")
        await click("Help")
        assert "open the selected one" in screen_text(app)

    run_screen(fresh, act)


def test_read_only_screen_offers_and_sends_no_command(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "p", "c", "u", "S", "b", "enter", "ctrl+c", "ctrl+c")
        assert said(app) == "press q to leave"
        assert sent(fresh) == []
        text = screen_text(app)
        assert "read-only" in text
        assert not {"Pause", "Save", "Stop"} & set(text.splitlines()[-1].split())
        await press(app, pilot, "question_mark")
        assert "save a checkpoint" not in screen_text(app)
        assert "show the next metric" in screen_text(app)

    run_screen(fresh, act, readonly=True)


def test_help_has_every_key_and_is_not_cut(fresh: RecordedRun) -> None:
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

    run_screen(fresh, act, (80, 24))


def test_zoom_filter_and_chart_keys_act_on_their_panes(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "3", "f")
        assert "Classes" in screen_text(app)
        assert "last 0." not in screen_text(app)
        await press(app, pilot, "f", "slash", *"BUILD", "enter")
        assert ("building" in screen_text(app), "pavement" in screen_text(app)) == (True, False)
        await press(app, pilot, "escape")
        assert "pavement" in screen_text(app)
        for is_log in (True, False):
            await press(app, pilot, "1", "y")
            assert (" log " in screen_text(app)) == is_log

    run_screen(fresh, act, (120, 40))


def test_menu_is_short_and_begins_with_actions(tmp_path: Path) -> None:
    names = [f"class number {i}" for i in range(30)]
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20, classes=names, num_devices=1)
    run.epoch()
    run.folder.acquire()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "ctrl+p")
        assert screen_text(app).isascii()
        dialog = screen_text(app).split("- Menu -")[1].splitlines()
        entries = [match.groups() for row in dialog if (match := re.search(r"(\w+): (\S.*?) {2,}(\S*) ?\|", row))]
        assert 12 <= len(entries) <= 19
        assert [group for group, _, _ in entries[:5]] == ["Run"] * 5
        assert ("Run", "pause, or resume", "p") in entries
        assert "class number" not in " ".join(text for _, text, _ in entries)
        assert 0.6 < app.screen.query_one(".dialog").region.width / app.size.width < 0.7
        for words, title in (("quit", "leave"), ("cancel", "take back")):  # other words for it
            await press(app, pilot, *words)
            assert f": {title}" in screen_text(app), words
            await press(app, pilot, *["backspace"] * len(words))
        await press(app, pilot, *"metr", "enter", *"number 29", "enter")
        assert "IoU class number 29" in screen_text(app)
        await press(app, pilot, "ctrl+p", *"light", "enter", *"segapp-light", "enter")
        assert app.theme == "segapp-light"
        await press(app, pilot, "ctrl+p", *"checkp", "enter")
        assert sent(run) == ["checkpoint"]

    run_screen(run, act, ascii_only=True)
    run.folder.release()


def test_ascii_mode_shows_only_ascii_on_every_page(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for keys_pressed in (["1"], ["2"], ["3"], ["4"], ["i"], ["b"], ["escape", "question_mark"], ["escape", "S"]):
            await press(app, pilot, *keys_pressed)
            assert screen_text(app).isascii(), (keys_pressed, [c for c in screen_text(app) if not c.isascii()][:9])

    fresh.change_gpu0(6, apply=False)
    run_screen(fresh, act, (80, 24), ascii_only=True)


def test_screen_says_what_run_it_is_and_shows_its_config(fresh: RecordedRun) -> None:
    config = ["name: a", "data:", "  format: folder", "  root: \"/data/wheat\\x9b-2026\"", "model:",
              "  name: DeepLabV3Plus",
              "optim:", "  name: adamw", "  lr: 0.014", "  groups:", "  - params: backbone", "    lr_factor: 10.0",
              "parallel:", "  gpu0_bsz: 4", "train:", "  recompute: 'off'",
              "log:", "  mlflow: http://bob:secret@box/x"]  # fmt: skip
    fresh.folder.write_config("\n".join(config) + "\n")
    changes = ({"recompute": "all"}, {"lr_factor": 0.5}, {"lr_factor": 0.25}, {"gpu0_bsz_auto": True})
    for i, change in enumerate(changes):
        text = ",".join(f"{name}={value}" for name, value in change.items())
        fresh.write(CommandAnswer(id=f"{i:012}", command=f"set {text}", by="alice@box", status="applied", step=70 + i,
                                  changes=change))  # fmt: skip

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert r"DeepLabV3Plus · wheat\x9b-2026 · adamw 0.014" in screen_text(app).splitlines()[0]
        await press(app, pilot, "C")
        text = screen_text(app)
        for wanted in ("format: folder", "gpu0_bsz: 4  # now gpu0_bsz: auto, by alice@box at step 73",
                       "recompute: 'off'  # now recompute: all, by alice@box at step 70", "lr_factor: 10.0  ",
                       "   # now lr_factor: 0.25, by alice@box at step 72", "http://box/x"):  # fmt: skip
            assert wanted in text, text
        assert "secret" not in text
        assert "\x9b" not in text
        await press(app, pilot, "escape")
        fresh.write_start(live={"lr_factor": 0.25, "gpu0_bsz": 4, "recompute": "config"})
        await press(app, pilot)
        await press(app, pilot, "C")
        assert "now lr_factor: 0.25, by alice@box" in screen_text(app)
        assert all(f"now {name}" not in screen_text(app) for name in ("gpu0_bsz", "recompute")), "a resume changed them"
        await press(app, pilot, "escape")
        fresh.folder.config_yaml.unlink()
        await press(app, pilot, "C")
        assert "config.yaml cannot be read: No such file" in screen_text(app)

    run_screen(fresh, act)


def test_bell_rings_once_when_a_seen_training_ends(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        with mock.patch.object(app, "bell") as bell:
            fresh.train(2)
            await settle(app, pilot)
            assert not bell.called
            fresh.end("failed", "no space")
            fresh.folder.release()
            app.shown.source._trainer = None  # its facts are read every two seconds
            await settle(app, pilot)
            await settle(app, pilot)
            assert "FAILED" in screen_text(app)
            assert bell.call_count == 1

    run_screen(fresh, act)
