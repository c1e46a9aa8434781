"""Normalization of images as stored in files, on the device that runs the network."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class Normalizer(nn.Module):
    """Normalization of images on their device: (value - low) / (high - low), clipped to 0..1, then mean and std.

    Without `ranges`, values are 0 to 255 and are not clipped. NaN, which float images may have for missing data,
    becomes 0.

    Mean and standard deviation of each band are in 0..1; `ranges` has the lowest and highest value of each band.
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
        constants = {"scale": [1 / (top * s) for s in std], "shift": [m / s for m, s in zip(mean, std, strict=True)]}
        if ranges is not None:
            constants |= {"low": [low for low, _ in ranges], "span": [high - low for low, high in ranges]}
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return normalized images with the same shape, from (N, B, H, W) with the dtype of the files."""
        pixels = images.to(torch.float32, copy=True)
        if self.has_ranges:
            pixels.sub_(self.low).div_(self.span).nan_to_num_(nan=0.0).clamp_(0, 1)
        return pixels.mul_(self.scale).sub_(self.shift).to(self.dtype)
