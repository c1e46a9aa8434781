"""Preprocessing of images as stored in files, on the device that runs the network."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.datasets.images.pixel_format import PixelFormat


def padded(values: Tensor, size: Sequence[int], value: float = 0) -> Tensor:
    """Return images or targets (..., H, W) padded to `size` at the bottom and right; 0 is the mean color."""
    if values.shape[-2:] == tuple(size):
        return values
    return F.pad(values, (0, size[1] - values.shape[-1], 0, size[0] - values.shape[-2]), value=value)


class Preprocessing(nn.Module):
    """From images as stored in files to the input of a network, in training, evaluation, prediction and export.

    Values become (value - low) / (high - low), clipped to 0..1, and are then normalized with mean and standard
    deviation. Without a `value_range`, values are 0 to 255 and are not clipped. NaN, which float images may have for
    missing data, becomes 0.

    Args:
        pixels: What the files hold, and how it is prepared. Crops of a training have been resized with their image.
        dtype: Dtype of the result.
    """

    scale: Tensor
    shift: Tensor
    low: Tensor
    span: Tensor

    def __init__(self, pixels: PixelFormat, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.pixels, self.dtype, self.resize_px = pixels, dtype, pixels.resize_px
        self.has_ranges, (mean, std) = pixels.value_range is not None, pixels.statistics
        top = 1 if self.has_ranges else 255
        constants = {"scale": [1 / (top * s) for s in std], "shift": [m / s for m, s in zip(mean, std, strict=True)]}
        constants |= {"low": [low for low, _ in pixels.ranges], "span": [high - low for low, high in pixels.ranges]}
        for name, values in constants.items():
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the input (N, B, h, w) of a network for whole images (N, B, H, W) with the dtype of the files."""
        # A traced size is no number, and a comparison would make the trace valid for one size only.
        is_traced = not isinstance(images.shape[-1], int)
        if self.resize_px is not None and (is_traced or images.shape[-2:] != self.resize_px):
            images = F.interpolate(images.to(torch.float32), self.resize_px, mode="bilinear", align_corners=False)
        return self.normalize(images)

    def normalize(self, images: Tensor) -> Tensor:
        """Return normalized images with the same shape, from (N, B, H, W) with the dtype of the files."""
        pixels = images.to(torch.float32, copy=True)
        if self.has_ranges:
            pixels.sub_(self.low).div_(self.span).nan_to_num_(nan=0.0).clamp_(0, 1)
        return pixels.mul_(self.scale).sub_(self.shift).to(self.dtype)

    def restore(self, inputs: Tensor) -> Tensor:
        """Return the input (N, B, h, w) of a network in the units of the files, as float32, clipped to their range."""
        pixels = inputs.to(torch.float32).add(self.shift).div_(self.scale)
        return pixels.mul_(self.span).add_(self.low) if self.has_ranges else pixels
