"""The loss chart: raw curve as a band, average as a line, evaluations as diamonds, and marks of changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip
from textual.widget import Widget

from segapp.tui.panes.glyphs import UNICODE, Glyphs
from segapp.tui.panes.plot import (
    Columns,
    Floats,
    Scale,
    choose_scale,
    draw_columns,
    pack_dots,
    padded_range,
    reduce_columns,
)
from segapp.tui.state.history import SMOOTHINGS
from segapp.tui.state.view import View
from segapp.tui.state.wording import duration, number

WINDOWS = ("all", "epoch", "1000", "100")
"""The visible part of the history: all, the steps of one epoch, the last 1000, the last 100."""

AUTO = -1.0
"""Select the smoothing by the length of the curve."""

X_AXES = ("step", "epoch", "time")
GUTTER = 8

_BLANK, _RAW, _MARK, _AVERAGE, _VAL, _BAD, _BEST, _CURSOR, _AXIS = range(9)
_CLASSES = ("blank", "raw", "mark", "average", "val", "bad", "best", "cursor", "axis")


@dataclass(frozen=True)
class ChartOptions:
    """Display options of the chart; changed by keys."""

    smoothing: float = AUTO
    """One of `SMOOTHINGS`; 0: the raw curve alone; `AUTO`: by the number of steps."""
    is_log: bool = False
    window: str = "all"
    x_axis: str = "step"
    cursor: int | None = None
    """Position in cells from the left edge of the plot; None: no cursor."""


class LossChart(Widget, can_focus=True):
    """Draws `View.history` with the numpy functions of `plot`; a refresh reads every point once.

    Every segment has a style, because Textual's NO_COLOR filter fails on a segment without one.
    """

    COMPONENT_CLASSES: ClassVar[set[str]] = {f"loss-chart--{name}" for name in _CLASSES}
    DEFAULT_CSS = """
    LossChart {
        .loss-chart--blank { color: $foreground; }
        .loss-chart--raw { color: $secondary 85%; }
        .loss-chart--average { color: $warning; text-style: bold; }
        .loss-chart--mark { color: $accent; }
        .loss-chart--val { color: $success; text-style: bold; }
        .loss-chart--bad { color: $error; text-style: bold; }
        .loss-chart--best { color: $success; text-style: bold; }
        .loss-chart--cursor { color: $foreground; text-style: bold; }
        .loss-chart--axis { color: $text-muted; }
    }
    """

    def __init__(self, glyphs: Glyphs = UNICODE, **keywords: str) -> None:
        super().__init__(id=keywords.get("id"), classes=keywords.get("classes"))
        self.glyphs = glyphs
        self.options = ChartOptions()
        self._view = View()
        self._strips: list[Strip] = []
        self._built: tuple[object, ...] | None = None
        self._x_range = (0.0, 1.0)
        self._subtitle = ""

    @property
    def smoothing(self) -> float:
        """The smoothing factor in use; 0 for none."""
        if self.options.smoothing != AUTO:
            return self.options.smoothing
        num_steps = self._view.history.num_steps
        return SMOOTHINGS[0] if num_steps < 200 else SMOOTHINGS[1] if num_steps < 4000 else SMOOTHINGS[2]

    def show(self, view: View) -> None:
        """Show a view; redraws only if it has changed."""
        self._view = view
        if self._key() == self._built:
            return
        before, size = self._strips, self.content_size
        self._make()
        readout = self._readout()
        if readout != self._subtitle:
            self._subtitle = readout
            self.border_subtitle = Content(readout)  # redraws the whole widget
        elif len(before) != len(self._strips):
            self.refresh()
        else:
            rows = [y for y, (old, new) in enumerate(zip(before, self._strips, strict=True)) if old != new]
            if rows:
                self.refresh(*(Region(0, y, size.width, 1) for y in rows))

    def _make(self) -> None:
        self._strips, self._built = self._build(), self._key()

    def change(self, **options: object) -> None:
        """Change some of `ChartOptions`."""
        self.options = replace(self.options, **options)  # type: ignore[arg-type]
        self.show(self._view)

    def move_cursor(self, by: int) -> None:
        """Move the cursor; the first move puts it at the right edge."""
        width = max(1, self._plot_size()[0])
        at = width - 1 if self.options.cursor is None else min(max(self.options.cursor + by, 0), width - 1)
        self.change(cursor=at)

    def render_line(self, y: int) -> Strip:
        """Return one line of the widget's content."""
        if self._key() != self._built:
            self._make()
        width = self.content_size.width
        if y < len(self._strips):
            return self._strips[y].crop_extend(0, width, self.rich_style)
        return Strip.blank(width, self.rich_style)

    def notify_style_update(self) -> None:
        """Rebuild the strips after a change of theme: they hold the old colours."""
        self._built = None
        super().notify_style_update()

    def _key(self) -> tuple[object, ...]:
        view = self._view
        return (id(view), view.history.num_steps, view.history.size, len(view.vals), len(view.marks),
                self.options, self.content_size)  # fmt: skip

    def _plot_size(self) -> tuple[int, int]:
        """Return width and height of the plot in cells, without legend, labels and axis."""
        return self.content_size.width - GUTTER - 1, self.content_size.height - 2

    # --- the x axis ------------------------------------------------------------------------------------------------

    def _x_of(self, steps: Floats) -> Floats:
        """Return the positions of steps on the x axis."""
        if self.options.x_axis != "time":
            return steps
        history = self._view.history
        return np.interp(steps, history.step, np.maximum.accumulate(history.t))

    def _find_range(self) -> tuple[float, float]:
        steps = self._view.history.step
        last, first = float(steps[-1]), float(steps[0])
        start = self._view.start
        if self.options.window == "epoch" and start is not None:
            first = max(first, last - start.steps_per_epoch)
        elif self.options.window.isdigit():
            first = max(first, last - int(self.options.window))
        x0, x1 = (float(x) for x in self._x_of(np.array([first, last])))
        return padded_range(x0, x1)

    def _x_label(self, x: float) -> str:
        if self.options.x_axis == "time":
            return duration(x - (self._view.first_start_s or float(self._view.history.t[0])))
        if self.options.x_axis == "epoch" and self._view.start is not None:
            return f"e{x / max(self._view.start.steps_per_epoch, 1):.4g}"
        return f"{x:.0f}"

    # --- drawing ---------------------------------------------------------------------------------------------------

    def _build(self) -> list[Strip]:
        width, height = self._plot_size()
        history = self._view.history
        if width < 4 or height < 2:
            return []
        if not history.size:
            text = "no step yet"
            return [Strip([Segment(" " * GUTTER + text, self._style(_AXIS))], GUTTER + len(text))]
        self._x_range = self._find_range()
        num_columns = width * self.glyphs.dots_per_cell[1]
        x = self._x_of(history.step) if self.options.x_axis != "time" else np.maximum.accumulate(history.t)
        raw = reduce_columns(x, history.low, history.high, history.is_bad, *self._x_range, num_columns)
        average = self._average(x, num_columns) if self.smoothing else raw
        vals = [(val.step, val.loss) for val in self._view.vals if val.loss is not None]
        val_x, val_y = self._x_of(np.array([v[0] for v in vals], float)), np.array([v[1] for v in vals], float)
        is_shown = (val_x >= self._x_range[0]) & (val_x <= self._x_range[1])
        scale = choose_scale(raw, average, val_y[is_shown], is_log=self.options.is_log)
        if scale is None:
            text = "no finite loss yet" if not self.options.is_log else "no loss above 0: y shows it without logarithm"
            return [Strip([Segment(" " * GUTTER + text, self._style(_BAD))], GUTTER + len(text))]
        canvas = _Canvas(width, height, self.glyphs)
        canvas.curve(raw, scale, _RAW)
        self._draw_marks(canvas, height)
        if self.smoothing:
            canvas.curve(average, scale, _AVERAGE)
        canvas.clipped(raw, scale)
        for at_x, at_y in zip(val_x[is_shown], val_y[is_shown], strict=True):
            canvas.point(self._cell(at_x, width), float(scale.fraction(np.array([at_y]))[0]), self.glyphs.diamond, _VAL)
        if self.options.cursor is not None:
            canvas.line(min(self.options.cursor, width - 1), self.glyphs.v_cursor, _CURSOR)
        rows = canvas.rows([self._style(i) for i in range(len(_CLASSES))])
        labels = _row_labels(scale, height)
        axis = self._style(_AXIS)
        strips = [
            Strip([Segment(labels[i] + self.glyphs.v_axis, axis), *row], GUTTER + 1 + width)
            for i, row in enumerate(rows)
        ]
        return [self._legend(), *strips, self._axis_line(raw, width)]

    def _legend(self) -> Strip:
        """Return the legend, with the latest values."""
        history, vals = self._view.history, self._view.vals
        segments = [Segment(" " * (GUTTER + 1), self._style(_BLANK))]
        segments.append(Segment(f"last {number(float(history.low[-1]))}", self._style(_AXIS)))
        if self.smoothing:
            text = f"  ema {number(history.last_average(self.smoothing))} ({self.smoothing:g})"
            segments.append(Segment(text, self._style(_AVERAGE)))
        if vals and vals[-1].loss is not None:
            text = f"  {self.glyphs.diamond} val {number(vals[-1].loss)} epoch {vals[-1].epoch}"
            segments.append(Segment(text, self._style(_VAL)))
        return Strip(segments)

    def _average(self, x: Floats, num_columns: int) -> Columns:
        history = self._view.history
        values = history.average(self.smoothing)
        return reduce_columns(x, values, values, history.is_bad & np.isnan(values), *self._x_range, num_columns)

    def _cell(self, x: float, width: int) -> int:
        x0, x1 = self._x_range
        return int(min(max((x - x0) / (x1 - x0), 0.0) * width, width - 1))

    def _draw_marks(self, canvas: _Canvas, height: int) -> None:
        for mark in self._view.marks:
            x = float(self._x_of(np.array([float(mark.step)]))[0])
            if mark.kind != "best" and self._x_range[0] <= x <= self._x_range[1]:
                canvas.line(self._cell(x, canvas.width), self.glyphs.v_mark, _MARK)

    def _axis_line(self, raw: Columns, width: int) -> Strip:
        """Return the x axis with its labels, × where a loss was not finite, and a star at the best checkpoint."""
        text = [self.glyphs.h_axis] * width
        styles = [_AXIS] * width
        end, previous = 0, ""
        for x in Scale(*self._x_range).ticks(max(2, width // 12)):
            label, at = self._x_label(x), self._cell(x, width)
            if label != previous and at >= end and at + len(label) < width:  # all equal in a range of one step
                text[at : at + len(label)] = label
                end, previous = at + len(label) + 1, label
        stars = self._best_cells(width)
        for cell in stars:
            if cell == stars[-1] or text[cell] == self.glyphs.h_axis:
                text[cell] = self.glyphs.star if cell == stars[-1] else self.glyphs.former
                styles[cell] = _BEST
        for column in np.flatnonzero(raw.is_bad):
            cell = int(column) // self.glyphs.dots_per_cell[1]
            text[cell], styles[cell] = self.glyphs.bad, _BAD
        segments = [Segment(" " * GUTTER + self.glyphs.corner, self._style(_AXIS))]
        segments += [Segment(char, self._style(style)) for char, style in zip(text, styles, strict=True)]
        return Strip(segments, GUTTER + 1 + width).simplify()

    def _best_cells(self, width: int) -> list[int]:
        """Return the columns of the best checkpoints, the last one last."""
        x0, x1 = self._x_range
        at = [float(self._x_of(np.array([float(m.step)]))[0]) for m in self._view.marks if m.kind == "best"]
        return [self._cell(x, width) for x in at if x0 <= x <= x1]

    def _style(self, index: int) -> Style:
        return self.get_component_rich_style(f"loss-chart--{_CLASSES[index]}")

    def _readout(self) -> str:
        """Return the values at the cursor, or the display options, as plain text for the border."""
        history, options = self._view.history, self.options
        if options.cursor is not None and history.size:
            return self._cursor_readout()
        parts = ["log" if options.is_log else "linear", f"last {options.window}" if options.window != "all" else "all"]
        if options.x_axis != "step":
            parts.append(f"by {options.x_axis}")
        return f" {self.glyphs.separator} ".join(parts)

    def _cursor_readout(self) -> str:
        history = self._view.history
        width = max(1, self._plot_size()[0])
        x0, x1 = self._x_range
        x = x0 + (min(self.options.cursor or 0, width - 1) + 0.5) / width * (x1 - x0)
        index = int(np.searchsorted(self._x_of(history.step), x))
        index = min(index, history.size - 1)
        low, high = float(history.low[index]), float(history.high[index])
        loss = number(low) if low == high or low != low else f"{number(low)} to {number(high)}"
        smooth = f"  ema {number(float(history.average(self.smoothing)[index]))}" if self.smoothing else ""
        return f"step {history.step[index]:.0f}  loss {loss}{smooth}"


class _Canvas:
    """Cells with a character and a style each; later drawing overwrites earlier."""

    def __init__(self, width: int, height: int, glyphs: Glyphs) -> None:
        self.width, self.height = width, height
        self._glyphs = glyphs
        self._chars = np.full((height, width), " ", dtype="<U1")
        self._styles = np.zeros((height, width), dtype=np.int8)
        self._table = np.array(list(glyphs.dot_cells), dtype="<U1")

    def curve(self, columns: Columns, scale: Scale, style: int) -> None:
        """Draw a curve in dots."""
        dots = draw_columns(columns, scale, self.height * self._glyphs.dots_per_cell[0])
        packed = pack_dots(dots, self._glyphs.dot_weights)
        is_set = packed > 0
        self._chars[is_set] = self._table[packed[is_set]]
        self._styles[is_set] = style

    def clipped(self, columns: Columns, scale: Scale) -> None:
        """Mark in the top row where the curve exceeds the scale."""
        with np.errstate(invalid="ignore"):
            beyond = np.flatnonzero(columns.high > scale.top * (1 + 1e-12))
        for cell in set((beyond // self._glyphs.dots_per_cell[1]).tolist()):
            self._set(0, cell, self._glyphs.clipped, _BAD)

    def point(self, column: int, fraction: float, char: str, style: int) -> None:
        """Draw a character at a height from 0 (bottom) to 1 (top); nothing outside that range."""
        if 0 <= fraction <= 1:
            self._set(min(int((1 - fraction) * self.height), self.height - 1), column, char, style)

    def line(self, column: int, char: str, style: int) -> None:
        """Draw a vertical line where there is no curve."""
        is_empty = self._chars[:, column] == " "
        self._chars[is_empty, column] = char
        self._styles[is_empty, column] = style

    def rows(self, styles: list[Style]) -> list[list[Segment]]:
        """Return the rows as segments, one for each run of equal style."""
        return [self._row(chars, own, styles) for chars, own in zip(self._chars, self._styles, strict=True)]

    def _row(self, chars: NDArray[np.str_], own: NDArray[np.int8], styles: list[Style]) -> list[Segment]:
        text = "".join(chars.tolist())
        edges = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), len(text)]
        return [Segment(text[a:b], styles[int(own[a])]) for a, b in pairwise(edges)]

    def _set(self, row: int, column: int, char: str, style: int) -> None:
        self._chars[row, column], self._styles[row, column] = char, style


def _row_labels(scale: Scale, height: int) -> list[str]:
    """Return the label of each row of the plot; most are blank."""
    labels = [" " * GUTTER] * height
    for value in reversed(scale.ticks(max(2, height // 3))):
        fraction = float(scale.fraction(np.array([value]))[0])
        row = min(int((1 - fraction) * height), height - 1)
        labels[row] = f"{value:.4g}".rjust(GUTTER - 1)[: GUTTER - 1] + " "
    return labels
