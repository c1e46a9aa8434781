"""The loss's road on CUDA, taken on the CPU, and dispatch modes that watch it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

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
    forget_trials(monkeypatch)


def forget_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first use of the Triton kernels be tried again, and its warning be shown again."""
    monkeypatch.setattr(kernels, "_results", {})
    monkeypatch.setattr(kernels, "_warned", set())


class LaunchCounter(TorchDispatchMode):
    """Counts the operators that start a kernel on a device."""

    # Views, and memory that nothing is written to.
    FREE = frozenset(
        {"view", "_unsafe_view", "t", "transpose", "permute", "expand", "slice", "select", "detach", "unsqueeze"}
        | {"squeeze", "alias", "as_strided", "empty", "new_empty", "empty_like", "split", "unbind", "lift_fresh"}
    )

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname not in self.FREE:
            self.calls[func._opname] += 1
        return func(*args, **(kwargs or {}))

    @property
    def total(self) -> int:
        return sum(self.calls.values())


class DeterministicOnCuda(TorchDispatchMode):
    """Refuses operators whose result on CUDA depends on the order of atomics, or which raise in deterministic mode.

    From torch.use_deterministic_algorithms' list: those that the losses might meet.
    """

    REFUSED = frozenset(
        {"index_add", "index_add_", "scatter_add", "scatter_add_", "histc", "put_", "median", "kthvalue"}
    )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._opname
        is_bad = (
            name in self.REFUSED
            or (name == "cumsum" and args[0].is_floating_point())
            or (name in ("nll_loss2d_forward", "nll_loss_forward") and args[3] != 0)
            or (name == "bincount" and len(args) > 1 and args[1] is not None)
            or (name == "index_put" and not (len(args) > 3 and args[3]))
        )
        assert not is_bad, f"{name} is not deterministic on CUDA"
        return func(*args, **(kwargs or {}))
