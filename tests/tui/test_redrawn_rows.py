"""Lines of a text and rows of the chart that are kept when the others are drawn anew."""

from __future__ import annotations

import asyncio
import random

from textual.app import App, ComposeResult
from textual.content import Content
from textual.geometry import Region

from segapp.tui.chart import LossChart
from segapp.tui.widgets import LiteralText
from segapp.view.view import View
from tests.support.screens import screen_text


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
            assert screen_text(app).split("\n") == ["one", "2", "three", "", "", ""]
            text.show(Content("one\n2"))
            await pilot.pause()
            assert text.size.height == 2

    asyncio.run(go())


def test_chart_redraws_only_the_rows_that_differ() -> None:
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
                chart._repaint_regions.clear()
                chart.show(view)
                new = {y for y, (a, b) in enumerate(zip(before, chart._strips, strict=False)) if a != b}
                if len(before) == len(chart._strips):
                    assert {region.y for region in chart._repaint_regions} == new
                    num_kept += len(before) - len(new)
                assert {strip.cell_length for strip in chart._strips[1:]} == {chart.content_size.width}
                if step == 30:
                    app.theme = "textual-light"
        assert num_kept > 59 * 3

    asyncio.run(go())
