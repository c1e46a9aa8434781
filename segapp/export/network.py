"""The exported module: it takes images as stored in files, and returns logits or class ids at full resolution.

Shapes: N images, B bands, C classes, H x W pixels of an image.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.models import SegmentationModel
from segapp.models.normalizer import Normalizer
from segapp.models.surgery import replace_adaptive_pooling


class ExportNetwork(nn.Module):
    """Normalization, network, upsampling and optional argmax in one module.

    Images whose size the network does not accept are padded at the bottom and right with the mean color, as in
    evaluation, and the logits are cropped. The model is copied; see `Normalizer` for `mean`, `std` and `ranges`.
    """

    def __init__(
        self,
        model: SegmentationModel,
        mean: Sequence[float],
        std: Sequence[float],
        ranges: Sequence[tuple[float, float]] | None = None,
        *,
        align_corners: bool = True,
        argmax: bool = False,
    ) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float().eval()
        self.model.requires_grad_(False)
        replace_adaptive_pooling(self.model)
        self.normalizer = Normalizer(mean, std, torch.float32, ranges)
        self.align_corners = align_corners
        self.argmax = argmax

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits (N, C, H, W), or class ids (N, H, W), of images (N, H, W, B) as stored in files.

        Class ids are uint8, or int32 for more than 256 classes.
        """
        pixels = self.normalizer(images.permute(0, 3, 1, 2).contiguous())
        height, width = pixels.shape[-2], pixels.shape[-1]
        pixels = self._padded(pixels)
        low = self.model.compute_logits(pixels)[0].float()
        logits = F.interpolate(low, pixels.shape[-2:], mode="bilinear", align_corners=self.align_corners)
        if self._needs_padding:
            # A slice would be a view, and tracing would turn its strides into constraints on the image size.
            rows, columns = torch.arange(height, device=low.device), torch.arange(width, device=low.device)
            logits = logits.index_select(2, rows).index_select(3, columns)
        if not self.argmax:
            return logits
        return logits.argmax(1).to(torch.uint8 if logits.shape[1] <= 256 else torch.int32)

    @property
    def _needs_padding(self) -> bool:
        model = self.model
        return model.fixed_size_px is None and (model.size_divisor > 1 or model.min_size_px > 1)

    def _padded(self, pixels: Tensor) -> Tensor:
        if not self._needs_padding:
            return pixels
        divisor = self.model.size_divisor
        sides: list[int] = []
        for side in (pixels.shape[-1], pixels.shape[-2]):
            # An int if run, a symbol if traced.
            least: Any = torch.sym_max(side, self.model.min_size_px) if self.model.min_size_px > 1 else side
            # Written as a multiple, so that a tracer can divide it by the network's strides.
            sides += [0, (least + divisor - 1) // divisor * divisor - side]
        return F.pad(pixels, sides)
