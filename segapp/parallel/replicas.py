"""Replicas of a module on several devices: copy it, run the copies at the same time.

Device lists may name a device more than once (`["cpu", "cpu"]`, `["cuda:0", "cuda:0"]`): *logical* devices, on which
the same code runs as on distinct ones. Copies are differentiable, twice where the module is.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.cuda import comm
from torch.nn.parameter import is_lazy

from segapp.parallel.rendezvous import DEFAULT_TIMEOUT_S, Mode, ReplicaGroup
from segapp.parallel.scatter_gather import reduce_add

T = TypeVar("T")

_BUCKET_BYTES = 25 * 2**20
"""Bytes of parameters whose gradients are summed together: early buckets are reduced and freed while backward runs."""


# -------------------------------------------------------------------------------------------------------- replicate
def replicate(module: nn.Module, devices: Sequence[torch.device], *, name: str = "module") -> list[nn.Module]:
    """Return copies of a module, one per device, whose parameters are differentiable copies of the module's.

    The gradient of a parameter is the sum of its copies' gradients, added in device order on the parameter's device.
    Shared parameters and shared sub-modules stay shared within a replica. The first replica *owns* the buffers: on the
    module's device it updates the module's own, elsewhere `write_back_buffers` copies them back; the updates of the
    other replicas are discarded.

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
    """Copy the first replica's buffers into the module after the forward pass.

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
                # .data, so that a graph that saved the old values stays valid; batch_norm does the same
                old.data.copy_(buffer, non_blocking=old.device.type != "cpu")
            else:
                original._buffers[key] = buffer if old is None else buffer.to(old.device)


def check_replicable(module: nn.Module, name: str = "module") -> None:
    """Check that copies of a module compute the same as the module.

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
    """Tensors -> their copies on every device, device by device; the gradient is the sum in device order.

    On the tensors' own device the copies are views, which take no memory. Twice differentiable: under `create_graph`
    the backward pass consists of differentiable operations.
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
    """Return one row of copies per device; on a tensor's own device a view."""
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
    """Return shallow copies of all sub-modules that hold the given tensors, by `id` of the originals."""
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
                setattr(replica, key, value)  # through __setattr__, where recurrent layers update their flat weights
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
    """Call every module on its own inputs, at the same time, and return their results.

    The threads inherit grad mode, inference mode, autocast with its dtype, the default device, CUDA streams, hooks on
    saved tensors and dispatch modes.

    Args:
        modules: one per device.
        inputs: positional arguments per module.
        kwargs: keyword arguments per module.
        devices: one per module.
        mode: "threads", or "lockstep" for one at a time in replica order.
        timeout_s: seconds to wait for a missing replica.

    Returns:
        The results in replica order.

    Raises:
        ReplicaError: a module raised; the others are stopped.
        ReplicaDesyncError: a replica did not come to an exchange.
    """
    named = kwargs if kwargs is not None else [{}] * len(modules)

    def call(i: int) -> Callable[[], T]:
        return lambda: modules[i](*inputs[i], **named[i])

    return ReplicaGroup[T](devices, mode, timeout_s).run([call(i) for i in range(len(modules))])
