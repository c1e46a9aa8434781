"""What a user is told on leaving, and about the state above the panes."""

from __future__ import annotations

from textual.pilot import Pilot

from segapp.run.commands import drain_commands, parse_command
from segapp.run.events import CommandAnswer
from segapp.tui.app import MonitorApp
from segapp.tui.shown_run import ShownRun
from segapp.view.runs import summarize
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import press, run_screen, said, screen_text, source_of

AGAIN = "; to see it again: segapp attach "


def shown_of(run: RecordedRun) -> ShownRun:
    source = source_of(run)
    while source.poll():
        pass
    return ShownRun(source)


def test_line_on_leaving_has_the_state_and_what_waits(fresh: RecordedRun) -> None:
    live = shown_of(fresh)
    assert live.leaving([]).startswith(f"left {live.name} (the training continues){AGAIN}")
    assert live.leaving(["pause sent"]).startswith(f"left {live.name} (pause sent){AGAIN}")
    fresh.write(CommandAnswer(id="a" * 12, command="stop epoch", by="bob@there", status="accepted"))
    waiting = shown_of(fresh)
    told = "the training continues; waiting: stop epoch by bob@there"
    assert waiting.leaving([]).startswith(f"left {waiting.name} ({told}){AGAIN}")
    fresh.end("failed", "disk full")
    fresh.folder.release()
    failed = shown_of(fresh)
    assert failed.leaving([]).startswith(f"left {failed.name} (failed){AGAIN}")
    failed.wishes.hold(parse_command("checkpoint"), failed.view)
    assert failed.send_held() == [("checkpoint was not sent: the run has ended", "error")]


def test_line_on_leaving_a_finished_run_has_its_result(fresh: RecordedRun) -> None:
    fresh.end("finished")
    fresh.folder.release()
    finished = shown_of(fresh)
    best = finished.view.best
    assert best is not None
    assert finished.leaving(["pause sent"]).startswith(f"best mIoU {best.miou:.3f} at epoch 1")


def test_run_that_has_ended_has_no_remaining_time(fresh: RecordedRun) -> None:
    assert summarize(fresh.folder.path).as_json()["eta_run_s"] is not None
    fresh.end("stopped")
    fresh.folder.release()
    facts = summarize(fresh.folder.path).as_json()
    assert (facts["state"], facts["eta_epoch_s"], facts["eta_run_s"]) == ("stopped", None, None)


def test_details_are_those_of_the_line_above_the_panes(fresh: RecordedRun) -> None:
    fresh.alert("classes", "classes without a pixel: pole")
    fresh.alert("hang", "no progress")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "d")
        assert "Event: alert" in screen_text(app)
        assert "kind: hang" in screen_text(app)
        await press(app, pilot, "escape")
        fresh.folder.path.rename(fresh.folder.path.with_name("moved"))
        app.shown.source._trainer = None  # its facts are read every two seconds
        await press(app, pilot, "d")
        assert "─ State ─" in screen_text(app)
        assert "Event: alert" not in screen_text(app)
        fresh.folder.path.with_name("moved").rename(fresh.folder.path)

    run_screen(fresh, act)


def test_refusals_name_their_run(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "u")
        assert said(app) == "run: nothing to take back: this view has sent no command"
        await press(app, pilot, "question_mark", "u")
        assert "run: nothing waits to be sent" in screen_text(app)
        await press(app, pilot, "escape")
        fresh.end("stopped")
        fresh.folder.release()
        app.shown.source._trainer = None
        await press(app, pilot, "space", "p")
        assert said(app).startswith("run: pause was not sent: the run has ended")
        assert drain_commands(fresh.folder.path) == []

    run_screen(fresh, act)
