"""Large TIFFs of an evaluation: indexed like tensors, of which only the asked part is read.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.datasets.images.windows import ImageWindows, MaskWindows


@dataclass(frozen=True)
class TensorOnDisk:
    """An image (1, B, H, W) or a target (1, H, W) on disk; `large[..., rows, columns]` is a tensor.

    Attributes:
        pixels: The image (H, W, B) or the mask (H, W), to be read in windows; or a mask that has been read.
    """

    pixels: ImageWindows | MaskWindows | NDArray[Any]

    @property
    def shape(self) -> torch.Size:
        """As of a tensor."""
        height, width, *bands = self.pixels.shape
        return torch.Size((1, *bands, height, width))

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: tuple[EllipsisType, slice, slice]) -> Tensor:
        """Return some rows and columns.

        Raises:
            DataError: They cannot be read.
        """
        part = torch.from_numpy(self.pixels[key[1:]])
        return (part if part.dim() == 2 else part.permute(2, 0, 1).contiguous())[None]


@dataclass(frozen=True)
class LargeBatch:
    """A batch of one large image.

    Attributes:
        images: (1, B, H, W), not normalised.
        target: (1, H, W) train ids.
        indices: Of the image in the data set.
    """

    images: TensorOnDisk
    target: TensorOnDisk
    indices: tuple[int, ...]
