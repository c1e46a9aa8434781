"""Sums over the parts of a batch: over the replicas of a model, and over the ranks of a process group.

All functions are differentiable any number of times, unless they say otherwise.
"""

from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from segapp.parallel.recompute import computed_once
from segapp.parallel.replica_threads import current_replica
from segapp.parallel.scatter_gather import reduce_add


def allreduce(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors' sums over all replicas, or over all ranks; differentiable any number of times.

    Inside a replica of a `DataParallelModel`, the sum is over the running replicas, in replica order. Otherwise, if
    `torch.distributed` has a process group, it is over its ranks. Otherwise, the tensors are returned unchanged. All
    participants must call it with the same number of tensors of the same shapes.

    Args:
        *tensors: this part's summands, each on the part's device.

    Returns:
        One sum per tensor, on the same device. Each part's gradient is the sum of all parts' gradients, which is the
        gradient of the sum of all parts' losses.

    Raises:
        TypeError: an argument is not a tensor.
        ValueError: the parts' shapes differ.
        ReplicaDesyncError: not every replica called it.
    """
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"allreduce got a {type(tensor).__name__}: give tensors, as in allreduce(*tensors)")
    return computed_once(partial(_all_reduced, tensors))  # a recomputed block has no other replicas to add


def _all_reduced(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    replica = current_replica()
    if replica is not None and replica.num_replicas > 1:
        return cast(tuple[Tensor, ...], replica.exchange("allreduce", tensors, _sum_of_parts))
    if has_other_ranks():
        return tuple(all_reduce_ranks(tensor) for tensor in tensors)
    return tensors


def _sum_of_parts(parts: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    shapes = [[tuple(tensor.shape) for tensor in part] for part in parts]
    if any(shape != shapes[0] for shape in shapes):
        raise ValueError(f"allreduce got different shapes from the replicas: {shapes}: give the same shapes from each")
    main = [tensor.device for tensor in parts[0]]
    totals = [reduce_add(column, device) for column, device in zip(zip(*parts, strict=True), main, strict=True)]
    return [tuple(total.to(t.device) for total, t in zip(totals, part, strict=True)) for part in parts]


_layers_group: dist.ProcessGroup | None = None
"""The group of synchronized layers; None is the default one."""


def use_layers_group(group: dist.ProcessGroup | None) -> None:
    """Let synchronized layers use a separate process group, on all ranks; None: the default group.

    NCCL has one queue per group and GPU. In the default group, the small exchange of a layer in the backward pass would
    wait behind each bucket of gradients that DDP has begun to reduce.
    """
    global _layers_group
    _layers_group = group


def layers_group() -> dist.ProcessGroup | None:
    """Return the process group of synchronized layers; None is the default group."""
    return _layers_group


def has_other_ranks() -> bool:
    """Return True if this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _SumOverRanks(torch.autograd.Function):
    """Sum over ranks; its derivative is the same sum over the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_reduce_ranks(grad, ctx.group), None


class _StackRanks(torch.autograd.Function):
    """(K,) on every rank -> (ranks, K) on every rank; a row's gradient is the sum of all ranks' gradients for it."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        rows = tensor.new_empty((dist.get_world_size(), *tensor.shape))
        if dist.get_backend(_layers_group) == "gloo":  # it cannot gather into one tensor
            dist.all_gather(list(rows.unbind()), tensor.contiguous(), group=_layers_group)
        else:
            dist.all_gather_into_tensor(rows, tensor.contiguous(), group=_layers_group)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return sum_of_layer(grad)[dist.get_rank()]


def sum_of_layer(tensor: Tensor) -> Tensor:
    """Return the sum over the ranks of a layer's tensor, like `all_reduce_ranks` in the layers' group."""
    return all_reduce_ranks(tensor, _layers_group)


def all_reduce_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' tensors of one shape, differentiable any number of times; every rank calls it."""
    return cast(Tensor, _SumOverRanks.apply(tensor, group))


def all_reduce_in_place(tensor: Tensor) -> Tensor:
    """Replace a layer's tensor by its sum over the ranks and return it; not differentiable; every rank must call it."""
    dist.all_reduce(tensor, group=_layers_group)
    return tensor


def stack_ranks(tensor: Tensor) -> Tensor:
    """Return every rank's row (K,) of a layer as (ranks, K); differentiable; every rank must call it."""
    return cast(Tensor, _StackRanks.apply(tensor))
