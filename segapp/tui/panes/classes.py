"""The class pane: the IoU of each class and its change since the evaluation before."""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len
from textual.content import Content

from segapp.tui.panes.glyphs import Glyphs, progress, spark
from segapp.tui.panes.header import Part, fit_parts
from segapp.tui.state.view import View
from segapp.tui.state.wording import fit_cells, number

SORTS = ("worst", "best", "drop", "name", "id")
FALL = -0.02
"""Change of IoU between two evaluations from which on a class is marked."""


@dataclass(frozen=True)
class ClassRow:
    """One class at the last evaluation."""

    index: int
    name: str
    iou: float | None
    """None if the class is in neither prediction nor target."""
    delta: float | None
    """Change since the evaluation before."""


def class_rows(view: View, sort: str = "worst", wanted: str = "") -> list[ClassRow]:
    """Return the classes of the last evaluation, sorted and filtered.

    Args:
        view: The run.
        sort: One of `SORTS`; absent classes come last, except for `name` and `id`.
        wanted: Part of the name, case-insensitive; empty: all classes.
    """
    if not view.vals:
        return [ClassRow(i, name, None, None) for i, name in enumerate(view.classes)]
    now = view.vals[-1].iou
    before = next((val.iou for val in reversed(view.vals[:-1]) if len(val.iou) == len(now)), [])
    rows = []
    for i, name in enumerate(view.classes):
        iou = now[i] if i < len(now) else None
        old = before[i] if i < len(before) else None
        rows.append(ClassRow(i, name, iou, iou - old if iou is not None and old is not None else None))
    rows = [row for row in rows if wanted.casefold() in row.name.casefold()]
    return sorted(rows, key=lambda row: _sort_key(row, sort))


def _sort_key(row: ClassRow, sort: str) -> tuple[bool, float | str, int]:
    if sort == "name":
        return False, row.name.casefold(), row.index
    if sort == "id":
        return False, float(row.index), row.index
    if sort == "drop":
        return row.delta is None, row.delta or 0.0, row.index
    iou = row.iou or 0.0
    return row.iou is None, -iou if sort == "best" else iou, row.index


def classes_content(view: View, sort: str, wanted: str, width: int, glyphs: Glyphs) -> Content:
    """Return one line per class."""
    if not view.classes:
        return Content.styled("no classes yet", "$text-muted")
    rows = class_rows(view, sort, wanted)
    if not rows:
        return Content.styled("no class with that name: esc shows all", "$text-muted")
    longest = max(cell_len(row.name) for row in rows)
    name_width = max(6, min(longest, width // 2 - 8, 28))
    lines = [_row_content(row, name_width, width, glyphs) for row in rows]
    course = [val.miou for val in view.vals if val.miou is not None]
    if len(course) > 1 and not wanted:
        bars = spark(course, width - name_width - 17, glyphs)
        mean = Content.assemble(
            (fit_cells("mean", name_width), "bold"), " ", (bars.ljust(width - name_width - 17), "$text-success")
        )
        lines.insert(0, Content.assemble(mean, (f" {course[-1]:.3f}", "bold")))
    return Content("\n").join(lines)


def _iou_style(iou: float) -> str:
    return "$text-error" if iou < 0.25 else "$text-warning" if iou < 0.5 else "$text-primary"


def _row_content(row: ClassRow, name_width: int, width: int, glyphs: Glyphs) -> Content:
    name = fit_cells(row.name, name_width)
    bar_width = width - name_width - 17
    if row.iou is None:
        return Content.assemble((f"{name} {' ' * max(0, bar_width)} {'-':>5}", "$text-muted"))
    if row.delta is None:
        change, style = "", ""
    else:
        sign = glyphs.up if row.delta > 0 else glyphs.down if row.delta < 0 else "="
        change = f"{sign}{abs(row.delta):.3f}"
        style = "$text-success" if row.delta > 0 else "$text-error" if row.delta < FALL else "$text-muted"
    warning = " !" if row.delta is not None and row.delta < FALL else "  "
    done, left = progress(row.iou, bar_width, glyphs) if bar_width >= 3 else ("", "")
    return Content.assemble(
        f"{name} ",
        (done, _iou_style(row.iou)),
        " " * len(left),
        f" {row.iou:.3f} ",
        (change.rjust(7), style),
        (warning, "$text-error bold"),
    )


def classes_title(view: View, sort: str, wanted: str, width: int, glyphs: Glyphs) -> Content:
    """Return the title of the pane: mean, best, and the order of the table."""
    parts = [Part(0, Content.styled("3 Classes", "bold"))]
    if view.vals:
        parts.append(Part(1, Content(f"e{view.vals[-1].epoch} mIoU {number(view.vals[-1].miou)}")))
    if view.best is not None:
        parts.append(Part(2, Content.styled(f"best {number(view.best.miou)} e{view.best.epoch}", "$text-success")))
    if wanted:
        parts.append(Part(1, Content.styled(f"/{wanted}", "$text-warning")))
    parts.append(
        Part(
            1 if sort != SORTS[0] else 3,
            Content.styled(f"{sort} first" if sort in ("worst", "best") else f"by {sort}", "$text-muted"),
        )
    )
    return fit_parts(parts, width)
