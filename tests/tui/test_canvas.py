"""Cells on which the chart draws: heights, and what lies on top."""

from __future__ import annotations

import numpy as np

from segapp.tui.chart import Canvas
from segapp.view.plot import CurveColumns, Scale


def test_points_stand_at_their_heights() -> None:
    canvas = Canvas(8, 4)
    for column, fraction in enumerate((0.0, 0.25, 0.26, 0.5, 0.75, 0.76, 1.0, 1.01)):
        canvas.point(column, fraction, "x", 1)
    canvas.point(0, -0.01, "y", 1)
    assert ["".join(row) for row in canvas._chars] == ["     xx ", "    x   ", "  xx    ", "xx      "]


def test_curves_cover_and_lines_leave_what_is_there() -> None:
    canvas = Canvas(4, 2)
    low = np.repeat([1.0, 0.0, 1.0, np.nan], 2)
    high = np.repeat([1.0, 0.0, 5.0, np.nan], 2)
    columns = CurveColumns(low, high, np.zeros(8, dtype=bool))
    canvas.put(0, 0, "z", 2)
    canvas.curve(columns, Scale(0.0, 1.0), 1)
    canvas.line(1, ":", 3)  # the curve falls and rises here, so that no cell is empty
    canvas.line(3, ":", 3)
    canvas.clipped(columns, Scale(0.0, 1.0), 2)
    assert "".join(canvas._chars[0]) == "⠉⡆▲:"
    assert (canvas._chars[1, 1], canvas._chars[1, 3]) == ("⣇", ":")
    assert canvas._styles.tolist()[0] == [1, 1, 2, 3]
    assert canvas._styles[1, 1] == 1
