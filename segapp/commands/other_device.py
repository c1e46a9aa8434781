"""Real tensors that say they are on another device, to try on the CPU alone whether a part follows its inputs.

torch's own meta tensors have no values: a boolean index, `item()` or a sort by loss cannot be tried with them. Here
every operator computes on the CPU, and one that mixes tensors of the two devices raises, as it would on a GPU.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from segapp.accelerator import GPUS
from segapp.compat.torch import TorchDispatchMode, operator_name, tree_leaves, tree_map_only, wrapper, written_arguments
from segapp.custom.loading import shown_error
from segapp.errors import SegappError

AnyModule = TypeVar("AnyModule", bound=nn.Module)

ELSEWHERE = "meta"
"""The name of the other device: one that every torch knows, and for which no code of users has a branch."""

_TAKE_BOTH = ("_to_copy", "copy_", "index", "index_put", "index_put_")
"""Operators that take tensors of two devices: copies, and indices on the CPU."""


class NotTriedError(Exception):
    """A check that could not be carried out; its message has the reason."""


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
                "and register those of a module with register_buffer"
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


def follows(module: AnyModule, run: Callable[[AnyModule, str], Tensor]) -> str | None:
    """Return what is wrong with a copy of a module on another device; None if it computes there.

    The other device is a GPU if there is one.

    Args:
        module: stays as it is.
        run: computes something with the copy and inputs on the device of the name.

    Raises:
        NotTriedError: the code cannot run with tensors that only say where they are.
    """
    for kind in (gpu.kind for gpu in GPUS if gpu.is_available()):
        return None if run(copy.deepcopy(module).to(kind), kind).device.type == kind else _STAYS
    with elsewhere() as device:
        copied = copy.deepcopy(module).to(device)
        try:
            return None if run(copied, device).device.type == device else _STAYS
        except (LeftBehindError, SegappError):
            raise
        except Exception as error:
            raise NotTriedError(f"there is no GPU here, and without one it fails with {shown_error(error)}") from error


_STAYS = "the result stays on the CPU: compute it from the inputs, on their device"
