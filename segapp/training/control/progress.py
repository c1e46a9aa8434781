"""The progress of a training: its position and its best evaluation; changed only by the trainer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from segapp.checkpoint.saver import Position
from segapp.training.control.commands import TrainingPosition


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
        """Record that the settings of the present epoch are applied."""
        self._begun_epoch = self.position.epoch

    def finish_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.position = replace(self.position, epoch=self.position.epoch + 1, batch=0)

    def restore(self, position: Position, best: Best) -> None:
        """Continue from a checkpoint."""
        self.position, self.best, self.resumed_from_step = position, best, position.step

    def command_position(self) -> TrainingPosition:
        """Return the position with which commands are checked."""
        at = self.position
        is_before = at.batch == 0 and self._begun_epoch != at.epoch
        return TrainingPosition(at.epoch, at.step, at.epoch if is_before else at.epoch + 1, self.epochs)
