"""A CUDA driver for Triton without a GPU: kernels are specialised, compiled and measured as on a card, not launched.

`JITFunction.run` is Triton's own, so each argument is specialised (an integer equal to 1, one divisible by 16, an
aligned pointer) exactly as at a real launch, from CPU tensors. The launch itself does nothing, so results are
meaningless.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver

MAX_SHARED_BYTES = {
    **{75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376},
    **{90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376},
}
"""Shared memory that a program may take, by compute capability (CUDA C programming guide, table of capabilities)."""


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes on a card.

    Attributes:
        kernel: name of the kernel.
        registers: of a thread.
        stack_bytes: of a thread; Triton's kernels have no arrays of their own, so these are spilled registers.
        shared_bytes: of a program.
        num_warps: of a program.
        options: as Triton recorded them, with `enable_fp_fusion`.
        cubin: the machine code.
    """

    kernel: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    num_warps: int
    options: Any
    cubin: bytes


class FakeCudaDriver:
    """Driver of one pretended card.

    Args:
        capability: compute capability, such as 90.

    Attributes:
        usages: of the kernels in the order of their launches.
    """

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.usages: list[Usage] = []
        self.launcher_cls = functools.partial(_Launcher, self)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": MAX_SHARED_BYTES[capability]},
            load_binary=self._load,
            unload_module=lambda _: None,
        )
        self._loaded: dict[int, tuple[int, int, bytes]] = {}

    def get_current_device(self) -> int:
        """Return 0, the only card."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return 0, the default stream."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """Return the target to compile for."""
        return GPUTarget("cuda", self.capability, 32)

    def _load(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[None, int, int, int, int]:
        """Return (module, function, registers, spills, largest number of threads); the function is a number."""
        registers, stack = _registers_and_stack(cubin)
        function = len(self._loaded) + 1
        self._loaded[function] = registers, stack, cubin
        return None, function, registers, stack, 1024

    def record(self, metadata: Any, function: int) -> None:
        """Note a launch."""
        registers, stack, cubin = self._loaded[function]
        self.usages.append(Usage(metadata.name, registers, stack, metadata.shared, metadata.num_warps, metadata, cubin))


class _Launcher:
    """Takes the place of the launcher that Triton compiles with a C compiler."""

    def __init__(self, driver: FakeCudaDriver, source: Any, metadata: Any) -> None:
        self.driver, self.metadata = driver, metadata

    def __call__(self, *arguments: Any) -> None:
        assert all(size > 0 for size in arguments[:3]), "an empty grid"
        self.driver.record(self.metadata, arguments[4])


def _registers_and_stack(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of stack of a thread, as cuobjdump of Triton's wheel prints them."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+)", done.stdout + done.stderr)
    assert found, done
    return int(found[1]), int(found[2])


@contextlib.contextmanager
def pretend_card(capability: int = 90, driver: Any = None) -> Iterator[Any]:
    """Let Triton launch on a pretended card in the body of the `with` statement.

    Args:
        capability: compute capability of the card.
        driver: another driver to pretend with.
    """
    driver = driver or FakeCudaDriver(capability)
    kernels = [value for value in vars(_kernels()).values() if isinstance(value, triton.runtime.JITFunction)]
    before = triton_driver._active
    triton_driver.set_active(driver)
    for kernel in kernels:
        kernel.device_caches.clear()
    try:
        yield driver
    finally:
        for kernel in kernels:
            kernel.device_caches.clear()
        triton_driver._active = before


def _kernels() -> Any:
    from segapp.losses.fused import triton_kernels

    return triton_kernels
