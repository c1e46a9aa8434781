"""Line charts and confusion matrices as SVG inside a page, in the colors of its style sheet.

Each curve has a color, a dash and a marker, which the legend names, so a chart can be read in black and white too.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from segapp.run.words import learning_rate, number, printable
from segapp.view.plot import CurveColumns, Floats, Scale, choose_scale, reduce_columns
from segapp.view.wording import clip

WIDTH_PX, HALF_PX, HEIGHT_PX = 1040, 510, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
NUM_COLORS = 8
"""Number of colors in the style sheet (`c0` and so on), each with a dash and a marker."""
_MARKERS = ("M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z", "M-3-3h6v6h-6z", "M0-4L3.8 3H-3.8z", "M0-4L4 0L0 4L-4 0z")
_MAX_MARKERS = 60
_MAX_LABEL_CHARS = 18


@dataclass(frozen=True)
class ChartCurve:
    """A curve over increasing x, with gaps where y is not finite."""

    label: str
    x: Floats
    y: Floats
    color: int = 0
    """0 to `NUM_COLORS` - 1."""
    is_dotted: bool = False
    """Draw a marker with a tooltip at each point; with more than 60 points, at every second, third ... point."""
    band: tuple[Floats, Floats] | None = None
    """Lowest and highest value at each x, drawn faintly behind the curve."""


@dataclass(frozen=True)
class Frame:
    """Axes and size of a chart."""

    x_label: str
    y_label: str
    is_log: bool = False
    marks: Sequence[tuple[float, str]] = ()
    """Positions on the horizontal axis with their tooltips."""
    bottom: float | None = None
    """Lower end of the vertical axis; None: below the lowest value."""
    top: float = -math.inf
    """Lower bound of the upper end."""
    width_px: int = WIDTH_PX


@dataclass(frozen=True)
class _Plot:
    """Area between the axes of a figure that is `width_px` wide."""

    width_px: int
    x_scale: Scale
    y_scale: Scale

    @property
    def inner_px(self) -> int:
        return self.width_px - _LEFT - _RIGHT

    def x(self, value: float) -> float:
        return _LEFT + self.inner_px * (value - self.x_scale.bottom) / (self.x_scale.top - self.x_scale.bottom)

    def ys(self, values: Floats) -> Floats:
        room = HEIGHT_PX - _TOP - _BOTTOM
        result: Floats = _TOP + room * (1 - np.clip(self.y_scale.fraction(values), -0.02, 1.02))
        return result


def line_chart(curves: Sequence[ChartCurve], frame: Frame) -> Markup:
    """Return a chart of curves with a legend; a sentence if none has a value."""
    known = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not known:
        return Markup("<p class=quiet>nothing was recorded</p>")
    legend = Markup("").join(curve_key(curve.label, curve.color) for curve in known)
    return Markup('<figure class="chart scroll">{}<figcaption>{}</figcaption></figure>').format(
        _picture(known, frame), legend
    )


def curve_key(label: str, color: int) -> Markup:
    """Return a label after a sample of a curve in a color: its dash and its marker."""
    return Markup(
        '<span class="key c{0}"><svg viewBox="0 0 34 10"><path class="line c{0}" d="M0 5H34"/>{1}</svg>{2}</span>'
    ).format(color, _marker(color, 17, 5), printable(label))


def _picture(curves: Sequence[ChartCurve], frame: Frame) -> Markup:
    left, right = (float(edge([edge(curve.x) for curve in curves])) for edge in (np.min, np.max))
    x_scale = Scale(left, right if right > left else left + 1.0)
    plot = _Plot(frame.width_px, x_scale, _y_scale(curves, frame))
    parts = [_axes(plot, frame)]
    for at, label in frame.marks:
        parts.append(Markup('<g class=mark><line x1="{0}" x2="{0}" y1="{1}" y2="{2}"/>{3}</g>').format(
            f"{plot.x(at):.1f}", _TOP, HEIGHT_PX - _BOTTOM, _tip(label)))  # fmt: skip
    parts += [_band(curve, plot) for curve in curves if curve.band is not None]
    parts += [_curve_path(curve, plot, is_alone=len(curves) == 1) for curve in curves]
    return Markup('<svg viewBox="0 0 {} {}" style="{}" role=img aria-label="{} over {}">{}</svg>').format(
        frame.width_px, HEIGHT_PX, _width_style(frame.width_px, 1.1), frame.y_label, frame.x_label,
        Markup("").join(parts),
    )  # fmt: skip


def _width_style(width_px: int, largest: float) -> str:
    """Return the style of a figure that the page shrinks to 0.75 times its size, and enlarges up to `largest` times.

    With other sizes, its text is too small or too large to read; a narrower page scrolls the figure.
    """
    return f"min-width:{round(0.75 * width_px)}px;max-width:{round(largest * width_px)}px"


def _y_scale(curves: Sequence[ChartCurve], frame: Frame) -> Scale:
    nothing = np.empty(0)
    lows, highs = (np.concatenate([nothing, *(curve.band[i] for curve in curves if curve.band)]) for i in (0, 1))
    columns = CurveColumns(lows, highs, np.zeros(0, bool))
    firm = np.concatenate([curve.y for curve in curves])
    scale = choose_scale(columns, firm, is_log=frame.is_log) or Scale(0.0, 1.0)
    bottom = scale.bottom if frame.bottom is None else frame.bottom
    return Scale(bottom, max(scale.top, frame.top), scale.is_log)


def _axes(plot: _Plot, frame: Frame) -> Markup:
    right, floor = plot.width_px - _RIGHT, HEIGHT_PX - _BOTTOM
    parts = []
    is_tiny = max(abs(plot.y_scale.top), abs(plot.y_scale.bottom)) < 0.01
    for value in plot.y_scale.ticks(5):
        y = float(plot.ys(np.array([value]))[0])
        parts.append(Markup('<line class=grid x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(_LEFT, right, y=f"{y:.1f}"))
        label = learning_rate(value) if is_tiny and value else f"{value:g}"
        parts.append(_text(_LEFT - 6, y + 4, "end", label))
    steps = [value for value in plot.x_scale.ticks(max(2, plot.inner_px // 100)) if value == round(value)]
    parts += [_text(plot.x(value), floor + 16, "mid", f"{value:g}") for value in steps]
    parts.append(Markup('<line class=axis x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(_LEFT, right, y=floor))
    parts.append(_text(right, HEIGHT_PX - 4, "end quiet", frame.x_label))
    return Markup("").join(parts)


def _text(x: float, y: float, style: str, text: str) -> Markup:
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(f"{x:.1f}", f"{y:.1f}", style, text)


def _tip(text: str) -> Markup:
    return Markup("<title>{}</title>").format(printable(text))


def _marker(color: int, x: float, y: float, tip: str = "") -> Markup:
    return Markup('<path class="dot c{}" transform="translate({:.1f} {:.1f})" d="{}">{}</path>').format(
        color, x, y, _MARKERS[color % len(_MARKERS)], tip
    )


def _band(curve: ChartCurve, plot: _Plot) -> Markup:
    assert curve.band is not None
    is_bad = ~np.isfinite(curve.band[0])
    columns = reduce_columns(curve.x, *curve.band, is_bad, plot.x_scale.bottom, plot.x_scale.top, plot.inner_px)
    at = np.flatnonzero(np.isfinite(columns.low))
    low, high = plot.ys(columns.low[at]), plot.ys(columns.high[at])
    strokes = " ".join(f"M{_LEFT + i} {b + 0.4:.1f}V{t - 0.4:.1f}" for i, b, t in zip(at, low, high, strict=True))
    return Markup('<path class="band c{}" d="{}"/>').format(curve.color, strokes)


def _curve_path(curve: ChartCurve, plot: _Plot, *, is_alone: bool) -> Markup:
    stride = max(1, len(curve.x) // (2 * plot.width_px)) if not curve.is_dotted else 1
    keep = np.unique([*range(0, len(curve.x), stride), len(curve.x) - 1])
    x, y = curve.x[keep], curve.y[keep]
    ys = plot.ys(y)
    path, is_drawing = [], False
    for at, height in zip(x, ys, strict=True):
        if not math.isfinite(height):
            is_drawing = False
            continue
        path.append(f"{'L' if is_drawing else 'M'}{plot.x(at):.1f} {height:.1f}")
        is_drawing = True
    drawn = Markup('<path class="line c{}" d="{}"/>').format(curve.color, "".join(path))
    finite = np.flatnonzero(np.isfinite(ys))
    if curve.is_dotted:
        marked = finite[:: math.ceil(len(finite) / _MAX_MARKERS)]
    else:  # a few markers distinguish the curves, at different places for each curve
        spread = (np.arange(5) + (curve.color + 0.5) / NUM_COLORS) / 5
        marked = finite[:0] if is_alone and len(finite) > 1 else finite[np.unique((spread * len(finite)).astype(int))]
    markers = [
        _marker(
            curve.color, plot.x(x[i]), ys[i], _tip(f"{curve.label} at {x[i]:g}: {number(float(y[i]), 4)}")
            if curve.is_dotted else Markup("")
        )
        for i in marked
    ]  # fmt: skip
    return drawn + Markup("").join(markers)


class Confusion(NamedTuple):
    """Pixels of one class that are predicted as another."""

    target: str
    prediction: str
    share: float
    """Share of the pixels of `target`."""
    wrong_share: float
    """Share of all wrong pixels."""


def top_confusions(matrix: NDArray[np.int64], names: Sequence[str], count: int) -> list[Confusion]:
    """Return the most frequent confusions of a matrix (C, C), by their share of the class."""
    wrong = matrix * ~np.eye(len(matrix), dtype=bool)
    totals, num_wrong = matrix.sum(1, keepdims=True), max(1, wrong.sum())
    shares = np.divide(wrong, totals, out=np.zeros(matrix.shape), where=totals > 0)
    order = np.argsort(-shares, axis=None, kind="stable")[:count]
    pairs = [divmod(int(at), len(names)) for at in order]
    return [
        Confusion(names[a], names[b], float(shares[a, b]), float(wrong[a, b] / num_wrong))
        for a, b in pairs
        if wrong[a, b] > 0
    ]


class _Grid:
    """Cells and sizes of a figure, px."""

    def __init__(self, matrix: NDArray[np.int64], classes: Sequence[str]) -> None:
        self.matrix = matrix
        self.names = [printable(name) for name in classes]
        labels = [clip(name, _MAX_LABEL_CHARS) for name in self.names]
        self.cell_px = 30 if len(classes) <= 24 else max(6, 720 // len(classes))
        self.margin_px = round(8 + 6.6 * max(map(len, labels)))
        self.side_px = self.margin_px + self.cell_px * len(classes) + 4
        self.labels = labels if self.cell_px >= 11 else []

    def corner(self, number: int) -> int:
        return self.margin_px + number * self.cell_px

    def center(self, number: int) -> float:
        return self.margin_px + (number + 0.5) * self.cell_px


def confusion_figure(matrix: NDArray[np.int64], classes: Sequence[str]) -> Markup:
    """Return a confusion matrix, (C, C) counts of (target, prediction), as a figure in the colors of the page.

    Rows are targets, columns are predictions, and darker cells have a larger share of the target's pixels.
    """
    grid = _Grid(matrix, classes)
    return Markup(
        '<figure class="matrix scroll"><svg viewBox="0 0 {0} {0}" style="{1}" role=img '
        'aria-label="confusion matrix">{2}</svg></figure>'
    ).format(grid.side_px, _width_style(grid.side_px, 1.6), _svg_parts(grid))


def _svg_parts(grid: _Grid) -> Markup:
    parts = []
    near = grid.margin_px - 6
    for row, label in enumerate(grid.labels):
        at = grid.center(row) + 4
        parts.append(f'<text x="{near}" y="{at}" class="end">{escape(label)}</text>')
        parts.append(f'<text transform="translate({at} {near}) rotate(-90)">{escape(label)}</text>')
    for row, column, share in _shares(grid.matrix):
        opacity = 0.06 + 0.94 * math.sqrt(share)  # the root makes confusions of a few percent visible
        target, prediction = escape(grid.names[row]), escape(grid.names[column])
        parts.append(
            f'<g class="{"hit" if row == column else "miss"}"><rect x="{grid.corner(column)}" y="{grid.corner(row)}" '
            f'width="{grid.cell_px - 1}" height="{grid.cell_px - 1}" fill-opacity="{opacity:.2f}"/><title>{target} '
            f"read as {prediction}, {share:.1%} of its pixels</title></g>"
        )
        if grid.cell_px >= 24 and share >= 0.005:
            parts.append(
                f'<text x="{grid.center(column) - 0.5}" y="{grid.center(row) + 3.5}" '
                f'class="mid value{" on" if opacity > 0.55 else ""}">{100 * share:.0f}</text>'
            )
    return Markup("".join(parts))


def _shares(matrix: NDArray[np.int64]) -> Iterator[tuple[int, int, float]]:
    """Yield row, column and share of the cells that are drawn: the diagonal, and shares of at least 0.05 %."""
    totals = matrix.sum(1)
    for row in np.flatnonzero(totals).tolist():
        for column, share in enumerate((matrix[row] / totals[row]).tolist()):
            if share >= 0.0005 or row == column:
                yield row, column, share
