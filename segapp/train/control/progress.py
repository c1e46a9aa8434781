"""The progress of a training: its position, its best evaluation and its throughput; changed by the trainer alone."""

from __future__ import annotations

from segapp.train.control.commands import TrainingPosition
from segapp.train.saving.position import Best, Position
from segapp.train.telemetry.clock import Clock


class TrainingProgress:
    """Position, best evaluation and throughput of a training.

    Args:
        epochs: of the whole training.

    Attributes:
        position: micro-batches and steps done.
        best: the best evaluation so far.
        clock: throughput since the last `step` event.
        resumed_from_step: steps that were done before this process began; None for a new training.
    """

    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        self.position = Position()
        self.best = Best()
        self.clock = Clock()
        self.resumed_from_step: int | None = None
        self._begun_epoch = 0

    @property
    def is_complete(self) -> bool:
        """True if no epoch is left."""
        return self.position.epoch > self.epochs

    def begin_epoch(self) -> None:
        """Record that the settings of the present epoch are in force."""
        self._begun_epoch = self.position.epoch

    def finish_epoch(self) -> None:
        """Move to the beginning of the next epoch."""
        self.position = Position(epoch=self.position.epoch + 1, batch=0, step=self.position.step)

    def restore(self, position: Position, best: Best) -> None:
        """Continue from a checkpoint."""
        self.position, self.best, self.resumed_from_step = position, best, position.step

    def command_position(self) -> TrainingPosition:
        """Return the position that commands are checked against."""
        at = self.position
        is_before = at.batch == 0 and self._begun_epoch != at.epoch
        return TrainingPosition(at.epoch, at.step, at.epoch if is_before else at.epoch + 1, self.epochs)
