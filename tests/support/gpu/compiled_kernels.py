"""The loss's Triton kernels, compiled for several cards without one: registers and spilled bytes.

`pretend_card` gives Triton a CUDA driver without a GPU: `JITFunction.run` is Triton's own, so each argument is
specialised (an integer equal to 1, one divisible by 16, an aligned pointer) exactly as at a real launch, from CPU
tensors. The launch itself does nothing, so results are meaningless.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver

from segapp.losses.fused import checks, triton_kernels
from segapp.losses.fused.pixel_sums import PixelOptions
from segapp.losses.fused.triton_cross_entropy import cross_entropy_by_triton

MAX_SHARED_BYTES = {
    **{75: 65536, 80: 166912, 86: 101376, 87: 166912, 89: 101376},
    **{90: 232448, 100: 232448, 103: 232448, 120: 101376, 121: 101376},
}
"""Shared memory that a program may take, by compute capability (CUDA C programming guide, table of capabilities)."""


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes on a card: registers and bytes of the stack of a thread.

    Triton's kernels have no arrays of their own, so the stack holds spilled registers.
    """

    kernel: str
    registers: int
    stack_bytes: int
    num_warps: int
    options: Any


class FakeCudaDriver:
    """Driver of one pretended card; `usages` are those of the kernels in the order of their launches."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.usages: list[Usage] = []
        self.launcher_cls = functools.partial(_Launcher, self)
        self.utils = SimpleNamespace(
            get_device_properties=lambda _: {"max_shared_mem": MAX_SHARED_BYTES[capability]},
            load_binary=self._load,
            unload_module=lambda _: None,
        )
        self._loaded: dict[int, tuple[int, int]] = {}

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def _load(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[None, int, int, int, int]:
        """Return (module, function, registers, spills, largest number of threads); the function is a number."""
        registers, stack = _registers_and_stack(cubin)
        function = len(self._loaded) + 1
        self._loaded[function] = registers, stack
        return None, function, registers, stack, 1024

    def record(self, metadata: Any, function: int) -> None:
        registers, stack = self._loaded[function]
        self.usages.append(Usage(metadata.name, registers, stack, metadata.num_warps, metadata))


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
    """Let Triton launch on a pretended card, or with another driver, in the body of the `with` statement."""
    driver = driver or FakeCudaDriver(capability)
    kernels = [value for value in vars(triton_kernels).values() if isinstance(value, triton.runtime.JITFunction)]
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


CLASSES = (2, 19, 60, 150, 300)
CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
SIZES = {  # N, h, w, H, W
    "many cells": (16, 64, 64, 512, 512),
    "many small cells": (16, 128, 128, 256, 256),
    "divisible by 16": (2, 16, 16, 128, 128),
    "odd": (3, 9, 13, 33, 51),
    "one block": (2, 4, 2, 15, 9),
    "ones": (1, 1, 1, 5, 1),
    "scale 1.5": (1, 6, 64, 9, 96),
}
DTYPES = {
    "fp32": (torch.float32, torch.uint8),
    "fp16": (torch.float16, torch.int16),
    "bf16": (torch.bfloat16, torch.int64),
    "fp64": (torch.float64, torch.int32),
}


@dataclass(frozen=True)
class Case:
    num_classes: int
    capability: int
    size: str = "divisible by 16"
    layout: str = "contiguous"
    has_options: bool = False
    dtype: str = "fp32"


def cases() -> list[Case]:
    """Return a case of every number of classes and of every card, with the other choices in turn."""
    layouts, dtypes = ("contiguous", "channels last", "sliced"), ("fp32", "bf16", "fp32", "fp16")
    choices = zip(
        *map(itertools.cycle, (CLASSES, CAPABILITIES, [*SIZES, "odd"], layouts, (False, True), dtypes)), strict=False
    )
    return [Case(*choice) for choice in itertools.islice(choices, 14)] + [Case(3, 80, "odd", dtype="fp64")]


def inputs_of(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and a target of the case's sizes, strides and dtypes; their values do not matter."""
    N, h, w, H, W = SIZES[case.size]
    dtype, target_dtype = DTYPES[case.dtype]
    if case.layout == "sliced":
        return (
            torch.zeros(N, case.num_classes, h, 2 * w, dtype=dtype)[..., ::2],
            torch.zeros(N, H, 2 * W, dtype=target_dtype)[..., ::2],
        )
    logits = torch.zeros(N, case.num_classes, h, w, dtype=dtype)
    if case.layout == "channels last":
        logits = torch.zeros(N, h, w, case.num_classes, dtype=dtype).permute(0, 3, 1, 2)
    return logits, torch.zeros(N, H, W, dtype=target_dtype)


def usages_of(case: Case) -> list[Usage]:
    """Return what the kernels of a case take on its card; they are compiled, not run."""
    logits, target = inputs_of(case)
    weight = torch.ones(case.num_classes) if case.has_options else None
    options = PixelOptions(True, 255, label_smoothing=0.1 if case.has_options else 0.0)
    with pretend_card(case.capability) as card:
        cross_entropy_by_triton(logits, target, weight, options, with_gradient=True)
    checks._reports.clear()  # what the kernels did not write is no target
    return list(card.usages)
