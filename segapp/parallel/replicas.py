"""Batches and modules on several devices: scatter, replicate, run, gather, reduce.

Device lists may name a device more than once (`["cpu", "cpu"]`, `["cuda:0", "cuda:0"]`): *logical* devices, on which
the same code runs as on distinct ones. Everything here is differentiable, twice where the module is.
"""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.cuda import comm
from torch.nn.parameter import is_lazy

from segapp.parallel.rendezvous import DEFAULT_TIMEOUT_S, Mode, ReplicaGroup

T = TypeVar("T")
DeviceLike: TypeAlias = int | str | torch.device

_BUCKET_BYTES = 25 * 2**20
"""Parameters whose gradients are summed together: early buckets are done, and freed, while backward still runs."""


# ---------------------------------------------------------------------------------------------------------- devices
def resolve_devices(device_ids: Iterable[DeviceLike] | None = None) -> tuple[torch.device, ...]:
    """The devices meant, each known to exist.

    Args:
        device_ids: CUDA indices, strings or `torch.device`s, repetitions allowed; None takes all CUDA devices, or the
            CPU where there is none.

    Raises:
        TypeError: an entry is none of these.
        ValueError: an entry names no device of this machine, or there is no entry.

    Example:
        >>> resolve_devices(["cpu", "cpu"])
        (device(type='cpu'), device(type='cpu'))
    """
    if device_ids is None:
        found = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
        return tuple(found) or (torch.device("cpu"),)
    if isinstance(device_ids, str | int | torch.device):
        raise TypeError(f"device_ids={device_ids!r} is one device: give a list, such as [{device_ids!r}]")
    devices = tuple(_resolve_device(device_id) for device_id in device_ids)
    if not devices:
        raise ValueError("device_ids is empty: name at least one device, or use None for all CUDA devices")
    return devices


def _resolve_device(device_id: DeviceLike) -> torch.device:
    if isinstance(device_id, bool) or not isinstance(device_id, str | int | torch.device):
        raise TypeError(f"device {device_id!r} is not a CUDA index, a string or a torch.device")
    try:
        device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    except RuntimeError as error:
        raise ValueError(f"device {device_id!r} is unknown: use 'cpu', 'cuda:0' or a CUDA index like 0") from error
    if device.type == "meta":
        raise ValueError("device 'meta' holds no values: use a device that computes")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count == 0:
            raise ValueError(f"device {device_id!r}: no CUDA device is visible here: use ['cpu'], or see nvidia-smi")
        device = torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
        if device.index >= count:
            raise ValueError(f"device {device_id!r}: only {count} CUDA devices are visible: use 0 to {count - 1}")
    return device


# ------------------------------------------------------------------------------------------------------- structures
def _children(item: Any) -> list[Any] | None:
    """What a container holds, or None for a leaf. Tuples, lists, mappings and dataclasses are containers."""
    if isinstance(item, list | tuple):
        return list(item)
    if isinstance(item, dict):
        return list(item.values())
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in dataclasses.fields(item)]
    return None


def _refill(item: Any, children: Sequence[Any]) -> Any:
    """A container of the same kind, with other contents."""
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
    """All tensors in nested tuples, lists, dicts and dataclasses, in order."""
    if isinstance(item, Tensor):
        yield item
    else:
        for child in _children(item) or ():
            yield from tensors_in(child)


def map_tensors(function: Callable[[Tensor], Any], item: Any) -> Any:
    """The same structure with every tensor replaced; what is not a tensor stays."""
    if isinstance(item, Tensor):
        return function(item)
    children = _children(item)
    return item if children is None else _refill(item, [map_tensors(function, child) for child in children])


def to_device(item: Any, device: torch.device) -> Any:
    """The same structure with every tensor on one device; copies to an accelerator do not wait."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=device.type != "cpu"), item)


def batch_size(item: Any, dim: int = 0) -> int | None:
    """Samples in the first tensor that has a dimension `dim`; None where there is no such tensor."""
    return next((tensor.size(dim) for tensor in tensors_in(item) if _has_dim(tensor, dim)), None)


def _has_dim(tensor: Tensor, dim: int) -> bool:
    return -tensor.dim() <= dim < tensor.dim()


# -------------------------------------------------------------------------------------------------- scatter, gather
def scatter(item: T, devices: Sequence[torch.device], sizes: Sequence[int], dim: int = 0) -> list[T]:
    """Cuts a batch into chunks, one per device.

    Tensors are cut along `dim`; on their own device a chunk is a view. 0-d tensors and what is not a tensor go to every
    device whole. Tuples, named tuples, lists, dicts and dataclasses keep their type.

    Args:
        item: the batch: tensors whose size along `dim` is `sum(sizes)`, nested as one likes.
        devices: one per chunk.
        sizes: samples per chunk, none of them negative.
        dim: the dimension of the samples.

    Returns:
        The chunks in device order; gradients flow back to `item`.

    Raises:
        ValueError: a tensor's size is not the sum of the sizes.
    """
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def chunk_on(device: torch.device, start: int, size: int) -> Callable[[Tensor], Tensor]:
        def cut(tensor: Tensor) -> Tensor:
            if tensor.dim() > 0:
                if not _has_dim(tensor, dim) or tensor.size(dim) != sum(sizes):
                    raise ValueError(
                        f"a tensor of shape {tuple(tensor.shape)} cannot be cut along dim {dim} into {list(sizes)}:"
                        " every tensor of a batch needs the same number of samples there"
                    )
                # narrow, because the several views that split() makes forbid in-place operations
                tensor = tensor if size == sum(sizes) else tensor.narrow(dim, start, size)
            return tensor.to(device, non_blocking=device.type != "cpu")

        return cut

    return [
        map_tensors(chunk_on(device, start, size), item)
        for device, start, size in zip(devices, starts, sizes, strict=True)
    ]


def gather(outputs: Sequence[T], device: torch.device, dim: int = 0) -> T:
    """Puts the replicas' outputs together on one device: the inverse of `scatter`.

    Tensors are joined along `dim`, 0-d tensors become one value per replica. Containers keep their type. Anything else
    must be the same from every replica.

    Args:
        outputs: one structure per replica, in replica order.
        device: where the joined tensors go.
        dim: the dimension of the samples.

    Raises:
        TypeError: replicas returned different structures or different plain values.
    """
    first = outputs[0]
    if isinstance(first, Tensor):
        moved = [_expect_tensor(output).to(device, non_blocking=device.type != "cpu") for output in outputs]
        joined = moved[0] if len(moved) == 1 and first.dim() else None
        if joined is None:
            joined = torch.cat(moved, dim) if first.dim() else torch.stack(moved)
        return joined  # type: ignore[return-value]
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


def _expect_tensor(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise TypeError(f"one replica returned a tensor and another {output!r}: return the same structure from each")
    return output


def reduce_add(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The tensors' sum on one device, added in the given order so that every run rounds alike.

    Args:
        tensors: of one shape, on any devices; at least one.
        device: where the sum lies.
    """
    total = tensors[0].to(device, non_blocking=device.type != "cpu")
    for tensor in tensors[1:]:
        total = total + tensor.to(device, non_blocking=device.type != "cpu")
    return total


# -------------------------------------------------------------------------------------------------------- replicate
def replicate(module: nn.Module, devices: Sequence[torch.device], *, name: str = "module") -> list[nn.Module]:
    """Copies of a module, one per device, whose parameters are differentiable copies of the module's.

    The gradient of a parameter is the sum of its copies' gradients, added in device order on the parameter's device.
    Shared parameters and shared sub-modules stay shared within a replica. The first replica *owns* the buffers: on the
    module's device it writes the module's own, elsewhere `write_back_buffers` brings them home; the other replicas
    write to copies that nobody reads.

    Args:
        module: what to copy; its parameters on one device.
        devices: one per replica.
        name: what error messages call the module.

    Raises:
        TypeError: a part of the module is compiled.
        ValueError: a lazy parameter has no shape yet.
    """
    check_replicable(module, name)
    parameters = list(module.parameters())  # without repetitions: a weight used twice is copied once
    buffers = list(module.buffers())
    parameter_copies = _copy_parameters(parameters, devices)
    buffer_copies = _copy_buffers(buffers, devices)
    return [
        _assemble(
            module,
            dict(zip(map(id, parameters), copies, strict=True)),
            dict(zip(map(id, buffers), own_buffers, strict=True)),
        )
        for copies, own_buffers in zip(parameter_copies, buffer_copies, strict=True)
    ]


@torch.no_grad()
def write_back_buffers(module: nn.Module, owner: nn.Module) -> None:
    """Gives the module the buffers that its first replica has after the forward pass.

    Args:
        module: the original.
        owner: the first of `replicate`'s results.
    """
    for original, replica in zip(module.modules(), owner.modules(), strict=True):
        for key, buffer in replica._buffers.items():
            old = original._buffers.get(key)
            if buffer is None or buffer is old:
                continue
            if old is not None and old.shape == buffer.shape:
                # .data: a graph that saved the old values is not to be invalidated, as batch_norm does not either
                old.data.copy_(buffer, non_blocking=old.device.type != "cpu")
            else:
                original._buffers[key] = buffer if old is None else buffer.to(old.device)


def check_replicable(module: nn.Module, name: str = "module") -> None:
    """Refuses what cannot be copied without changing what it computes.

    Raises:
        TypeError: a part of the module is compiled; its compiled code would run the original, not the copy.
        ValueError: a lazy parameter has no shape yet.
    """
    for path, part in module.named_modules():
        if type(part).__name__ == "OptimizedModule" or getattr(part, "_compiled_call_impl", None) is not None:
            raise TypeError(
                f"{path or name} is compiled, and compiled code runs the original instead of the copy on each device:"
                " use one device, one process per device (parallel mode ddp), or leave out torch.compile"
            )
        for key, parameter in (*part._parameters.items(), *part._buffers.items()):
            if parameter is not None and is_lazy(parameter):
                raise ValueError(
                    f"{f'{path}.{key}' if path else key} of {name} has no shape yet: run the bare module once on a"
                    " small batch before using it in parallel"
                )


class _CopyToDevices(torch.autograd.Function):
    """Tensors -> their copies on every device, device by device; the gradient is the copies' sum, in device order.

    Views on the tensors' own device, so that a single replica costs no memory. Twice differentiable: under
    `create_graph` the backward pass is made of ordinary operations.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices, ctx.sources = devices, [tensor.device for tensor in tensors]
        ctx.set_materialize_grads(False)
        copies = [copy for row in _broadcast(tensors, devices) for copy in row]
        needed = ctx.needs_input_grad[1:]
        ctx.mark_non_differentiable(*(copy for i, copy in enumerate(copies) if not needed[i % len(tensors)]))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num_tensors = len(ctx.sources)
        columns = [[grad for grad in grads[j::num_tensors] if grad is not None] for j in range(num_tensors)]
        totals: list[Tensor | None] = [None] * num_tensors
        whole = [j for j in range(num_tensors) if len(columns[j]) == len(ctx.devices)]
        if whole and not torch.is_grad_enabled() and _are_distinct_cuda(ctx.devices):
            rows = [[columns[j][i] for j in whole] for i in range(len(ctx.devices))]
            sums = comm.reduce_add_coalesced(rows, ctx.devices[0].index, _BUCKET_BYTES)  # type: ignore[no-untyped-call]
            for j, total in zip(whole, sums, strict=True):
                totals[j] = total.to(ctx.sources[j], non_blocking=True)
        for j, column in enumerate(columns):
            if totals[j] is None and column:
                totals[j] = reduce_add(column, ctx.sources[j])
        return (None, *totals)


def _broadcast(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """One row of copies per device; on a tensor's own device a view of it."""
    others = [device for device in devices if device != tensors[0].device]
    copies = {}
    if others and _are_distinct_cuda(devices) and len({tensor.device for tensor in tensors}) == 1:
        order = [tensors[0].device, *others]
        if order[0].type == "cuda":
            rows = comm.broadcast_coalesced(tensors, order, _BUCKET_BYTES)  # type: ignore[no-untyped-call]
            copies = dict(zip(order[1:], rows[1:], strict=True))
    return [
        list(copies[device])
        if device in copies
        else [t.view_as(t) if t.device == device else t.to(device, non_blocking=device.type != "cpu") for t in tensors]
        for device in devices
    ]


def _are_distinct_cuda(devices: Sequence[torch.device]) -> bool:
    return all(device.type == "cuda" for device in devices) and len(set(devices)) == len(devices) > 1


def _copy_parameters(parameters: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    rows: list[list[Tensor]] = [[] for _ in devices]
    for bucket in _buckets(parameters):
        if torch.is_grad_enabled():
            copies: Sequence[Tensor] = _CopyToDevices.apply(tuple(devices), *bucket)
            parts = [list(copies[i * len(bucket) : (i + 1) * len(bucket)]) for i in range(len(devices))]
        else:
            parts = _broadcast([parameter.detach() for parameter in bucket], devices)
        for row, part in zip(rows, parts, strict=True):
            row.extend(part)
    return rows


@torch.no_grad()
def _copy_buffers(buffers: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    if not buffers:
        return [[] for _ in devices]
    rows = _broadcast([buffer.detach() for buffer in buffers], devices)
    for i, row in enumerate(rows):
        for j, buffer in enumerate(buffers):
            if row[j].device == buffer.device:
                row[j] = buffer if i == 0 else buffer.detach().clone()
    return rows


def _buckets(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for parameter in parameters:
        bucket.append(parameter)
        size += parameter.numel() * parameter.element_size()
        if size >= _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket


def _assemble(module: nn.Module, parameters: Mapping[int, Tensor], buffers: Mapping[int, Tensor]) -> nn.Module:
    """A tree of shallow module copies that holds the given tensors in place of the originals, found by identity."""
    originals = list(module.modules())
    replicas: dict[int, nn.Module] = {
        id(original): original._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for original in originals
    }
    names = {id(part): name for name, part in module.named_modules()}
    for original in originals:
        replica = replicas[id(original)]
        replica.__dict__["_replica_name"] = names[id(original)]
        for key, child in original._modules.items():
            replica._modules[key] = None if child is None else replicas[id(child)]
        for key, buffer in original._buffers.items():
            replica._buffers[key] = None if buffer is None else buffers[id(buffer)]
        for key, parameter in original._parameters.items():
            value = None if parameter is None else parameters[id(parameter)]
            if value is not None:
                setattr(replica, key, value)  # not past __setattr__: recurrent layers refresh their flat weights there
            replica.__dict__["_parameters"][key] = (
                value  # so that `next(self.parameters()).device` holds in a forward pass
            )
        for key, value in original.__dict__.items():
            if isinstance(value, types.MethodType) and value.__self__ is original:
                replica.__dict__[key] = types.MethodType(value.__func__, replica)  # a forward patched onto the object
    return replicas[id(module)]


# -------------------------------------------------------------------------------------------------------------- run
def run_replicas(
    modules: Sequence[Callable[..., T]],
    inputs: Sequence[Sequence[Any]],
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    *,
    devices: Sequence[torch.device],
    mode: Mode = "threads",
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> list[T]:
    """Calls every module on its own inputs, at the same time.

    The threads inherit grad mode, inference mode, autocast with its dtype, the default device, CUDA streams, hooks on
    saved tensors and dispatch modes.

    Args:
        modules: one per device.
        inputs: positional arguments per module.
        kwargs: keyword arguments per module.
        devices: one per module.
        mode: "threads", or "lockstep" for one at a time in replica order.
        timeout_s: seconds a replica may be missing while others wait for it.

    Returns:
        The results in replica order.

    Raises:
        ReplicaError: a module raised; the others are freed.
        ReplicaDesyncError: replicas did not meet.
    """
    named = kwargs if kwargs is not None else [{}] * len(modules)

    def call(i: int) -> Callable[[], T]:
        return lambda: modules[i](*inputs[i], **named[i])

    return ReplicaGroup[T](devices, mode, timeout_s).run([call(i) for i in range(len(modules))])
