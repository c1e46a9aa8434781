"""The loss's road on CUDA, taken on the CPU, and Triton's interpreter without two thirds of its time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from segapp.losses import cross_entropy, overlap, pixel_losses
from segapp.losses.fused import bands, grid, kernels, reference


def take_cuda_road(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the losses choose on the CPU as they do on CUDA: kernels, or large bands without blocked matrices."""
    monkeypatch.setattr(cross_entropy, "BAND_DEVICES", frozenset())
    monkeypatch.setattr(bands, "plan_sweep", lambda *_: (bands.BlockSweep, 1))
    monkeypatch.setattr(bands, "CPU_BAND_BYTES", bands.DEVICE_BAND_BYTES)
    monkeypatch.setattr(overlap, "CPU_SORT_BYTES", overlap.SORT_BYTES)
    monkeypatch.setattr(pixel_losses, "CPU_COLUMNS", pixel_losses.DEVICE_COLUMNS)
    for module in (grid, reference):
        monkeypatch.setattr(module, "products_are_exact", lambda: False)
    for module in (bands, reference):  # the host does not wait for the values of a device
        monkeypatch.setattr(module, "is_finite", lambda _: False)
    monkeypatch.setattr(kernels, "_results", {})  # the first use is tried again, and its warning shown again
    monkeypatch.setattr(kernels, "_warned", set())


def call_functions_directly() -> None:
    """Let the interpreter replace the names of the language before the first call of a function from a module only.

    It looks through all of them again before each call of a function within a kernel (`tl.sum` is one).
    """
    from triton.runtime import interpreter

    prepared: set[frozenset[int]] = set()

    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        seen = frozenset(id(value) for value in self.fn.__globals__.values() if isinstance(value, ModuleType))
        if seen not in prepared:
            interpreter._patch_lang(self.fn)
            prepared.add(seen)
        return self.rewrite()(*arguments, **options)

    interpreter.InterpretedFunction.__call__ = call
