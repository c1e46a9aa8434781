"""Replicas of a module: its copies on several devices.

Device lists may name a device more than once (`["cpu", "cpu"]`, `["cuda:0", "cuda:0"]`): these are *logical* devices,
on which the same code runs as on distinct ones. Copies are differentiable, twice if the module is.

Weights travel in flat buckets from one device to the next, and so do the sums of their gradients: no device sends or
receives a bucket more than once. All of this uses copies between two streams, ordered by events. Collectives are not
used, because the kernels of a collective wait for each other: if another thread issues a copy between their launches,
as the backward pass of synchronized BatchNorm may, the devices wait for each other forever
(`tests/parallel/test_fake_devices.py`).
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from segapp.compat.torch import buffer_slots, is_compiled, module_slots, parameter_slots, shallow_replica
from segapp.parallel.scatter_gather import buckets, reduce_add, to_device

_BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters whose gradients are summed together: early buckets are freed during the backward pass."""


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return a copy of a module, whose parameters are on one device, for one forward pass on each device.

    Parameters: each copy has differentiable copies of the module's. The gradient of a parameter is the sum of its
    copies' gradients, added in device order on the parameter's device.

    Buffers: the first copy *owns* them. On the module's device it has the module's own buffers and updates them;
    elsewhere `write_back_buffers` copies them back. The buffer updates of the other copies are discarded.

    Submodules: they are copied, too. What is shared in the module, a parameter, a buffer or a submodule, is shared in
    the same way in each copy.

    All other attributes, such as hooks and the training mode, are the same as in the module. Methods that were
    patched onto a submodule are bound to its copy. Nothing is kept for the next call, so the module may change between
    two steps.

    Raises:
        TypeError: a part of the module is compiled.
        ValueError: a lazy parameter has no shape yet.
    """
    check_replicable(module)
    parts = dict(module.named_modules())
    parameters = _distinct(map(parameter_slots, parts.values()))
    buffers = _distinct(map(buffer_slots, parts.values()))
    methods = [_patched_methods(part) for part in parts.values()]
    rows = zip(
        _copy_parameters(list(parameters.values()), devices),
        _copy_buffers(list(buffers.values()), devices),
        strict=True,
    )
    return [
        _assemble(parts, methods, dict(zip(parameters, copied, strict=True)), dict(zip(buffers, copies, strict=True)))
        for copied, copies in rows
    ]


@torch.no_grad()
def write_back_buffers(module: nn.Module, owner: nn.Module) -> None:
    """Copy the buffers of `owner`, the first copy of the module, into the module after the forward pass."""
    parts = dict(module.named_modules())
    for name, replica in owner.named_modules():
        if not buffer_slots(replica) or name not in parts:
            continue
        originals = buffer_slots(parts[name])
        for key, buffer in buffer_slots(replica).items():
            old = originals.get(key)
            if buffer is None or buffer is old:
                continue
            if old is not None and old.shape == buffer.shape:
                # .data, so that a graph that saved the old values stays valid; batch_norm does the same
                old.data.copy_(buffer, non_blocking=old.device.type != "cpu")
            else:
                originals[key] = buffer if old is None else buffer.to(old.device)


def _distinct(slots: Iterable[Mapping[str, Any]]) -> dict[int, Tensor]:
    """Return the tensors in dictionaries by identity, in order, each once."""
    return {id(tensor): tensor for tensors in slots for tensor in tensors.values() if tensor is not None}


def _assemble(
    parts: Mapping[str, nn.Module],
    methods: Sequence[Mapping[str, Callable[..., Any]]],
    parameters: Mapping[int, Tensor],
    buffers: Mapping[int, Tensor],
) -> nn.Module:
    """Return a shallow copy of the first part with copies of all submodules; tensors are replaced by their identity."""
    replicas = {id(part): shallow_replica(part) for part in parts.values()}

    def copied(slots: Mapping[str, Any], copies: Mapping[int, Any]) -> dict[str, Any]:
        return {key: None if value is None else copies[id(value)] for key, value in slots.items()}

    for (name, part), patched, replica in zip(parts.items(), methods, replicas.values(), strict=True):
        attributes, values = replica.__dict__, copied(parameter_slots(part), parameters)
        attributes.setdefault("_replica_name", name)  # a part of a replica keeps the name in the outermost module
        attributes["_modules"] = copied(module_slots(part), replicas)
        attributes["_buffers"] = copied(buffer_slots(part), buffers)
        if type(part).__setattr__ is not nn.Module.__setattr__:
            for key, value in values.items():
                if value is not None:
                    setattr(replica, key, value)  # recurrent layers update their flat weights here
        attributes["_parameters"] = values  # so that `next(self.parameters()).device` is correct in a forward pass
        for key, function in patched.items():
            attributes[key] = types.MethodType(function, replica)
    return next(iter(replicas.values()))


def check_replicable(module: nn.Module) -> None:
    """Check that copies of a module compute the same as the module.

    Raises:
        TypeError: a part of the module is compiled; its compiled code would run the original, not the copy.
        ValueError: a lazy parameter has no shape yet.
    """
    name = type(module).__name__
    for path, part in module.named_modules():
        if is_compiled(part):
            raise TypeError(
                f"{path or name} is compiled, and compiled code runs the original instead of the copy on each device:"
                " use one device, one process per device (parallel mode ddp), or leave out torch.compile and torch.jit"
            )
        for key, parameter in (*parameter_slots(part).items(), *buffer_slots(part).items()):
            if parameter is not None and is_lazy(parameter):
                raise ValueError(
                    f"{f'{path}.{key}' if path else key} of {name} has no shape yet: run the bare module once on a"
                    " small batch before using it in parallel"
                )


_Layout = tuple[torch.Size, tuple[int, ...]]
"""Size and strides of a tensor that is dense in memory."""


def _layout_of(tensor: Tensor) -> _Layout:
    """Return the layout of a tensor; contiguous if it is not dense."""
    size, stride, num_values = tensor.size(), tensor.stride(), 1
    for dim in sorted(range(tensor.dim()), key=stride.__getitem__):
        if size[dim] != 1 and stride[dim] != num_values:
            return size, tuple(math.prod(size[dim + 1 :]) for dim in range(tensor.dim()))
        num_values *= size[dim]
    return size, stride


def _pack(tensors: Sequence[Tensor], layouts: Sequence[_Layout]) -> Tensor:
    """Return one flat tensor with the values of all, each in its layout's order of memory."""
    flat = tensors[0].new_empty(sum(tensor.numel() for tensor in tensors))
    torch._foreach_copy_(_unpack(flat, layouts), list(tensors))
    return flat


def _unpack(
    flat: Tensor, layouts: Sequence[_Layout], split: Callable[..., Sequence[Tensor]] = torch.split_with_sizes
) -> list[Tensor]:
    """Return the parts of a tensor from `_pack`, in their layouts.

    `split` makes views or, like `torch.unsafe_split_with_sizes`, tensors with separate version counters, of which one
    may change while autograd has saved another.
    """
    parts = split(flat, [size.numel() for size, _ in layouts])
    pairs = zip(parts, layouts, strict=True)
    return [part if len(size) == 1 else part.as_strided(size, stride) for part, (size, stride) in pairs]


class _CopyToDevices(torch.autograd.Function):
    """Tensors of one dtype and device -> their copies on every device, device by device.

    The gradient is the sum in device order. On the tensors' own device, the copies are views, which need no memory. It
    is twice differentiable: under `create_graph`, the backward pass consists of differentiable operations.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices, ctx.source = devices, tensors[0].device
        ctx.layouts = [_layout_of(tensor) for tensor in tensors]
        ctx.set_materialize_grads(False)
        copies = [copy for row in _broadcast(tensors, ctx.layouts, devices) for copy in row]
        needed = ctx.needs_input_grad[1:]
        if not all(needed):
            ctx.mark_non_differentiable(*(copy for i, copy in enumerate(copies) if not needed[i % len(tensors)]))
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num_tensors = len(ctx.layouts)
        columns = [[grad for grad in grads[j::num_tensors] if grad is not None] for j in range(num_tensors)]
        totals: list[Tensor | None] = [None] * num_tensors
        flat = (
            []
            if torch.is_grad_enabled()
            else [
                j
                for j, column in enumerate(columns)
                if len(column) == len(ctx.devices) and all(grad.layout == torch.strided for grad in column)
            ]
        )
        if flat:
            layouts = [ctx.layouts[j] for j in flat]
            total: Tensor | None = None
            for i in range(len(ctx.devices)):
                row = _pack([columns[j][i] for j in flat], layouts)
                total = row if total is None else row.add_(to_device(total, row.device))
            for j, part in zip(flat, _unpack(to_device(total, ctx.source), layouts), strict=True):
                totals[j] = part
        for j, column in enumerate(columns):
            if totals[j] is None and column:
                totals[j] = reduce_add(column, ctx.source)
        return (None, *totals)


def _broadcast(
    tensors: Sequence[Tensor], layouts: Sequence[_Layout], devices: Sequence[torch.device]
) -> list[list[Tensor]]:
    """Return one row of copies per device; on the tensors' own device the tensors themselves."""
    flats: dict[torch.device, Tensor] = {}
    latest: Tensor | None = None
    for device in devices:
        if device != tensors[0].device and device not in flats:
            latest = flats[device] = to_device(_pack(tensors, layouts) if latest is None else latest, device)
    return [_unpack(flats[device], layouts) if device in flats else list(tensors) for device in devices]


def _copy_parameters(parameters: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    rows: list[list[Tensor]] = [list(parameters) for _ in devices]
    for bucket in buckets(parameters, _BUCKET_BYTES):
        tensors = [parameters[j] for j in bucket]
        if torch.is_grad_enabled():
            copies: Sequence[Tensor] = _CopyToDevices.apply(tuple(devices), *tensors)
            parts = [list(copies[i : i + len(bucket)]) for i in range(0, len(copies), len(bucket))]
        else:
            detached = [tensor.detach() for tensor in tensors]
            parts = _broadcast(detached, [_layout_of(tensor) for tensor in tensors], devices)
        for row, part in zip(rows, parts, strict=True):
            for j, copied in zip(bucket, part, strict=True):
                row[j] = copied
    return rows


@torch.no_grad()
def _copy_buffers(buffers: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Return one row of copies per device; the first row has the buffers themselves if they are on its device."""
    rows: list[list[Tensor]] = [list(buffers) for _ in devices]
    for group in buckets(buffers):
        tensors = [buffers[j] for j in group]
        layouts = [_layout_of(tensor) for tensor in tensors]
        flat: Tensor | None = None
        for i, device in enumerate(devices):
            if i == 0 and device == tensors[0].device:
                continue
            if flat is not None and flat.device == device:
                flat = flat.clone()
            else:
                flat = to_device(_pack(tensors, layouts) if flat is None else flat, device)
            for j, part in zip(group, _unpack(flat, layouts, torch.unsafe_split_with_sizes), strict=True):
                rows[i][j] = part
    return rows


def _patched_methods(part: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the functions that were patched onto a module as its methods, such as another forward."""
    return {
        key: value.__func__
        for key, value in part.__dict__.items()
        if type(value) is types.MethodType and value.__self__ is part
    }
