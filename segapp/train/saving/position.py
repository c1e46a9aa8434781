"""Where a training stands, and how fast it goes."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Position:
    """Where a training stands: `batch` micro-batches of epoch `epoch` are done, `step` updates in all."""

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
        """Takes an evaluation's value; whether it is the best so far."""
        if value is None or (self.value is not None and value <= self.value):
            self.evaluations_since += 1
            return False
        self.value, self.epoch, self.evaluations_since = value, epoch, 0
        return True


@dataclass
class Clock:
    """Times since the last `step` event, seconds."""

    began: float = field(default_factory=time.perf_counter)
    wait_s: float = 0.0
    num_images: int = 0
    num_steps: int = 0
    evaluation_s: float = 0.0  # of the last evaluation
    away_s: float = 0.0
    """Time of this process that was spent paused."""

    def restart(self) -> None:
        """Starts counting anew."""
        self.began = time.perf_counter()
        self.wait_s, self.num_images, self.num_steps = 0.0, 0, 0

    def count_step(self, num_images: int) -> None:
        """A step was made, from so many images."""
        self.num_steps += 1
        self.num_images += num_images

    def leave_out(self, seconds: float) -> None:
        """Does not count so much of the time that has passed: a pause."""
        self.began += seconds
        self.away_s += seconds


def images_in(first: int, count: int, batch_size: int, num_images: int) -> int:
    """Images of `count` batches of an epoch from the batch `first` on, over all ranks.

    >>> images_in(0, 2, 4, 10), images_in(1, 2, 4, 10)
    (8, 6)
    """
    return sum(min(batch_size, num_images - batch * batch_size) for batch in range(first, first + count))
