"""Networks whose training repeats bit for bit on a GPU (`train.deterministic`).

torch raises at the first operation that has no deterministic implementation on CUDA. Here such operations of a network
are replaced where that is possible, or named before the training begins.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from segapp.export.network import replace_adaptive_pooling

WITHOUT_DETERMINISTIC_CUDA = frozenset(
    {
        "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_max_pool2d", "avg_pool3d", "fractional_max_pool2d",
        "fractional_max_pool3d", "grid_sampler_2d", "grid_sampler_3d", "histc", "max_unpool2d", "max_unpool3d",
        "median", "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "upsample_bicubic2d", "upsample_linear1d",
        "upsample_trilinear3d",
    }
)  # fmt: skip
"""Operators that raise under `torch.use_deterministic_algorithms`, most of them in backward; see there.

Bilinear upsampling is not among them: `F.interpolate` has another, slower form of it for this.
"""


class _Finder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes operators that have no deterministic implementation, with the module that runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.running: list[str] = []
        self.found: list[tuple[str, str]] = []

    def leave(self) -> None:
        """Note that the module that began last has run."""
        self.running.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        if name in WITHOUT_DETERMINISTIC_CUDA:
            self.found.append((self.running[-1] if self.running else "", name))
        return func(*args, **(kwargs or {}))


def make_deterministic(model: nn.Module) -> None:
    """Replace adaptive average pooling, whose backward pass adds in random order on CUDA, by matrix products."""
    replace_adaptive_pooling(model)


def nondeterministic_parts(model: nn.Module, example: Tensor) -> list[tuple[str, str]]:
    """Return (module, operator) for each operator without a deterministic implementation on CUDA.

    The forward pass runs on the meta device, without values; the model is not changed.

    Args:
        model: on any device.
        example: (N, 3, H, W) on the meta device.
    """
    finder, handles = _Finder(), []
    for name, part in model.named_modules():
        handles.append(part.register_forward_pre_hook(lambda *_, name=name: finder.running.append(name)))
        handles.append(part.register_forward_hook(lambda *_: finder.leave()))
    state = {name: tensor.to("meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    try:
        with finder:
            torch.func.functional_call(model, state, (example,))
    finally:
        for handle in handles:
            handle.remove()
    return finder.found


def refusal(model: nn.Module, example: Tensor) -> str | None:
    """Return why a network cannot train deterministically on CUDA, and what to do; None if it can."""
    try:
        found = nondeterministic_parts(model, example)
    except (RuntimeError, NotImplementedError):  # an operator without a meta kernel: the first step will tell
        return None
    if not found:
        return None
    named = ", ".join(sorted({f"{name or 'the network'} ({operator})" for name, operator in found}))
    return f"train.deterministic = true, but {named} has no deterministic form on CUDA: choose another model, or false"
