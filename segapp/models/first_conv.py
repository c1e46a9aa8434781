"""The first convolution of a network for images of any number of bands, and RGB weights for it.

Shapes: O output channels, B bands, k kernel size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

RGB = 3


def first_conv_name(module: nn.Module, in_channels: int) -> str | None:
    """Return the name of the convolution that takes the image: the first one with so many input channels."""
    for name, part in module.named_modules():
        if isinstance(part, nn.Conv2d) and part.in_channels == in_channels:
            return str(name)
    return None


def adapt_first_conv(weight: Tensor, in_channels: int) -> Tensor:
    """Return the weight (O, B, k, k) of a first convolution for B bands, from one for RGB (O, 3, k, k).

    One band gets the sum over RGB. Others repeat R, G, B in turn, times 3 / B, which keeps the size of the output. As
    segmentation_models_pytorch's `patch_first_conv`.
    """
    if in_channels == 1:
        return weight.sum(1, keepdim=True)
    return weight[:, torch.arange(in_channels) % RGB] * (RGB / in_channels)


def widen_first_conv(module: nn.Module, in_channels: int) -> None:
    """Replace the first convolution of a network for RGB by one for other bands, with new random weights, in place."""
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
