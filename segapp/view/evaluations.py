"""The evaluations of a run: the last ones completely, the others only as numbers."""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from segapp.run.events import Val
from segapp.scores import SCORES, as_float

Floats = NDArray[np.float64]

NUM_WHOLE = 64
"""Number of the last evaluations that are kept as events."""

_NUMBERS = ("epoch", "step", "num_images", "val_s", *SCORES)


class Evaluations:
    """The evaluations of a run, in order, in about 200 bytes and 8 bytes per class.

    The last `NUM_WHOLE` are the events themselves. The others are made from their numbers when they are requested, and
    have no precision and recall per class.
    """

    def __init__(self, vals: Iterable[Val] = ()) -> None:
        self._rows: list[array[float]] = []
        """`_NUMBERS` and the IoU of the classes of each evaluation; nan for None."""
        self._last: deque[Val] = deque(maxlen=NUM_WHOLE)
        for val in vals:
            self.append(val)

    def append(self, val: Val) -> None:
        """Add an evaluation."""
        numbers = [val.score(name) if name in SCORES else getattr(val, name) for name in _NUMBERS]
        self._rows.append(array("d", [as_float(value) for value in (*numbers, *val.iou)]))
        self._last.append(val)

    def drop_after(self, step: int) -> None:
        """Remove the evaluations after a step."""
        at = _NUMBERS.index("step")
        self._rows = [row for row in self._rows if row[at] <= step]
        self._last = deque((val for val in self._last if val.step <= step), maxlen=NUM_WHOLE)

    def values(self, name: str) -> Floats:
        """Return `epoch`, `step`, `num_images`, `val_s` or a score, float64 [evaluations]; nan if it is missing."""
        return self._column(_NUMBERS.index(name))

    def class_iou(self, index: int) -> Floats:
        """Return the IoU of a class at every evaluation, float64 [evaluations]; nan if it is missing."""
        return self._column(len(_NUMBERS) + index) if index >= 0 else np.full(len(self), np.nan)

    def _column(self, at: int) -> Floats:
        return np.array([row[at] if at < len(row) else math.nan for row in self._rows], dtype=np.float64)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Val]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: int) -> Val:
        place = range(len(self))[index]
        num_short = len(self) - len(self._last)
        if place >= num_short:
            return self._last[place - num_short]
        known = [None if math.isnan(value) else value for value in self._rows[place]]
        numbers = dict(zip(_NUMBERS, known, strict=False))
        return Val.model_validate({**numbers, "scores": numbers, "iou": known[len(_NUMBERS) :]})
