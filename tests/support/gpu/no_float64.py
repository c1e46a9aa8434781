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

from segapp import accelerator
from segapp.accelerator import Accelerator, Gpu, GpuFacts
from segapp.compat.torch import TorchDispatchMode, register_python_backend, tree_leaves
from tests.support.gpu import other_device
from tests.support.gpu.other_device import _Elsewhere

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


class RefuseFloat64(TorchDispatchMode):
    """Raises the error of MPS for every tensor of float64 on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.device.type == KIND and made.dtype == torch.float64:
                raise TypeError(f"{func}: this device has no float64: use float32 instead")
        return out


class _Data(TorchFunctionMode):
    """Gives a tensor the values of the one that is set as its `data`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data.__set__ and isinstance(args[0], _Elsewhere):  # type: ignore[attr-defined]
            args[0].stored = args[1].stored
            return None
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_float64() -> Iterator[torch.device]:
    """Give the device for the body of the `with` statement."""
    register_python_backend(KIND)
    device, gpu, made = torch.device(KIND, 0), NoFloat64Gpu(), other_device.wrapper
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(other_device, "ELSEWHERE", KIND))
        stack.enter_context(mock.patch.object(other_device, "wrapper", lambda kind, like, _: made(kind, like, device)))
        stack.enter_context(mock.patch.dict(accelerator.ACCELERATORS, {KIND: gpu}))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(other_device.elsewhere())
        stack.enter_context(RefuseFloat64())
        stack.enter_context(_Data())
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
