"""Replicas of a module: its copies on several devices.

Device lists may name a device more than once (`["cpu", "cpu"]`, `["cuda:0", "cuda:0"]`): these are *logical* devices,
on which the same code runs as on distinct ones. Copies are differentiable, twice if the module is.

Weights travel in flat buckets from one device to the next, and so do the sums of their gradients: no device sends or
receives a bucket more than once. All of this uses copies between two streams, ordered by events. Collectives are not
used, because the kernels of a collective wait for each other: if another thread issues a copy between their launches,
as the backward pass of synchronized BatchNorm may, the devices wait for each other forever
(`tests/parallel/test_order_graph.py`).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from segapp.compat.torch import buffer_slots, is_compiled, module_slots, parameter_slots, shallow_replica
from segapp.parallel.scatter_gather import buckets, reduce_add, to_device

_BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters whose gradients are summed together: early buckets are freed during the backward pass."""


class Replicator:
    """Makes the replicas of a module in every step; its structure is read once, and again after a change.

    The structure consists of the submodules' classes, and the names of their parameters, buffers and submodules.
    Everything else is read in every step: values, dtypes and devices of the tensors, and other attributes of the
    submodules, such as hooks, the training mode and functions that were patched onto them.

    Attributes:
        module: the module to copy; its parameters are on one device.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._parts: list[_SubModule] = []
        self._parameters: list[Tensor] = []
        self._buffers: list[Tensor] = []
        self._contents: list[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module,)

    def parameters(self) -> Sequence[Tensor]:
        """Return the module's parameters, each once."""
        self._read()
        return self._parameters

    def buffers(self) -> Sequence[Tensor]:
        """Return the module's buffers, each once."""
        self._read()
        return self._buffers

    def replicate(self, devices: Sequence[torch.device]) -> list[list[nn.Module]]:
        """Return for each device the copies of all submodules, first of the whole module.

        The copies' parameters are differentiable copies of the module's: the gradient of a parameter is the sum of its
        copies' gradients, added in device order on the parameter's device. Shared parameters and shared submodules stay
        shared within a replica. The first replica *owns* the buffers: on the module's device it updates the module's
        own buffers, elsewhere `write_back_buffers` copies them back. The buffer updates of other replicas are
        discarded.

        Raises:
            TypeError: a part of the module is compiled.
            ValueError: a lazy parameter has no shape yet.
        """
        self._read()
        methods = [_own_methods(part.module) for part in self._parts]
        parameter_rows = _copy_parameters(self._parameters, devices)
        buffer_rows = _copy_buffers(self._buffers, devices)
        return [self._assemble(*rows, methods) for rows in zip(parameter_rows, buffer_rows, strict=True)]

    @torch.no_grad()
    def write_back_buffers(self, owner: Sequence[nn.Module]) -> None:
        """Copy the buffers of `owner`, the first of the last copies, into the module after its forward pass."""
        for part, replica in zip(self._parts, owner, strict=True):
            originals = buffer_slots(part.module)
            for key, buffer in buffer_slots(replica).items():
                old = originals.get(key)
                if buffer is None or buffer is old:
                    continue
                if old is not None and old.shape == buffer.shape:
                    # .data, so that a graph that saved the old values stays valid; batch_norm does the same
                    old.data.copy_(buffer, non_blocking=old.device.type != "cpu")
                else:
                    originals[key] = buffer if old is None else buffer.to(old.device)

    def _read(self) -> None:
        """Read the module's structure, unless it is known and has not changed."""
        if self._contents is not None and _contents_of(part.module for part in self._parts) == self._contents:
            return
        check_replicable(self.module)
        named = list(self.module.named_modules())
        numbers = {id(part): i for i, (_, part) in enumerate(named)}
        parameters: dict[int, tuple[int, Tensor]] = {}
        buffers: dict[int, tuple[int, Tensor]] = {}

        def number_of(tensors: dict[int, tuple[int, Tensor]], tensor: Tensor | None) -> int | None:
            return None if tensor is None else tensors.setdefault(id(tensor), (len(tensors), tensor))[0]

        self._parts = [
            _SubModule(
                part,
                path,
                {key: None if child is None else numbers[id(child)] for key, child in module_slots(part).items()},
                {key: number_of(parameters, value) for key, value in parameter_slots(part).items()},
                {key: number_of(buffers, value) for key, value in buffer_slots(part).items()},
            )
            for path, part in named
        ]
        self._parameters = [tensor for _, tensor in parameters.values()]
        self._buffers = [tensor for _, tensor in buffers.values()]
        self._contents = _contents_of(part for _, part in named)

    def _assemble(
        self, parameters: Sequence[Tensor], buffers: Sequence[Tensor], methods: Sequence[Mapping[str, Any]]
    ) -> list[nn.Module]:
        """Return shallow copies of all submodules with these tensors; other attributes are the present ones."""
        replicas = [shallow_replica(part.module) for part in self._parts]
        for part, replica, own_methods in zip(self._parts, replicas, methods, strict=True):
            own = replica.__dict__
            own["_replica_name"] = part.name
            own["_modules"] = {key: None if i is None else replicas[i] for key, i in part.children.items()}
            own["_buffers"] = {key: None if i is None else buffers[i] for key, i in part.buffers.items()}
            values = {key: None if i is None else parameters[i] for key, i in part.parameters.items()}
            if type(part.module).__setattr__ is not nn.Module.__setattr__:
                for key, value in values.items():
                    if value is not None:
                        setattr(replica, key, value)  # recurrent layers update their flat weights here
            own["_parameters"] = values  # so that `next(self.parameters()).device` is correct in a forward pass
            for key, function in own_methods.items():
                own[key] = types.MethodType(function, replica)
        return replicas


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
                " use one device, one process per device (parallel mode ddp), or leave out torch.compile"
            )
        for key, parameter in (*parameter_slots(part).items(), *buffer_slots(part).items()):
            if parameter is not None and is_lazy(parameter):
                raise ValueError(
                    f"{f'{path}.{key}' if path else key} of {name} has no shape yet: run the bare module once on a"
                    " small batch before using it in parallel"
                )


@dataclass(frozen=True)
class _Layout:
    """Size and strides of a tensor, and its order in memory."""

    size: torch.Size
    stride: tuple[int, ...] | None = None  # None: contiguous
    order: tuple[int, ...] | None = None  # dimensions from outermost to innermost in memory; None: unchanged

    @classmethod
    def of(cls, tensor: Tensor) -> _Layout:
        """Return the layout of a tensor; contiguous if it is not dense."""
        size, stride = tensor.size(), tensor.stride()
        if len(size) < 2:
            return cls(size)
        order = tuple(sorted(range(len(size)), key=lambda dim: -stride[dim]))
        num_values, is_plain = 1, True
        for dim in reversed(order):
            if size[dim] != 1 and stride[dim] != num_values:
                return cls(size)
            is_plain = is_plain and stride[dim] == num_values
            num_values *= size[dim]
        is_ordered = order == tuple(range(len(size)))
        return cls(size, None if is_plain and is_ordered else stride, None if is_ordered else order)


def _pack(tensors: Sequence[Tensor], layouts: Sequence[_Layout]) -> Tensor:
    """Return one flat tensor with the values of all, each in its layout's order of memory."""
    parts = []
    for tensor, layout in zip(tensors, layouts, strict=True):
        if layout.order is not None:
            tensor = tensor.permute(layout.order)
        parts.append(tensor if tensor.dim() == 1 else tensor.reshape(-1))
    return torch.cat(parts)


def _unpack(
    flat: Tensor, layouts: Sequence[_Layout], split: Callable[..., Sequence[Tensor]] = torch.split_with_sizes
) -> list[Tensor]:
    """Return the parts of a tensor from `_pack`, in their layouts.

    `split` makes views or, like `torch.unsafe_split_with_sizes`, tensors with separate version counters, of which one
    may change while autograd has saved another.
    """
    parts = split(flat, [layout.size.numel() for layout in layouts])
    unpacked = []
    for part, layout in zip(parts, layouts, strict=True):
        if layout.stride is not None:
            part = part.as_strided(layout.size, layout.stride)
        elif len(layout.size) != 1:
            part = part.view(layout.size)
        unpacked.append(part)
    return unpacked


class _CopyToDevices(torch.autograd.Function):
    """Tensors of one dtype and device -> their copies on every device, device by device.

    The gradient is the sum in device order. On the tensors' own device, the copies are views, which need no memory. It
    is twice differentiable: under `create_graph`, the backward pass consists of differentiable operations.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices, ctx.source = devices, tensors[0].device
        ctx.layouts = [_Layout.of(tensor) for tensor in tensors]
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
        flat = [] if torch.is_grad_enabled() else [j for j in range(num_tensors) if _can_pack(columns[j], ctx.devices)]
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


def _can_pack(column: Sequence[Tensor], devices: Sequence[torch.device]) -> bool:
    return len(column) == len(devices) and all(grad.layout == torch.strided for grad in column)


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
            parts = _broadcast(detached, [_Layout.of(tensor) for tensor in tensors], devices)
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
        layouts = [_Layout.of(tensor) for tensor in tensors]
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


@dataclass(frozen=True)
class _SubModule:
    """A submodule, and the numbers of the submodules and tensors that it holds; None stays None."""

    module: nn.Module
    name: str
    children: Mapping[str, int | None]
    parameters: Mapping[str, int | None]
    buffers: Mapping[str, int | None]


def _contents_of(parts: Iterable[nn.Module]) -> list[Any]:
    """Return the data that a structure depends on: classes, names, and identities of submodules' contents."""
    contents: list[Any] = []
    for part in parts:
        contents += (type(part), is_compiled(part))
        for slots in (module_slots(part), parameter_slots(part), buffer_slots(part)):
            contents += slots
            contents += map(id, slots.values())
            contents.append(None)
    return contents


def _own_methods(part: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the functions that were patched onto a module as its methods, such as another forward."""
    return {
        key: value.__func__
        for key, value in part.__dict__.items()
        if type(value) is types.MethodType and value.__self__ is part
    }
