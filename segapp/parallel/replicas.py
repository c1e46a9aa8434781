"""Replicas of a module: its copies on several devices.

Device lists may name a device more than once (`["cpu", "cpu"]`, `["cuda:0", "cuda:0"]`): these are *logical* devices,
on which the same code runs as on distinct ones. They share no memory that a forward pass may write: only the first copy
uses the module's own tensors. Copies are differentiable, twice if the module is.

Weights travel in flat buckets from one device to the next, and so do the sums of their gradients: no device sends or
receives a bucket more than once. All of this uses copies between two streams, ordered by events. Collectives are not
used, because the kernels of a collective wait for each other: if another thread issues a copy between their launches,
as the backward pass of synchronized BatchNorm may, the devices wait for each other forever
(`tests/parallel/test_fake_devices.py`).
"""

from __future__ import annotations

import math
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from segapp.compat.torch import (
    FakeTensor,
    buffer_slots,
    is_compiled,
    module_slots,
    parameter_slots,
    shallow_replica,
)
from segapp.parallel.scatter_gather import buckets, reduce_add, to_device

T = TypeVar("T")

_BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters whose gradients are summed together: early buckets are freed during the backward pass."""


def replicate(module: nn.Module, devices: Sequence[torch.device]) -> list[nn.Module]:
    """Return a copy of a module, whose parameters are on one device, for one forward pass on each device.

    Tensors that require gradients: each copy has differentiable copies of the module's. The gradient of a tensor is the
    sum of its copies' gradients, added in device order on the tensor's device.

    Other tensors, which are buffers and frozen parameters: the first copy *owns* them. On the module's device it has
    the module's own tensors and updates them; elsewhere `write_back` copies them back. The updates of the other copies
    are discarded.

    Submodules: they are copied, too. What is shared in the module, a parameter, a buffer or a submodule, is shared in
    the same way in each copy.

    All other attributes, such as hooks and the training mode, are the same as in the module. Methods that were
    patched onto a submodule are bound to its copy. Nothing is kept for the next call but what a graph refers to
    (`_kept`), so the module may change between two steps.

    Raises:
        TypeError: a part of the module is compiled.
        ValueError: a lazy parameter has no shape yet.
    """
    check_replicable(module)
    parts = dict(module.named_modules())
    slots = (own for part in parts.values() for own in (parameter_slots(part), buffer_slots(part)))
    tensors = {id(tensor): tensor for own in slots for tensor in own.values() if tensor is not None}
    trained, fixed = ({key: t for key, t in tensors.items() if t.requires_grad is flag} for flag in (True, False))
    methods = [_patched_methods(part) for part in parts.values()]
    rows = zip(_copied(list(trained.values()), devices), _copied(list(fixed.values()), devices), strict=True)
    replicas = []
    for i, (own, others) in enumerate(rows):
        kept = (_kept(i, *pair) for pair in zip(fixed.values(), others, strict=True))
        copies = dict(zip((*trained, *fixed), (*own, *kept), strict=True))
        if i == 0:  # the owner
            for key, copied in copies.items():
                _mark_copy(tensors[key], copied)
        replicas.append(_assemble(parts, methods, copies))
    return replicas


@torch.no_grad()
def write_back(module: nn.Module, owner: nn.Module) -> None:
    """Give the module what the forward pass changed in `owner`, its first copy: as if the module itself had run.

    Another tensor in a slot is put into the module's slot, because the graph may have saved the tensor that it
    replaces. A tensor with new memory, by `.data =`, gives it to the module's. What changed in place is copied, unless
    the owner has the module's own memory. Trained parameters and buffers that change in place have it on device 0.
    """
    parts = dict(module.named_modules())
    for name, replica in owner.named_modules():
        if name not in parts:
            continue
        for slots in (parameter_slots, buffer_slots):
            originals: Any = slots(parts[name])
            copies: Any = slots(replica)
            for key, value in copies.items():
                old: Any = originals.get(key)
                if value is None or value is old:
                    continue
                if old is None or _original_of(value) is not old:
                    kept = value if value.grad_fn is None else value.detach()
                    originals[key] = kept if old is None else kept.to(old.device)
                elif _address_of(value) != value.copy_address:
                    old.data = value.detach().to(old.device)
                elif not old.requires_grad and (old.device.type != "cpu" or not torch.equal(old, value)):
                    # .data, so that a graph that saved the old values stays valid; batch_norm does the same
                    old.data.copy_(value, non_blocking=old.device.type != "cpu")


def _assemble(
    parts: Mapping[str, nn.Module],
    methods: Sequence[Mapping[str, Callable[..., Any]]],
    tensors: Mapping[int, Tensor],
) -> nn.Module:
    """Return a shallow copy of the first part with copies of all submodules and tensors, which have keys by `id`."""
    replicas = {id(part): shallow_replica(part) for part in parts.values()}

    def copied(slots: Mapping[str, Any], copies: Mapping[int, Any]) -> dict[str, Any]:
        return {key: None if value is None else copies[id(value)] for key, value in slots.items()}

    for (name, part), patched, replica in zip(parts.items(), methods, replicas.values(), strict=True):
        attributes, values = replica.__dict__, copied(parameter_slots(part), tensors)
        attributes.setdefault("_replica_name", name)  # a part of a replica keeps the name in the outermost module
        attributes["_modules"] = copied(module_slots(part), replicas)
        attributes["_buffers"] = copied(buffer_slots(part), tensors)
        if type(part).__setattr__ is not nn.Module.__setattr__:
            for key, value in values.items():
                if value is not None:
                    setattr(replica, key, value)  # recurrent layers update their flat weights here
        attributes["_parameters"] = values  # so that `next(self.parameters()).device` is correct in a forward pass
        for key, function in patched.items():
            attributes[key] = types.MethodType(function, replica)
    return next(iter(replicas.values()))


def check_module(module: object) -> None:
    """Raise TypeError for anything but a module."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"module={module!r} is not an nn.Module: give the model itself, and check the arguments' order")


def check_parameters(parameters: Iterable[T]) -> list[T]:
    """Return parameters as a list; raise TypeError for a module, a single tensor or the groups of an optimizer."""
    is_list = isinstance(parameters, Iterable) and not isinstance(parameters, Tensor | nn.Module)
    # A ParameterList is a module, but holds only parameters.
    given = list(parameters) if is_list or isinstance(parameters, nn.ParameterList) else None
    strange = [parameters] if given is None else [each for each in given if not isinstance(each, Tensor)]
    if strange:
        raise TypeError(f"parameters given as {type(strange[0]).__name__}: give a list, such as model.parameters()")
    return given or []


def check_replicable(module: nn.Module) -> None:
    """Check that copies of a module compute the same as the module.

    Raises:
        TypeError: it is no module, or a part of it is compiled; compiled code would run the original, not the copy.
        ValueError: a lazy parameter has no shape yet.
    """
    check_module(module)
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


def _unpack(flat: Tensor, layouts: Sequence[_Layout]) -> list[Tensor]:
    """Return the parts of a tensor from `_pack`, in their layouts.

    They have separate version counters: one may change while autograd has saved another.
    """
    parts = torch.unsafe_split_with_sizes(flat, [size.numel() for size, _ in layouts])
    pairs = zip(parts, layouts, strict=True)
    return [part if len(size) == 1 else part.as_strided(size, stride) for part, (size, stride) in pairs]


class _CopyToDevices(torch.autograd.Function):
    """Tensors of one dtype and device -> their copies on every device, device by device.

    The gradient is the sum in device order. It is twice differentiable: under `create_graph`, the backward pass
    consists of differentiable operations.
    """

    @staticmethod
    def forward(ctx: Any, devices: Sequence[torch.device], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.devices, ctx.source = devices, tensors[0].device
        ctx.layouts = [_layout_of(tensor) for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(copy for row in _broadcast(tensors, ctx.layouts, devices) for copy in row)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        num_tensors = len(ctx.layouts)
        columns = [[grad for grad in grads[j::num_tensors] if grad is not None] for j in range(num_tensors)]
        totals: list[Tensor | None] = [None] * num_tensors
        flat = (
            # In a double backward pass, the additions must be part of the graph.
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
) -> list[Sequence[Tensor]]:
    """Return one row of copies per device; the first row has the tensors themselves if they are on its device."""
    rows: list[Sequence[Tensor]] = []
    flat: Tensor | None = None
    for i, device in enumerate(devices):
        if i == 0 and device == tensors[0].device:
            rows.append(tensors)
            continue
        if flat is not None and flat.device == device:
            # Two replicas on one device need memory of their own.
            flat = flat.clone()
        else:
            flat = to_device(_pack(tensors, layouts) if flat is None else flat, device)
        rows.append(_unpack(flat, layouts))
    return rows


def _copied(tensors: Sequence[Tensor], devices: Sequence[torch.device]) -> list[list[Tensor]]:
    """Return one row of copies per device, differentiable if the tensors are; see `_broadcast`."""
    if not torch.is_grad_enabled():
        tensors = [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors]
    rows: list[list[Tensor]] = [list(tensors) for _ in devices]
    for bucket in buckets(tensors, _BUCKET_BYTES):
        originals = [tensors[j] for j in bucket]
        # Either all tensors need a gradient, or none does: `replicate` copies the two kinds apart.
        if originals[0].requires_grad:
            flat: Sequence[Tensor] = _CopyToDevices.apply(tuple(devices), *originals)
            parts: Sequence[Sequence[Tensor]] = [flat[i : i + len(bucket)] for i in range(0, len(flat), len(bucket))]
        else:
            parts = _broadcast(originals, [_layout_of(tensor) for tensor in originals], devices)
        for row, part in zip(rows, parts, strict=True):
            for j, copied in zip(bucket, part, strict=True):
                row[j] = copied
    return rows


_alive: weakref.WeakValueDictionary[tuple[int, int], Tensor] = weakref.WeakValueDictionary()
"""Copies of fixed tensors that a graph refers to, by the identity of the tensor and the position of the copy."""


def _address_of(tensor: Tensor) -> int:
    return 0 if isinstance(tensor, FakeTensor) else tensor.data_ptr()


def _mark_copy(original: Tensor, copied: Any) -> None:
    """Let a copy know its original, and its own memory."""
    if copied is not original:
        copied.copy_of, copied.copy_address = weakref.ref(original), _address_of(copied)


def _original_of(tensor: Tensor) -> Any:
    """Return the tensor of which this one is a copy, or None."""
    copy_of: Any = getattr(tensor, "copy_of", None)
    return None if copy_of is None else copy_of()


def _kept(position: int, original: Tensor, copied: Tensor) -> Tensor:
    """Return a copy of a fixed tensor: the one of an earlier forward pass with the new values, if it is still in use.

    A backward pass through a module's own tensor uses its present values, also if forward passes have replaced them
    since by `.data =`, as some implementations of spectral normalization do. So it is with its copies.
    """
    has_graph = (copied.is_floating_point() or copied.is_complex()) and not torch.is_inference_mode_enabled()
    if copied is original or not has_graph:
        return copied
    earlier = _alive.get((id(original), position))
    if earlier is not None and _original_of(earlier) is original and earlier.device == copied.device:
        # A change that autograd counts would make graphs that saved the tensor unusable.
        earlier.data = copied
        return earlier
    _mark_copy(original, copied)
    _alive[id(original), position] = copied
    return copied


def _patched_methods(part: nn.Module) -> dict[str, Callable[..., Any]]:
    """Return the functions that were patched onto a module as its methods, such as another forward."""
    return {
        key: value.__func__
        for key, value in part.__dict__.items()
        if type(value) is types.MethodType and value.__self__ is part
    }
