"""The critic of holistic distillation: it scores whether a map of class probabilities of an image is a teacher's.

Follows Liu et al., "Structured Knowledge Distillation for Semantic Segmentation" (CVPR 2019; TPAMI 2020), section 3.3:
a fully convolutional network of strided 4 x 4 convolutions with self-attention (Zhang et al. 2019, SAGAN, section 3) in
its last stages. Its input is the image and the map.

Shapes: N images, B bands, C classes, K channels, H x W of the crop, h x w of the critic's input.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUT_STRIDE = 8
"""Pixels of the crop per pixel of the critic's input, along each axis: the stride of PSPNet's logits, as published."""


def critic_size(crop_px: tuple[int, int]) -> tuple[int, int]:
    return max(1, crop_px[0] // INPUT_STRIDE), max(1, crop_px[1] // INPUT_STRIDE)


def critic_input(images: Tensor, logits: Tensor, size: tuple[int, int]) -> Tensor:
    """Return the critic's input: image and class probabilities, both averaged over the cells of a grid of h x w.

    Normalized images (N, B, H, W) and logits (N, C, h', w') give (N, B + C, h, w) in float32 or better, differentiable
    with respect to the logits. Logits smaller than the grid are interpolated.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    maps = logits.to(wide).softmax(1)
    if maps.shape[-2] >= size[0] and maps.shape[-1] >= size[1]:
        maps = F.interpolate(maps, size, mode="area")
    else:
        maps = F.interpolate(maps, size, mode="bilinear", align_corners=False)
    return torch.cat([F.interpolate(images.to(wide), size, mode="area"), maps], 1)


class SelfAttention(nn.Module):
    """Self-attention over all positions, added with a factor that starts at 0 (SAGAN, section 3)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        narrow = max(1, channels // 8)
        self.query, self.key = nn.Conv2d(channels, narrow, 1), nn.Conv2d(channels, narrow, 1)
        self.value = nn.Conv2d(channels, channels, 1)
        self.strength = nn.Parameter(torch.zeros(1))

    def forward(self, features: Tensor) -> Tensor:
        similarity = self.query(features).flatten(2).transpose(1, 2) @ self.key(features).flatten(2)
        attended = self.value(features).flatten(2) @ similarity.softmax(2).transpose(1, 2)
        result: Tensor = features + self.strength * attended.view_as(features)
        return result


class Critic(nn.Module):
    """Network that scores each image's map; a higher score means that it is more like a teacher's.

    Every layer is twice differentiable, as a gradient penalty requires. Smaller inputs get fewer stages; the first
    stage has `width` channels, and each further one twice as many as the previous. The input
    is normalized over the batch first, as in the published network.
    """

    def __init__(self, channels: int, size: tuple[int, int], *, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        num_stages = max(1, min(4, min(size).bit_length() - 1))
        stages: list[nn.Module] = []
        for stage in range(num_stages):
            wider = width * 2**stage
            stages += [nn.Conv2d(channels, wider, 4, stride=2, padding=1), nn.LeakyReLU(0.1)]
            if stage >= 2:
                stages.append(SelfAttention(wider))
            channels = wider
        self.stages = nn.Sequential(*stages)
        # No bias: no difference of two scores depends on it, so its gradient would be rounding error.
        self.score = nn.Conv2d(channels, 1, 1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Return scores (N,), the mean over the last map, from maps (N, B + C, h, w) of `critic_input`."""
        scores: Tensor = self.score(self.stages(self.norm(maps)))
        return scores.mean((1, 2, 3))
