"""Edits of a network's layers: a first convolution for any number of bands, and pooling that ONNX can express.

Shapes: N images, C channels, H x W pixels; O output channels, B bands, k kernel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

RGB = 3


def first_conv_name(module: nn.Module, in_channels: int) -> str | None:
    """Return the name of the convolution that gets the image: the first one with this number of input channels."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == in_channels:
            return str(name)
    return None


def adapt_first_conv(weight: Tensor, in_channels: int) -> Tensor:
    """Return the weight (O, B, k, k) of a first convolution for B bands, from a weight for RGB (O, 3, k, k).

    One band gets the sum over RGB. Other numbers repeat R, G, B in turn, multiplied by 3 / B, which preserves the size
    of the output, as in segmentation_models_pytorch's `patch_first_conv`.
    """
    if in_channels == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, torch.arange(in_channels) % RGB] * (RGB / in_channels)


def widen_first_conv(module: nn.Module, in_channels: int) -> None:
    """Replace the first convolution of a network for RGB by one for other bands, with random weights, in place."""
    name = first_conv_name(module, RGB)
    if in_channels == RGB or name is None:
        return
    old = module.get_submodule(name)
    assert isinstance(old, nn.Conv2d)
    new = nn.Conv2d(
        in_channels,
        old.out_channels,
        old.kernel_size,  # type: ignore[arg-type]
        old.stride,  # type: ignore[arg-type]
        old.padding,  # type: ignore[arg-type]
        bias=old.bias is not None,
    )
    nn.init.kaiming_normal_(new.weight, mode="fan_out", nonlinearity="relu")  # as torchvision's ResNets and MobileNets
    parent, _, child = name.rpartition(".")
    setattr(module.get_submodule(parent), child, new)


class SizedPooling(nn.Module):
    """`nn.AdaptiveAvgPool2d` as two matrix products.

    ONNX can express these for images of any size, and on CUDA their gradient is summed in a fixed order.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, features: Tensor) -> Tensor:
        """Return features (N, C, H, W) pooled to (N, C, *size)."""
        rows, columns = (_bins(self.size[axis], features.shape[axis], features) for axis in (-2, -1))
        return torch.matmul(rows, torch.matmul(features, columns.T))


def _bins(num_bins: int, side: int, like: Tensor) -> Tensor:
    """Return weights (num_bins, side): bin i averages floor(i side / n) .. ceil((i + 1) side / n), as in torch."""
    bins = torch.arange(num_bins, device=like.device).view(-1, 1)
    first, last = bins * side // num_bins, ((bins + 1) * side + num_bins - 1) // num_bins
    places = torch.arange(side, device=like.device)
    inside = (places >= first) & (places < last)
    return inside.to(like.dtype) / (last - first).to(like.dtype)


def replace_adaptive_pooling(module: nn.Module) -> None:
    """Replace every adaptive average pooling to more than one value by `SizedPooling`, in place."""
    for name, child in module.named_children():
        if isinstance(child, nn.AdaptiveAvgPool2d):
            size = child.output_size
            rows, columns = size if isinstance(size, tuple) else (size, size)
            if rows is not None and columns is not None and (rows, columns) != (1, 1):
                setattr(module, name, SizedPooling((int(rows), int(columns))))
        else:
            replace_adaptive_pooling(child)
