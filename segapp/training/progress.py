"""The length of a training, its position, its best evaluation, and the rule by which it has diverged.

An epoch has diverged if the loss of each of its steps is higher than the loss of the first step, before which nothing
was learned, and if their mean is more than three times as high as the first loss and as a guess's loss, ln C for C
classes. Warm restarts, unfrozen layers and the noise of small data sets stay far below that. A fine-tuned network,
whose first loss is small, may rise to a guess's loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segapp.checkpoint.saver import Position


@dataclass(frozen=True)
class TrainingPosition:
    """The position of the training when it handles a command."""

    epoch: int
    step: int
    next_epoch: int
    """The epoch that begins next."""
    epochs: int


@dataclass
class Best:
    """The best evaluation so far (larger is better), and the number of evaluations since then."""

    value: float | None = None
    epoch: int | None = None
    evaluations_since: int = 0

    def note(self, value: float | None, epoch: int) -> bool:
        """Record the value of an evaluation; return True if it is the best so far."""
        if value is None or (self.value is not None and value <= self.value):
            self.evaluations_since += 1
            return False
        self.value, self.epoch, self.evaluations_since = value, epoch, 0
        return True


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


class TrainingProgress:
    """Position and best evaluation of a training, which with `total_steps` may end within an epoch."""

    def __init__(self, epochs: int, total_steps: int | None = None) -> None:
        self.epochs, self.total_steps = epochs, total_steps
        self.position = Position()
        self.best = Best()
        self.resumed_from_step: int | None = None
        """Steps that were made before this process began; None for a new training."""
        self._begun_epoch = 0

    @property
    def is_complete(self) -> bool:
        """True if no step is left, and the last one is evaluated."""
        if self.total_steps is None:
            return self.position.epoch > self.epochs
        return self.position.step >= self.total_steps and self.position.is_evaluated

    def begin_epoch(self) -> None:
        self._begun_epoch = self.position.epoch

    def restore(self, position: Position, best: Best) -> None:
        self.position, self.best, self.resumed_from_step = position, best, position.step

    def command_position(self) -> TrainingPosition:
        at = self.position
        is_before = at.batch == 0 and self._begun_epoch != at.epoch
        return TrainingPosition(at.epoch, at.step, at.epoch if is_before else at.epoch + 1, self.epochs)


DIVERGED = 3.0
"""Mean loss of an epoch that ends the run, relative to the first loss and a guess's loss."""
_LEAST_STEPS = 2


def epoch_divergence(first: float, losses: Sequence[float], num_classes: int) -> str | None:
    """Return a sentence about an epoch that has diverged; None if it has not.

    The losses are from the later steps; non-finite ones are left out, because they changed nothing.

    >>> epoch_divergence(2.4, [900.0, 3000.0], 11)
    'the loss of each step was above the loss of the first step (2.4), 1.95e+03 on average'
    >>> epoch_divergence(2.4, [3.0, 2.3, 2.0], 11)
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    # A run that was at times better than at its start has not diverged.
    if len(finite) < _LEAST_STEPS or not math.isfinite(first) or min(finite) <= first:
        return None
    mean = math.fsum(finite) / len(finite)
    # A guess of the class has a loss of log(C), which is no divergence, however low the first loss was.
    if mean <= DIVERGED * max(first, math.log(max(num_classes, 2))):
        return None
    return f"the loss of each step was above the loss of the first step ({first:.3g}), {mean:.3g} on average"


class LossWatch:
    """Keeps the losses of an epoch on their device, and reads them at its end."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._first: float | None = None
        self._losses: list[Tensor] = []

    def add(self, loss: Tensor) -> None:
        """Record the loss of a step without waiting for the device."""
        self._losses.append(loss)

    def end_epoch(self, num_steps: int) -> str | None:
        """Return the result of `epoch_divergence` for an epoch of `num_steps` steps.

        An epoch that this process trained only partly, after a resume, is not considered.
        """
        losses, self._losses = self._losses, []
        if not losses:
            return None
        values = torch.stack(losses).tolist()
        is_whole = len(values) == num_steps
        if self._first is None:
            self._first, values = values[0], values[1:]
        return epoch_divergence(self._first, values, self._num_classes) if is_whole else None
