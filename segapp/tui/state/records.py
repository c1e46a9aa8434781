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
    last: Gpu0Bsz | None = None
    """The last change that was applied, cancelled or reverted."""
    previous: list[int | None] = field(default_factory=list)
    """Earlier values, the latest last."""
    ceiling: int | None = None
    """Smallest number of samples with which device 0 ran out of memory."""
