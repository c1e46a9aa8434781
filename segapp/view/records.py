"""What a view of a run keeps of its events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from segapp.run.events import Alert, Gpu0Bsz

MemorySample = tuple[tuple[float, float], ...]
"""For each device: used memory and the highest allocation since the sample before, MiB; nan where unknown."""


class Raised(NamedTuple):
    """The alerts of one kind."""

    last: Alert
    times: int


class Evaluating(NamedTuple):
    """The progress of the running evaluation."""

    began_s: float
    """When it began, Unix seconds."""
    t: float
    """Time of the last report."""
    num_done: int = 0
    """Images that were evaluated until then."""
    num_images: int | None = None
    """Images of the evaluation; None where unknown."""

    def eta_s(self, now_s: float) -> float | None:
        """Return the seconds to its end, by its own speed so far."""
        if not self.num_done or self.num_images is None:
            return None
        left_s = (self.t - self.began_s) * (self.num_images - self.num_done) / self.num_done
        return max(0.0, left_s - max(0.0, now_s - self.t))


class Mark(NamedTuple):
    """A marked step on the curve."""

    step: int
    kind: str
    """`gpu0_bsz`, `best` or `resume`."""
    text: str


@dataclass
class Gpu0:
    """`gpu0_bsz`: the value in force, the pending change, and the last change."""

    value: int | None = None
    pending: Gpu0Bsz | None = None
    changes: list[Gpu0Bsz] = field(default_factory=list)
    """The changes that were applied, cancelled or reverted."""
    previous: list[int | None] = field(default_factory=list)
    """Earlier values, the latest last."""
    ceiling: int | None = None
    """Smallest number of samples with which device 0 ran out of memory."""

    @property
    def last(self) -> Gpu0Bsz | None:
        """The last of the changes."""
        return self.changes[-1] if self.changes else None
