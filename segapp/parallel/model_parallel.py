"""One model over several devices: stages on different devices, with tensors moved between them.

Use it for models that do not fit on one device. Results and state-dict keys are the same as on one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.hooks import RemovableHandle

from segapp.compat.torch import apply_to_own_tensors, buffer_slots, parameter_slots, storage_key
from segapp.parallel.replicas import check_module, check_replicable
from segapp.parallel.scatter_gather import DeviceLike, map_tensors, resolve_devices, to_device

T = TypeVar("T")


def place_stages(
    module: nn.Module,
    stages: Mapping[str, DeviceLike],
    *,
    rest: DeviceLike | None = None,
    output_device: DeviceLike | None = None,
) -> None:
    """Move stages of a module to devices, in place, and add hooks that move their inputs.

    The inputs of every submodule with parameters are moved to its device, so a placement works if the remaining code
    (additions, concatenations) joins tensors on the same device.

    Args:
        module: the model, changed in place.
        stages: dotted names of sub-modules and their devices; an inner name wins over an outer one.
        rest: the device of everything else; by default the device of the first stage.
        output_device: device that the module's outputs are moved to; None: they are not moved.

    Raises:
        ValueError: no stages, an unknown device or submodule, or a parameter shared between devices.
        TypeError: it is no module, or a part of it is compiled.
    """
    check_replicable(module)
    if not isinstance(stages, Mapping) or not stages:
        raise ValueError(f"stages={stages!r}: give names of submodules and their devices, such as {{'0': 'cuda:0'}}")
    parts = dict(module.named_modules())
    if unknown := [name for name in stages if name not in parts]:
        raise ValueError(f"{type(module).__name__} has no submodule {unknown[0]!r}: name one of named_modules()")
    devices = dict(zip(stages, resolve_devices(stages.values()), strict=True))
    default = next(iter(devices.values())) if rest is None else resolve_devices([rest])[0]
    homes = {name: home_of(name, devices, default) for name in parts}
    _check_shared(parts, homes)
    for name, part in parts.items():
        device = homes[name]
        if any(tensor.device != device for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False))):
            apply_to_own_tensors(part, partial(to_device, device=device))
        # A module without tensors computes on the device of its inputs.
        if name in stages or parameter_slots(part) or buffer_slots(part):
            part.register_forward_pre_hook(partial(_moved, device), with_kwargs=True)
    if output_device is not None:
        target = resolve_devices([output_device])[0]
        module.register_forward_hook(lambda _module, _args, output: to_device(output, target))


def home_of(name: str, stages: Mapping[str, T], default: T) -> T:
    """Return the device of a submodule, from the innermost stage that contains it."""
    holders = [stage for stage in stages if name == stage or name.startswith(f"{stage}.")]
    return stages[max(holders, key=len)] if holders else default


def _moved(device: torch.device, _module: nn.Module, args: Any, kwargs: Any) -> Any:
    return to_device((args, kwargs), device)


def _check_shared(parts: Mapping[str, nn.Module], homes: Mapping[str, torch.device]) -> None:
    first: dict[int, tuple[str, torch.device]] = {}
    for name, part in parts.items():
        for key, parameter in part.named_parameters(recurse=False):
            full, device = f"{name}.{key}" if name else key, homes[name]
            other, home = first.setdefault(id(parameter), (full, device))
            if home != device:
                raise ValueError(
                    f"{full} on {device} is the same parameter as {other} on {home}: put both stages on one device"
                )


def plan_stages(costs: Sequence[float], num_devices: int) -> tuple[int, ...]:
    """Return the device number of each stage, non-decreasing, such that the largest load of a device is minimal.

    The costs, such as bytes, are >= 0 and in the order of use; there is at least one device.
    """
    # best[i] = (load of the fullest device, first stage of each device) for the first i stages
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())] + [(sum(costs[:i]), (0,)) for i in range(1, len(costs) + 1)]
    for _ in range(1, num_devices):
        best = [
            min(
                [best[i], *((max(best[j][0], sum(costs[j:i])), (*best[j][1], j)) for j in range(1, i))],
                key=lambda option: option[0],
            )
            for i in range(len(costs) + 1)
        ]
    starts = best[-1][1]
    return tuple(sum(i >= start for start in starts) - 1 for i in range(len(costs)))


def measure_stages(module: nn.Module, names: Iterable[str], *inputs: Any) -> dict[str, int]:
    """Return the bytes that each stage keeps in a training step: parameters, gradients, tensors saved for backward.

    The module runs on the meta device: nothing is computed, no memory is allocated, and the module is not changed. So a
    model that is too large for one device can be measured.

    The stages, none inside another, are in the order of execution. Of the inputs, a small example batch, only shapes
    and dtypes are used.

    Raises:
        ValueError: the module needs values and cannot run on the meta device.
    """
    costs: dict[str, int] = {}
    running: list[str] = []
    parameters = {name: p.detach().to("meta").requires_grad_(p.requires_grad) for name, p in module.named_parameters()}
    state = parameters | {name: buffer.to("meta") for name, buffer in module.named_buffers()}
    seen = {storage_key(tensor) for tensor in parameters.values()}

    def save(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if running and storage_key(tensor) not in seen:
            seen.add(storage_key(tensor))  # the graph keeps it alive, so no two storages share an address
            costs[running[-1]] += storage.nbytes()
        return tensor

    def enter(name: str, part: nn.Module, _args: Any) -> None:
        running.append(name)
        if name not in costs:
            costs[name] = sum((1 + p.requires_grad) * p.nbytes for p in part.parameters())

    hooks: list[RemovableHandle] = []
    for name in names:
        part = module.get_submodule(name)
        hooks.append(part.register_forward_pre_hook(partial(enter, name)))
        hooks.append(part.register_forward_hook(lambda *_: running.pop() and None))
    try:
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
            kept = functional_call(module, state, tuple(map_tensors(lambda t: t.to("meta"), item) for item in inputs))
    except (RuntimeError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"{type(module).__name__} cannot be measured without values ({reason}): name the device of each stage"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()
    del kept
    return costs


def balance_stages(module: nn.Module, device_ids: Iterable[DeviceLike], *inputs: Any) -> dict[str, torch.device]:
    """Return stages and devices for `place_stages`, balanced by measured memory: its children, or an only child's.

    The devices are filled in order; `measure_stages` has the same `inputs`.

    Raises:
        ValueError: the module cannot run without values.
    """
    check_module(module)
    devices = resolve_devices(device_ids)
    costs = measure_stages(module, _parts_that_run(module), *inputs)
    numbers = plan_stages(list(costs.values()), len(devices))
    return {name: devices[number] for name, number in zip(costs, numbers, strict=True)}


def _parts_that_run(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """Yield the names of a module's children; instead of an only child or of a list, which is not called, its own."""
    children = dict(module.named_children())
    for name, child in children.items():
        is_divided = len(children) == 1 or isinstance(child, (nn.ModuleList, nn.ModuleDict))
        inner = list(_parts_that_run(child, f"{prefix}{name}.")) if is_divided else []
        yield from inner or [f"{prefix}{name}"]
