"""The confusion matrix as a figure: SVG inside a page.

Rows are targets, columns predictions; darker cells have a larger share of the target's pixels. C classes.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray

from segapp.run.words import printable
from segapp.view.wording import clip

_MAX_LABEL_CHARS = 18


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

    It grows with the page up to 1.6 times the size of its cells, and shrinks to 0.75 times; a narrower page scrolls it.
    """
    grid = _Grid(matrix, classes)
    return Markup(
        '<figure class="matrix scroll"><svg viewBox="0 0 {0} {0}" style="min-width:{1}px;max-width:{2}px" role=img '
        'aria-label="confusion matrix">{3}</svg></figure>'
    ).format(grid.side_px, round(0.75 * grid.side_px), round(1.6 * grid.side_px), _svg_parts(grid))


def _svg_parts(grid: _Grid) -> Markup:
    parts = []
    near = grid.margin_px - 6
    for number, label in enumerate(grid.labels):
        at = grid.center(number) + 4
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
