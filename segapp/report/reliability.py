"""Reliability diagram as an SVG file: the share of correct predictions per confidence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from markupsafe import Markup

from segapp.inference.calibration import Reliability

_SIDE, _LEFT, _TOP, _BOTTOM = 320, 56, 40, 44
_SHADES = ("#9aa0a6", "#1a5fb4")  # colors of the first and the second result, which also differ in lightness


def reliability_picture(results: Mapping[str, Reliability]) -> str:
    """Return the diagram of at most two results, by name: a bar per bin, and a diagonal for perfect calibration."""
    width, height = _LEFT + _SIDE + 16, _TOP + _SIDE + _BOTTOM
    parts = [Markup('<rect width="100%" height="100%" fill="#fff"/>')]
    for value in np.linspace(0, 1, 6):
        x, y = _LEFT + value * _SIDE, _TOP + (1 - value) * _SIDE
        parts.append(Markup('<path d="M{} {y}H{}" stroke="#ddd"/>').format(_LEFT, _LEFT + _SIDE, y=f"{y:.1f}"))
        parts.append(_text(_LEFT - 6, y + 4, "end", f"{value:.1f}"))
        parts.append(_text(x, _TOP + _SIDE + 16, "middle", f"{value:.1f}"))
    for number, (name, found) in enumerate(results.items()):
        bar = _SIDE / len(found.num_px) / (len(results) + 0.4)
        for at in np.flatnonzero(found.num_px):
            x = _LEFT + _SIDE * at / len(found.num_px) + (number + 0.2) * bar
            tall = found.accuracy[at] * _SIDE
            tip = (
                f"{name}: confidence {found.confidence[at]:.3f}, right {found.accuracy[at]:.3f}, "
                f"{found.num_px[at]} pixels"
            )
            box = (f"{value:.1f}" for value in (x, _TOP + _SIDE - tall, bar, tall))
            bin_markup = Markup('<rect x="{}" y="{}" width="{}" height="{}" fill="{}"><title>{}</title></rect>')
            parts.append(bin_markup.format(*box, _SHADES[number], tip))
        x = _LEFT + number * _SIDE / 2
        parts.append(
            Markup('<rect x="{}" y="12" width="12" height="12" fill="{}"/>').format(f"{x:.1f}", _SHADES[number])
        )
        parts.append(_text(x + 18, 22, "start", f"{name}, error {found.error:.4f}"))
    parts.append(Markup('<path d="M{} {}L{} {}" stroke="#000" stroke-dasharray="4 3"/>').format(
        _LEFT, _TOP + _SIDE, _LEFT + _SIDE, _TOP))  # fmt: skip
    parts.append(_text(_LEFT + _SIDE / 2, height - 8, "middle", "confidence"))
    parts.append(Markup('<g transform="rotate(-90 14 {y})">{}</g>').format(
        _text(14, _TOP + _SIDE / 2, "middle", "share of right pixels"), y=_TOP + _SIDE / 2))  # fmt: skip
    return Markup('<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {} {}" width="{}" font-family="sans-serif" '
        'font-size="12" role="img" aria-label="reliability diagram">{}</svg>\n').format(
        width, height, width, Markup("").join(parts))  # fmt: skip


def _text(x: float, y: float, anchor: str, text: str) -> Markup:
    return Markup('<text x="{}" y="{}" text-anchor="{}">{}</text>').format(f"{x:.1f}", f"{y:.1f}", anchor, text)
