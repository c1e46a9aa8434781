"""Adaptive average pooling as matrix products, for targets that cannot compute it in torch's own way."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SizedPooling(nn.Module):
    """`nn.AdaptiveAvgPool2d` as two matrix products.

    ONNX can express them for images of any size, and on CUDA their gradient is summed in a fixed order.
    """

    def __init__(self, size: tuple[int, int]) -> None:
        super().__init__()
        self.size = size

    def forward(self, features: Tensor) -> Tensor:
        """Return features (N, C, H, W) pooled to (N, C, *size)."""
        rows, columns = (
            _bins(num_bins, side, features)
            for num_bins, side in zip(self.size, (features.shape[-2], features.shape[-1]), strict=True)
        )
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
