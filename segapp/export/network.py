"""The exported module: it takes images as stored in files, and returns logits or class ids at full resolution.

Shapes: N images, B bands, C classes, H x W pixels of an image.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.datasets.preprocessing import Preprocessing
from segapp.models import SegmentationModel
from segapp.models.surgery import replace_adaptive_pooling


class ExportNetwork(nn.Module):
    """Normalization, network, upsampling and optional argmax in one module.

    Images whose size is not suitable for the network are padded at the bottom and right with the mean color, as in
    evaluation, and the logits are cropped. The model is copied.
    """

    def __init__(
        self,
        model: SegmentationModel,
        preprocessing: Preprocessing,
        *,
        align_corners: bool = True,
        argmax: bool = False,
    ) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).cpu().float().eval()
        self.model.requires_grad_(False)
        replace_adaptive_pooling(self.model)
        self.preprocessing = preprocessing
        self.align_corners = align_corners
        self.argmax = argmax

    def forward(self, images: Tensor) -> Tensor:
        """Return float32 logits (N, C, H, W), or class ids (N, H, W), of images (N, H, W, B) as stored in files.

        Class ids are uint8, or int32 for more than 256 classes.
        """
        seen = self.preprocessing(images.permute(0, 3, 1, 2).contiguous())
        pixels, is_resized = seen, self.preprocessing.resize_px is not None
        if self._needs_padding:
            height, width = self.model.suitable_size(*seen.shape[-2:])
            pixels = F.pad(seen, (0, width - seen.shape[-1], 0, height - seen.shape[-2]))
        logits = self.model.compute_logits(pixels)[0].float()
        # The size of a resized image is fixed, so it is known here if it needs padding.
        is_padded = pixels.shape[-2:] != seen.shape[-2:] if is_resized else self._needs_padding
        if is_padded or not is_resized:
            logits = self._upsampled(logits, pixels.shape[-2:])
        if is_padded:
            # A slice would be a view, and tracing would turn its strides into constraints on the image size.
            rows, columns = (torch.arange(side, device=logits.device) for side in seen.shape[-2:])
            logits = logits.index_select(2, rows).index_select(3, columns)
        if is_resized:
            logits = self._upsampled(logits, images.shape[1:3])
        if not self.argmax:
            return logits
        return logits.argmax(1).to(torch.uint8 if logits.shape[1] <= 256 else torch.int32)

    def _upsampled(self, logits: Tensor, size: Sequence[int]) -> Tensor:
        return F.interpolate(logits, size, mode="bilinear", align_corners=self.align_corners)

    @property
    def _needs_padding(self) -> bool:
        model = self.model
        return model.fixed_size_px is None and (model.size_multiple > 1 or model.min_size_px > 1)
