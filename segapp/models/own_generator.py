"""Random initial values from a generator of their own, independent of the process's generator and its other users."""

import contextlib
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from segapp.compat.torch import TorchDispatchMode, dispatch_modes, schema_names

_swapping = threading.Lock()


class OwnGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, random operators on the CPU draw from a generator of its own, in this thread.

    It draws the same numbers as the process's generator after `torch.manual_seed(seed)`. An operator that takes no
    generator, such as dropout, runs while the process's generator has the state of this one.
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        tensors = (value for value in args if isinstance(value, Tensor))
        device = next((tensor.device for tensor in tensors), torch.device(kwargs.get("device") or "cpu"))
        # The generator is for the CPU, and the meta device draws nothing.
        if device.type != "cpu":
            return func(*args, **kwargs)
        overload = _overload_with_generator(func)
        if overload is not None:
            return overload(*args, **{**kwargs, "generator": self.generator})
        # The global state is replaced for a moment, by one thread at a time.
        with _swapping:
            state = torch.get_rng_state()
            torch.set_rng_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(torch.get_rng_state())
                torch.set_rng_state(state)


@cache
def _overload_with_generator(func: Any) -> Any:
    """Return an operator, or the overload of it, that takes a generator; None without one."""
    wanted = schema_names(func) | {"generator"}
    overloads = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    return next((each for each in (func, *overloads) if schema_names(each) == wanted), None)


@contextlib.contextmanager
def own_generator(seed: int = 0) -> Iterator[None]:
    """Build networks in the body from a generator of their own, or from the one that the caller has entered."""
    if any(isinstance(mode, OwnGenerator) for mode in dispatch_modes()):
        yield
        return
    with OwnGenerator(seed):
        yield
