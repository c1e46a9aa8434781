"""The widgets of the screen; each redraws only if its content has changed."""

from __future__ import annotations

import time

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widget import Widget
from textual.widgets import Input, Static

from segapp.tui.panes.glyphs import ascii_text
from segapp.tui.state.view import View
from segapp.tui.state.wording import LogLine

KIND_STYLES = {
    "val": "$text-success",
    "best": "$text-success bold",
    "saved": "$text-primary",
    "ctl": "$text-accent",
    "gpu0": "$text-accent bold",
    "alert": "$text-error bold",
    "end": "$text-warning bold",
    "start": "$text-warning",
}
_MAX_LINES = 500


class LiteralText(Static):
    """Literal text, redrawn only if it differs."""

    def __init__(self, **keywords: str) -> None:
        super().__init__("", id=keywords.get("id"), classes=keywords.get("classes"), markup=False)
        self._key: tuple[object, ...] | None = None
        self._num_rows = 0

    def show(self, content: Content) -> None:
        """Show a content."""
        content = _drawable(self, content)
        key = (content.plain, tuple(content.spans))
        if key == self._key:
            return
        num_rows = content.plain.count("\n") + bool(content.plain)
        has_moved = num_rows != self._num_rows
        self._key, self._num_rows = key, num_rows
        self.update(content, layout=has_moved)


class Pane(VerticalScroll, can_focus=True):
    """A box with a title and scrolling text."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="pane -scroll")
        self._lines = LiteralText(classes="lines")
        self._title: str | None = None

    def compose(self) -> ComposeResult:
        """Yield the text."""
        yield self._lines

    def show(self, content: Content) -> None:
        """Show a content."""
        self._lines.show(content)

    @property
    def inner_width(self) -> int:
        """Width of a line in cells."""
        return max(1, self.scrollable_content_region.width)


class EventsPane(Pane):
    """The log of events, latest last; follows the end unless the user has scrolled up."""

    _last: LogLine | None = None
    _num_shown = -1

    def show_log(self, view: View) -> None:
        """Show the log of a view."""
        last = view.log[-1] if view.log else None
        if last is self._last and len(view.log) == self._num_shown:
            return
        is_at_end = self.max_scroll_y - self.scroll_y <= 1
        self._last, self._num_shown = last, len(view.log)
        self._lines.show(Content("\n").join([log_content(line) for line in list(view.log)[-_MAX_LINES:]]))
        if is_at_end:
            self.scroll_end(animate=False)


class ClassesPane(Vertical):
    """The class table, with an input line for the filter."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._lines = LiteralText(classes="lines")
        self._box = VerticalScroll(self._lines, can_focus=True, id="class-lines")

    def compose(self) -> ComposeResult:
        """Yield the filter, hidden at first, and the table."""
        yield Input(placeholder="part of a class name", id="filter", compact=True, select_on_focus=False)
        yield self._box

    def show(self, content: Content) -> None:
        """Show a table."""
        self._lines.show(content)

    @property
    def inner_width(self) -> int:
        """Width of a row in cells."""
        return max(1, self._box.scrollable_content_region.width)

    def focus_table(self) -> None:
        """Focus the table."""
        self._box.focus()


class Gpu0Pane(LiteralText, can_focus=True):
    """The pane of `gpu0_bsz`; the app focuses it and handles its keys while the editor is open."""


def set_title(widget: Widget, title: Content) -> None:
    """Set a border title; redraw the border only if it differs."""
    title = _drawable(widget, title)
    key = (title.plain, tuple(title.spans))
    if getattr(widget, "_segapp_title", None) != key:
        widget._segapp_title = key  # type: ignore[attr-defined]
        widget.border_title = title


def _drawable(widget: Widget, content: Content) -> Content:
    """Return the content as the terminal can draw it: on an ASCII screen all text is converted to ASCII."""
    if content.plain.isascii() or not widget.app.has_class("-ascii"):
        return content
    return Content(ascii_text(content.plain), list(content.spans))


def log_content(line: LogLine, now_s: float | None = None) -> Content:
    """Return a line of the log; with its date if older than a day."""
    now_s = time.time() if now_s is None else now_s
    form = "%H:%M:%S" if abs(now_s - line.t) < 86_400 else "%d %b %H:%M"
    try:
        clock = time.strftime(form, time.localtime(line.t))
    except (OverflowError, ValueError, OSError):
        clock = "--:--:--"
    return Content.assemble(
        (f"{clock} ", "$text-muted"), (f"{line.kind:<6}", KIND_STYLES.get(line.kind, "")), line.text
    )
