"""Tensors divided over ranks: each rank keeps and updates its own, and sends them to the others.

This is stage 1 of ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
2020), divided by whole parameters: gradients are reduced as usual, and the same operator updates each parameter, on one
rank instead of all. The resulting weights are equal bit for bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from segapp.compat.torch import foreach_copy_
from segapp.parallel.distributed import PeerOutOfMemoryError, Ranks
from segapp.parallel.scatter_gather import buckets

_BUCKET_BYTES = 25 * 2**20
"""A message is sent when it has this size, like DDP's buckets, because a message needs additional memory."""


class Shards:
    """Owners of tensors, and exchanges between them. Every rank must make the same calls.

    The tensors are the same on every rank, in order and sizes, and `num_shards` ranks share them. In a single process
    nothing is sent, and it has the shard with the most bytes, as a memory plan needs.
    """

    def __init__(self, tensors: Iterable[Tensor], num_shards: int, ranks: Ranks) -> None:
        self.num_shards, self._ranks = num_shards, ranks
        self._bytes = [0] * num_shards
        self._owners: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no `id` is used again
        self.add(tensors)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Add tensors: the largest first, each to the rank with the fewest bytes."""
        added = list(tensors)
        self._kept += added
        for tensor in sorted(added, key=lambda each: -each.nbytes):
            owner = self._bytes.index(min(self._bytes))
            self._owners[id(tensor)] = owner
            self._bytes[owner] += tensor.nbytes

    @property
    def rank(self) -> int:
        """The shard of this process."""
        is_alone = self._ranks.world_size == 1
        return self._bytes.index(max(self._bytes)) if is_alone else self._ranks.rank

    def owner(self, tensor: Tensor) -> int:
        """Return the rank that a tensor belongs to."""
        return self._owners[id(tensor)]

    def is_own(self, tensor: Tensor) -> bool:
        """Return True if a tensor belongs to this rank."""
        return self.owner(tensor) == self.rank

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Turn an out-of-memory error of one rank within the context into an error on every rank: none waits."""
        failure: torch.OutOfMemoryError | None = None
        try:
            yield
        except torch.OutOfMemoryError as error:
            failure = error
        (is_any,) = self._ranks.any_of(failure is not None)
        if is_any:
            raise failure or PeerOutOfMemoryError("another rank ran out of memory for the average of the weights")

    @torch.no_grad()
    def share(self, tensors: Sequence[Tensor], owners: Sequence[int]) -> None:
        """Replace the tensors on all ranks, dense and with the same layout on each, by those on the ranks `owners`."""
        for owner in sorted(set(owners)):
            owned = [tensor for tensor, its_owner in zip(tensors, owners, strict=True) if its_owner == owner]
            for indices in buckets(owned, _BUCKET_BYTES):
                self._share([owned[i] for i in indices], owner)

    def _share(self, bucket: list[Tensor], owner: int) -> None:
        flat = torch.empty(sum(t.numel() for t in bucket), dtype=bucket[0].dtype, device=bucket[0].device)
        parts, start = [], 0
        for tensor in bucket:
            parts.append(flat.as_strided(tensor.shape, tensor.stride(), start))
            start += tensor.numel()
        if owner == self.rank:
            foreach_copy_(parts, bucket)
        self._ranks.broadcast(flat, owner)
        if owner != self.rank:
            foreach_copy_(bucket, parts)

    def keep_own_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Free the optimizer's state of the parameters that belong to other ranks."""
        for parameter in list(optimizer.state):
            if not self.is_own(parameter):
                del optimizer.state[parameter]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the optimizer's step for the parameters of this rank; free the gradients of the others."""
        for parameter in _parameters(optimizer):
            if not self.is_own(parameter):
                parameter.grad = None
        optimizer.step()

    def share_weights(self, optimizer: torch.optim.Optimizer) -> None:
        """Send each parameter of the optimizer from its owner to the other ranks."""
        parameters = _parameters(optimizer)
        self.share(parameters, [self.owner(parameter) for parameter in parameters])

    def whole_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Return the `state_dict` of the undivided optimizer on the main rank, with tensors of other ranks on the CPU.

        On other ranks it has only their own state.
        """
        state = optimizer.state_dict()
        own = {(index, key): each for index, tensors in state["state"].items() for key, each in tensors.items()}
        whole: dict[int, dict[str, Tensor]] = {}
        for (index, key), tensor in sorted(self._to_main(own).items(), key=lambda entry: entry[0][0]):
            whole.setdefault(index, {})[key] = tensor
        return {**state, "state": whole}

    def load_own_state(self, optimizer: torch.optim.Optimizer, whole: Mapping[str, Any]) -> None:
        """Load this rank's part of the `state_dict` of an undivided optimizer."""
        own = {index for index, parameter in enumerate(_parameters(optimizer)) if self.is_own(parameter)}
        state = {index: each for index, each in whole["state"].items() if index in own}
        optimizer.load_state_dict({**whole, "state": state})

    def _to_main(self, own: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """Return the tensors of all ranks on the main rank; on other ranks, only this rank's own."""
        found = dict(own)
        facts = [(key, tuple(each.shape), each.stride(), each.dtype) for key, each in own.items()]
        for source, listed in enumerate(self._ranks.gather(facts)):
            for key, shape, stride, dtype in listed if source else ():
                if self._ranks.rank == source:
                    self._ranks.send_to_main(own[key])
                elif self._ranks.is_main:
                    found[key] = self._ranks.receive(torch.empty_strided(shape, stride, dtype=dtype), source)
        return found


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
