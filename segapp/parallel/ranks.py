"""What the ranks of a training tell each other; one rank alone is the same thing with nobody to tell."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from segapp.parallel.distributed import RankInfo


class PeerOutOfMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory; this one does as it does."""


class Ranks:
    """This process among the ranks.

    Words between the ranks (a stop, a path, a state) travel over gloo on the host, so that they never wait for a GPU.

    Args:
        info: what `init_from_env` gave; None for a process on its own.
    """

    def __init__(self, info: RankInfo | None = None) -> None:
        self.rank = 0 if info is None else info.rank
        self.world_size = 1 if info is None else info.world_size
        self._words: Any = None  # the default group
        if info is not None and info.world_size > 1 and info.backend != "gloo":
            self._words = dist.new_group(backend="gloo")

    @property
    def is_main(self) -> bool:
        """Whether this rank writes what is written once."""
        return self.rank == 0

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Which of the flags are set on any rank, in one exchange; every rank must ask."""
        if self.world_size == 1:
            return flags
        counts = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(counts, group=self._words)
        return tuple(bool(count) for count in counts.tolist())

    def from_main(self, value: Any) -> Any:
        """The main rank's value, on every rank; every rank must ask."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._words)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank; every rank must ask."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._words)
        return values

    def first_of(self, value: Any) -> Any:
        """The first rank's value that says more than None, on every rank; every rank must ask."""
        return next((each for each in self.gather(value) if each is not None), None)

    @torch.no_grad()
    def sums(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The sums of the ranks' tensors, without gradient; every rank must ask."""
        if self.world_size == 1:
            return tensors
        totals = tuple(tensor.detach().clone() for tensor in tensors)
        for total in totals:
            dist.all_reduce(total)
        return totals
