"""The class pane: the IoU of each class and its change since the previous evaluation."""

from dataclasses import dataclass
from typing import ClassVar

from rich.cells import cell_len
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Size

from segapp.tui.header import LinePart, fit_parts
from segapp.tui.widgets import LiteralText, SearchLine, progress
from segapp.view.plot import CLASS, class_iou
from segapp.view.view import View
from segapp.view.wording import best_miou, fit_cells, miou

FALL = -0.02
"""Minimum change of IoU between two evaluations for which a class is marked."""


@dataclass(frozen=True)
class ClassRow:
    """A class at the last evaluation."""

    index: int
    name: str
    iou: float | None
    """None if the class is in neither prediction nor target."""
    delta: float | None


def class_rows(view: View, wanted: str = "") -> list[ClassRow]:
    """Return the classes of the last evaluation, worst first and absent ones last, filtered by a part of the name."""
    if not view.vals:
        return [ClassRow(i, name, None, None) for i, name in enumerate(view.classes)]
    num_classes = len(view.vals[-1].iou)
    earlier = (view.vals[i] for i in reversed(range(len(view.vals) - 1)))
    before = next((val for val in earlier if len(val.iou) == num_classes), None)
    rows = []
    for i, name in enumerate(view.classes):
        iou = class_iou(view.vals[-1], i)
        old = class_iou(before, i)
        rows.append(ClassRow(i, name, iou, iou - old if iou is not None and old is not None else None))
    rows = [row for row in rows if wanted.casefold() in row.name.casefold()]
    return sorted(rows, key=lambda row: (row.iou is None, row.iou or 0.0))


def classes_content(view: View, size: Size, *, wanted: str = "", cursor: int | None = None) -> Content:
    """Return the classes one below the other; in several columns if they would not all be visible."""
    if not view.classes:
        return Content.styled("no classes yet", "$text-muted")
    rows = class_rows(view, wanted)
    if not rows:
        return Content.styled("no class has this name: press esc to show all", "$text-muted")
    num_columns = min(max(1, size.width // 46), -(-len(rows) // max(1, size.height)))
    width = (size.width - 2 * (num_columns - 1)) // num_columns
    longest = max(cell_len(row.name) for row in rows)
    name_width = max(6, min(longest, width // 2 - 8, 28 if width < 80 else 60))
    widths = width, name_width
    cells = [_row_content(row, widths, is_selected=i == cursor) for i, row in enumerate(rows)]
    num_rows = -(-len(cells) // num_columns)
    lines = [Content("  ").join(cells[i::num_rows]) for i in range(num_rows)]
    return Content("\n").join(lines)


def _row_content(row: ClassRow, widths: tuple[int, int], *, is_selected: bool) -> Content:
    """Return the row of a class; the widths of the row and of the name are in cells."""
    width, name_width = widths
    bar_width = width - name_width - 17
    name = fit_cells(row.name, name_width), "reverse" if is_selected else ""
    if row.iou is None:
        empty = " " * max(0, width - name_width - 16)
        return Content.assemble(name, (f" {empty} {'-':>5}{' ' * 9}", "$text-muted"))
    if row.delta is None:
        change, style = "", ""
    else:
        sign = "▲" if row.delta > 0 else "▼" if row.delta < 0 else "="
        change = f"{sign}{abs(row.delta):.3f}"
        style = "$text-success" if row.delta > 0 else "$text-error" if row.delta < FALL else "$text-muted"
    warning = " !" if row.delta is not None and row.delta < FALL else "  "
    done, left = progress(row.iou, bar_width) if bar_width >= 3 else ("", "")
    return Content.assemble(
        name,
        " ",
        (done, "$text-error" if row.iou < 0.25 else "$text-warning" if row.iou < 0.5 else "$text-primary"),
        " " * len(left),
        f" {row.iou:.3f} ",
        (change.rjust(7), style),
        (warning, "$text-error bold"),
    )


def classes_title(view: View, wanted: str, width: int) -> Content:
    """Return the title of the pane: mean, best, and the search."""
    last, best = view.vals.last, view.best
    parts = [
        LinePart(0, "3 Classes", "bold"),
        LinePart(1, f"e{last.epoch} mIoU {miou(last)}") if last else None,
        LinePart(2, f"best {best_miou(best, last)}", "$text-success") if best and last else None,
        LinePart(1, f"/{wanted}", "$text-warning") if wanted else None,
    ]
    return fit_parts(parts, width)


class _Rows(VerticalScroll, can_focus=True, inherit_bindings=False):
    """Scrolls with the cursor of its pane, which handles the keys."""


class ClassesPane(Vertical):
    """The class table with a cursor, and a search line."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("down,j", "move(1)", "down"),
        ("up", "move(-1)", "up"),
        ("pagedown", "move(10)", "page down"),
        ("pageup", "move(-10)", "page up"),
        ("enter", "choose", "chart of the class"),
    ]

    def __init__(self) -> None:
        self.search = SearchLine("part of a class name", id="filter", lines="class-lines")
        self._lines = LiteralText(classes="lines")
        self._box = _Rows(self._lines, id="class-lines")
        super().__init__(self.search, self._box, id="classes", classes="pane")
        self.names: list[str] = []
        self.cursor: int | None = None
        """Index of the selected row; None before the first key."""
        self._shown: tuple[object, ...] = ()
        self._view: View | None = None

    def show(self, view: View) -> None:
        """Show the table of a view; it is made anew after a change of the evaluations, the options or the size."""
        self._view = view
        wanted = self.search.text
        size = Size(max(1, self._box.scrollable_content_region.width), max(1, self.size.height - 2))
        shown = wanted, self.cursor, size, id(view), view.start, view.vals.last
        if shown == self._shown:
            return
        self._shown = shown
        self._lines.show(classes_content(view, size, wanted=wanted, cursor=self.cursor))
        self.names = [row.name for row in class_rows(view, wanted)]

    def action_move(self, by: int) -> None:
        if not self.names or self._view is None:
            return
        self.cursor = min(max(0 if self.cursor is None else self.cursor + by, 0), len(self.names) - 1)
        self.show(self._view)
        height = max(1, self._box.size.height)
        if self._lines.size.height > height:  # one column
            top = self._box.scroll_y
            self._box.scroll_to(y=min(max(top, self.cursor - height + 1), self.cursor), animate=False)

    async def action_choose(self) -> None:
        if self.cursor is not None and self.cursor < len(self.names):
            await self.app.run_action(f"show_metric({CLASS + self.names[self.cursor]!r})")
