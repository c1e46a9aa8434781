"""Line charts as SVG inside a page, in the colours of its style sheet."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from segapp.run.words import learning_rate, number, printable
from segapp.view.plot import CurveColumns, Floats, Scale, choose_scale, reduce_columns

WIDTH_PX, HALF_PX, HEIGHT_PX = 1040, 510, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
NUM_COLORS = 8
"""Number of colours in the style sheet, `c0` and so on."""


@dataclass(frozen=True)
class ChartCurve:
    """A curve over increasing x, with gaps where y is not finite."""

    label: str
    x: Floats
    y: Floats
    color: int = 0
    """0 to `NUM_COLORS` - 1."""
    is_dotted: bool = False
    """Draw a dot with a tooltip at each point."""
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


def line_chart(curves: Sequence[ChartCurve], frame: Frame) -> Markup:
    """Return a chart of curves with a legend; a sentence if no curve has a finite value."""
    known = [curve for curve in curves if np.isfinite(curve.y).any()]
    if not known:
        return Markup("<p class=quiet>nothing was recorded</p>")
    left, right = (float(edge([edge(curve.x) for curve in known])) for edge in (np.min, np.max))
    x_scale = Scale(left, right if right > left else left + 1.0)
    y_scale = _y_scale(known, frame)
    parts = [_axes(x_scale, y_scale, frame)]
    for at, label in frame.marks:
        x = _x(x_scale, at, frame)
        parts.append(Markup('<g class=mark><line x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><title>{3}</title></g>').format(
            f"{x:.1f}", _TOP, HEIGHT_PX - _BOTTOM, printable(label)))  # fmt: skip
    parts += [_band(curve, x_scale, y_scale, frame) for curve in known if curve.band is not None]
    parts += [_curve_path(curve, x_scale, y_scale, frame) for curve in known]
    legend = Markup("").join(
        Markup('<span class="key c{}">{}</span>').format(curve.color, printable(curve.label)) for curve in known
    )
    return Markup(
        '<figure class=chart><svg viewBox="0 0 {} {}" role=img aria-label="{} over {}">{}</svg>'
        "<figcaption>{}</figcaption></figure>"
    ).format(frame.width_px, HEIGHT_PX, frame.y_label, frame.x_label, Markup("").join(parts), legend)


def _y_scale(curves: Sequence[ChartCurve], frame: Frame) -> Scale:
    nothing = np.empty(0)
    lows, highs = (np.concatenate([nothing, *(curve.band[i] for curve in curves if curve.band)]) for i in (0, 1))
    columns = CurveColumns(lows, highs, np.zeros(0, bool))
    firm = np.concatenate([curve.y for curve in curves])
    scale = choose_scale(columns, firm, is_log=frame.is_log) or Scale(0.0, 1.0)
    bottom = scale.bottom if frame.bottom is None else frame.bottom
    return Scale(bottom, max(scale.top, frame.top), scale.is_log)


def _x(scale: Scale, value: float, frame: Frame) -> float:
    return _LEFT + (frame.width_px - _LEFT - _RIGHT) * (value - scale.bottom) / (scale.top - scale.bottom)


def _ys(scale: Scale, values: Floats) -> Floats:
    room = HEIGHT_PX - _TOP - _BOTTOM
    result: Floats = _TOP + room * (1 - np.clip(scale.fraction(values), -0.02, 1.02))
    return result


def _axes(x_scale: Scale, y_scale: Scale, frame: Frame) -> Markup:
    right, floor = frame.width_px - _RIGHT, HEIGHT_PX - _BOTTOM
    parts = []
    is_tiny = max(abs(y_scale.top), abs(y_scale.bottom)) < 0.01
    for value in y_scale.ticks(5):
        y = float(_ys(y_scale, np.array([value]))[0])
        parts.append(Markup('<line class=grid x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(_LEFT, right, y=f"{y:.1f}"))
        label = learning_rate(value) if is_tiny and value else f"{value:g}"
        parts.append(_text(_LEFT - 6, y + 4, "end", label))
    parts += [_text(_x(x_scale, value, frame), floor + 16, "mid", f"{value:g}") for value in x_scale.ticks(8)]
    parts.append(Markup('<line class=axis x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(_LEFT, right, y=floor))
    parts.append(_text(right, HEIGHT_PX - 4, "end quiet", frame.x_label))
    return Markup("").join(parts)


def _text(x: float, y: float, style: str, text: str) -> Markup:
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(f"{x:.1f}", f"{y:.1f}", style, text)


def _band(curve: ChartCurve, x_scale: Scale, y_scale: Scale, frame: Frame) -> Markup:
    assert curve.band is not None
    width_px, is_bad = frame.width_px - _LEFT - _RIGHT, ~np.isfinite(curve.band[0])
    columns = reduce_columns(curve.x, *curve.band, is_bad, x_scale.bottom, x_scale.top, width_px)
    at = np.flatnonzero(np.isfinite(columns.low))
    low, high = _ys(y_scale, columns.low[at]), _ys(y_scale, columns.high[at])
    strokes = " ".join(f"M{_LEFT + i} {b + 0.4:.1f}V{t - 0.4:.1f}" for i, b, t in zip(at, low, high, strict=True))
    return Markup('<path class="band c{}" d="{}"/>').format(curve.color, strokes)


def _curve_path(curve: ChartCurve, x_scale: Scale, y_scale: Scale, frame: Frame) -> Markup:
    stride = max(1, len(curve.x) // (2 * frame.width_px)) if not curve.is_dotted else 1
    keep = np.unique([*range(0, len(curve.x), stride), len(curve.x) - 1])
    x, y = curve.x[keep], curve.y[keep]
    ys = _ys(y_scale, y)
    path, is_drawing = [], False
    for at, height in zip(x, ys, strict=True):
        if not math.isfinite(height):
            is_drawing = False
            continue
        path.append(f"{'L' if is_drawing else 'M'}{_x(x_scale, at, frame):.1f} {height:.1f}")
        is_drawing = True
    drawn = Markup('<path class="line c{}" d="{}"/>').format(curve.color, "".join(path))
    if not curve.is_dotted:
        return drawn
    dots = [
        Markup('<circle class="dot c{}" cx="{}" cy="{}" r="3"><title>{} at {}: {}</title></circle>').format(
            curve.color,
            f"{_x(x_scale, at, frame):.1f}",
            f"{height:.1f}",
            printable(curve.label),
            f"{at:g}",
            number(value, 4),
        )
        for at, height, value in zip(x, ys, y, strict=True)
        if math.isfinite(height)
    ]
    return drawn + Markup("").join(dots)
