"""Exchange of flags, values and sums among the ranks; a process without others gets its own values back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from segapp.parallel.distributed import RankInfo


class PeerOutOfMemoryError(torch.OutOfMemoryError):
    """Another rank ran out of memory; raised on every rank, so that all handle it alike."""


class Ranks:
    """This process's rank, and collective operations on Python values and tensors.

    Every method but `is_main` is collective: all ranks must call it. Python values use gloo on the host, so that they
    never wait for a GPU; with one rank nothing is sent.

    Args:
        info: result of `init_from_env`; None for a process on its own.
    """

    def __init__(self, info: RankInfo | None = None) -> None:
        self.rank = 0 if info is None else info.rank
        self.world_size = 1 if info is None else info.world_size
        self._host_group: Any = None  # the default group
        if info is not None and info.world_size > 1 and info.backend != "gloo":
            self._host_group = dist.new_group(backend="gloo")

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes what is written once."""
        return self.rank == 0

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """Return, for each flag, True if any rank sets it; one exchange."""
        if self.world_size == 1:
            return flags
        counts = torch.tensor(flags, dtype=torch.int32)
        dist.all_reduce(counts, group=self._host_group)
        return tuple(bool(count) for count in counts.tolist())

    def from_main(self, value: Any) -> Any:
        """Return the main rank's value, on every rank."""
        if self.world_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._host_group)
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value in rank order, on every rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._host_group)
        return values

    def first_of(self, value: Any) -> Any:
        """Return the value of the first rank whose value is not None, on every rank; None if there is none."""
        return next((each for each in self.gather(value) if each is not None), None)

    @torch.no_grad()
    def sums(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return the sums of the ranks' tensors, without gradient, in one exchange.

        Args:
            tensors: Of the same shapes and types on every rank; several travel together in float64.
        """
        if self.world_size == 1:
            return tensors
        if len(tensors) == 1:
            total = tensors[0].detach().clone()
            dist.all_reduce(total)
            return (total,)
        flat = torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])
        dist.all_reduce(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        return tuple(part.view(own.shape).to(own.dtype) for part, own in zip(parts, tensors, strict=True))
