"""The remaining time of a training, from the measured times of steps, evaluations, saves and epoch starts. Pure."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from segapp.checkpoint.saver import SAVING_SHARE
from segapp.training.telemetry.clock import Clock, Spent

MIN_SPAN_STEPS = 20
"""The mean time of a step covers the last half epoch, but at least this number of steps."""

_KEPT = 3
"""The steps before a change count as this number of steps."""

_SPAN = 2.0
"""The mean time of an evaluation, a save or an epoch start covers this number of them."""


class Observed(NamedTuple):
    """Activities of a training so far in this process, and their time without pauses."""

    steps: Spent
    evaluations: Spent
    saves: Spent
    """The time during which the training waited."""
    loads: Spent
    """From the start of an epoch, or of its rest after an evaluation, to its first batch."""
    writes: Spent
    """Checkpoints written in the background; the end of the training waits for the last one."""

    @classmethod
    def of(cls, clock: Clock) -> Observed:
        """Return the counts of a clock."""
        return cls(clock.steps(), *(clock.spent(activity) for activity in ("eval", "save", "load", "write")))


class EpochPosition(NamedTuple):
    """A position in a training, after a step."""

    epoch: int
    """The present epoch, from 1."""
    step: int
    """Number of finished steps."""
    steps_in_epoch: int
    """Number of steps left in the epoch."""


class Left(NamedTuple):
    """The remaining work of a training."""

    steps: int
    evaluations: int
    saves: int
    loads: int


@dataclass(frozen=True)
class Timetable:
    """The length of a training, and its evaluations and saves; its end is always evaluated and saved.

    `total_steps` may end within an epoch; None: whole epochs. `eval_every_steps` replaces the epochs between
    evaluations; saves depend on epochs and on steps.
    """

    epochs: int
    steps_per_epoch: int
    total_steps: int | None = None
    eval_every_epochs: int = 1
    eval_every_steps: int | None = None
    save_every_epochs: int | None = 1
    save_every_steps: int | None = None
    save_every_s: float | None = None
    num_eval_images: int = 0
    num_step_images: int = 1

    def is_evaluation_due(self, epoch: int, step: int, *, is_epoch_end: bool) -> bool:
        """Return True at the end of the training, and after the given number of steps or epochs."""
        is_end = is_epoch_end and epoch >= self.epochs if self.total_steps is None else step >= self.total_steps
        if self.eval_every_steps is not None:
            return is_end or (step > 0 and step % self.eval_every_steps == 0)
        return is_end or (is_epoch_end and epoch % self.eval_every_epochs == 0)

    def whole_run(self) -> Left:
        """Return the work of a training from its beginning to its end."""
        return self.left_of_run(EpochPosition(1, 0, self.steps_per_epoch))

    def saves_within(self, left: Left, seconds: float, save_s: float) -> int:
        """Return the number of saves in the remaining work of this duration, if a copy and a write take `save_s`."""
        due = left.saves if self.save_every_s is None else max(left.saves, int(seconds / self.save_every_s))
        return min(due, 2 + int(SAVING_SHARE * seconds / save_s)) if save_s else due

    def left_of_run(self, place: EpochPosition) -> Left:
        """Return the remaining work of the training; work that is due at this position is included."""
        last = place.step + place.steps_in_epoch + (self.epochs - place.epoch) * self.steps_per_epoch
        if self.total_steps is not None:
            last = max(place.step, self.total_steps)
        return self._left(place, last, is_end=True)

    def left_of_epoch(self, place: EpochPosition) -> Left:
        """Return the remaining work before the next epoch begins, or the training ends."""
        of_run = self.left_of_run(place)
        if of_run.steps <= place.steps_in_epoch:
            return of_run
        return self._left(place, place.step + place.steps_in_epoch, is_end=False)

    def _left(self, place: EpochPosition, last: int, *, is_end: bool) -> Left:
        """Count the work that is due up to the step `last`; `is_end`: the training ends with it."""
        epoch_ends = range(place.step + place.steps_in_epoch, last + 1, self.steps_per_epoch)
        first = max(1, place.step)  # nothing is due before the first step

        def due(every_epochs: int | None, every_steps: int | None) -> set[int]:
            """Return the steps after which something is due that is repeated by epochs and by steps."""
            steps = {last} if is_end else set()
            if every_epochs is not None:
                steps |= {step for epoch, step in enumerate(epoch_ends, place.epoch) if epoch % every_epochs == 0}
            if every_steps is not None:
                steps.update(range(-(-first // every_steps) * every_steps, last + 1, every_steps))
            return steps

        by_steps = self.eval_every_steps
        evaluations = due(self.eval_every_epochs if by_steps is None else None, by_steps)
        saves = due(self.save_every_epochs, self.save_every_steps)
        loads = {*epoch_ends, *evaluations} - {last}
        return Left(last - place.step, len(evaluations), len(saves), len(loads))


class RemainingTime:
    """Estimates the remaining time of a training."""

    def __init__(self, timetable: Timetable) -> None:
        self._timetable = timetable
        self._step = _Mean(max(MIN_SPAN_STEPS, timetable.steps_per_epoch / 2))
        self._others = [_Mean(_SPAN, is_first_slow=True) for _ in Observed._fields[1:]]
        self._before = Observed(*[Spent()] * len(Observed._fields))
        self._way: Hashable = None

    def observe(self, observed: Observed, way: Hashable = None) -> None:
        """Process the activities since the last call.

        The steps before a change of `way` count as only a few. So do steps before the data is loaded for the second
        time: in the first epoch, files are read that are cached later, and the allocator grows.
        """
        if way != self._way or self._before.loads.times < 2 <= observed.loads.times:
            self._step.forget()
        self._way = way
        for mean, now, before in zip([self._step, *self._others], observed, self._before, strict=True):
            mean.add(now.times - before.times, now.seconds - before.seconds)
        self._before = observed

    def etas_s(self, place: EpochPosition) -> tuple[float | None, float | None]:
        """Return the seconds until the next epoch begins, and until the training ends; None before the first step.

        Future evaluations are assumed to take as long as the last ones; before the first one, an image is assumed to
        take as long as in a step.
        """
        if self._step.value is None:
            return None, None
        write_s = self._others[-1].value or 0.0
        of_run = self._timetable.left_of_run(place)
        of_epoch = self._timetable.left_of_epoch(place)
        run_s = self._seconds(of_run) + write_s
        return run_s if of_epoch == of_run else self._seconds(of_epoch), run_s

    def _seconds(self, left: Left) -> float:
        timetable, step_s = self._timetable, self._step.value or 0.0
        eval_s, save_s, load_s, write_s = (mean.value for mean in self._others[:4])
        if eval_s is None:
            eval_s = step_s * timetable.num_eval_images / timetable.num_step_images
        seconds = left.steps * step_s + left.evaluations * eval_s + left.loads * (load_s or 0.0)
        return seconds + timetable.saves_within(left, seconds, (save_s or 0.0) + (write_s or 0.0)) * (save_s or 0.0)


class _Mean:
    """A mean in which each measurement loses weight with every later one.

    Args:
        span: number of measurements after which the weight has fallen to 1/e.
        is_first_slow: the first measurement counts only until there is a second one.
    """

    def __init__(self, span: float, *, is_first_slow: bool = False) -> None:
        self._span, self._is_first_slow = span, is_first_slow
        self._sum = self._weight = 0.0
        self._num = 0

    @property
    def value(self) -> float | None:
        """The mean; None without a measurement."""
        return self._sum / self._weight if self._weight else None

    def add(self, num: int, total: float) -> None:
        """Add `num` measurements with this sum."""
        if num <= 0:
            return
        if self._is_first_slow and self._num == 1:
            self._sum = self._weight = 0.0
        kept = math.exp(-num / self._span)
        self._sum = kept * self._sum + (1 - kept) * total / num
        self._weight = kept * self._weight + (1 - kept)
        self._num += num

    def forget(self) -> None:
        """Give all measurements so far the weight of `_KEPT`."""
        kept = 1 - math.exp(-_KEPT / self._span)
        if self._weight > kept:
            self._sum, self._weight = self._sum / self._weight * kept, kept
