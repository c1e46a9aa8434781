"""The progress of an evaluation, text that can be selected, sweeps, and words that misled."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from textual.geometry import Offset
from textual.pilot import Pilot

from segapp.run.commands import drain_commands
from segapp.run.events import CommandAnswer, DeviceMemory, EpochStart, EventReader, Heartbeat, Memory, RunStart, Step
from segapp.tui import header
from segapp.tui.app import MonitorApp
from segapp.view.source import LiveSource, Status
from segapp.view.view import EventFold, View
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import press, run_screen, said, screen_text, settle


@pytest.fixture
def fresh(tmp_path: Path) -> Any:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20, epochs=8)
    run.epoch()
    run.train(5)
    run.hold()
    yield run
    run.folder.release()


def folded(run: RecordedRun) -> View:
    view = View()
    EventFold(view).add(EventReader(run.folder.events).read_raw())
    return view


# --- evaluations and pauses ------------------------------------------------------------------------------------------


def test_running_evaluation_shows_its_images_and_its_end(fresh: RecordedRun) -> None:
    fresh.write(Heartbeat(phase="eval", step=25), 1.0)
    fresh.write(Heartbeat(phase="eval", step=25, num_evaluated=25, num_images=100), 10.0)

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "LIVE eval" in text
        assert "25/100 images ETA 30s" in text
        fresh.write(Heartbeat(phase="train", step=25), 30.0)
        await settle(app, pilot)
        assert "BUSY train" in screen_text(app)
        assert "images ETA" not in screen_text(app)

    run_screen(fresh, act)


@pytest.mark.parametrize("fields", [{"num_evaluated": 3}, {"num_evaluated": 9, "num_images": 4}, {}])
def test_evaluation_of_unknown_progress_only_begins(fresh: RecordedRun, fields: dict[str, int]) -> None:
    fresh.write(Heartbeat(phase="eval", step=25, **fields), 1.0)
    view = folded(fresh)
    assert view.evaluating is not None
    assert view.evaluating.eta_s(fresh.clock.now_s) is None
    line = header.progress_line(view, Status("busy", now_s=fresh.clock.now_s), 120).plain
    assert "eval" in line
    assert "begins" in line


def test_first_line_names_the_precision_of_the_steps(fresh: RecordedRun) -> None:
    view, status = folded(fresh), Status("live", now_s=fresh.clock.now_s)

    def line(start: RunStart) -> list[str]:
        return header.header(replace(view, start=start), status, "run", 160, about="", is_readonly=False).plain.split(
            "  "
        )

    assert view.start is not None
    assert view.start.precision is None  # an older run
    without, chosen = line(view.start), line(view.start.model_copy(update={"precision": "amp-fp16"}))
    assert [part for part in chosen if part not in without] == ["amp-fp16"]


def test_history_that_is_read_shows_how_far() -> None:
    line = header.progress_line(View(), Status("busy", loaded_frac=0.5), 30).plain
    assert line == "reading the history ━━━━━─────"


def test_remaining_time_stands_still_while_paused(fresh: RecordedRun) -> None:
    fresh.write(Step(epoch=2, step=26, loss=0.5, lr=0.01, eta_epoch_s=100.0, eta_run_s=1000.0), 1.0)
    for _ in range(3):
        fresh.beat("paused", 100.0)
    view = folded(fresh)
    assert header.etas_s(view, Status("busy", now_s=fresh.clock.now_s)) == (None, None)
    assert header.state_content(view, Status("live")).spans[0].style == "$text-warning bold"
    fresh.beat("train", 100.0)
    etas_s = header.etas_s(folded(fresh), Status("live", now_s=fresh.clock.now_s + 7))
    assert etas_s == (None, pytest.approx(1000 - 100 - 7))  # 100 s passed before the pause began


def test_new_epoch_does_not_show_the_end_of_the_one_before(fresh: RecordedRun) -> None:
    fresh.write(EpochStart(epoch=3, lr=0.01, step=25))
    of_epoch_s, of_run_s = header.etas_s(folded(fresh), Status("live", now_s=fresh.clock.now_s))
    assert of_epoch_s is None
    assert of_run_s is not None


# --- words -----------------------------------------------------------------------------------------------------------


def test_memory_below_1_gib_is_shown_in_mib(fresh: RecordedRun) -> None:
    fresh.write(Memory(devices=[DeviceMemory(device="cuda:0", used_mib=212.0, total_mib=512.0, peak_mib=300.0)]))

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "212/512 MiB" in screen_text(app)
        await press(app, pilot, "3", "f")
        await pilot.resize_terminal(80, 24)
        await settle(app, pilot)

    run_screen(fresh, act)


def test_bound_above_the_memory_is_shown_as_a_bound(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20, gpu0_bsz=8)
    run.epoch()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "b", "1", "2")
        text = screen_text(app)
        assert "tight: split 12·" in text
        assert "at most" in text

    run_screen(run, act)


@pytest.mark.parametrize("status", ["stopped", "failed"])
def test_run_that_did_not_finish_shows_how_to_resume(
    tmp_path: Path, status: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = RecordedRun(tmp_path / "runs" / "my run", steps_per_epoch=20)
    run.epoch()
    run.end(status, "asked to stop")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = " ".join(screen_text(app).split())
        assert f"{status}: asked to stop; to continue: `segapp train --resume 'my run'`" in text
        await press(app, pilot, "ctrl+c")
        assert said(app) == "press q to leave"
        await pilot.resize_terminal(40, 10)
        await settle(app, pilot)
        assert "press q to leave" in screen_text(app)

    run_screen(run, act)


@pytest.mark.parametrize("size", [(120, 36), (80, 24)])
def test_answer_is_one_line_above_the_keys(fresh: RecordedRun, size: tuple[int, int]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "4")
        before = screen_text(app).splitlines()
        await press(app, pilot, "c")
        assert screen_text(app).splitlines()[-2].strip() == "sent: checkpoint"
        sent = drain_commands(fresh.folder.path)[0]
        fresh.write(CommandAnswer(id=sent.id, command="checkpoint", by="me@box", status="applied"))
        await settle(app, pilot)
        rows = screen_text(app).splitlines()
        assert rows[-2].strip() == "checkpoint applied"
        assert sum("checkpoint" in row for row in rows) == 2, "it stands in the events, and once as an answer"
        differing = [i for i, (old, new) in enumerate(zip(before, rows, strict=True)) if old != new]
        assert all(i == 0 or "me@box" in rows[i] or i == size[1] - 2 for i in differing), "nothing else is covered"

    run_screen(fresh, act, size)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("pane", ["1", "2", "3", "4", "5"])
def test_keys_below_always_show_menu_and_help(fresh: RecordedRun, width: int, pane: str) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, pane)
        keys = screen_text(app).splitlines()[-1]
        assert all(label in keys for label in ("q Leave", "p Pause", "S Stop", "^p Menu", "? Help"))

    run_screen(fresh, act, (width, 24))


# --- selection and sweeps --------------------------------------------------------------------------------------------


def test_selected_text_is_copied(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await pilot.mouse_down("#head", offset=Offset(1, 0))
        await pilot.hover("#head", offset=Offset(30, 0))
        await pilot.mouse_up("#head", offset=Offset(30, 0))
        await press(app, pilot, "ctrl+c")
        assert "segapp" in app.clipboard

    run_screen(fresh, act)


def test_list_of_runs_shows_and_finds_sweeps(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    alone = RecordedRun(root / "alone", steps_per_epoch=10)
    alone.epoch()
    (root / "lr-sweep").mkdir()
    (root / "lr-sweep" / "sweep.json").write_text("{}")
    for name in ("lr=0.1", "lr=0.2"):
        run = RecordedRun(root / "lr-sweep" / name, steps_per_epoch=10)
        run.epoch()
        run.end()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "R")
        text = screen_text(app)
        assert "3 runs in" in text
        assert "1 sweep" in text
        assert any(line.split()[:2] == ["lr=0.1", "lr-sweep"] for line in text.splitlines())
        assert any("SWEEP" in line for line in text.splitlines())
        await press(app, pilot, "slash", *"sweep", "enter")
        assert "alone" not in screen_text(app).split("RUN")[1]
        assert "lr=0.2" in screen_text(app)
        await press(app, pilot, "enter")
        assert app.shown.name.startswith("lr-sweep/lr=0.")
        await press(app, pilot, "R")  # from a run of the sweep the list is that of all runs
        assert "alone" in screen_text(app)

    run_screen(LiveSource(alone.folder), act)
