"""A network of some hundred parameters whose import makes a training one in float64; `model.library: python`.

Rounding then stays below 1e-12 for many steps, and runs on one machine and on several can be compared.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from segapp.precision import Precision

_set_up = Precision.__init__


def _double(self: Precision, name: str, device: torch.device) -> None:
    _set_up(self, name, device)
    self.input_dtype = torch.float64


def _begin_float64() -> None:
    torch.set_default_dtype(torch.float64)
    Precision.__init__ = _double  # type: ignore[method-assign]


class DoubleNet(nn.Module):
    """Two convolutions with BatchNorm and dropout between them, in float64."""

    def __init__(self, num_classes: int, width: int = 6) -> None:
        _begin_float64()
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, 4, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.2))
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.backbone(images))
