"""Updates of parts of the screen, against Textual's own compositor; lines and rows that are kept, against new ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from rich.style import Style
from textual._compositor import ChopsUpdate, Compositor
from textual.app import App, ComposeResult
from textual.content import Content
from textual.geometry import Region

from segapp.tui.app import MonitorApp
from segapp.tui.output.frame import _pieces
from segapp.tui.panes.chart import LossChart
from segapp.tui.widgets import LiteralText
from segapp.view.source import LiveSource
from segapp.view.view import View
from tests.support.recorded_runs import RecordedRun

SIZE = (120, 36)


def cells_of(update: ChopsUpdate | None) -> Iterator[tuple[int, int, str, Style | None]]:
    """Yield row, column, character and style of the cells inside the changed regions."""
    assert update is not None
    for x, y, strip in _pieces(update):
        for text, style, _ in strip:
            for at, char in enumerate(text, x):
                if any(row == y and left <= at < right for row, left, right in update.spans):
                    yield y, at, char, style
            x += len(text)


def test_partial_update_equals_that_of_textual(fresh: RecordedRun) -> None:
    rng = random.Random(1)

    async def go() -> None:
        app = MonitorApp(LiveSource(fresh.folder))
        async with app.run_test(size=SIZE) as pilot:
            await pilot.pause()
            app.say("a message over the panes")
            await pilot.pause()
            compositor = app.screen._compositor
            for _ in range(30):
                corners = [(rng.randrange(SIZE[0]), rng.randrange(SIZE[1])) for _ in range(rng.randint(1, 4))]
                regions = {
                    Region(x, y, rng.randint(1, SIZE[0] - x), rng.randint(1, min(4, SIZE[1] - y))) for x, y in corners
                }
                compositor._dirty_regions = set(regions)
                found = set(cells_of(compositor.render_partial_update()))
                compositor._dirty_regions = set(regions)
                expected = set(cells_of(Compositor.render_partial_update(compositor)))
                assert found == expected
                assert len(found) >= max(region.area for region in regions)

    asyncio.run(go())


def test_text_redraws_only_the_lines_that_differ() -> None:
    class TextApp(App[None]):
        CSS = ".lines { text-wrap: nowrap; }"

        def compose(self) -> ComposeResult:
            yield LiteralText(classes="lines")

    async def go() -> None:
        app = TextApp()
        async with app.run_test(size=(20, 6)) as pilot:
            text = app.query_one(LiteralText)
            text.show(Content("one\ntwo\nthree"))
            await pilot.pause()
            text.show(Content.assemble("one\n", ("2", "bold"), "\nthree"))
            assert text._repaint_regions == {Region(0, 1, 20, 1)}
            await pilot.pause()
            shown = [strip.text.rstrip() for strip in app.screen._compositor.render_strips()]
            assert shown == ["one", "2", "three", "", "", ""]
            text.show(Content("one\n2"))
            await pilot.pause()
            assert text.size.height == 2

    asyncio.run(go())


def test_rows_kept_by_the_chart_equal_new_ones() -> None:
    class ChartApp(App[None]):
        def compose(self) -> ComposeResult:
            yield LossChart(id="loss")

    async def go() -> None:
        rng, view, app = random.Random(2), View(), ChartApp()
        num_kept = 0
        async with app.run_test(size=(80, 20)):
            chart = app.query_one(LossChart)
            for step in range(1, 60):
                view.history.extend([step], [float(step)], [1 / step + 0.1 * rng.random()])
                before = chart._strips
                chart.show(view)
                num_kept += sum(a is b for a, b in zip(before, chart._strips, strict=False))
                canvas, chart._canvas = chart._canvas, None
                assert chart._build() == chart._strips
                assert {strip.cell_length for strip in chart._strips[1:]} == {chart.content_size.width}
                chart._canvas = canvas
                if step == 30:
                    app.theme = "textual-light"
        assert num_kept > 59 * 3

    asyncio.run(go())
