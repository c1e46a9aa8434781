"""The widgets of the screen: thin shells that draw again only when what they say has changed."""

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


class Lines(Static):
    """Text that is literal, and drawn again only when it differs."""

    def __init__(self, **keywords: str) -> None:
        super().__init__("", id=keywords.get("id"), classes=keywords.get("classes"), markup=False)
        self._key: tuple[object, ...] | None = None
        self._num_rows = 0

    def show(self, content: Content) -> None:
        """Shows something."""
        content = _drawable(self, content)
        key = (content.plain, tuple(content.spans))
        if key == self._key:
            return
        num_rows = content.plain.count("\n") + bool(content.plain)
        has_moved = num_rows != self._num_rows
        self._key, self._num_rows = key, num_rows
        self.update(content, layout=has_moved)


class Pane(VerticalScroll, can_focus=True):
    """A box with a title around lines that scroll."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="pane -scroll")
        self._lines = Lines(classes="lines")
        self._title: str | None = None

    def compose(self) -> ComposeResult:
        """Only the lines."""
        yield self._lines

    def show(self, content: Content) -> None:
        """Shows something."""
        self._lines.show(content)

    @property
    def inner_width(self) -> int:
        """Cells of a line."""
        return max(1, self.scrollable_content_region.width)


class EventsPane(Pane):
    """What happened, the latest last; follows the end unless somebody has scrolled up."""

    _last: LogLine | None = None
    _num_shown = -1

    def show_log(self, view: View) -> None:
        """Shows the log of a view."""
        last = view.log[-1] if view.log else None
        if last is self._last and len(view.log) == self._num_shown:
            return
        is_at_end = self.max_scroll_y - self.scroll_y <= 1
        self._last, self._num_shown = last, len(view.log)
        self._lines.show(Content("\n").join([log_content(line) for line in list(view.log)[-_MAX_LINES:]]))
        if is_at_end:
            self.scroll_end(animate=False)


class ClassesPane(Vertical):
    """The class table, with a line to type a filter into."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._lines = Lines(classes="lines")
        self._box = VerticalScroll(self._lines, can_focus=True, id="class-lines")

    def compose(self) -> ComposeResult:
        """The filter, which is closed at first, and the table."""
        yield Input(placeholder="part of a class name", id="filter", compact=True, select_on_focus=False)
        yield self._box

    def show(self, content: Content) -> None:
        """Shows a table."""
        self._lines.show(content)

    @property
    def inner_width(self) -> int:
        """Cells of a row."""
        return max(1, self._box.scrollable_content_region.width)

    def focus_table(self) -> None:
        """Gives the keys to the table."""
        self._box.focus()


class Gpu0Pane(Lines, can_focus=True):
    """The pane of `gpu0_bsz`; while it is edited the app gives it the focus and reads its keys."""


def set_title(widget: Widget, title: Content) -> None:
    """Sets a border title, and draws the border again only if it differs."""
    title = _drawable(widget, title)
    key = (title.plain, tuple(title.spans))
    if getattr(widget, "_segapp_title", None) != key:
        widget._segapp_title = key  # type: ignore[attr-defined]
        widget.border_title = title


def _drawable(widget: Widget, content: Content) -> Content:
    """The content as the terminal can draw it: an ASCII screen gets only ASCII, names from data too."""
    if content.plain.isascii() or not widget.app.has_class("-ascii"):
        return content
    return Content(ascii_text(content.plain), list(content.spans))


def log_content(line: LogLine, now_s: float | None = None) -> Content:
    """A line of the log; older than a day with its date."""
    now_s = time.time() if now_s is None else now_s
    form = "%H:%M:%S" if abs(now_s - line.t) < 86_400 else "%d %b %H:%M"
    try:
        clock = time.strftime(form, time.localtime(line.t))
    except (OverflowError, ValueError, OSError):
        clock = "--:--:--"
    return Content.assemble(
        (f"{clock} ", "$text-muted"), (f"{line.kind:<6}", KIND_STYLES.get(line.kind, "")), line.text
    )
