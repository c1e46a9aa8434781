"""Widgets that several panes and screens use; each redraws only if its content has changed."""

from collections.abc import Iterable

from textual import events
from textual.content import Content
from textual.geometry import Region
from textual.selection import Selection
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input, OptionList

from segapp.run.words import ASCII_FOR, printable

_ASCII_FOR: dict[int, int | str] = {
    **ASCII_FOR,
    **{0x2800 + dots: " '.:"[bool(dots & 0x1B) + 2 * bool(dots & 0xE4)] for dots in range(256)},
}
"""A braille pattern becomes the halves of its cell that have dots."""


def ascii_text(text: str) -> str:
    """Return the text in ASCII, character by character; a character without an equivalent becomes `?`."""
    return text.translate(_ASCII_FOR).encode("ascii", "replace").decode()


def progress(frac: float | None, width: int) -> tuple[str, str]:
    """Return the finished and the open part of a progress bar of `width` cells; all open for None."""
    halves = int(min(max(frac or 0.0, 0.0), 1.0) * 2 * width + 1e-9)
    done = "━" * (halves // 2) + "╸" * (halves % 2)
    return done, "─" * (width - len(done))


class LiteralText(Widget):
    """Literal text; only lines that differ are redrawn."""

    DEFAULT_CSS = "LiteralText { height: auto; }"

    def __init__(self, **keywords: str) -> None:
        super().__init__(id=keywords.get("id"), classes=keywords.get("classes"))
        self._content = Content("")
        self._lines: list[tuple[object, ...]] = []

    def render(self) -> Content:
        return self._content

    def show(self, content: Content) -> None:
        content = drawable(self, content)
        if content.plain == self._content.plain and content.spans == self._content.spans:
            return
        lines: list[tuple[object, ...]] = [(line.plain, *line.spans) for line in content.split(allow_blank=True)]
        before, self._content, self._lines = self._lines, content, lines
        if len(lines) != len(before) or not content.plain or self.styles.text_wrap != "nowrap":
            self.refresh(layout=True)
        else:
            width = self.content_size.width
            self.refresh(*(Region(0, y, width, 1) for y, line in enumerate(lines) if line != before[y]))


class SelectableLines(Widget):
    """A widget that draws lines of its own, whose text can be selected with the mouse."""

    ALLOW_SELECT = True

    def drawn_lines(self) -> Iterable[str]:
        raise NotImplementedError

    def selectable(self, strip: Strip, y: int) -> Strip:
        """Return the line `y` with the positions that the mouse needs, and its selected part highlighted."""
        span = self.text_selection.get_span(y) if self.text_selection is not None else None
        if span is not None:
            start, end = span[0], strip.cell_length if span[1] == -1 else span[1]
            style = self.screen.get_component_rich_style("screen--selection")
            strip = Strip.join([strip.crop(0, start), strip.crop(start, end).apply_style(style), strip.crop(end)])
        return strip.apply_offsets(0, y)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        lines = [line.rstrip() for line in selection.extract("\n".join(self.drawn_lines())).splitlines()]
        return "\n".join(lines), "\n"


class SelectableList(OptionList, SelectableLines):
    """A list of one-line options; a click chooses one, and the end of a selection does not."""

    ALLOW_SELECT = True

    def drawn_lines(self) -> Iterable[str]:
        return (str(option.prompt) for option in self.options)

    def render_line(self, y: int) -> Strip:
        return self.selectable(super().render_line(y), self.scroll_offset.y + y)

    def on_click(self, event: events.Click) -> None:
        if self.screen.selections:
            event.prevent_default()


class StripWidget(SelectableLines, can_focus=True):
    """A drawing that is made anew when its input has changed."""

    def __init__(self, **keywords: str) -> None:
        super().__init__(id=keywords.get("id"), classes=keywords.get("classes"))
        self._strips: list[Strip] = []
        self._made_of: object = None

    def key(self) -> object:
        """Return the values that the drawing depends on."""
        raise NotImplementedError

    def build(self) -> list[Strip]:
        raise NotImplementedError

    @property
    def is_current(self) -> bool:
        """True if nothing has changed since the drawing was made."""
        return self._made_of is not None and self.key() == self._made_of

    def make(self) -> None:
        self._strips = self.build()
        if self.app.has_class("-ascii"):
            self._strips = [
                Strip([segment._replace(text=ascii_text(segment.text)) for segment in strip]) for strip in self._strips
            ]
        self._made_of = self.key()

    def render_line(self, y: int) -> Strip:
        if not self.is_current:
            self.make()
        width = self.content_size.width
        strip = self._strips[y] if y < len(self._strips) else Strip([])
        strip = strip if strip.cell_length == width else strip.crop_extend(0, width, self.rich_style)
        return self.selectable(strip, y)

    def drawn_lines(self) -> Iterable[str]:
        return (strip.text for strip in self._strips)

    def notify_style_update(self) -> None:
        """Make the strips anew after a change of theme, because they contain the old colors."""
        self._made_of = None
        super().notify_style_update()


class SearchLine(Input):
    """An input line for a part of the text of some lines; hidden until it is opened.

    After the input, the widget with the id `lines` gets the focus.
    """

    def __init__(self, hint: str, *, id: str, lines: str) -> None:
        super().__init__(placeholder=hint, id=id, compact=True, select_on_focus=False)
        self._lines = lines

    @property
    def text(self) -> str:
        """The text to find; empty: every line is shown."""
        return printable(self.value)

    def open(self) -> None:
        self.add_class("-open")
        self.focus()

    def close(self) -> bool:
        """Clear and hide the line; return False if it was neither open nor contained a text."""
        if not self.has_class("-open") and not self.value:
            return False
        self.value = ""
        self._hide()
        return True

    async def action_submit(self) -> None:
        self._hide()

    def _hide(self) -> None:
        self.remove_class("-open")
        self.screen.query_one(f"#{self._lines}").focus()


def set_title(widget: Widget, title: Content, name: str = "border_title") -> None:
    """Set a border's title or subtitle; redraw the border only if it differs."""
    title = drawable(widget, title)
    key = (title.plain, tuple(title.spans))
    if getattr(widget, f"_segapp_{name}", ("", ())) != key:
        setattr(widget, f"_segapp_{name}", key)
        setattr(widget, name, title or None)


def drawable(widget: Widget, content: Content) -> Content:
    """Return the content as the terminal can draw it: in ASCII mode, all text is converted to ASCII."""
    if content.plain.isascii() or not widget.app.has_class("-ascii"):
        return content
    return Content(ascii_text(content.plain), list(content.spans))
