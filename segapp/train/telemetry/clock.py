"""The throughput of a training between two `step` events."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass
class Clock:
    """Times and counts since the last `step` event, seconds."""

    began: float = field(default_factory=time.perf_counter)
    wait_s: float = 0.0
    num_images: int = 0
    num_steps: int = 0
    evaluation_s: float = 0.0  # of the last evaluation
    away_s: float = 0.0
    """Seconds of this process that were spent paused."""

    def restart(self) -> None:
        """Reset the counts of the interval."""
        self.began = time.perf_counter()
        self.wait_s, self.num_images, self.num_steps = 0.0, 0, 0

    def count_step(self, num_images: int) -> None:
        """Count one step of `num_images` images."""
        self.num_steps += 1
        self.num_images += num_images

    def leave_out(self, seconds: float) -> None:
        """Exclude a pause from the interval."""
        self.began += seconds
        self.away_s += seconds


def images_in(first: int, count: int, batch_size: int, num_images: int) -> int:
    """Return the images of `count` batches of an epoch from the batch `first` on, over all ranks.

    >>> images_in(0, 2, 4, 10), images_in(1, 2, 4, 10)
    (8, 6)
    """
    return sum(min(batch_size, num_images - batch * batch_size) for batch in range(first, first + count))
