"""What a checkpoint may hold: tensors and plain values, copied at one instant."""

import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Not bytes: an empty one is pickled in a way that `weights_only` refuses to read.
_PLAIN = (str, int, float, bool, type(None))


def snapshot(state: Any) -> Any:
    """A deep copy on the CPU of nested dicts, lists and tuples of tensors and plain values.

    The copy shares nothing with what it was taken from, so training may go on while it is written. A tensor that occurs
    twice is copied once, so shared weights stay shared. Dicts come back as dicts (an `OrderedDict`, as `state_dict`
    gives, stays one with its `_metadata`), tuples of any kind as tuples.

    Args:
        state: Tensors on any device, `str`, `int`, `float`, `bool`, `None`; dicts, lists and tuples of them.

    Raises:
        TypeError: anything else; the message gives its place and type, for example a numpy number.
    """
    copies: dict[tuple[Any, ...], Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        key = _identity(tensor)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
        return copies[key]

    return _mapped(state, copy, "state")


def as_storable(state: Any) -> Any:
    """A state in the form in which it is stored: copied containers, the same tensors, equal strings one object.

    Pickle writes an object that it has met a second time as a reference, so equal states have equal bytes only where
    the identity of their strings is equal too.

    Raises:
        TypeError: something else than tensors and plain values; the message gives its place and type.
    """
    return _mapped(state, lambda tensor: tensor, "state")


def find_non_finite(state: Any, name: str = "state") -> str | None:
    """The place of the first tensor or number in a state that is NaN or infinite; None when all are finite.

    Args:
        state: As `snapshot` takes it.
        name: What to call its root in the answer.
    """
    for place, leaf in _leaves(state, name):
        if isinstance(leaf, Tensor):
            if (leaf.is_floating_point() or leaf.is_complex()) and not bool(torch.isfinite(leaf).all()):
                return place
        elif isinstance(leaf, float) and leaf - leaf != 0.0:
            return place
    return None


def num_tensor_bytes(state: Any) -> int:
    """How many bytes the tensors of a state take, shared ones counted once."""
    sizes = {_identity(leaf): leaf.nbytes for _, leaf in _leaves(state, "") if isinstance(leaf, Tensor)}
    return sum(sizes.values())


def capture_rng() -> dict[str, Any]:
    """The state of Python's, numpy's and torch's generators (every CUDA device's too), as plain values and tensors."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state(legacy=True)
    return {
        "python": [version, list(numbers), gauss],
        "numpy": [str(legacy[0]), np.asarray(legacy[1]).tolist(), *_plain_tail(legacy[2:])],
        "torch": torch.get_rng_state(),
        "cuda": list(torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else [],
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Sets every generator to what `capture_rng` gave; CUDA devices that are not there any more are left out.

    Raises:
        ValueError: the state is not one of `capture_rng`'s.
    """
    try:
        version, numbers, gauss = state["python"]
        name, key, position, has_gauss, cached = state["numpy"]
        random.setstate((version, tuple(numbers), gauss))
        np.random.set_state((name, np.array(key, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(state["torch"])
        if torch.cuda.is_available():
            for device, cuda_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
                torch.cuda.set_rng_state(cuda_state, device)
    except (KeyError, TypeError, RuntimeError) as error:
        raise ValueError(f"not the state of random generators: {error}") from error


def _plain_tail(tail: Any) -> list[Any]:
    position, has_gauss, cached = tail
    return [int(position), int(has_gauss), float(cached)]


def _identity(tensor: Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are the same numbers in memory."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    pointer = tensor.untyped_storage().data_ptr()
    return (pointer or id(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def _mapped(value: Any, tensor: Callable[[Tensor], Tensor], place: str) -> Any:
    """A copy of the containers, with every tensor replaced by `tensor` of it."""
    kind = type(value)
    if kind in _PLAIN:
        return sys.intern(value) if kind is str else value
    if kind in (Tensor, torch.nn.Parameter) or isinstance(value, torch.nn.Buffer):
        return tensor(value)
    if kind is dict or kind is OrderedDict:
        copied: Any = kind()
        for key, child in value.items():
            if type(key) not in _PLAIN:
                raise TypeError(f"{place} has a key of type {_type_name(key)}: a checkpoint holds plain keys")
            copied[sys.intern(key) if type(key) is str else key] = _mapped(child, tensor, f"{place}[{key!r}]")
        metadata = getattr(value, "_metadata", None)
        if metadata is not None:
            copied._metadata = _mapped(metadata, tensor, f"{place}._metadata")
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
