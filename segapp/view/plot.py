"""The curves that a chart can show: metrics of a run, their extremes per column, scales and ticks. Numbers only."""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from segapp.run.events import Val
from segapp.scores import HEADLINES
from segapp.view.history import LossHistory
from segapp.view.view import View

Floats = NDArray[np.float64]

STEP_METRICS = {"lr": "learning rate", "grad_norm": "grad norm", "images_per_s": "images/s"}
"""Field of a `step` event -> title."""

VAL_METRICS = {name: score.title for name, score in HEADLINES.items() if name != "loss"}

NO_POINTS: Floats = np.empty((0, 3))

_ROUNDING = 1e-9
"""Values whose relative difference is smaller are drawn as equal."""

TERM, CLASS = "term ", "IoU "
"""Prefixes of the names of a loss term and of the IoU of a class."""


@dataclass(frozen=True)
class CurveColumns:
    """A curve as one vertical stroke per column of dots; nan in empty columns."""

    low: Floats
    high: Floats
    is_bad: NDArray[np.bool_]
    """True for columns with a non-finite value."""


@dataclass(frozen=True)
class Scale:
    """The range of the y axis."""

    bottom: float
    top: float
    is_log: bool = False

    def fraction(self, values: Floats) -> Floats:
        """Return heights from 0 (bottom) to 1 (top); nan if the logarithm is undefined."""
        if not self.is_log:
            span = self.top - self.bottom
            return (values - self.bottom) / span
        with np.errstate(divide="ignore", invalid="ignore"):
            logs = np.log10(np.where(values > 0, values, np.nan))
        low, high = math.log10(self.bottom), math.log10(self.top)
        result: Floats = (logs - low) / (high - low)
        return result

    def ticks(self, count: int) -> list[float]:
        """Return about `count` round values inside the scale, increasing."""
        return _log_ticks(self.bottom, self.top, count) if self.is_log else _ticks(self.bottom, self.top, count)


def reduce_columns(
    x: Floats, low: Floats, high: Floats, is_bad: NDArray[np.bool_], x0: float, x1: float, num: int
) -> CurveColumns:
    """Return the extremes of a curve in `num` columns between the edges `x0` and `x1`.

    Empty columns between two points are filled by a straight line, unless a value between the points was not finite.

    The positions `x` increase; `low` and `high` are the extremes of each point, nan if there is none, and `is_bad` is
    True for points with a non-finite value.
    """
    first, last = np.searchsorted(x, [x0, x1], side="left")[0], np.searchsorted(x, x1, side="right")
    x, low, high, is_bad = x[first:last], low[first:last], high[first:last], is_bad[first:last]
    out_low, out_high, out_bad = np.full(num, np.nan), np.full(num, np.nan), np.zeros(num, dtype=bool)
    if not len(x):
        return CurveColumns(out_low, out_high, out_bad)
    column = np.minimum(((x - x0) * (num / (x1 - x0))).astype(np.int64), num - 1)
    starts = np.flatnonzero(np.concatenate(([True], column[1:] != column[:-1])))
    at = column[starts]
    out_low[at] = np.fmin.reduceat(low, starts)
    out_high[at] = np.fmax.reduceat(high, starts)
    out_bad[at] = np.logical_or.reduceat(is_bad, starts)
    _join(out_low, out_high, out_bad)
    return CurveColumns(out_low, out_high, out_bad)


def _join(low: Floats, high: Floats, is_bad: NDArray[np.bool_]) -> None:
    """Fill empty columns between two points with the line that joins them, in place."""
    known = np.flatnonzero(np.isfinite(low))
    if len(known) < 2:
        return
    inside = np.arange(known[0], known[-1] + 1)
    empty = inside[np.isnan(low[inside])]
    if not len(empty):
        return
    num_bad = np.cumsum(is_bad & np.isnan(low))
    right = np.searchsorted(known, empty)
    is_gap = num_bad[known[right]] > num_bad[known[right - 1]]
    middle = (low[known] + high[known]) / 2
    values = np.interp(empty, known, middle)
    values[is_gap] = np.nan
    low[empty] = high[empty] = values


def padded_range(first: float, last: float) -> tuple[float, float]:
    """Return an x range with free space at its end, so that it changes rarely and not with every step.

    In between, only the newest columns change, so a live curve redraws a few cells per second instead of all.
    """
    if last - first < 1e-6:
        return first - 0.5, first + 0.5
    stride = 2.0 ** math.floor(math.log2((last - first) / 24))
    left = math.floor(first / stride) * stride
    return left, left + math.ceil((last - left) / stride + 1e-9) * stride


def draw_columns(columns: CurveColumns, scale: Scale, num_rows: int) -> NDArray[np.bool_]:
    """Return the dots of a curve, (num_rows, columns), first row on top; neighboring strokes touch."""
    top = np.clip((1 - scale.fraction(columns.high)) * (num_rows - 1), -1, num_rows)
    bottom = np.clip((1 - scale.fraction(columns.low)) * (num_rows - 1), -1, num_rows)
    top = np.where(np.isnan(top), bottom, top)  # the logarithm of the lower end is undefined
    first, last = np.round(top), np.round(np.where(np.isnan(bottom), num_rows, bottom))
    first, last = np.where(np.isnan(first), np.nan, first), np.where(np.isnan(first), np.nan, last)
    before_first = np.concatenate(([np.nan], first[:-1]))
    before_last = np.concatenate(([np.nan], last[:-1]))
    falls, rises = first > before_last + 1, last < before_first - 1
    rows = np.arange(num_rows)[:, None]
    dots: NDArray[np.bool_] = (rows >= np.where(falls, before_last + 1, first)) & (
        rows <= np.where(rises, before_first - 1, last)
    )
    return dots


_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint16)


def pack_dots(dots: NDArray[np.bool_]) -> NDArray[np.uint16]:
    """Return dots of (4 * rows, 2 * columns) as one braille pattern per cell, (rows, columns): 0 (blank) to 255."""
    cells = dots.reshape(dots.shape[0] // 4, 4, dots.shape[1] // 2, 2)
    packed: NDArray[np.uint16] = np.einsum("hrwc,rc->hw", cells.astype(np.uint16), _BRAILLE)
    return packed


def without_spikes(columns: CurveColumns, top: float) -> CurveColumns:
    """Return a band in which columns that exceed a value are as high as the columns next to them.

    Otherwise, a single step far outside the scale would be a stroke over the whole chart.
    """
    with np.errstate(invalid="ignore"):
        is_spike = columns.high > top
    known = np.flatnonzero(np.isfinite(columns.high) & ~is_spike)
    spikes = np.flatnonzero(is_spike)
    if not len(known) or not len(spikes):
        return columns
    high = columns.high.copy()
    high[spikes] = np.minimum(top, np.maximum(columns.low[spikes], np.interp(spikes, known, high[known])))
    return CurveColumns(columns.low, high, columns.is_bad)


def choose_scale(
    raw: CurveColumns, firm: Floats, *, is_log: bool, usual: tuple[float, float] | None = None
) -> Scale | None:
    """Return a scale that covers the firm values, and a curve without its rarest values; None if there are none.

    Args:
        raw: Extremes of the curve.
        firm: Values that must be inside: smoothed curves and single marks.
        is_log: Logarithmic; values of 0 and below are left out.
        usual: `usual_range` of the curve's points; None: of its columns.
    """
    loose = np.concatenate((raw.low, raw.high))
    firm, loose = (values[np.isfinite(values) & ((values > 0) | (not is_log))] for values in (firm, loose))
    if not len(firm) and not len(loose):
        return None
    if usual is None or (is_log and usual[0] <= 0):
        usual = usual_range(loose, loose)
    bottom, top = usual or (math.inf, -math.inf)
    if len(firm):
        bottom, top = min(bottom, float(firm.min())), max(top, float(firm.max()))
    if is_log:
        bottom = max(bottom, top * 1e-12, 1e-300)
        ratio = max((top / bottom) ** 0.03, 1.02)
        return Scale(max(bottom / ratio, 5e-324), top * ratio, is_log=True)
    span = top - bottom
    is_rounding = span <= _ROUNDING * max(abs(bottom), abs(top))  # as of the average of equal values
    margin = (abs(top) * 0.1 or 0.5) if is_rounding else span * 0.03
    return Scale(bottom - margin, top + margin)


def usual_range(low: Floats, high: Floats) -> tuple[float, float] | None:
    """Return the extremes of points, without the rarest 0.5 % if these are far outside the rest.

    `low` and `high` are the limits of each point; None without a finite value.
    """
    low, high = low[np.isfinite(low)], high[np.isfinite(high)]
    if not len(low):
        return None
    bottom, top = float(low.min()), float(high.max())
    rare = len(high) // 200
    first, last = _nth(low, rare), _nth(high, len(high) - 1 - max(rare, int(len(high) > 20)))
    span = last - first
    return (first if first - bottom > span > 0 else bottom, last if top - last > 2 * span > 0 else top)


def _nth(values: Floats, index: int) -> float:
    return float(np.partition(values, index)[index])  # importing numpy's quantile takes another 45 ms


def row_labels(scale: Scale, height: int, width: int) -> list[str]:
    """Return the label of each row of a plot, in `width` characters; most are blank."""
    labels = [" " * width] * height
    ticks = scale.ticks(max(2, height // 3))
    for value, text in zip(reversed(ticks), reversed(_tick_texts(ticks, width - 1)), strict=True):
        fraction = float(scale.fraction(np.array([value]))[0])
        row = min(int((1 - fraction) * height), height - 1)
        labels[row] = text.rjust(width - 1) + " "
    return labels


def _tick_texts(ticks: Sequence[float], width: int) -> list[str]:
    """Return the text of each tick with enough digits that neighbors differ; only the first one if they have no room.

    A text is never cut: without its exponent, it would be another number.
    """
    for digits in (4, 5, 6, 3, 2, 1):
        texts = [f"{value:.{digits}g}" for value in ticks]
        if all(len(text) <= width for text in texts) and all(a != b for a, b in pairwise(texts)):
            return texts
    return [text if i == 0 and len(text) <= width else "" for i, text in enumerate(texts)]


def _ticks(bottom: float, top: float, count: int) -> list[float]:
    step = _round_step((top - bottom) / max(count, 1))
    if not step or not math.isfinite(step):
        return []
    first = math.ceil(bottom / step - 1e-9)
    return [(first + i) * step for i in range(count + 2) if (first + i) * step <= top]


def _round_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, close to a value."""
    if rough <= 0 or not math.isfinite(rough):
        return 0.0
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.75)


def _log_ticks(bottom: float, top: float, count: int) -> list[float]:
    if not 0 < bottom < top < math.inf:
        return []
    low, high = math.floor(math.log10(bottom)), min(math.ceil(math.log10(top)), sys.float_info.max_10_exp)
    decades = range(low, high + 1)
    factors = (1, 2, 5) if len(decades) * 3 <= 2 * count + 4 else (1,)
    every = max(1, len(decades) // max(count, 1))
    ticks = [factor * 10.0**power for power in decades if power % every == 0 for factor in factors]
    ticks = [value for value in ticks if bottom <= value <= top]
    return ticks if len(ticks) >= 2 else _ticks(bottom, top, count)


class Curve(NamedTuple):
    """A metric over the steps of a run."""

    history: LossHistory | None
    """Values of the steps; None for a metric of the evaluations."""
    points: Floats
    """Step, value and epoch of each evaluation that has one, float64 [evaluations, 3]."""


def metric_names(view: View) -> list[str]:
    """Return the metrics of a run, in the order of the key; the IoU of classes is chosen in their pane."""
    names = ["loss"]
    step = view.step
    names += [TERM + name for name in (step.terms or {})] if step is not None else []
    names += [name for name in VAL_METRICS if view.vals and view.vals[-1].score(name) is not None]
    names += [name for name in STEP_METRICS if step is None or getattr(step, name) is not None]
    return names


def metric_title(name: str) -> str:
    return {**STEP_METRICS, **VAL_METRICS}.get(name, name)


def chart_title(metric: str) -> str:
    title = metric_title(metric)
    return title if title.startswith("mIoU") else title[:1].upper() + title[1:]


def step_field(name: str) -> str | None:
    """Return the field of `step` events with a metric's values, `terms.NAME` for a term; None for other metrics."""
    if name in STEP_METRICS:
        return name
    return f"terms.{name.removeprefix(TERM)}" if name.startswith(TERM) else None


def curve_of(view: View, name: str, series: LossHistory | None) -> Curve:
    """Return a metric of a run; the series has the values of `step_field(name)` if there is one."""
    if name == "loss":
        return Curve(view.history, _points(view, view.vals.values("loss")))
    if step_field(name) is not None:
        return Curve(series or LossHistory(), NO_POINTS)
    if name in VAL_METRICS:
        return Curve(None, _points(view, view.vals.values(name)))
    index = view.classes.index(name.removeprefix(CLASS)) if name.removeprefix(CLASS) in view.classes else -1
    return Curve(None, _points(view, view.vals.class_iou(index)))


def _points(view: View, values: Floats) -> Floats:
    """Return step, value and epoch of each evaluation that has one, float64 [evaluations, 3]."""
    return np.stack([view.vals.values("step"), values, view.vals.values("epoch")], axis=1)[~np.isnan(values)]


def class_iou(val: Val | None, index: int) -> float | None:
    return val.iou[index] if val is not None and 0 <= index < len(val.iou) else None
