"""The chart: a metric as a band with its average, evaluations, and marks of changes."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from rich.segment import Segment
from rich.style import Style
from textual.content import Content
from textual.geometry import Region
from textual.strip import Strip

from segapp.run.words import number
from segapp.tui.widgets import StripWidget
from segapp.view import plot
from segapp.view.history import LossHistory
from segapp.view.plot import NO_POINTS, Curve, CurveColumns, Scale, curve_of, draw_columns, metric_title, pack_dots
from segapp.view.runs import RunSummary
from segapp.view.view import View
from segapp.view.wording import loss

_PATTERNS = np.array([chr(0x2800 + dots) for dots in range(256)])


class Canvas:
    """A grid of cells; later drawing overwrites earlier."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._chars = np.full((height, width), " ", dtype="<U1")
        self._styles = np.zeros((height, width), dtype=np.int8)

    def curve(self, columns: CurveColumns, scale: Scale, style: int) -> None:
        """Draw a curve in dots."""
        dots = draw_columns(columns, scale, 4 * self.height)
        packed = pack_dots(dots)
        is_set = packed > 0
        self._chars[is_set] = _PATTERNS[packed[is_set]]
        self._styles[is_set] = style

    def clipped(self, columns: CurveColumns, scale: Scale, style: int) -> None:
        """Mark in the top row where the curve exceeds the scale."""
        with np.errstate(invalid="ignore"):
            beyond = np.flatnonzero(columns.high > scale.top * (1 + 1e-12))
        for cell in set((beyond // 2).tolist()):
            self.put(0, cell, "▲", style)

    def point(self, column: int, fraction: float, char: str, style: int) -> None:
        """Draw a character at a height from 0 (bottom) to 1 (top); nothing outside that range."""
        if 0 <= fraction <= 1:
            self.put(min(int((1 - fraction) * self.height), self.height - 1), column, char, style)

    def line(self, column: int, char: str, style: int) -> None:
        is_empty = self._chars[:, column] == " "
        self._chars[is_empty, column] = char
        self._styles[is_empty, column] = style

    def put(self, row: int, column: int, char: str, style: int) -> None:
        self._chars[row, column], self._styles[row, column] = char, style

    def text(self, column: int, text: str, style: int) -> None:
        for at, char in enumerate(text, start=column):
            self.put(0, at, char, style)

    def strips(self, styles: Sequence[Style], labels: Sequence[str]) -> list[Strip]:
        """Return the rows, each after its label; `styles` has the style of each index, and last the style of labels."""
        strips = []
        for label, chars, own in zip(labels, self._chars, self._styles, strict=True):
            text = "".join(chars.tolist())
            edges = [0, *(np.flatnonzero(own[1:] != own[:-1]) + 1).tolist(), len(text)]
            segments = [Segment(text[a:b], styles[int(own[a])]) for a, b in pairwise(edges)]
            strips.append(Strip([Segment(label, styles[-1]), *segments], len(label) + self.width))
        return strips


GUTTER = 8

_BLANK, _RAW, _MARK, _AVERAGE, _VAL, _BAD, _BEST, _AXIS = range(8)
_CLASSES = (
    "blank", "raw", "mark", "average", "val", "bad", "best", "axis",
)  # fmt: skip


class LossChart(StripWidget):
    """Draws a metric with the numpy functions of `plot`; each update reads every point once.

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
        .loss-chart--axis { color: $text-muted; }
    }
    """

    def __init__(self, **keywords: str) -> None:
        super().__init__(**keywords)
        self.metric, self.is_log = "loss", False  # one of `metric_names` or `IoU CLASS`
        self._view = View()
        self._series: LossHistory | None = None
        self._curve = Curve(None, NO_POINTS)
        self._x_range = (0.0, 1.0)
        self._subtitle = ""

    def show(self, view: View, series: LossHistory | None = None) -> None:
        """Show a view, with a metric's values at the steps; redraw only after a change."""
        self._view, self._series = view, series
        if self.is_current:
            return
        before, size = self._strips, self.content_size
        self.make()
        readout = "log" if self.is_log else ""
        if readout != self._subtitle:
            self._subtitle = readout
            self.border_subtitle = Content(readout)  # redraws the whole widget
        elif len(before) != len(self._strips):
            self.refresh()
        else:
            pairs = enumerate(zip(before, self._strips, strict=True))
            rows = [y for y, (old, new) in pairs if old != new]
            if rows:
                self.refresh(*(Region(0, y, size.width, 1) for y in rows))

    def key(self) -> tuple[object, ...]:
        view, series = self._view, self._series
        steps = (view.history.num_steps, view.history.size) if self.metric == "loss" else ()
        return (id(view), steps, len(view.vals), len(view.marks),
                series.num_steps if series else 0, self.metric, self.is_log, self.content_size)  # fmt: skip

    @property
    def _is_schedule(self) -> bool:
        """True for a curve without noise, whose average would only be late."""
        return self.metric == "lr"

    def _plot_size(self) -> tuple[int, int]:
        """Return width and height of the plot in cells, without legend, labels and axis."""
        return self.content_size.width - GUTTER - 1, self.content_size.height - 2

    def _steps(self) -> plot.Floats:
        history, points = self._curve.history, self._curve.points
        if history is not None and history.size:
            return history.step
        return points[:, 0]

    def _cell(self, x: float, width: int) -> int:
        x0, x1 = self._x_range
        return int(min(max((x - x0) / (x1 - x0), 0.0) * width, width - 1))

    def build(self) -> list[Strip]:
        """Return the legend, the rows of the plot, and the axis."""
        self._curve = curve_of(self._view, self.metric, self._series)
        width, height = self._plot_size()
        if width < 4 or height < 2:
            return []
        steps = self._steps()
        if not len(steps):
            is_loss = self.metric == "loss"
            return [self._message("no step yet" if is_loss else f"no {metric_title(self.metric)} yet", _AXIS)]
        self._x_range = plot.padded_range(float(steps[0]), float(max(steps[-1], steps[0] + 1)))
        history = self._curve.history
        raw, average = self._band(history)
        point_x, point_y = self._curve.points[:, 0], self._curve.points[:, 1]
        is_shown = (point_x >= self._x_range[0]) & (point_x <= self._x_range[1])
        # The average and the evaluations must be inside the scale; single raw values may exceed it.
        firm = np.concatenate((average.low, average.high, point_y[is_shown]))
        usual = None if history is None else plot.usual_range(history.low, history.high)
        scale = plot.choose_scale(raw, firm, is_log=self.is_log, usual=usual)
        if scale is None:
            why = "no value above 0: y draws it without logarithm" if self.is_log else "no finite value yet"
            return [self._message(why, _BAD)]
        canvas = Canvas(width, height)
        canvas.curve(plot.without_spikes(raw, scale.top), scale, _RAW)
        for mark in self._view.marks:
            if mark.kind != "best" and self._x_range[0] <= mark.step <= self._x_range[1]:
                canvas.line(self._cell(mark.step, width), "┊", _MARK)
        canvas.curve(average, scale, _AVERAGE)
        canvas.clipped(raw, scale, _BAD)
        for column in np.flatnonzero(raw.is_bad):
            canvas.put(height - 1, int(column) // 2, "×", _BAD)
        self._draw_points(canvas, scale, point_x[is_shown], point_y[is_shown])
        return [self._legend(width), *self._framed(canvas, scale)]

    def _framed(self, canvas: Canvas, scale: plot.Scale) -> list[Strip]:
        labels = [label + "│" for label in plot.row_labels(scale, canvas.height, GUTTER)]
        styles = [*(self._style(i) for i in range(len(_CLASSES))), self._style(_AXIS)]
        axis = self._axis_line(canvas.width).strips(styles, [" " * GUTTER + "└"])
        return [*canvas.strips(styles, labels), *axis]

    def _message(self, text: str, style: int) -> Strip:
        return Strip([Segment(" " * GUTTER + text, self._style(style))], GUTTER + len(text))

    def _reduced(self, x: plot.Floats, low: plot.Floats, high: plot.Floats, is_bad: NDArray[Any]) -> plot.CurveColumns:
        return plot.reduce_columns(x, low, high, is_bad, *self._x_range, 2 * self._plot_size()[0])

    def _band(self, history: LossHistory | None) -> tuple[plot.CurveColumns, plot.CurveColumns]:
        """Return the extremes and the average of the steps' values."""
        history = history or LossHistory(capacity=2)
        raw = self._reduced(history.step, history.low, history.high, history.is_bad)
        values = history.high if self._is_schedule else history.average(history.usual_smoothing)
        return raw, self._reduced(history.step, values, values, history.is_bad & np.isnan(values))

    def _joined(self, x: plot.Floats, y: plot.Floats) -> plot.CurveColumns:
        return self._reduced(x, y, y, np.zeros(len(x), dtype=bool))

    def _draw_points(self, canvas: Canvas, scale: plot.Scale, x: plot.Floats, y: plot.Floats) -> None:
        """Draw the evaluations: diamonds if there is room between them, else a line; the best one as a star."""
        has_line = self._curve.history is None or len(x) > canvas.width // 4
        if has_line and len(x) > 1:
            canvas.curve(self._joined(x, y), scale, _VAL)
        if len(x) <= canvas.width // 4:
            for at_x, at_y in zip(x, y, strict=True):
                self._draw_point(canvas, scale, at_x, at_y, "◆", _VAL)
        if self._view.best is not None:
            is_best = self._curve.points[:, 0] == self._view.best.step
            for step, value, _ in self._curve.points[is_best][:1]:
                if self._x_range[0] <= step <= self._x_range[1]:
                    self._draw_point(canvas, scale, float(step), float(value), "★", _BEST)

    def _draw_point(self, canvas: Canvas, scale: plot.Scale, x: float, y: float, char: str, style: int) -> None:
        canvas.point(self._cell(x, canvas.width), float(scale.fraction(np.array([y]))[0]), char, style)

    def _legend(self, width: int) -> Strip:
        """Return the legend, with the latest values."""
        history, points = self._curve.history, self._curve.points
        parts: list[tuple[str, int]] = []
        if history is not None and history.size:
            of_epoch = self._view.loss
            is_loss = history is self._view.history
            latest = f"mean e{of_epoch.epoch} {loss(of_epoch.mean)}" if is_loss else f"last {number(history.low[-1])}"
            parts.append((latest, _AXIS))
            factor = history.usual_smoothing
            if not self._is_schedule:
                parts.append((f"smoothed {number(history.last_average(factor))} ({factor:g})", _AVERAGE))
        for _, value, epoch in points[-1:].tolist():
            parts.append((f"◆ val {number(value)} e{epoch:.0f}", _VAL))
        segments, left = [Segment(" " * (GUTTER + 1), self._style(_BLANK))], width
        for text, style in parts:
            if len(text) + 2 <= left or len(segments) == 1:
                segments.append(Segment(text + "  ", self._style(style)))
                left -= len(text) + 2
        return Strip(segments)

    def _axis_line(self, width: int) -> Canvas:
        line = Canvas(width, 1)
        line.text(0, "─" * width, _AXIS)
        end, previous = 0, ""
        for x in plot.Scale(*self._x_range).ticks(max(2, width // 12)):
            label, at = f"{x:.0f}", self._cell(x, width)
            if label != previous and at >= end and at + len(label) < width:  # all are equal in a range of one step
                line.text(at, label, _AXIS)
                end, previous = at + len(label) + 1, label
        return line

    def _style(self, index: int) -> Style:
        return self.get_component_rich_style(f"loss-chart--{_CLASSES[index]}")


class RunsChart(LossChart, can_focus=False):
    """Draws a metric of several runs over the epochs, on one scale; the last run is highlighted."""

    def show_runs(self, metric: str, runs: Sequence[RunSummary]) -> None:
        self.metric, self._runs = metric, runs
        if not self.is_current:
            self.refresh()

    def key(self) -> tuple[object, ...]:
        return *self._runs, self.content_size

    def build(self) -> list[Strip]:
        """Return the plot, or why there is none."""
        width, height = self.content_size.width - GUTTER - 1, self.content_size.height - 1
        found = [np.array([run.curves["epoch"], run.curves[self.metric]], float) for run in self._runs]
        curves = [points[:, np.isfinite(points).all(0)] for points in found]
        epochs, values = np.concatenate(curves, axis=1) if curves else np.empty((2, 0))
        if width < 4 or height < 2 or not len(values):
            return [self._message("no evaluation yet", _AXIS)]
        self._x_range = plot.padded_range(float(epochs.min()), float(epochs.max()))
        columns = [self._joined(x, y) for x, y in curves]
        scale = plot.choose_scale(columns[-1], values, is_log=False)
        assert scale is not None
        canvas = Canvas(width, height)
        for each in columns:
            canvas.curve(each, scale, _AVERAGE if each is columns[-1] else _RAW)
        for x, y in curves[-1].T[-1:]:
            self._draw_point(canvas, scale, x, y, "◆", _AVERAGE)
        return self._framed(canvas, scale)
