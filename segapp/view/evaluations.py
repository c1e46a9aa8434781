"""The evaluations of a run: the last ones whole, all of them as columns of numbers."""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

import numpy as np
from numpy.typing import NDArray

from segapp.run.events import Val
from segapp.scores import SCORES

Floats = NDArray[np.float64]

NUM_WHOLE = 64
"""Number of evaluations, the last ones, that are kept as events."""

_FACTS = ("epoch", "step", "num_images", "val_s")
_NUMBERS = (*_FACTS, *SCORES)


class PastVal(NamedTuple):
    """An old evaluation, in short."""

    epoch: int
    step: int
    num_images: int | None
    val_s: float | None
    scores: dict[str, float | None]
    """Name, as in `segapp.scores.SCORES`, -> value."""
    iou: Sequence[float | None]
    """nan in place of None."""

    @property
    def loss(self) -> float | None:
        """Of the evaluation; None if it was not finite."""
        return self.scores["loss"]

    @property
    def miou(self) -> float | None:
        """Mean over the classes that occur."""
        return self.scores["miou"]

    def score(self, name: str) -> float | None:
        """Return a score by its name; None if it is not known."""
        return self.scores.get(name)


class Evaluations(Sequence[Val | PastVal]):
    """The evaluations of a run, in order, in about 100 bytes and 8 per class.

    The last `NUM_WHOLE` are the events themselves, the others are made from the columns when they are asked for.

    Args:
        vals: The first ones.
    """

    def __init__(self, vals: Iterable[Val] = ()) -> None:
        self._numbers = array("d")
        """`_NUMBERS` of each evaluation; nan for None."""
        self._ious = array("d")
        """Of the classes of each evaluation; nan for None."""
        self._ends = array("q")
        """End of each evaluation in `_ious`."""
        self._last: deque[Val] = deque(maxlen=NUM_WHOLE)
        for val in vals:
            self.append(val)

    def append(self, val: Val) -> None:
        """Add an evaluation."""
        self._numbers.extend(_as_float(getattr(val, name)) for name in _FACTS)
        self._numbers.extend(_as_float(val.score(name)) for name in SCORES)
        self._ious.extend(map(_as_float, val.iou))
        self._ends.append(len(self._ious))
        self._last.append(val)

    def drop_after(self, step: int) -> None:
        """Remove the evaluations after a step."""
        kept = [i for i, value in enumerate(self.values("step").tolist()) if value <= step]
        whole = {len(self) - len(self._last) + i: val for i, val in enumerate(self._last)}
        short = [(self._row(i), self._iou_of(i)) for i in kept]
        self._numbers, self._ious, self._ends = array("d"), array("d"), array("q")
        for row, iou in short:
            self._numbers.extend(row)
            self._ious.extend(iou)
            self._ends.append(len(self._ious))
        self._last = deque((whole[i] for i in kept if i in whole), maxlen=NUM_WHOLE)

    def values(self, name: str) -> Floats:
        """Return a number of every evaluation, float64 [evaluations]; nan where it has none.

        Args:
            name: `epoch`, `step`, `num_images`, `val_s`, or a score.
        """
        return np.array(self._numbers[_NUMBERS.index(name) :: len(_NUMBERS)])

    def class_iou(self, index: int) -> Floats:
        """Return the IoU of a class at every evaluation, float64 [evaluations]; nan where it has none."""
        ends, ious = np.array(self._ends), np.array(self._ious)
        places = np.concatenate([[0], ends[:-1]])[: len(ends)] + index
        found = np.full(len(ends), np.nan)
        is_known = (places < ends) & (index >= 0)
        found[is_known] = ious[places[is_known]]
        return found

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> Val | PastVal: ...

    @overload
    def __getitem__(self, index: slice) -> list[Val | PastVal]: ...

    def __getitem__(self, index: int | slice) -> Val | PastVal | list[Val | PastVal]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        num_short = len(self) - len(self._last)
        if place >= num_short:
            return self._last[place - num_short]
        epoch, step, num_images, val_s, *values = self._row(place)
        whole = None if math.isnan(num_images) else int(num_images)
        scores = dict(zip(SCORES, map(_known, values), strict=True))
        return PastVal(int(epoch), int(step), whole, _known(val_s), scores, self._iou_of(place))

    def _row(self, place: int) -> array[float]:
        return self._numbers[place * len(_NUMBERS) : (place + 1) * len(_NUMBERS)]

    def _iou_of(self, place: int) -> array[float]:
        return self._ious[self._ends[place - 1] if place else 0 : self._ends[place]]


def _as_float(value: float | None) -> float:
    """Return a number as a float; nan for None and for an integer too large."""
    try:
        return math.nan if value is None else float(value)
    except OverflowError:
        return math.nan


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
