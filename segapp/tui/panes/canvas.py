"""Cells with a character and a style each, on which the chart draws."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from segapp.tui.glyphs import Glyphs
from segapp.view.plot import CurveColumns, Scale, draw_columns, pack_dots


class Canvas:
    """A grid of cells; later drawing overwrites earlier."""

    def __init__(self, width: int, height: int, glyphs: Glyphs) -> None:
        self.width, self.height = width, height
        self._glyphs = glyphs
        self._chars = np.full((height, width), " ", dtype="<U1")
        self._styles = np.zeros((height, width), dtype=np.int8)
        self._table = np.array(list(glyphs.dot_cells), dtype="<U1")

    def curve(self, columns: CurveColumns, scale: Scale, style: int) -> None:
        """Draw a curve in dots."""
        dots = draw_columns(columns, scale, self.height * self._glyphs.dots_per_cell[0])
        packed = pack_dots(dots, self._glyphs.dot_weights)
        is_set = packed > 0
        self._chars[is_set] = self._table[packed[is_set]]
        self._styles[is_set] = style

    def clipped(self, columns: CurveColumns, scale: Scale, style: int) -> None:
        """Mark in the top row where the curve exceeds the scale."""
        with np.errstate(invalid="ignore"):
            beyond = np.flatnonzero(columns.high > scale.top * (1 + 1e-12))
        for cell in set((beyond // self._glyphs.dots_per_cell[1]).tolist()):
            self.put(0, cell, self._glyphs.clipped, style)

    def point(self, column: int, fraction: float, char: str, style: int) -> None:
        """Draw a character at a height from 0 (bottom) to 1 (top); nothing outside that range."""
        if 0 <= fraction <= 1:
            self.put(min(int((1 - fraction) * self.height), self.height - 1), column, char, style)

    def line(self, column: int, char: str, style: int) -> None:
        """Draw a vertical line in the cells without a curve."""
        is_empty = self._chars[:, column] == " "
        self._chars[is_empty, column] = char
        self._styles[is_empty, column] = style

    def put(self, row: int, column: int, char: str, style: int) -> None:
        """Draw a character in one cell."""
        self._chars[row, column], self._styles[row, column] = char, style

    def text(self, column: int, text: str, style: int) -> None:
        """Draw a text in the first row."""
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
