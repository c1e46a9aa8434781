"""Where three pictures and their legend go in a pane. Pure."""

from __future__ import annotations

from typing import NamedTuple

LEAST_LEGEND_ROWS = 3


class Arrangement(NamedTuple):
    """Places of three pictures, each below its label.

    The legend is beside the stack of one column, in the free quarter of two, and below three.
    """

    columns: int
    width: int
    """Cells of a picture."""
    height: int
    """Rows of a picture, without its label."""
    legend_width: int
    legend_height: int


def arrange(size: tuple[int, int], picture_px: tuple[int, int], legend_width: int) -> Arrangement:
    """Return the arrangement in which the pictures are largest; the stack, if several are equal.

    Args:
        size: Cells and rows of the pane; a cell shows one pixel beside and two below each other.
        picture_px: Width and height of a picture.
        legend_width: Cells of the widest line of the legend; 0: there is none.
    """
    width, height = size
    beside = min(legend_width, width // 3) + 1 if legend_width else 0
    below = LEAST_LEGEND_ROWS if legend_width and height >= 12 else min(1, legend_width)
    rooms = {
        1: (width - beside, height // 3 - 1),
        2: ((width - 1) // 2, height // 2 - 1),
        3: ((width - 2) // 3, height - 1 - below),
    }
    scales = {columns: min(w / picture_px[0], 2 * h / picture_px[1]) for columns, (w, h) in rooms.items()}
    columns = max(scales, key=lambda columns: scales[columns])
    used = max(1, round(scales[columns] * picture_px[0])), max(1, round(scales[columns] * picture_px[1] / 2))
    legend = {
        1: (width - used[0] - 1, height),
        2: (width - used[0] - 1, used[1]),
        3: (width, max(below, height - used[1] - 1)),
    }[columns]
    return Arrangement(columns, *used, *legend)
