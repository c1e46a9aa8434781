"""Show a page of the documentation, as a dialog over the TUI of a run, or on its own."""

from pathlib import PurePath
from typing import ClassVar

from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Resize
from textual.screen import ModalScreen
from textual.widgets import Markdown, MarkdownViewer

from segapp.docs.pages import FOLDER, Page, pages
from segapp.tui import themes
from segapp.tui.settings import load_settings, settings_path


def show_page(page: Page, anchor: str = "") -> None:
    """Show a page until the user leaves."""
    DocsApp(page, anchor).run()


class PageViewer(MarkdownViewer):
    """A viewer whose links between pages open here; others are shown, not followed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("j", "scroll_down", "down"),
        ("k", "scroll_up", "up"),
        ("space", "page_down", "page down"),
    ]

    async def go(self, location: str | PurePath) -> None:
        """Open a page, or jump to a heading; a link to anything else is shown as a message."""
        text = str(location)
        path, anchor = Markdown.sanitize_location(text)
        target = (self.navigator.location.parent / path).resolve()
        is_page = target.suffix == ".md" and target.is_file() and FOLDER.parent in target.parents
        if text.startswith("#") or is_page:
            await super().go(location)
            if anchor:
                self.document.goto_anchor(anchor)
        else:
            self.app.notify(text, title="outside the documentation", markup=False, timeout=8)


class DocsScreen(ModalScreen[None]):
    """A page in a box, from a heading on if one is given."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,q,f1", "dismiss", "close"),
        ("backspace,left", "back", "back"),
        ("right", "forward", "forward"),
        ("n", "turn(1)", "next page"),
        ("p", "turn(-1)", "previous page"),
        ("t", "contents", "headings"),
    ]
    DEFAULT_CSS = """
    DocsScreen { align: center middle; background: $background 60%; }
    DocsScreen > Vertical { width: 100%; max-width: 124; height: 100%; border: round $primary; }
    DocsScreen > Vertical { background: $background; }
    DocsScreen MarkdownViewer, DocsScreen Markdown { background: $background; }
    DocsScreen MarkdownFence > Label { width: 100%; padding: 0 1; }
    DocsScreen MarkdownTableOfContents { width: 30; max-width: 30; background: $background; }
    DocsScreen MarkdownTableOfContents Tree { background: $background; }
    """

    def __init__(self, page: Page, anchor: str = "") -> None:
        super().__init__()
        self._page, self._anchor = page, anchor
        self._has_contents: bool | None = None

    def compose(self) -> ComposeResult:
        """Yield the viewer."""
        with Vertical() as box:
            box.border_title = Content(f"segapp docs {self._page.topic}")
            box.border_subtitle = Content("esc to close  n p for other pages  backspace to go back  t for headings")
            yield PageViewer(show_table_of_contents=False, open_links=False)

    async def on_mount(self) -> None:
        """Load the page."""
        viewer = self.query_one(PageViewer)
        viewer.document.focus()
        await viewer.go(self._page.path)
        if self._anchor:
            viewer.document.goto_anchor(self._anchor)

    def on_resize(self, event: Resize) -> None:
        """List the headings next to the page if there is room, unless the user has chosen."""
        if self._has_contents is None:
            self.query_one(PageViewer).show_table_of_contents = event.size.width >= 110

    def on_markdown_viewer_navigator_updated(self) -> None:
        """Show the name of the present page."""
        topic = self.query_one(PageViewer).navigator.location.stem
        self.query_one(Vertical).border_title = Content(f"segapp docs {topic}")

    async def action_back(self) -> None:
        """Show the previous page."""
        await self.query_one(PageViewer).back()

    async def action_forward(self) -> None:
        """Show the page that `back` has left."""
        await self.query_one(PageViewer).forward()

    async def action_turn(self, by: int) -> None:
        """Show the next (1) or the previous (-1) page of the index."""
        viewer, paths = self.query_one(PageViewer), [page.path for page in pages()]
        at = paths.index(viewer.navigator.location) if viewer.navigator.location in paths else -by
        await viewer.go(paths[(at + by) % len(paths)])
        viewer.scroll_home(animate=False)

    def action_contents(self) -> None:
        """Show or hide the list of headings."""
        viewer = self.query_one(PageViewer)
        self._has_contents = viewer.show_table_of_contents = not viewer.show_table_of_contents


class DocsApp(App[None]):
    """A screen with one page."""

    TITLE = "segapp docs"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, page: Page, anchor: str = "") -> None:
        super().__init__()
        self._page, self._anchor = page, anchor
        themes.set_up(self, load_settings(settings_path()).theme)

    def on_mount(self) -> None:
        """Show the page; the app ends with it."""
        self.push_screen(DocsScreen(self._page, self._anchor), lambda _: self.exit())
