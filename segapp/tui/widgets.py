"""The widgets of the screen; each redraws only if its content has changed."""

from __future__ import annotations

import time
from typing import ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.widget import Widget
from textual.widgets import Input, OptionList

from segapp.run.events import RunStart, Val
from segapp.tui.glyphs import Glyphs, ascii_text
from segapp.tui.panes.classes import TableOptions, class_rows, classes_content
from segapp.view.evaluations import PastVal
from segapp.view.view import View
from segapp.view.wording import LogLine


class LiteralText(Widget):
    """Literal text, of which only the lines that differ are redrawn."""

    DEFAULT_CSS = "LiteralText { height: auto; }"

    def __init__(self, **keywords: str) -> None:
        super().__init__(id=keywords.get("id"), classes=keywords.get("classes"))
        self._content = Content("")
        self._lines: list[tuple[object, ...]] = []

    def render(self) -> Content:
        """Return the text."""
        return self._content

    def show(self, content: Content) -> None:
        """Show a content."""
        content = drawable(self, content)
        if content.plain == self._content.plain and content.spans == self._content.spans:
            return
        lines: list[tuple[object, ...]] = [(line.plain, *line.spans) for line in content.split(allow_blank=True)]
        before, self._content, self._lines = self._lines, content, lines
        if len(lines) != len(before) or not content.plain:
            self.refresh(layout=True)
        elif self.styles.text_wrap != "nowrap":
            self.refresh()
        else:
            width = self.content_size.width
            self.refresh(*(Region(0, y, width, 1) for y, line in enumerate(lines) if line != before[y]))


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


class _Rows(VerticalScroll, can_focus=True, inherit_bindings=False):
    """Scrolls with the cursor of its pane, which handles the keys."""


class _Shown(NamedTuple):
    """What a table of classes was made of."""

    view: View | None
    start: RunStart | None
    val: Val | PastVal | None


class ClassesPane(Vertical):
    """The class table with a cursor, and an input line for the filter."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down,j", "move(1)", "down"),
        ("up", "move(-1)", "up"),
        ("pagedown", "move(10)", "page down"),
        ("pageup", "move(-10)", "page up"),
        ("enter", "choose", "chart of the class"),
    ]

    class Moved(Message):
        """The cursor has moved."""

    class Chosen(Message):
        """A class was chosen.

        Attributes:
            name: Of the class.
        """

        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self.names: list[str] = []
        """Of the rows, in order."""
        self.cursor: int | None = None
        """Index of the selected row; None before the first key."""
        self._shown = _Shown(None, None, None)
        self._options: tuple[TableOptions, Size] | None = None
        self._lines = LiteralText(classes="lines")
        self._box = _Rows(self._lines, id="class-lines")

    def compose(self) -> ComposeResult:
        """Yield the filter, hidden at first, and the table."""
        yield Input(placeholder="part of a class name", id="filter", compact=True, select_on_focus=False)
        yield self._box

    def show_view(self, view: View, sort: str, wanted: str, glyphs: Glyphs) -> None:
        """Show the table of a view, made anew if its evaluations, the options or the size have changed.

        Args:
            view: The run.
            sort: One of `SORTS`.
            wanted: Part of a class name; empty: all classes.
            glyphs: Characters to draw with.
        """
        size = Size(self.inner_width, max(1, self.size.height - 2))
        shown = _Shown(view, view.start, view.vals[-1] if view.vals else None)
        options = TableOptions(sort, wanted, self.cursor)
        if self._options == (options, size) and all(a is b for a, b in zip(self._shown, shown, strict=True)):
            return
        self._shown, self._options = shown, (options, size)
        self._lines.show(classes_content(view, options, size, glyphs))
        self.names = [row.name for row in class_rows(view, sort, wanted)]

    @property
    def inner_width(self) -> int:
        """Width of a row in cells."""
        return max(1, self._box.scrollable_content_region.width)

    def focus_table(self) -> None:
        """Focus the table."""
        self._box.focus()

    def action_move(self, by: int) -> None:
        """Move the cursor by rows, and keep it in view."""
        if not self.names:
            return
        self.cursor = min(max(0 if self.cursor is None else self.cursor + by, 0), len(self.names) - 1)
        self.post_message(self.Moved())
        height = max(1, self._box.size.height)
        if self._lines.size.height > height:  # one column
            top = self._box.scroll_y
            at = self.cursor + 1
            self._box.scroll_to(y=min(max(top, at - height + 1), at), animate=False)

    def action_choose(self) -> None:
        """Choose the class under the cursor."""
        if self.cursor is not None and self.cursor < len(self.names):
            self.post_message(self.Chosen(self.names[self.cursor]))


class Gpu0Pane(LiteralText, can_focus=True):
    """The pane of `gpu0_bsz`; the app focuses it and handles its keys while the editor is open."""


def set_title(widget: Widget, title: Content) -> None:
    """Set a border title; redraw the border only if it differs."""
    title = drawable(widget, title)
    key = (title.plain, tuple(title.spans))
    if getattr(widget, "_segapp_title", None) != key:
        widget._segapp_title = key  # type: ignore[attr-defined]
        widget.border_title = title


def drawable(widget: Widget, content: Content) -> Content:
    """Return the content as the terminal can draw it: on an ASCII screen all text is converted to ASCII."""
    if content.plain.isascii() or not widget.app.has_class("-ascii"):
        return content
    return Content(ascii_text(content.plain), list(content.spans))


KIND_STYLES = {
    "val": "$text-success",
    "best": "$text-success bold",
    "saved": "$text-primary",
    "ctl": "$text-accent",
    "gpu0": "$text-accent bold",
    "alert": "$text-error bold",
    "oom": "$text-error bold",
    "end": "$text-warning bold",
    "start": "$text-warning",
}
GROUPS: dict[str, frozenset[str]] = {
    "all": frozenset(),
    "alerts": frozenset({"alert", "oom", "end"}),
    "commands": frozenset({"ctl", "gpu0"}),
    "evaluations": frozenset({"val", "best"}),
    "checkpoints": frozenset({"saved", "best"}),
    "starts": frozenset({"start", "load", "end"}),
}
"""Name of a filter -> kinds of lines that it shows; empty: every kind."""


class EventsPane(Vertical):
    """The log of events, latest last, with an input line for a search."""

    def __init__(self, *, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._list = _EventList(id="event-lines", compact=True)
        self._lines: list[LogLine] = []
        self._filter: tuple[object, ...] = ()

    def compose(self) -> ComposeResult:
        """Yield the search line, hidden at first, and the list."""
        yield Input(placeholder="text in an event", id="search", classes="search", compact=True, select_on_focus=False)
        yield self._list

    def show_log(self, view: View, group: str = "all", wanted: str = "") -> None:
        """Show the lines of a view that belong to a group and contain a text."""
        kinds, text = GROUPS[group], wanted.casefold()
        lines = [line for line in view.log if (not kinds or line.kind in kinds) and text in line.text.casefold()]
        chosen, num_before = (group, wanted), len(self._lines)
        is_longer = len(lines) >= num_before and all(
            lines[i][:3] == self._lines[i][:3] for i in (0, num_before - 1) if num_before
        )
        if self._filter == chosen and is_longer:
            new, kept = lines[num_before:], None
        else:
            new, kept = lines, self.selected
            self._list.clear_options()
            self._list.is_following |= self._filter != chosen
        self._filter, self._lines = chosen, lines
        if new:
            self._list.add_options([drawable(self, log_content(line)) for line in new])
            self._list.show_newest_or(next((i for i, line in enumerate(lines) if kept and line[:3] == kept[:3]), None))

    @property
    def selected(self) -> LogLine | None:
        """The line under the cursor; None if there is no line."""
        at = self._list.highlighted
        return self._lines[at] if at is not None and at < len(self._lines) else None

    @property
    def num_shown(self) -> int:
        """Number of lines that pass the filter."""
        return len(self._lines)

    def focus_lines(self) -> None:
        """Focus the list."""
        self._list.focus()


class _EventList(OptionList):
    """Keeps the newest line in view unless the cursor or the wheel has left it."""

    is_following = True

    def show_newest_or(self, at: int | None) -> None:
        """Move to the newest line if the list is followed, else to the line given, if any."""
        if self.is_following:
            self.highlighted = self.option_count - 1
        elif at is not None:
            self.highlighted = at

    def watch_highlighted(self, highlighted: int | None) -> None:
        """Follow from now on if the user has moved the cursor to the newest line."""
        super().watch_highlighted(highlighted)
        if highlighted is not None:
            self.is_following = highlighted == self.option_count - 1

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        """Stop following: the user reads older lines."""
        self.is_following = False

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        """Follow again at the end."""
        self.is_following = self.max_scroll_y - self.scroll_y <= 3


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
