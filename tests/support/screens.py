"""The screen in Textual's test driver: shows a run, presses keys, and reads what a user sees.

Only this file knows how Textual composes a screen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from unittest import mock

from rich.segment import Segment
from textual.app import App
from textual.pilot import Pilot

from segapp.tui.app import MonitorApp
from segapp.view.source import LiveSource
from tests.support.recorded_runs import RecordedRun


def screen_rows(app: App[Any]) -> list[list[Segment]]:
    """Return the rows of the screen, each as texts with their styles."""
    return [list(strip) for strip in app.screen._compositor.render_strips()]


def screen_text(app: App[Any]) -> str:
    """Return what the screen shows, without styles and without spaces at the ends of rows."""
    return "\n".join("".join(segment.text for segment in row).rstrip() for row in screen_rows(app))


def said(app: MonitorApp) -> str:
    """Return the message above the keys of the open screen; empty if there is none."""
    return "".join(str(line.render()) for line in app.screen.query(".said") if line.display)


async def settle(app: MonitorApp, pilot: Pilot[None]) -> None:
    """Read all events, and draw them."""
    while app.shown.source.poll():
        pass
    app.tick()
    await pilot.pause()
    app.show_view()
    await pilot.pause()


async def press(app: MonitorApp, pilot: Pilot[None], *names: str) -> None:
    """Press keys, and draw what they changed."""
    for name in names:
        await pilot.press(name)
    await settle(app, pilot)


def source_of(run: RecordedRun) -> LiveSource:
    """Return a source of a run with the run's clock, just after its last event."""
    return LiveSource(run.folder, clock=lambda: run.clock.now_s + 0.4)


def run_screen(
    source: LiveSource | RecordedRun,
    act: Callable[[MonitorApp, Pilot[None]], Awaitable[None]],
    size: tuple[int, int] = (120, 36),
    seconds: tuple[float, float] = (0.0, 0.0),
    **keywords: Any,
) -> None:
    """Show a run and act on the screen.

    `seconds`: how long a command is held, and the time between keys that counts as typing; a test presses keys fast.
    """

    async def go() -> None:
        app = MonitorApp(source_of(source) if isinstance(source, RecordedRun) else source, **keywords)
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot)
            await act(app, pilot)

    with mock.patch.multiple("segapp.tui.app", HOLD_S=seconds[0], TYPING_S=seconds[1]):
        asyncio.run(go())
