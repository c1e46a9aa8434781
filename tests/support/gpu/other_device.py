"""Real tensors that say they are on another device, for trainings without that device.

Every operator computes on the CPU, and one that mixes tensors of the two devices raises, as it would on a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from segapp.compat.torch import TorchDispatchMode, operator_name, tree_leaves

_Wrapper = TypeVar("_Wrapper", bound=Tensor)

ELSEWHERE = "meta"
"""The name of the other device: one that every torch knows, and for which no code of users has a branch."""

_TAKE_BOTH = ("_to_copy", "copy_", "index", "index_put", "index_put_")
"""Operators that take tensors of two devices: copies, and indices on the CPU."""


def written_arguments(operator: Any) -> list[tuple[int, str]]:
    """Return place and name of the arguments that an operator writes to."""
    return [
        (place, argument.name)
        for place, argument in enumerate(operator._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def wrapper(kind: type[_Wrapper], like: Tensor, device: torch.device) -> _Wrapper:
    """Return a tensor of a subclass that has a shape and a device, but no values of its own."""
    made: _Wrapper = Tensor._make_wrapper_subclass(
        kind,
        like.size(),
        strides=like.stride(),
        storage_offset=like.storage_offset(),
        dtype=like.dtype,
        device=device,
    )
    return made


class LeftBehindError(RuntimeError):
    """An operator was given a tensor of the CPU and one of the other device."""


class _Elsewhere(Tensor):
    """A tensor whose values are in `stored`, on the CPU, and whose device is the other one."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> _Elsewhere:
        made = wrapper(cls, stored, torch.device(ELSEWHERE))
        made.stored = stored
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the operator
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the outputs of an operator outside `elsewhere`, such as a comparison of results."""
        with _OtherDevice():  # type: ignore[no-untyped-call]
            return func(*args, **(kwargs or {}))


class _OtherDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes every operator on the CPU, and gives its results the device of its inputs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler at the first operator, which takes five seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the outputs of an operator.

        Raises:
            LeftBehindError: its tensors are on two devices; a scalar may be on the CPU, as torch allows.
        """
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        num_moved = sum(isinstance(value, _Elsewhere) for value in tensors)
        is_left = any(value.dim() and not isinstance(value, _Elsewhere) for value in tensors)
        name = operator_name(func)
        if num_moved and is_left and name not in _TAKE_BOTH:
            raise LeftBehindError(
                f"{name} has inputs on two devices: make tensors on the device of the input, "
                "and register tensors of a module with register_buffer"
            )
        is_moved = num_moved > 0
        if kwargs.get("device") is not None:
            is_moved = torch.device(kwargs["device"]).type == ELSEWHERE
            kwargs["device"] = torch.device("cpu") if is_moved else kwargs["device"]
        here, named = tree_map_only(_Elsewhere, lambda value: value.stored, (args, kwargs))
        out = func(*here, **named)
        if not is_moved or out is None:  # None from `_foreach_` and `_fused_` operators
            return out
        changed = [
            args[place] if place < len(args) else kwargs.get(argument) for place, argument in written_arguments(func)
        ]
        if changed:
            return changed[0] if len(changed) == 1 else tuple(changed)
        return tree_map_only(Tensor, lambda value: value if isinstance(value, _Elsewhere) else _Elsewhere(value), out)


class _Numbers(TorchFunctionMode):
    """Carries Python's numbers to tensors of the other device and back, which torch hides from dispatch modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of a function."""
        kwargs = dict(kwargs or {})
        if func is Tensor.tolist and isinstance(args[0], _Elsewhere):
            return args[0].stored.tolist()
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            device = kwargs.get("device") or (args[0].device if func is Tensor.new_tensor else "cpu")
            if torch.device(device).type == ELSEWHERE:
                made: Tensor = func(*args, **{**kwargs, "device": "cpu"})
                return made.to(ELSEWHERE)
        return func(*args, **kwargs)


@contextlib.contextmanager
def elsewhere() -> Iterator[str]:
    """Give the name of another device for the body of the `with` statement; tensors move there with `to`.

    Example:
        >>> import torch
        >>> with elsewhere() as device:
        ...     values = torch.tensor([1.0, 2.0]).to(device)
        ...     float(values[values > 1].sum()), values.device.type == device
        (2.0, True)
    """
    with _Numbers(), _OtherDevice():  # type: ignore[no-untyped-call]
        yield ELSEWHERE
