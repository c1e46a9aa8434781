"""trainer.log on the screen: the lines that are there, those that follow, and a search."""

from __future__ import annotations

from textual.pilot import Pilot
from textual.widgets import Log

from segapp.tui.app import MonitorApp
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import press, run_screen, screen_text, settle


def shown(app: MonitorApp) -> list[str]:
    return [line for line in app.screen.query_one(Log).lines if line]


def test_log_is_read_followed_and_searched(fresh: RecordedRun) -> None:
    log = fresh.folder.log
    log.write_text("".join(f"line {i}: \x1b[31mwarm\n" for i in range(300)))

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "l")
        assert "line 299: " in screen_text(app), "the end is shown first"
        assert len(shown(app)) == 300
        with log.open("a") as file:
            file.write("CUDA error: half a ")
        await pilot.pause(0.6)
        assert "CUDA" not in screen_text(app), "a line is shown when it is whole"
        with log.open("a") as file:
            file.write("line\nloss 0.5\n")
        await pilot.pause(0.6)
        assert shown(app)[-2:] == ["CUDA error: half a line", "loss 0.5"]
        await press(app, pilot, "slash", *"cuda", "enter")
        assert shown(app) == ["CUDA error: half a line"]
        with log.open("a") as file:
            file.write("no match\nsecond cuda error\n")
        await pilot.pause(0.6)
        assert shown(app) == ["CUDA error: half a line", "second cuda error"]
        await press(app, pilot, "escape")
        assert len(shown(app)) == 304
        await press(app, pilot, "escape")
        assert len(app.screen_stack) == 1

    run_screen(fresh, act)


def test_log_without_a_line_says_why(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "l")
        assert "with --plain, a training prints them on its terminal" in screen_text(app)
        fresh.folder.log.write_text("é first\n")
        await pilot.pause(0.6)
        await settle(app, pilot)
        assert shown(app) == ["? first"]
        assert "--plain" not in screen_text(app)
        assert screen_text(app).isascii()

    run_screen(fresh, act, ascii_only=True)
