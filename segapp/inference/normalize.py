"""Normalisation of images, as they are stored, on the device that runs the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from segapp.inference.compiled import CompiledCall
from segapp.memory.oom_failpoint import oom_failpoint


class Normalizer(nn.Module):
    """Normalisation of images, on their device: (value - low) / (high - low), limited to 0..1, then mean and std.

    Without `ranges`, values are 0 to 255 and need no limits. NaN, as float images have without data, becomes 0.

    Args:
        mean: of each band, in 0..1.
        std: of each band, in 0..1.
        dtype: of the result.
        ranges: lowest and highest value of each band; None: 0 and 255.
    """

    scale: Tensor
    shift: Tensor
    low: Tensor
    span: Tensor

    def __init__(
        self,
        mean: Sequence[float],
        std: Sequence[float],
        dtype: torch.dtype = torch.float32,
        ranges: Sequence[tuple[float, float]] | None = None,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.has_ranges = ranges is not None
        top = 255 if ranges is None else 1
        self._hold("scale", [1 / (top * s) for s in std])
        self._hold("shift", [m / s for m, s in zip(mean, std, strict=True)])
        if ranges is not None:
            self._hold("low", [low for low, _ in ranges])
            self._hold("span", [high - low for low, high in ranges])

    def _hold(self, name: str, values: list[float]) -> None:
        self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return normalised images of the same shape, from (N, B, H, W) of the type of the files."""
        pixels = images.to(torch.float32, copy=True)
        if self.has_ranges:
            pixels.sub_(self.low).div_(self.span).nan_to_num_(nan=0.0).clamp_(0, 1)
        return pixels.mul_(self.scale).sub_(self.shift).to(self.dtype)


class NormalizedInput(nn.Module):
    """Model that takes images as they are stored; copies of uint8 between devices are a quarter of float32's size.

    Args:
        model: takes normalised images (N, B, H, W) and returns a tuple, logits first.
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
        """Return (logits, *auxiliary logits) of stored images (N, B, H, W)."""
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
