"""The progress of an evaluation, text that can be selected, sweeps, and words that misled."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.geometry import Offset
from textual.pilot import Pilot

from segapp.run.commands import drain_commands
from segapp.run.events import CommandAnswer, Heartbeat, Step
from segapp.tui import header
from segapp.tui.app import MonitorApp
from segapp.view.source import LiveSource, Status
from tests.support.recorded_runs import RecordedRun, folded
from tests.support.screens import press, run_screen, said, screen_text, settle


@pytest.mark.parametrize("fields", [{"num_evaluated": 3}, {"num_evaluated": 9, "num_images": 4}, {}])
def test_evaluation_of_unknown_progress_only_begins(fresh: RecordedRun, fields: dict[str, int]) -> None:
    fresh.write(Heartbeat(phase="eval", step=25, **fields), 1.0)
    view = folded(fresh)
    assert view.evaluating is not None
    assert view.evaluating.eta_s(fresh.clock.now_s) is None
    line = header.progress_line(view, Status("busy", "busy", now_s=fresh.clock.now_s), 120).plain
    assert "eval" in line
    assert "begins" in line


def test_remaining_time_stands_still_while_paused(fresh: RecordedRun) -> None:
    fresh.write(Step(epoch=2, step=26, loss=0.5, lr=0.01, eta_epoch_s=100.0, eta_run_s=1000.0), 1.0)
    for _ in range(3):
        fresh.beat("paused", 100.0)
    view = folded(fresh)
    assert header.etas_s(view, Status("busy", "busy", now_s=fresh.clock.now_s)) == (None, None)
    assert header.state_content(view, Status("busy", "paused")).spans[0].style == "$text-warning bold"
    fresh.beat("train", 100.0)
    etas_s = header.etas_s(folded(fresh), Status("live", "live", now_s=fresh.clock.now_s + 7))
    assert etas_s == (None, pytest.approx(1000 - 100 - 7))  # 100 s passed before the pause began


def test_run_that_did_not_finish_shows_how_to_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = RecordedRun(tmp_path / "runs" / "my run", steps_per_epoch=20)
    run.epoch()
    run.end("stopped", "asked to stop")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = " ".join(screen_text(app).split())
        assert "stopped: asked to stop; to continue: `segapp train --resume 'my run'`" in text
        await press(app, pilot, "ctrl+c")
        assert said(app) == "press q to leave"
        await pilot.mouse_down("#head", offset=Offset(1, 0))
        await pilot.hover("#head", offset=Offset(30, 0))
        await pilot.mouse_up("#head", offset=Offset(30, 0))
        await press(app, pilot, "ctrl+c")
        assert "segapp" in app.clipboard, "selected text is copied"

    run_screen(run, act)


def test_answer_is_one_line_above_the_keys(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "4")
        before = screen_text(app).splitlines()
        await press(app, pilot, "c")
        assert screen_text(app).splitlines()[-2].strip() == f"{app.shown.name}: checkpoint sent"
        sent = drain_commands(fresh.folder.path)[0]
        fresh.write(CommandAnswer(id=sent.id, command="checkpoint", by="me@box", status="applied"))
        await settle(app, pilot)
        rows = screen_text(app).splitlines()
        assert rows[-2].strip() == f"{app.shown.name}: checkpoint applied"
        assert sum("checkpoint" in row for row in rows) == 2, "it stands in the events, and once as an answer"
        differing = [i for i, (old, new) in enumerate(zip(before, rows, strict=True)) if old != new]
        assert all(i == 0 or "me@box" in rows[i] or i == 22 for i in differing), "nothing else is covered"

    run_screen(fresh, act, (80, 24))


def test_keys_below_always_show_menu_and_help(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for width in (120, 80, 60):
            await pilot.resize_terminal(width, 24)
            for pane in "12345":
                await press(app, pilot, pane)
                keys = screen_text(app).splitlines()[-1]
                assert all(label in keys for label in ("q Leave", "p Pause", "S Stop", "^p Menu", "? Help")), width
                own = {label for label in ("Metric", "Chart") if label in keys}
                assert width < 120 or own == {"1": {"Metric"}, "3": {"Chart"}}.get(pane, own)

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
