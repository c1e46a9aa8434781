"""The position of a training in its data, and its best evaluation."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Position:
    """`batch` micro-batches of epoch `epoch` (from 1) are done, and `step` updates in all.

    `is_evaluated`: there was an evaluation after the last of them.
    """

    epoch: int = 1
    batch: int = 0
    step: int = 0
    is_evaluated: bool = False


@dataclass
class Best:
    """The best evaluation so far, larger is better, and how many evaluations ago it was."""

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
