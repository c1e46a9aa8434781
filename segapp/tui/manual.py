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

from segapp.docs.pages import FOLDER, Page
from segapp.tui.settings import load_settings, set_up_themes, settings_path


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
        self._viewer = PageViewer(show_table_of_contents=False, open_links=False)

    def compose(self) -> ComposeResult:
        with Vertical() as box:
            box.border_title = Content("segapp docs")
            box.border_subtitle = Content("esc to close  backspace to go back  t for headings")
            yield self._viewer

    async def on_mount(self) -> None:
        self._viewer.document.focus()
        await self._viewer.go(self._page.path)
        if self._anchor:
            self._viewer.document.goto_anchor(self._anchor)

    def on_resize(self, event: Resize) -> None:
        """List the headings next to the page if there is room."""
        self._viewer.show_table_of_contents = event.size.width >= 110

    async def action_back(self) -> None:
        await self._viewer.back()

    async def action_forward(self) -> None:
        """Show the page that `back` has left."""
        await self._viewer.forward()

    def action_contents(self) -> None:
        self._viewer.show_table_of_contents = not self._viewer.show_table_of_contents


class DocsApp(App[None]):
    """A screen with one page."""

    TITLE = "segapp docs"
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, page: Page, anchor: str = "") -> None:
        super().__init__()
        self._page, self._anchor = page, anchor
        set_up_themes(self, load_settings(settings_path()).theme)

    def on_mount(self) -> None:
        self.push_screen(DocsScreen(self._page, self._anchor), lambda _: self.exit())
