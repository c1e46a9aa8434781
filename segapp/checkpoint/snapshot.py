"""Copies of a training state: nested tensors and plain values, and the states of the random generators."""

import contextlib
import math
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segapp.accelerator import CUDA, GPUS, accelerator_of
from segapp.compat.torch import STATE_DICT_METADATA

# Not bytes: an empty one is pickled in a way that `weights_only` refuses to read.
_PLAIN = (str, int, float, bool, type(None))


def snapshot(state: Any) -> Any:
    """Return a deep copy on the CPU of nested dicts, lists and tuples of tensors and plain values.

    The copy shares no memory with the original, so training can continue while the copy is written. A tensor that
    occurs twice is copied once, so shared weights stay shared. An `OrderedDict`, as `state_dict` returns it, keeps its
    type and `_metadata`; other dicts become dicts, and tuples of any kind become tuples.

    Raises:
        TypeError: the state has another type, for example a numpy number; the message has its place and type.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}
    devices: set[torch.device] = set()

    def copy(tensor: Tensor) -> Tensor:
        key = _identity(tensor)
        if key not in copies:
            copies[key] = _copied(tensor.detach(), devices)
        return copies[key]

    copied = _mapped(state, copy, "state")
    for device in devices:
        accelerator_of(device).synchronize(device)
    return copied


def _copied(tensor: Tensor, devices: set[torch.device]) -> Tensor:
    """Return a copy on the CPU, which is complete once the devices that are added to `devices` are synchronized.

    Copies from a GPU use page-locked memory, so the copies of many tensors need not wait for the GPU one by one.
    """
    accelerator = accelerator_of(tensor.device)
    if accelerator.can_pin and tensor.layout is torch.strided:
        with contextlib.suppress(RuntimeError):  # the host cannot lock so much memory
            host, _ = accelerator.copy_to_host(tensor)
            devices.add(tensor.device)
            return host
    return tensor.to("cpu", copy=True)


def as_storable(state: Any) -> Any:
    """Return a state as it is stored: copied containers, the same tensors, equal strings as one object.

    Pickle writes the second occurrence of an object as a reference, so equal states have equal bytes only if their
    equal strings are also the same objects. Values other than tensors and plain ones raise TypeError.
    """
    return _mapped(state, lambda tensor: tensor, "state")


def hold_own_state(optimizer: torch.optim.Optimizer) -> None:
    """Copy an optimizer's tensors on the CPU, one after another, into memory that only they use.

    `Optimizer.load_state_dict` keeps the given tensors if they need no conversion, and they may be mapped from a file.
    """
    for parameter, state in optimizer.state.items():
        optimizer.state[parameter] = _mapped(state, lambda t: t.clone() if t.device.type == "cpu" else t, "optimizer")


def find_non_finite(state: Any, name: str = "state") -> str | None:
    """Return the path of the first NaN or infinity in a state; None if all numbers are finite.

    One norm of all tensors is computed where they are. If it is finite, they are; if it is not, it may have overflowed,
    and the tensors are checked one by one.
    """
    leaves = list(_leaves(state, name))
    tensors = [leaf for _, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    are_finite = math.isfinite(torch.nn.utils.get_total_norm(tensors))
    for place, leaf in leaves:
        if isinstance(leaf, Tensor):
            # The norm has no complex tensors in it.
            is_finite = (are_finite and not leaf.is_complex()) or bool(torch.isfinite(leaf).all())
        else:
            is_finite = not isinstance(leaf, float) or math.isfinite(leaf)
        if not is_finite:
            return place
    return None


def num_tensor_bytes(state: Any) -> int:
    """Return the size of a state's tensors in bytes; shared tensors count once."""
    sizes = {_identity(leaf): leaf.nbytes for _, leaf in _leaves(state, "") if isinstance(leaf, Tensor)}
    return sum(sizes.values())


def capture_rng() -> dict[str, Any]:
    """Return the states of the generators of Python, numpy, torch and every GPU as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    name, key, *rest = np.random.get_state(legacy=True)
    position, has_gauss, cached = rest
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(name), np.asarray(key).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": torch.get_rng_state(),
        CUDA.kind: [],
        **{gpu.kind: [gpu.rng_state(device) for device in gpu.devices()] for gpu in GPUS if gpu.count()},
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Set every generator to a state of `capture_rng`, or raise ValueError; states of missing GPUs are skipped."""
    try:
        version, numbers, gauss = state["python"]
        name, key, position, has_gauss, cached = state["numpy"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state((name, np.array(key, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        for gpu in GPUS:
            for device, of_device in zip(gpu.devices(), state.get(gpu.kind, []), strict=False):
                gpu.set_rng_state(of_device, device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"not a state of random generators: {error}") from error


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Return a key that is equal for two tensors on the same memory with the same layout."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    pointer = tensor.untyped_storage().data_ptr()
    return (pointer or id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _mapped(value: Any, tensor: Callable[[Tensor], Tensor], place: str) -> Any:
    """Return a copy of the containers with `tensor` applied to every tensor."""
    kind = type(value)
    if kind in _PLAIN:
        # Pickle writes an object once and then refers to it, so equal states have equal bytes only with one object per
        # text.
        return sys.intern(value) if kind is str else value
    # Subclasses are refused: a file that is read with `weights_only` cannot hold their classes.
    if kind in (Tensor, torch.nn.Parameter) or isinstance(value, torch.nn.Buffer):
        return tensor(value)
    if kind is dict or kind is OrderedDict:
        copied: Any = kind()
        for key, child in value.items():
            if type(key) not in _PLAIN:
                raise TypeError(f"{place} has a key of type {_type_name(key)}: a checkpoint holds plain keys")
            copied[sys.intern(key) if type(key) is str else key] = _mapped(child, tensor, f"{place}[{key!r}]")
        # Without the versions of the modules, `load_state_dict` would convert the tensors as if they were old.
        metadata = getattr(value, STATE_DICT_METADATA, None)
        if metadata is not None:
            setattr(copied, STATE_DICT_METADATA, _mapped(metadata, tensor, f"{place}.{STATE_DICT_METADATA}"))
        return copied
    if kind is list:
        return [_mapped(child, tensor, f"{place}[{index}]") for index, child in enumerate(value)]
    if isinstance(value, tuple):
        return tuple(_mapped(child, tensor, f"{place}[{index}]") for index, child in enumerate(value))
    raise TypeError(
        f"{place} is a {_type_name(value)}: a checkpoint holds tensors, str, int, float, bool, None, "
        "and dicts, lists and tuples of them"
    )


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, child in value.items():
            yield from _leaves(child, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, child in enumerate(value):
            yield from _leaves(child, f"{place}[{index}]")
    else:
        yield place, value


def _type_name(value: Any) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
