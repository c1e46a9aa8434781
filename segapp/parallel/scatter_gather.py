"""Devices, and batches on several of them: scatter and gather nested containers, and sum over replicas and ranks.

All functions are differentiable any number of times.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from segapp.accelerator import CUDA, gpu_of
from segapp.parallel.replica_threads import current_replica

T = TypeVar("T")
DeviceLike: TypeAlias = int | str | torch.device


def resolve_devices(device_ids: Iterable[DeviceLike] | None = None) -> tuple[torch.device, ...]:
    """Return the devices after checking that each exists.

    Args:
        device_ids: CUDA indices, strings or `torch.device`s, repetitions allowed; None takes all CUDA devices, or the
            CPU if there is none.

    Raises:
        TypeError: an entry has another type.
        ValueError: a device does not exist on this machine, or the list is empty.

    Example:
        >>> resolve_devices(["cpu", "cpu"])
        (device(type='cpu'), device(type='cpu'))
    """
    if device_ids is None:
        return tuple(CUDA.devices()) or (torch.device("cpu"),)
    if isinstance(device_ids, str | int | torch.device):
        raise TypeError(f"device_ids={device_ids!r} is one device: give a list, such as [{device_ids!r}]")
    devices = tuple(_resolve_device(device_id) for device_id in device_ids)
    if not devices:
        raise ValueError("device_ids is empty: name at least one device, or use None for all CUDA devices")
    return devices


def _resolve_device(device_id: DeviceLike) -> torch.device:
    if isinstance(device_id, bool) or not isinstance(device_id, str | int | torch.device):
        raise TypeError(f"device {device_id!r} is not a CUDA index, a string or a torch.device: use e.g. 0 or 'cuda:0'")
    try:
        device = torch.device(CUDA.kind, device_id) if isinstance(device_id, int) else torch.device(device_id)
    except RuntimeError as error:
        raise ValueError(f"device {device_id!r} is not known: use 'cpu', 'cuda:0' or a CUDA index like 0") from error
    if device.type == "meta":
        raise ValueError("device 'meta' holds no values: use 'cpu', 'cuda:0' or a CUDA index like 0")
    if gpu := gpu_of(device):
        count, name = gpu.count(), gpu.kind.upper()
        if count == 0:
            raise ValueError(f"device {device_id!r}: no {name} device is visible here: use ['cpu'], or see {gpu.tool}")
        device = torch.device(gpu.kind, gpu.current_index()) if device.index is None else device
        if device.index >= count:
            raise ValueError(f"device {device_id!r}: only {count} {name} devices are visible: use 0 to {count - 1}")
    return device


def _children(item: Any) -> list[Any] | None:
    """Return the elements of a tuple, list, dict or dataclass; None for anything else, a leaf."""
    if isinstance(item, list | tuple):
        return list(item)
    if isinstance(item, dict):
        return list(item.values())
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in dataclasses.fields(item)]
    return None


def _refill(item: Any, children: Sequence[Any]) -> Any:
    """Return a container of the same type with other elements."""
    if isinstance(item, tuple):
        return type(item)(*children) if hasattr(item, "_fields") else type(item)(children)
    filled = copy.copy(item)
    if isinstance(item, list):
        filled[:] = children
    elif isinstance(item, dict):
        for key, child in zip(item, children, strict=True):
            filled[key] = child
    else:
        for field, child in zip(dataclasses.fields(item), children, strict=True):
            object.__setattr__(filled, field.name, child)
    return filled


def tensors_in(item: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(item, Tensor):
        yield item
    else:
        for child in _children(item) or ():
            yield from tensors_in(child)


def map_tensors(function: Callable[[Tensor], Any], item: Any) -> Any:
    """Return the same structure with every tensor replaced; other leaves are unchanged."""
    if isinstance(item, Tensor):
        return function(item)
    children = _children(item)
    return item if children is None else _refill(item, [map_tensors(function, child) for child in children])


def to_device(item: Any, device: torch.device) -> Any:
    """Return the same structure with every tensor on one device; copies to an accelerator are asynchronous."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), item)


def batch_size(item: Any, dim: int = 0) -> int | None:
    """Return the size of `dim` in the first tensor that has it; None if there is no such tensor."""
    return next((tensor.size(dim) for tensor in tensors_in(item) if _has_dim(tensor, dim)), None)


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


def scatter(item: T, devices: Sequence[torch.device], sizes: Sequence[int], dim: int = 0) -> list[T]:
    """Cut a batch into chunks, one per device.

    Tensors are cut along `dim`; on their own device, a chunk is a view. 0-d tensors and other values are passed to
    every device unchanged. Tuples, named tuples, lists, dicts and dataclasses keep their type.

    The sizes are the samples of each chunk, >= 0. Gradients flow back to the batch.

    Raises:
        ValueError: a tensor's size is not the sum of the sizes.
    """

    def cut(device: torch.device, start: int, size: int, tensor: Tensor) -> Any:
        if tensor.dim():
            if not _has_dim(tensor, dim) or tensor.size(dim) != sum(sizes):
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} cannot be cut along dim {dim} into {list(sizes)}:"
                    " every tensor of a batch needs the same number of samples there"
                )
            # narrow, because the several views that split() makes forbid in-place operations
            tensor = tensor if size == sum(sizes) else tensor.narrow(dim, start, size)
        return to_device(tensor, device)

    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    chunks = zip(devices, starts, sizes, strict=True)
    return [map_tensors(partial(cut, *chunk), item) for chunk in chunks]


def gather(outputs: Sequence[T], device: torch.device, dim: int = 0) -> T:
    """Return the replicas' outputs joined on one device: the inverse of `scatter`.

    Tensors are concatenated along `dim`, 0-d tensors are stacked. Containers keep their type. Other values must be
    equal from every replica.

    Raises:
        TypeError: replicas returned different structures or different plain values.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        for output in outputs:
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"one replica returned a tensor and another {output!r}: return the same structure from each"
                )
        moved = [to_device(output, device) for output in outputs]
        if len(moved) == 1 and first.dim():
            return cast(T, moved[0])
        return cast(T, torch.cat(moved, dim) if first.dim() else torch.stack(moved))
    children = _children(first)
    if children is None:
        if any(isinstance(output, Tensor) or output != first for output in outputs[1:]):
            raise TypeError(f"replicas returned different values, such as {first!r}: return tensors, or equal values")
        return first
    columns = [_children(output) for output in outputs]
    if any(type(output) is not type(first) for output in outputs) or any(
        column is None or len(column) != len(children) for column in columns
    ):
        raise TypeError(f"replicas returned different structures of {type(first).__name__}: return the same from each")
    if isinstance(first, dict):
        columns = [[output[key] for key in first] for output in outputs]  # type: ignore[index]
    return _refill(first, [gather(column, device, dim) for column in zip(*columns, strict=True)])  # type: ignore[no-any-return]


def reduce_add(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum on one device of tensors of one shape, added in the given order: every run rounds equally."""
    total: Tensor = to_device(tensors[0], device)
    for tensor in tensors[1:]:
        total = total + to_device(tensor, device)
    return total


def buckets(tensors: Sequence[Tensor], max_bytes: float = float("inf")) -> Iterator[list[int]]:
    """Yield lists of indices of tensors of one dtype and device, in order, each as soon as it has `max_bytes`."""
    kinds: dict[tuple[torch.dtype, torch.device], tuple[list[int], int]] = {}
    for i, tensor in enumerate(tensors):
        bucket, size = kinds.pop((tensor.dtype, tensor.device), ([], 0))
        bucket.append(i)
        size += tensor.numel() * tensor.element_size()
        if size >= max_bytes:
            yield bucket
        else:
            kinds[tensor.dtype, tensor.device] = bucket, size
    for bucket, _ in kinds.values():
        yield bucket


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
        ValueError: the parts' shapes differ.
        ReplicaDesyncError: not every replica called it.
    """
    replica = current_replica()
    if replica is not None and replica.num_replicas > 1:
        return cast(tuple[Tensor, ...], replica.exchange("allreduce", tensors, _sum_of_parts))
    if has_other_ranks():
        return tuple(sum_over_ranks(tensor) for tensor in tensors)
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
        return sum_over_ranks(grad, ctx.group), None


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
    """Return the sum over the ranks of a layer's tensor, like `sum_over_ranks` in the layers' group."""
    return sum_over_ranks(tensor, _layers_group)


def sum_over_ranks(tensor: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of all ranks' tensors of one shape, differentiable any number of times; every rank calls it."""
    return cast(Tensor, _SumOverRanks.apply(tensor, group))


def all_reduce_in_place(tensor: Tensor) -> Tensor:
    """Replace a layer's tensor by its sum over the ranks and return it; not differentiable; every rank must call it."""
    dist.all_reduce(tensor, group=_layers_group)
    return tensor


def stack_ranks(tensor: Tensor) -> Tensor:
    """Return every rank's row (K,) of a layer as (ranks, K); differentiable; every rank must call it."""
    return cast(Tensor, _StackRanks.apply(tensor))
