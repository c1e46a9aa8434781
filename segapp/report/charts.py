"""Curves and matrices as SVG: text of a page, drawn in the page's own colours, light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import ArrayLike, NDArray

from segapp.run.text import printable
from segapp.tui.panes.plot import Columns, Floats, Scale, choose_scale, reduce_columns
from segapp.tui.state.wording import learning_rate, number

WIDTH_PX, HALF_PX, HEIGHT_PX = 1040, 510, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 34
NUM_COLORS = 8
"""Colours that the page's style names `c0` and so on."""


@dataclass(frozen=True)
class Line:
    """A curve.

    Args:
        label: what it is.
        x: rising.
        y: as many; gaps where not finite.
        color: 0 to `NUM_COLORS` - 1.
        is_dotted: a dot at each point, which tells its value.
        band: lowest and highest value at each x, drawn faintly behind; None for none.
    """

    label: str
    x: ArrayLike
    y: ArrayLike
    color: int = 0
    is_dotted: bool = False
    band: tuple[Floats, Floats] | None = None


@dataclass(frozen=True)
class Frame:
    """How a chart is drawn.

    Args:
        x_label: what the horizontal axis counts.
        y_label: what the vertical one does.
        is_log: logarithmic vertical axis.
        marks: places on the horizontal axis with a word.
        bottom: where the vertical axis begins; None: below the lowest value.
        top: highest value shown at least.
        width_px: of the chart.
    """

    x_label: str
    y_label: str
    is_log: bool = False
    marks: Sequence[tuple[float, str]] = field(default_factory=tuple)
    bottom: float | None = None
    top: float | None = None
    width_px: int = WIDTH_PX


def line_chart(lines: Sequence[Line], frame: Frame) -> Markup:
    """Curves over one axis; a word where there is nothing to draw."""
    known = [line for line in lines if np.isfinite(np.asarray(line.y, float)).any()]
    if not known:
        return Markup("<p class=quiet>nothing was recorded</p>")
    xs = np.concatenate([np.asarray(line.x, float) for line in known])
    x_scale = Scale(float(xs.min()), float(xs.max()) if xs.max() > xs.min() else float(xs.min()) + 1.0)
    y_scale = _y_scale(known, frame)
    parts = [_axes(x_scale, y_scale, frame)]
    for at, word in frame.marks:
        x = _x(x_scale, at, frame)
        parts.append(Markup('<g class=mark><line x1="{0}" x2="{0}" y1="{1}" y2="{2}"/><title>{3}</title></g>').format(
            f"{x:.1f}", _TOP, HEIGHT_PX - _BOTTOM, printable(word)))  # fmt: skip
    parts += [_band(line, x_scale, y_scale, frame) for line in known if line.band is not None]
    parts += [_curve(line, x_scale, y_scale, frame) for line in known]
    legend = Markup("").join(
        Markup('<span class="key c{}">{}</span>').format(line.color, printable(line.label)) for line in known
    )
    return Markup(
        '<figure class=chart><svg viewBox="0 0 {} {}" role=img aria-label="{} over {}">{}</svg>'
        "<figcaption>{}</figcaption></figure>"
    ).format(frame.width_px, HEIGHT_PX, frame.y_label, frame.x_label, Markup("").join(parts), legend)


def _y_scale(lines: Sequence[Line], frame: Frame) -> Scale:
    nothing = np.empty(0)
    lows = np.concatenate([line.band[0] for line in lines if line.band is not None] or [nothing])
    highs = np.concatenate([line.band[1] for line in lines if line.band is not None] or [nothing])
    firm = np.concatenate([np.asarray(line.y, float) for line in lines])
    is_bad = np.zeros(0, bool)
    scale = choose_scale(
        Columns(lows, highs, is_bad), Columns(nothing, nothing, is_bad), firm, is_log=frame.is_log
    ) or Scale(0.0, 1.0)
    bottom = scale.bottom if frame.bottom is None else min(scale.bottom, frame.bottom)
    top = scale.top if frame.top is None else max(scale.top, frame.top)
    return Scale(bottom if frame.bottom is None else frame.bottom, top, scale.is_log)


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
        word = learning_rate(value) if is_tiny and value else f"{value:g}"
        parts.append(_text(_LEFT - 6, y + 4, "end", word))
    parts += [_text(_x(x_scale, value, frame), floor + 16, "mid", f"{value:g}") for value in x_scale.ticks(8)]
    parts.append(Markup('<line class=axis x1="{}" x2="{}" y1="{y}" y2="{y}"/>').format(_LEFT, right, y=floor))
    parts.append(_text(right, HEIGHT_PX - 4, "end quiet", frame.x_label))
    return Markup("").join(parts)


def _text(x: float, y: float, style: str, word: str) -> Markup:
    return Markup('<text x="{}" y="{}" class="{}">{}</text>').format(f"{x:.1f}", f"{y:.1f}", style, word)


def _band(line: Line, x_scale: Scale, y_scale: Scale, frame: Frame) -> Markup:
    assert line.band is not None
    x = np.asarray(line.x, float)
    columns = reduce_columns(
        x, *line.band, ~np.isfinite(line.band[0]), x_scale.bottom, x_scale.top, frame.width_px - _LEFT - _RIGHT
    )
    at = np.flatnonzero(np.isfinite(columns.low))
    low, high = _ys(y_scale, columns.low[at]), _ys(y_scale, columns.high[at])
    strokes = " ".join(f"M{_LEFT + i} {b + 0.4:.1f}V{t - 0.4:.1f}" for i, b, t in zip(at, low, high, strict=True))
    return Markup('<path class="band c{}" d="{}"/>').format(line.color, strokes)


def _curve(line: Line, x_scale: Scale, y_scale: Scale, frame: Frame) -> Markup:
    x, y = np.asarray(line.x, float), np.asarray(line.y, float)
    stride = max(1, len(x) // (2 * frame.width_px)) if not line.is_dotted else 1
    keep = np.unique(np.concatenate([np.arange(0, len(x), stride), [len(x) - 1]]))
    x, y = x[keep], y[keep]
    ys = _ys(y_scale, y)
    path, is_drawing = [], False
    for at, height in zip(x, ys, strict=True):
        if not math.isfinite(height):
            is_drawing = False
            continue
        path.append(f"{'L' if is_drawing else 'M'}{_x(x_scale, at, frame):.1f} {height:.1f}")
        is_drawing = True
    drawn = Markup('<path class="line c{}" d="{}"/>').format(line.color, "".join(path))
    if not line.is_dotted:
        return drawn
    dots = [
        Markup('<circle class="dot c{}" cx="{}" cy="{}" r="3"><title>{} at {}: {}</title></circle>').format(
            line.color,
            f"{_x(x_scale, at, frame):.1f}",
            f"{height:.1f}",
            printable(line.label),
            f"{at:g}",
            number(value, 4),
        )
        for at, height, value in zip(x, ys, y, strict=True)
        if math.isfinite(height)
    ]
    return drawn + Markup("").join(dots)


def confusion_picture(matrix: NDArray[np.int64], classes: Sequence[str]) -> Markup:
    """A confusion matrix, each row as shares of its target's pixels; darker is more.

    Args:
        matrix: (C, C) counts of (target, prediction).
        classes: C names.
    """
    totals = matrix.sum(1, keepdims=True)
    shares = np.divide(matrix, totals, out=np.zeros(matrix.shape), where=totals > 0)
    cell = 30 if len(classes) <= 24 else max(6, 720 // len(classes))
    names = [printable(name) for name in classes]
    room = 8 + 6.6 * min(18, max(map(len, names)))
    side = cell * len(names)
    parts = []
    for row, name in enumerate(names):
        short = name if len(name) <= 18 else name[:17] + "…"
        middle = row * cell + cell / 2
        if cell >= 11:
            parts.append(f'<text x="{room - 6:.0f}" y="{room + middle + 4:.1f}" class=end>{escape(short)}</text>')
            place = f"translate({room + middle + 4:.1f} {room - 6:.0f}) rotate(-90)"
            parts.append(f'<text transform="{place}">{escape(short)}</text>')
        for column, other in enumerate(names):
            share = float(shares[row, column])
            if not totals[row, 0] or (share < 0.0005 and row != column):
                continue
            place = f'x="{room + column * cell:.0f}" y="{room + row * cell:.0f}"'
            kind = "hit" if row == column else "miss"
            parts.append(
                f'<g class={kind}><rect {place} width={cell - 1} height={cell - 1} fill-opacity="{_shade(share):.2f}"/>'
                f"<title>{escape(name)} taken for {escape(other)}: {share:.1%} of its pixels</title></g>"
            )
            if cell >= 24 and share >= 0.005:
                tone = "on" if _shade(share) > 0.55 else "off"
                parts.append(
                    f'<text x="{room + (column + 0.5) * cell - 0.5:.1f}" y="{room + (row + 0.5) * cell + 3.5:.1f}" '
                    f'class="mid value {tone}">{100 * share:.0f}</text>'
                )
    total = room + side + 4
    return Markup('<figure class=matrix><svg viewBox="0 0 {0} {0}" style="max-width:{0}px">{1}</svg></figure>').format(
        f"{total:.0f}", Markup("".join(parts))
    )


def _shade(share: float) -> float:
    """More than in proportion for small shares: a confusion of 5 % is to be seen."""
    return 0.06 + 0.94 * math.sqrt(min(max(share, 0.0), 1.0))
