"""The history of a whole run in bounded memory: its losses and its evaluations.

Neighboring losses are merged when the capacity is reached. Old evaluations are kept as numbers only.
"""

import contextlib
import math
import mmap
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from segapp.run.events import Val
from segapp.scores import SCORES, as_float

Floats = NDArray[np.float64]

SMOOTHINGS = (0.6, 0.9, 0.98)

NUM_WHOLE = 64
"""Number of the last evaluations that are kept as events."""

_NUMBERS = ("epoch", "step", "num_images", "val_s", *SCORES)

_BLOCK = 128


class LossHistory:
    """Loss over steps, with exponential averages.

    The averages are debiased, `a_n / (1 - factor ** n)` with `a_n = factor * a_(n-1) + (1 - factor) * loss_n` (Adam,
    Kingma and Ba, ICLR 2015, section 3), so they have no bias to zero at the start, as in TensorBoard. They are
    computed over every step before points are merged; non-finite losses are skipped.

    Args:
        capacity: Maximum number of points, even; beyond it, pairs of neighbors are merged, with their extremes. 0:
            nothing is kept.
    """

    def __init__(self, capacity: int = 2**17) -> None:
        self.size = 0
        self.num_steps = 0
        """Number of `step` events, including merged ones."""
        self.capacity = capacity
        self._columns = _lazy_zeros(6 + len(SMOOTHINGS), capacity or 1)

    @property
    def usual_smoothing(self) -> float:
        return SMOOTHINGS[0] if self.num_steps < 200 else SMOOTHINGS[1] if self.num_steps < 4000 else SMOOTHINGS[2]

    @property
    def step(self) -> Floats:
        return self._column(0)

    @property
    def t(self) -> Floats:
        """Time of each point, Unix seconds."""
        return self._column(1)

    @property
    def low(self) -> Floats:
        """Smallest loss of each point; nan if none was finite."""
        return self._column(2)

    @property
    def high(self) -> Floats:
        """Largest loss of each point; nan if none was finite."""
        return self._column(3)

    @property
    def is_bad(self) -> NDArray[np.bool_]:
        return self._column(4) > 0

    def average(self, factor: float) -> Floats:
        """Return the debiased average at each point, for one of `SMOOTHINGS`; nan where the loss is not finite."""
        return self._column(6 + SMOOTHINGS.index(factor))

    def extend(self, step: Sequence[int], t: Sequence[float], loss: Sequence[float]) -> None:
        for start in range(0, len(step), self.capacity // 2):
            part = slice(start, start + self.capacity // 2)
            self._extend(np.array(step[part], float), np.array(t[part], float), np.array(loss[part], float))

    def drop_after(self, step: int) -> None:
        """Remove all points after a step, which a resumed training repeats."""
        self.size = int(np.searchsorted(self.step, step, side="right"))

    def _column(self, row: int) -> Floats:
        column: Floats = self._columns[row, : self.size]
        return column

    def _extend(self, step: Floats, t: Floats, loss: Floats) -> None:
        count = len(step)
        while self.size + count > self.capacity:
            self._merge()
        is_finite = np.isfinite(loss)
        loss = np.where(is_finite, loss, np.nan)
        num_before = int(self._columns[5, self.size - 1]) if self.size else 0
        num_finite = num_before + np.cumsum(is_finite)
        new = self._columns[:, self.size : self.size + count]
        new[0], new[1], new[2], new[3], new[4], new[5] = step, t, loss, loss, ~is_finite, num_finite
        for row, factor in enumerate(SMOOTHINGS, start=6):
            start = self.last_average(factor) * (1 - factor**num_before) if num_before else 0.0
            new[row] = np.nan
            biased = _average(loss[is_finite], start, factor)
            is_settled = factor**num_before < 1e-15
            new[row, is_finite] = biased if is_settled else biased / (1 - factor ** num_finite[is_finite])
        self.size += count
        self.num_steps += count

    def last_average(self, factor: float) -> float:
        """Return the latest debiased average, for one of `SMOOTHINGS`; nan before the first finite loss."""
        column = self.average(factor)
        known = column[-256:][np.isfinite(column[-256:])]
        if not len(known):
            known = column[np.isfinite(column)]
        return float(known[-1]) if len(known) else np.nan

    def _merge(self) -> None:
        num_pairs = self.size // 2
        first = self._columns[:, 0 : 2 * num_pairs : 2]
        second = self._columns[:, 1 : 2 * num_pairs : 2]
        merged = second.copy()
        merged[2], merged[3] = np.fmin(first[2], second[2]), np.fmax(first[3], second[3])
        merged[4] = np.maximum(first[4], second[4])
        averages = merged[6:]
        np.copyto(averages, first[6:], where=np.isnan(averages))
        rest = self._columns[:, 2 * num_pairs : self.size].copy()
        self._columns[:, :num_pairs] = merged
        self._columns[:, num_pairs : num_pairs + rest.shape[1]] = rest
        self.size = num_pairs + rest.shape[1]


def _lazy_zeros(num_rows: int, num_columns: int) -> Floats:
    """Return zeros that use memory only for written pages, and that never move."""
    memory = mmap.mmap(-1, 8 * num_rows * num_columns, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # from a kernel without huge pages
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory).reshape(num_rows, num_columns)


def _average(values: Floats, start: float, factor: float) -> Floats:
    """Return `a_n = factor * a_(n-1) + (1 - factor) * value_n` from `a_0 = start`, in blocks."""
    out = np.empty_like(values)
    matrix, decay = _block_matrix(factor)
    for first in range(0, len(values), _BLOCK):
        block = values[first : first + _BLOCK]
        out[first : first + _BLOCK] = matrix[: len(block), : len(block)] @ block + start * decay[: len(block)]
        start = out[first + len(block) - 1]
    return out


@cache
def _block_matrix(factor: float) -> tuple[Floats, Floats]:
    lag = np.subtract.outer(np.arange(_BLOCK), np.arange(_BLOCK))
    return np.where(lag >= 0, (1 - factor) * factor ** np.maximum(lag, 0), 0.0), factor ** np.arange(1.0, _BLOCK + 1)


class Evaluations:
    """The evaluations of a run, in order, in about 200 bytes and 8 bytes per class.

    The last `NUM_WHOLE` are the events themselves. The others are made from their numbers when they are requested, and
    have no precision and recall per class.
    """

    def __init__(self, vals: Iterable[Val] = ()) -> None:
        self._rows: list[array[float]] = []
        """`_NUMBERS` and the IoU of the classes of each evaluation; nan for None."""
        self._whole: deque[Val] = deque(maxlen=NUM_WHOLE)
        for val in vals:
            self.append(val)

    @property
    def last(self) -> Val | None:
        return self[-1] if self._rows else None

    def append(self, val: Val) -> None:
        numbers = [val.score(name) if name in SCORES else getattr(val, name) for name in _NUMBERS]
        self._rows.append(array("d", [as_float(value) for value in (*numbers, *val.iou)]))
        self._whole.append(val)

    def drop_after(self, step: int) -> None:
        at = _NUMBERS.index("step")
        self._rows = [row for row in self._rows if row[at] <= step]
        self._whole = deque((val for val in self._whole if val.step <= step), maxlen=NUM_WHOLE)

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
        num_short = len(self) - len(self._whole)
        if place >= num_short:
            return self._whole[place - num_short]
        known = [None if math.isnan(value) else value for value in self._rows[place]]
        numbers = dict(zip(_NUMBERS, known, strict=False))
        return Val.model_validate({**numbers, "scores": numbers, "iou": known[len(_NUMBERS) :]})
