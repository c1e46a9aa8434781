"""What a user takes off the screen: text that a drag selects, and pictures of the screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual import events
from textual.pilot import Pilot

from segapp.tui.app import MonitorApp
from segapp.tui.runs_screen import RunsScreen
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import press, run_screen, said, screen_text


def place_of(app: MonitorApp, text: str) -> tuple[int, int]:
    """Return the column and the row of a text on the screen."""
    rows = screen_text(app).splitlines()
    y = next(y for y, row in enumerate(rows) if text in row)
    return rows[y].index(text), y


async def drag(app: MonitorApp, pilot: Pilot[None], text: str) -> None:
    """Select a text of one row as a terminal reports it; the mouse of a pilot would not end it with a click."""
    x, y = place_of(app, text)
    end = x + len(text) - 1
    for kind, at in ((events.MouseDown, x), (events.MouseMove, x + 1), (events.MouseMove, end), (events.MouseUp, end)):
        app.post_message(kind(None, at, y, 0, 0, 1, shift=False, meta=False, ctrl=False, screen_x=at, screen_y=y))
        await pilot.pause()


def num_screens(app: MonitorApp) -> int:
    return len(app.screen_stack)


def test_ctrl_c_copies_what_was_dragged_wherever_text_is(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for text in ("smoothed", "1 begins, lr", "pedestrian", "up 42s", "p Pause  c Save  S Stop"):
            await drag(app, pilot, text)
            assert num_screens(app) == 1, "the end of a selection opens nothing"
            await press(app, pilot, "ctrl+c")
            assert num_screens(app) == 1
            assert app.clipboard == text
            assert said(app) == f"copied {len(text)} characters"
        await drag(app, pilot, "1 begins, lr")
        await pilot.click(offset=place_of(app, "1 begins, lr"))
        await pilot.pause()
        assert "Event: epoch" in screen_text(app), "a click opens what a drag did not"
        await press(app, pilot, "escape")
        await drag(app, pilot, "1 Loss")  # a border has no text of its own
        await press(app, pilot, "ctrl+c")
        assert num_screens(app) == 1
        assert "nothing was copied" in said(app)
        await press(app, pilot, "ctrl+c")
        assert "Stop the training?" in screen_text(app)

    run_screen(fresh, act)


def test_ctrl_c_stops_nothing_that_is_not_shown(fresh: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for keys, way_out in (("R", "q"), ("question_mark", "esc")):
            await press(app, pilot, keys)
            await press(app, pilot, "ctrl+c")
            assert "Stop the training?" not in screen_text(app)
            assert f"press {way_out} to leave" in screen_text(app) or isinstance(app.screen, RunsScreen)
            await press(app, pilot, "escape")
        await press(app, pilot, "ctrl+c")
        assert "Stop the training?" in screen_text(app)

    run_screen(fresh, act)


def test_picture_lands_in_the_current_folder(
    fresh: RecordedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "odd [red] name"
    folder.mkdir()
    monkeypatch.chdir(folder)

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "ctrl+p", *"screenshot", "enter")
        (picture,) = folder.glob("*.svg")
        assert said(app) == f"saved {picture}"
        assert "<svg" in picture.read_text()
        app.action_screenshot(path=str(folder / "missing"))
        assert said(app) == f"no picture was saved in {folder / 'missing'}: No such file or directory"

    run_screen(fresh, act, size=(160, 40))
