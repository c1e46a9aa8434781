"""The documentation on the screen: F1 opens the page of the focused pane, `segapp docs TOPIC` a screen of its own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from textual.widgets import Markdown

from segapp.docs.pages import find_page, pages
from segapp.tui.app import MonitorApp
from segapp.tui.layout import TOPIC_OF
from segapp.tui.manual import DocsApp, DocsScreen, PageViewer
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import settle, source_of


def test_topics_of_all_panes_exist() -> None:
    for topic in TOPIC_OF.values():
        page, anchor = find_page(topic)
        assert page.topic == "screen"
        assert anchor


@pytest.mark.slow
def test_f1_opens_the_page_of_the_focused_pane(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.epoch()

    async def go() -> None:
        app = MonitorApp(source_of(run))
        async with app.run_test(size=(120, 36)) as pilot:
            await settle(app, pilot)
            await pilot.press("3", "f1")
            await pilot.pause()
            assert isinstance(app.screen, DocsScreen)
            assert app.screen._anchor == "the-classes"
            assert "The classes" in app.screen.query_one(Markdown).source
            await pilot.press("escape")
            assert not isinstance(app.screen, DocsScreen)
            await pilot.press("R", "f1")
            await pilot.pause()
            assert isinstance(app.screen, DocsScreen)
            assert app.screen._anchor == "the-list-of-runs"

    asyncio.run(go())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("width", [80, 120])
def test_pages_turn_and_links_between_pages_open(width: int) -> None:
    async def go() -> None:
        app = DocsApp(find_page("kills")[0])
        async with app.run_test(size=(width, 30)) as pilot:
            await pilot.pause()
            viewer = app.screen.query_one(PageViewer)
            assert viewer.show_table_of_contents is (width == 120)
            assert viewer.navigator.location == find_page("kills")[0].path
            await viewer.go("deterministic.md")
            assert viewer.navigator.location == find_page("deterministic")[0].path
            await viewer.go("../tasks/train.md#resume")
            assert viewer.navigator.location.name.startswith("train.md")
            shown = viewer.document.source
            await viewer.go("https://example.com/page")
            await viewer.go("../../../../etc/passwd")
            assert viewer.document.source == shown
            await pilot.press("backspace")
            assert viewer.navigator.location == find_page("deterministic")[0].path
            await pilot.press("right")
            assert viewer.navigator.location.name.startswith("train.md")
            await pilot.press("escape")
        assert app.return_code == 0

    asyncio.run(go())


@pytest.mark.slow
def test_every_page_is_drawn() -> None:
    async def go() -> None:
        app = DocsApp(pages()[0])
        async with app.run_test(size=(80, 30)) as pilot:
            viewer = app.screen.query_one(PageViewer)
            for page in [page for page in pages() if page.group in ("Start", "Troubleshooting")]:
                await viewer.go(page.path)
                await pilot.pause()
                assert viewer.document.children, page.topic

    asyncio.run(go())
