"""The critic of holistic distillation: whether a map of class probabilities, given its image, is a teacher's.

After Liu et al., "Structured Knowledge Distillation for Semantic Segmentation" (CVPR 2019; TPAMI 2020), section 3.3: a
fully convolutional network of strided 4 x 4 convolutions with self-attention (Zhang et al. 2019, SAGAN, section 3) in
its last stages, that sees the image beside the map.

Legend: N images, C classes, h and w the height and width of the critic's input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUT_STRIDE = 8
"""Pixels of the crop per pixel of the critic's input, along each axis: what PSPNet's logits have, as published."""

_SLOPE = 0.1
_MAX_STAGES = 4


def critic_size(crop_px: tuple[int, int]) -> tuple[int, int]:
    """Height and width of a critic's input for crops of this size, pixels."""
    return max(1, crop_px[0] // INPUT_STRIDE), max(1, crop_px[1] // INPUT_STRIDE)


def critic_input(images: Tensor, logits: Tensor, size: tuple[int, int]) -> Tensor:
    """What a critic looks at: the image and the class probabilities, both as means over the cells of a grid.

    Args:
        images: normalised (N, 3, H, W).
        logits: (N, C, h', w').
        size: height and width of the grid.

    Returns:
        (N, 3 + C, h, w) in float32 or better; differentiable with respect to the logits.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    probabilities = logits.to(wide).softmax(1)
    return torch.cat([F.interpolate(images.to(wide), size, mode="area"), _resized(probabilities, size)], 1)


def _resized(maps: Tensor, size: tuple[int, int]) -> Tensor:
    if maps.shape[-2] >= size[0] and maps.shape[-1] >= size[1]:
        return F.interpolate(maps, size, mode="area")
    return F.interpolate(maps, size, mode="bilinear", align_corners=False)


class SelfAttention(nn.Module):
    """Every place takes from all others, weighted by likeness; adds nothing at first (SAGAN, section 3).

    Args:
        channels: K of the features.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = max(1, channels // 8)
        self.query, self.key = nn.Conv2d(channels, narrow, 1), nn.Conv2d(channels, narrow, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.strength = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        """(N, K, h, w) -> the same shape."""
        likeness = self.query(features).flatten(2).transpose(1, 2) @ self.key(features).flatten(2)
        taken = self.value(features).flatten(2) @ likeness.softmax(2).transpose(1, 2)
        added: Tensor = features + self.strength * taken.view_as(features)
        return added


class Critic(nn.Module):
    """Gives each image's map a score; a higher one means more like a teacher's.

    Every layer can be differentiated twice, as a gradient penalty needs.

    Args:
        num_classes: C.
        size: height and width of its input; smaller ones get fewer stages.
        width: channels of the first stage; each later one has twice as many.
        has_batchnorm: normalise the input over the batch first, as the published one does.
    """

    def __init__(self, num_classes: int, size: tuple[int, int], *, width: int = 64, has_batchnorm: bool = True) -> None:
        super().__init__()
        channels = 3 + num_classes
        self.norm = nn.BatchNorm2d(channels) if has_batchnorm else nn.Identity()
        num_stages = max(1, min(_MAX_STAGES, min(size).bit_length() - 1))
        stages: list[nn.Module] = []
        for stage in range(num_stages):
            wider = width * 2**stage
            stages += [nn.Conv2d(channels, wider, 4, stride=2, padding=1), nn.LeakyReLU(_SLOPE)]
            if stage >= 2:
                stages.append(SelfAttention(wider))
            channels = wider
        self.stages = nn.Sequential(*stages)
        # Without bias: no difference of two scores depends on it, so that its gradient would be rounding alone.
        self.score = nn.Conv2d(channels, 1, 1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """(N, 3 + C, h, w), from `critic_input` -> scores (N,): the mean over what is left of the map."""
        scores: Tensor = self.score(self.stages(self.norm(maps)))
        return scores.mean((1, 2, 3))
