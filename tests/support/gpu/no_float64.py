"""Trainings on a device without float64, as Apple's MPS is: real values on the CPU, behind tensors of that device.

A tensor of float64 on the device raises, and so do operators with tensors of both devices. The device type cannot be
unregistered, so this runs in a process of its own:

    python -m tests.support.gpu.no_float64 CASES.json

The file lists {"config": ..., "folder": ...}; each case is trained in turn, or resumed if its folder exists.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from segapp import accelerator
from segapp.accelerator import Accelerator, Gpu, GpuFacts
from segapp.compat.torch import TorchDispatchMode, operator_name, register_python_backend, tree_leaves

KIND = "narrowgpu"


class NoFloat64Gpu(Gpu):
    """A kind of device without float64, pinned memory, streams and a peak of memory."""

    can_pin = can_replicate = False
    current, synchronize, empty_cache = Accelerator.current, Accelerator.synchronize, Accelerator.empty_cache
    is_capturing, copy_to_host = Accelerator.is_capturing, Accelerator.copy_to_host

    def __init__(self) -> None:
        super().__init__(KIND, "this test")
        self.states: list[int] = []

    def count(self) -> int:
        return 1

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def current_index(self) -> int:
        return 0

    def facts(self, device: torch.device) -> GpuFacts:
        return GpuFacts("a GPU without float64", "", 2**33)

    def rng_state(self, device: torch.device) -> Tensor:
        """Its random numbers are made by the CPU's generator."""
        return torch.zeros(1, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.states.append(int(state))

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        return 2**32, 2**33

    def allocated_bytes(self, device: torch.device) -> int:
        return 2**20

    reserved_bytes = peak_reserved_bytes = pop_peak_bytes = allocated_bytes

    def has_bf16(self, device: torch.device) -> bool:
        return False

    def has_tf32(self, device: torch.device) -> bool:
        return False

    def has_float64(self, device: torch.device) -> bool:
        return False


_TAKE_BOTH = ("_to_copy", "copy_", "index", "index_put", "index_put_")
"""Operators that take tensors of two devices: copies, and indices on the CPU."""


class _Elsewhere(Tensor):
    """A tensor whose values are in `stored`, on the CPU, and whose device is the other one."""

    stored: Tensor

    @staticmethod
    def __new__(cls, stored: Tensor) -> _Elsewhere:
        made: _Elsewhere = Tensor._make_wrapper_subclass(
            cls,
            stored.size(),
            strides=stored.stride(),
            storage_offset=stored.storage_offset(),
            dtype=stored.dtype,
            device=torch.device(KIND, 0),
        )
        made.stored = stored
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the operator
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Return the outputs of an operator outside `no_float64`, such as a comparison of results."""
        with _OtherDevice():  # type: ignore[no-untyped-call]
            return func(*args, **(kwargs or {}))


class _OtherDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes every operator on the CPU, and gives its results the device of its inputs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: otherwise torch imports its compiler at the first operator, which takes five seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the outputs of an operator, all of whose tensors but scalars are on one device."""
        kwargs = dict(kwargs or {})
        tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        num_moved = sum(isinstance(value, _Elsewhere) for value in tensors)
        is_left = any(value.dim() and not isinstance(value, _Elsewhere) for value in tensors)
        name = operator_name(func)
        if num_moved and is_left and name not in _TAKE_BOTH:
            raise RuntimeError(f"{name} has inputs on two devices")
        is_moved = num_moved > 0
        if kwargs.get("device") is not None:
            is_moved = torch.device(kwargs["device"]).type == KIND
            kwargs["device"] = torch.device("cpu") if is_moved else kwargs["device"]
        here, named = tree_map_only(_Elsewhere, lambda value: value.stored, (args, kwargs))
        out = func(*here, **named)
        if is_moved and any(isinstance(each, Tensor) and each.dtype == torch.float64 for each in tree_leaves(out)):
            raise TypeError(f"{func}: this device has no float64: use float32 instead")
        if not is_moved or out is None:  # None from `_foreach_` and `_fused_` operators
            return out
        changed = [
            args[place] if place < len(args) else kwargs.get(argument.name)
            for place, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        if changed:
            return changed[0] if len(changed) == 1 else tuple(changed)
        return tree_map_only(Tensor, lambda value: value if isinstance(value, _Elsewhere) else _Elsewhere(value), out)


class _Numbers(TorchFunctionMode):
    """Carries Python's numbers to tensors of the other device and back, which torch hides from dispatch modes."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return the result of a function."""
        kwargs = dict(kwargs or {})
        if func is Tensor.data.__set__ and isinstance(args[0], _Elsewhere):  # type: ignore[attr-defined]
            args[0].stored = args[1].stored
            return None
        if func is Tensor.tolist and isinstance(args[0], _Elsewhere):
            return args[0].stored.tolist()
        if func in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            device = kwargs.get("device") or (args[0].device if func is Tensor.new_tensor else "cpu")
            if torch.device(device).type == KIND:
                made: Tensor = func(*args, **{**kwargs, "device": "cpu"})
                return made.to(KIND)
        return func(*args, **kwargs)


@contextlib.contextmanager
def no_float64() -> Iterator[torch.device]:
    """Give the device for the body of the `with` statement."""
    register_python_backend(KIND)
    device, gpu = torch.device(KIND, 0), NoFloat64Gpu()
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(accelerator.ACCELERATORS, {KIND: gpu}))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_Numbers())
        stack.enter_context(_OtherDevice())  # type: ignore[no-untyped-call]
        yield device


def main(path: str) -> None:
    with no_float64() as device:
        from segapp.assembly import devices
        from segapp.checkpoint import snapshot
        from segapp.config import validate_config
        from segapp.losses.fused import checks, grid
        from segapp.run.folder import RunFolder
        from segapp.session.request import TrainRequest
        from segapp.session.session import run_session

        is_simulated, mapped, identity = checks.is_simulated, snapshot._mapped, snapshot._identity
        snapshot._identity = lambda tensor: identity(tensor.stored if isinstance(tensor, _Elsewhere) else tensor)
        modules: tuple[Any, ...] = (checks, grid)
        for module in modules:
            module.is_simulated = lambda tensor: not isinstance(tensor, _Elsewhere) and is_simulated(tensor)
        snapshot._mapped = lambda value, tensor, place: (
            tensor(value) if isinstance(value, _Elsewhere) else mapped(value, tensor, place)
        )
        devices._DEVICES = (*devices._DEVICES, KIND)
        with contextlib.suppress(TypeError):
            raise AssertionError(torch.zeros(2).to(device).sum(dtype=torch.float64))
        for case in json.loads(Path(path).read_text()):
            config, folder = validate_config(case["config"]), Path(case["folder"])
            request = TrainRequest(config, RunFolder(folder)) if folder.exists() else TrainRequest(config, run=folder)
            assert run_session(request) == 0


if __name__ == "__main__":
    main(sys.argv[1])
