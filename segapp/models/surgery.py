"""Edits of a network's layers: a first convolution for any number of bands, and pooling that ONNX can express.

Shapes: N images, C channels, H x W pixels; O output channels, B bands, k kernel size.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

RGB = 3


def fitted(
    value: Tensor, shape: tuple[int, ...], in_channels: int, positions: tuple[list[int], int] | None = None
) -> Tensor | None:
    """Return a tensor of a file in the shape that a network has, or None if it is of another network.

    The weight of a convolution that sees the image is adapted from RGB to the bands of the network. A position
    embedding is resampled to another grid, as in timm.

    Args:
        value: the tensor.
        shape: the shape in the network.
        in_channels: B of the network.
        positions: for a position embedding, its grid and number of prefix tokens (see `position_grids`).
    """
    if value.shape == shape:
        return value
    if positions is not None:
        from timm.layers.pos_embed import resample_abs_pos_embed

        grid, num_prefix = positions
        # timm takes the other grid for square.
        is_grid = value.ndim == 3 and math.sqrt(max(value.shape[1] - num_prefix, 0)).is_integer()
        if is_grid and value.shape[::2] == shape[::2]:
            return cast(Tensor, resample_abs_pos_embed(value, grid, num_prefix_tokens=num_prefix))
        return None
    # A stem may rearrange the pixels of a square before its convolution, which then has 3 channels for each of them.
    if value.ndim != 4 or value.shape[1] % RGB or value.shape[1] // RGB * in_channels != shape[1]:
        return None
    adapted = adapt_first_conv(value, in_channels)
    return adapted if adapted.shape == shape else None


def position_grids(module: nn.Module) -> dict[str, tuple[list[int], int]]:
    """Return the grid of patches (rows, columns) and the number of prefix tokens of each position embedding of timm."""
    found = {}
    for name, part in module.named_modules():
        grid = getattr(getattr(part, "patch_embed", None), "grid_size", None)
        if grid is not None and isinstance(getattr(part, "pos_embed", None), nn.Parameter):
            has_prefix = not getattr(part, "no_embed_class", False)
            found[f"{name}.pos_embed"] = [*grid], getattr(part, "num_prefix_tokens", 1) if has_prefix else 0
    return found


def adapt_first_conv(weight: Tensor, in_channels: int) -> Tensor:
    """Return the weight (O, mB, k, k) of a first convolution for B bands, from a weight for RGB (O, 3m, k, k).

    One band gets the sum over RGB. Other numbers repeat R, G, B in turn, multiplied by 3 / B, which preserves the size
    of the output, as in segmentation_models_pytorch's `patch_first_conv`.
    """
    by_pixel = weight.reshape(weight.shape[0], -1, RGB, *weight.shape[2:])
    if in_channels == 1:
        return by_pixel.sum(2)
    return (by_pixel[:, :, torch.arange(in_channels) % RGB] * (RGB / in_channels)).flatten(1, 2)


def widen_first_conv(module: nn.Module, in_channels: int) -> None:
    """Replace the first convolution of a network for RGB by one for other bands, with random weights, in place."""
    if in_channels == RGB:
        return
    name, old = next((name, part) for name, part in module.named_modules() if isinstance(part, nn.Conv2d))
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
