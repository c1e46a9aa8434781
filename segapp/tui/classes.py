"""The class pane: the IoU of each class and its change since the previous evaluation."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rich.cells import cell_len
from textual.binding import BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Size

from segapp.run.words import duration, number
from segapp.scores import count_scored, of_classes
from segapp.tui.header import LinePart, fit_parts
from segapp.tui.widgets import LiteralText, SearchLine, progress
from segapp.view.plot import CLASS, class_iou
from segapp.view.source import Status
from segapp.view.view import View
from segapp.view.wording import best_miou, fit_cells

FALL = -0.02
"""Minimum change of IoU between two evaluations for which a class is marked."""


@dataclass(frozen=True)
class ClassRow:
    """A class at the last evaluation."""

    index: int
    name: str
    iou: float
    delta: float | None


def first_evaluation(view: View, status: Status, settings: Mapping[str, Any]) -> str:
    """Return when the first evaluation comes, by the settings of the run: after epoch 5, in about 12m05s."""
    start, step, every_steps = view.start, view.step, settings.get("eval.every_steps")
    if status.is_over or view.evaluating is not None:
        return "the run ended before its first evaluation" if status.is_over else "the first evaluation is running"
    if start is None or step is None or not start.steps_per_epoch or "eval.every_epochs" not in settings:
        return "no evaluation yet"
    stride = every_steps or settings["eval.every_epochs"] * start.steps_per_epoch
    at = min((step.step // stride + 1) * stride, start.steps or start.epochs * start.steps_per_epoch)
    where = f"step {at}" if every_steps else f"epoch {-(-at // start.steps_per_epoch)}"
    # The last step event may be old: time has passed since.
    left_s = (at - step.step) * (step.step_s or math.nan) - max(0.0, status.now_s - step.t)
    when = "" if view.is_paused or math.isnan(left_s) else f", in about {duration(left_s)}"
    return f"first evaluation after {where}{when}"


def class_rows(view: View, wanted: str = "") -> tuple[list[ClassRow], list[str]]:
    """Return the classes of the last evaluation, worst first, and the names of the absent ones, with `wanted` in it."""
    earlier = (view.vals[i] for i in reversed(range(len(view.vals) - 1)))
    before = next((val for val in earlier if len(val.iou) == len(view.vals[-1].iou)), None)
    rows, absent = [], []
    for i, name in enumerate(view.classes):
        iou, old = class_iou(view.vals.last, i), class_iou(before, i)
        if wanted.casefold() in name.casefold():
            if iou is None:
                absent.append(name)
            else:
                rows.append(ClassRow(i, name, iou, None if old is None else iou - old))
    return sorted(rows, key=lambda row: row.iou), absent


def classes_content(view: View, size: Size, *, wanted: str = "", cursor: int | None = None) -> Content:
    """Return the classes one below the other, in several columns if they would not all be visible; then the absent."""
    rows, absent = class_rows(view, wanted)
    if not rows and not absent:
        return Content.styled("no class has this name: press esc to show all", "$text-muted")
    height = max(1, size.height - bool(absent))
    num_columns = min(max(1, size.width // 46), -(-len(rows) // height) or 1)
    width = (size.width - 2 * (num_columns - 1)) // num_columns
    longest = max((cell_len(row.name) for row in rows), default=0)
    name_width = max(6, min(longest, width // 2 - 8, 28 if width < 80 else 60))
    widths = width, name_width
    cells = [_row_content(row, widths, is_selected=i == cursor) for i, row in enumerate(rows)]
    num_rows = -(-len(cells) // num_columns)
    lines = [Content("  ").join(cells[i::num_rows]) for i in range(num_rows)]
    if absent:
        lines.append(Content.styled(f"absent: {', '.join(absent)}", "$text-muted"))
    return Content("\n").join(lines)


def _row_content(row: ClassRow, widths: tuple[int, int], *, is_selected: bool) -> Content:
    """Return the row of a class; the widths of the row and of the name are in cells."""
    width, name_width = widths
    bar_width = width - name_width - 17
    name = fit_cells(row.name, name_width), "reverse" if is_selected else ""
    if row.delta is None:  # there is no earlier evaluation with these classes
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
    shown = f"best {best_miou(best, last)}" if best and last and view.monitor.name == "miou" else view.best_words
    parts = [
        LinePart(0, "3 Classes", "bold"),
        LinePart(1, f"e{last.epoch} mIoU {number(last.miou)}") if last else None,
        LinePart(2, shown, "$text-success") if shown else None,
        LinePart(3, of_classes(count_scored(last.iou), len(last.iou)), "$text-muted") if last else None,
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
        self._rows: list[ClassRow] = []
        self.cursor: int | None = None
        """Index of the selected row; None before the first key."""
        self._shown: tuple[object, ...] = ()
        self._view: View | None = None

    def show(self, view: View, due: str) -> None:
        """Show the table, or before the first evaluation when it is due; made anew after a change of what it shows."""
        self._view = view
        wanted = self.search.text
        size = Size(max(1, self._box.scrollable_content_region.width), max(1, self.size.height - 2))
        shown = wanted, self.cursor, size, id(view), view.start, view.vals.last or due
        if shown == self._shown:
            return
        self._shown = shown
        is_due = view.vals.last is None
        found = (
            Content.styled(due, "$text-muted")
            if is_due
            else classes_content(view, size, wanted=wanted, cursor=self.cursor)
        )
        self._lines.show(found)
        self._rows = [] if is_due else class_rows(view, wanted)[0]

    def details(self) -> Content | None:
        """Return the whole name of the selected class and its scores in the last evaluation; None without one."""
        last = None if self._view is None else self._view.vals.last
        if self.cursor is None or self.cursor >= len(self._rows) or last is None:
            return None
        row = self._rows[self.cursor]
        scores = {"IoU": last.iou, "precision": last.precision or (), "recall": last.recall or ()}
        texts = [f"{name} {number(values[row.index])}" for name, values in scores.items() if row.index < len(values)]
        return Content(f"{row.name}\nepoch {last.epoch}: {', '.join(texts)}")

    def action_move(self, by: int) -> None:
        if not self._rows or self._view is None:
            return
        self.cursor = min(max(0 if self.cursor is None else self.cursor + by, 0), len(self._rows) - 1)
        self.show(self._view, "")
        height = max(1, self._box.size.height)
        if self._lines.size.height > height:  # one column
            top = self._box.scroll_y
            self._box.scroll_to(y=min(max(top, self.cursor - height + 1), self.cursor), animate=False)

    async def action_choose(self) -> None:
        if self.cursor is not None and self.cursor < len(self._rows):
            await self.app.run_action(f"show_metric({CLASS + self._rows[self.cursor].name!r})")
