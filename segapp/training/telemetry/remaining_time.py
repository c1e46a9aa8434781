"""The remaining time of a training, from the measured times of steps and evaluations. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from statistics import median_low

NUM_INTERVALS = 30
"""Number of intervals between two `step` events from which the time of a step is taken."""


@dataclass(frozen=True)
class Timetable:
    """The length of a training, and its evaluations; its end is always evaluated.

    `total_steps` may end within an epoch; None: whole epochs. `eval_every_steps` replaces the epochs between
    evaluations.
    """

    epochs: int
    steps_per_epoch: int
    total_steps: int | None = None
    eval_every_epochs: int = 1
    eval_every_steps: int | None = None

    @property
    def num_steps(self) -> int:
        """Steps of the whole training."""
        return self.epochs * self.steps_per_epoch if self.total_steps is None else self.total_steps

    def is_evaluation_due(self, epoch: int, step: int, *, is_epoch_end: bool) -> bool:
        """Return True at the end of the training, and after the given number of steps or epochs."""
        is_end = is_epoch_end and epoch >= self.epochs if self.total_steps is None else step >= self.total_steps
        if self.eval_every_steps is not None:
            return is_end or (step > 0 and step % self.eval_every_steps == 0)
        return is_end or (is_epoch_end and epoch % self.eval_every_epochs == 0)

    def num_evaluations(self, epoch: int = 1, step: int = 0) -> int:
        """Return the evaluations to come, with one that is due after this step of this epoch."""
        every, done, end = self.eval_every_epochs, epoch - 1, self.epochs
        if self.eval_every_steps is not None:
            every, done, end = self.eval_every_steps, max(0, step - 1), self.num_steps
        return end // every - done // every + (end % every > 0)


class RemainingTime:
    """Estimates the remaining time of a training: its steps at the median time, and its evaluations as measured."""

    def __init__(self, timetable: Timetable) -> None:
        self._timetable = timetable
        self._steps_s: deque[float] = deque(maxlen=NUM_INTERVALS)
        self._way: Hashable = None

    def observe(self, num_steps: int, seconds: float, way: Hashable = None) -> None:
        """Record the steps since the last `step` event; those before a change of `way` are forgotten."""
        if way != self._way:
            self._steps_s.clear()
        self._way = way
        self._steps_s.append(seconds / max(num_steps, 1))

    def etas_s(self, epoch: int, step: int, steps_in_epoch: int, eval_s: float) -> tuple[float, float]:
        """Return the seconds until the next epoch begins, and until the training ends.

        Args:
            epoch: the present epoch, from 1.
            step: number of finished steps.
            steps_in_epoch: number of steps left in the epoch.
            eval_s: seconds of an evaluation; 0 before the first one.
        """
        table, step_s = self._timetable, median_low(self._steps_s)
        steps, evaluations = table.num_steps - step, table.num_evaluations(epoch, step)
        run_s = steps * step_s + evaluations * eval_s
        if steps <= steps_in_epoch:
            return run_s, run_s
        later = table.num_evaluations(epoch + 1, step + steps_in_epoch + 1)
        return steps_in_epoch * step_s + (evaluations - later) * eval_s, run_s
