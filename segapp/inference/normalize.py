"""Normalisation of uint8 images on the device that runs the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segapp.inference.compiled import CompiledCall
from segapp.memory.oom_failpoint import oom_failpoint


class Normalizer(nn.Module):
    """Normalisation of uint8 images, on their device.

    Args:
        mean: RGB, in 0..1.
        std: RGB, in 0..1.
        dtype: of the result.
    """

    scale: Tensor
    shift: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        scale = torch.tensor([1 / (255 * s) for s in std]).view(1, 3, 1, 1)
        shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)]).view(1, 3, 1, 1)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return normalised images of the same shape, from uint8 (N, 3, H, W)."""
        return images.float().mul_(self.scale).sub_(self.shift).to(self.dtype)


class NormalizedInput(nn.Module):
    """Model with uint8 input; copies of uint8 images between devices are a quarter of the size of float32.

    Args:
        model: takes normalised images (N, 3, H, W) and returns a tuple, logits first.
        normalizer: normalises the images.
        channels_last: use the NHWC memory format.
    """

    def __init__(self, model: nn.Module, normalizer: Normalizer, *, channels_last: bool = False) -> None:
        super().__init__()
        self.model = model
        self.normalizer = normalizer
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.compiled_call: CompiledCall | None = None

    def compile_training(self) -> None:
        """Run the model's forward pass in training through torch.compile."""
        self.compiled_call = CompiledCall(self.model)

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        """Return (logits, *auxiliary logits) of uint8 images (N, 3, H, W)."""
        if self.training:
            oom_failpoint("train.forward")
        # Evaluation meets many sizes and a rank may have no sample: each would be compiled anew.
        is_compiled = self.compiled_call is not None and self.training and len(images) > 0
        call: Any = self.compiled_call if is_compiled else self.model
        outputs: tuple[Tensor, ...] = call(self.normalized(images))
        return outputs

    def normalized(self, images: Tensor) -> Tensor:
        """Return the input of the model."""
        normalized: Tensor = self.normalizer(images)
        return normalized.contiguous(memory_format=self.memory_format)
