"""The characters of the screen: Unicode, or ASCII for terminals and fonts without Unicode."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")


_BRAILLE = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]], dtype=np.uint16)


@dataclass(frozen=True)
class Glyphs:
    """A set of characters to draw with; the defaults are Unicode."""

    dot: str = "●"
    hollow_dot: str = "○"
    line_done: str = "━"
    line_half: str = "╸"
    """The last cell of a progress bar that ends in the middle of a cell."""
    line_left: str = "─"
    up: str = "▲"
    down: str = "▼"
    arrow: str = "→"
    separator: str = "·"
    spark: str = "▁▂▃▄▅▆▇█"
    """Levels of a sparkline, lowest first."""
    diamond: str = "◆"
    star: str = "★"
    bad: str = "×"
    v_mark: str = "┊"
    v_cursor: str = "│"
    v_axis: str = "│"
    h_axis: str = "─"
    corner: str = "└"
    clipped: str = "▲"
    degree: str = "°"
    dots_per_cell: tuple[int, int] = (4, 2)
    """Rows and columns of dots per cell of the chart."""
    dot_weights: NDArray[np.uint16] = field(default_factory=lambda: _BRAILLE)
    """Weight of each dot in the index into `dot_cells`."""
    dot_cells: str = "".join(map(chr, range(0x2800, 0x2900)))


UNICODE = Glyphs()
ASCII = Glyphs(
    dot="*", hollow_dot="o", line_done="=", line_half="-", line_left=".", up="+", down="-", arrow="->", separator=".",
    spark="_.-=*#", diamond="V", star="B", bad="x", v_mark=":", v_cursor="|", v_axis="|", h_axis="-", corner="+",
    clipped="^", degree="C", dots_per_cell=(2, 1), dot_weights=np.array([[1], [2]], dtype=np.uint16), dot_cells=" '.:",
)  # fmt: skip


_ASCII_FOR = str.maketrans({"·": ".", "→": ">", "←": "<", "…": "~", "×": "x", "±": "~", "°": "C", "—": "-"})


def ascii_text(text: str) -> str:
    """Return the text in ASCII, character by character; a character without an equivalent becomes `?`."""
    return text.translate(_ASCII_FOR).encode("ascii", "replace").decode()


def progress(frac: float | None, width: int, glyphs: Glyphs) -> tuple[str, str]:
    """Return the finished and the open part of a progress bar of `width` cells; all open for None."""
    halves = int(min(max(frac or 0.0, 0.0), 1.0) * 2 * width + 1e-9)
    done = glyphs.line_done * (halves // 2) + glyphs.line_half * (halves % 2)
    return done, glyphs.line_left * (width - len(done))


def spark(values: Sequence[float], width: int, glyphs: Glyphs) -> str:
    """Return the last `width` values as a sparkline between their extremes; shorter if there are fewer values.

    Values that differ by less than 2 % are drawn at half height, so that noise does not look like a trend.
    """
    shown = list(values)[-width:] if width > 0 else []
    bottom, top = min(shown, default=0.0), max(shown, default=0.0)
    last = len(glyphs.spark) - 1
    if top - bottom <= 0.02 * abs(top):
        return glyphs.spark[last // 2] * len(shown)
    return "".join(glyphs.spark[round((value - bottom) / (top - bottom) * last)] for value in shown)


def thinned(values: Sequence[Item], width: int) -> list[Item]:
    """Return at most `width` of the values, evenly spaced from the first to the last."""
    if len(values) <= width or width < 2:
        return list(values)
    return [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
