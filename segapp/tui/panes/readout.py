"""What the cursor of the chart reads: position, time, values, and the event nearest by. Text only."""

from __future__ import annotations

import numpy as np

from segapp.run.words import duration, number
from segapp.view.metrics import Curve
from segapp.view.view import View
from segapp.view.wording import clip

NEAR = 3
"""Cells within which an event is near the cursor."""


def cursor_readout(view: View, curve: Curve, index: int, smoothing: float, tolerance: float) -> list[str]:
    """Return the parts of the readout.

    Args:
        view: The run.
        curve: The metric that is shown.
        index: Of the point under the cursor: in the steps' values, or in the points of a metric of the evaluations.
        smoothing: One of `SMOOTHINGS`, or 0.
        tolerance: Steps of a cell.
    """
    history, points = curve.history, curve.points
    step = float(history.step[index]) if history is not None else float(points[index, 0])
    parts = [f"step {step:.0f}"]
    if view.start is not None and view.start.steps_per_epoch:
        parts.append(f"epoch {int((step - 1) // view.start.steps_per_epoch) + 1 if step > 0 else 1}")
    if view.history.size:
        at_s = float(np.interp(step, view.history.step, view.history.t))
        parts.append(duration(at_s - (view.first_start_s or float(view.history.t[0]))))
    if history is not None:
        low, high = float(history.low[index]), float(history.high[index])
        parts.append(number(low) if low == high or low != low else f"{number(low)} to {number(high)}")
        if smoothing:
            parts.append(f"smoothed {number(float(history.average(smoothing)[index]))}")
        near = points[np.abs(points[:, 0] - step) <= tolerance, 1]
        if len(near):
            parts.append(f"val {number(float(near[-1]))}")
    else:
        parts.append(number(float(points[index, 1])))
    marks = sorted((abs(mark.step - step), mark.text) for mark in view.marks)
    if marks and marks[0][0] <= NEAR * tolerance:
        parts.append(clip(marks[0][1], 30))
    return parts
