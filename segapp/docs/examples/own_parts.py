"""Custom components: a model, a loss, a transform and a schedule; `own_parts.yaml` next to this file names them."""

import math
from collections.abc import Callable

import albumentations as A  # type: ignore[import-untyped, unused-ignore]
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.losses import AdditiveCriterion, LossStatistics, ModelOutputs, heads_of


class SmallNet(nn.Module):
    """Three convolutions; segapp passes `num_classes`, `model.options` the width. `backbone` has its own lr factor."""

    def __init__(self, num_classes: int, width: int = 16) -> None:
        super().__init__()
        first, second = nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.Conv2d(width, 2 * width, 3, 2, 1)
        self.backbone = nn.Sequential(first, nn.BatchNorm2d(width), nn.ReLU(), second, nn.ReLU())
        self.classifier = nn.Conv2d(2 * width, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, C, H/4, W/4) of normalized images (N, 3, H, W)."""
        logits: Tensor = self.classifier(self.backbone(images))
        return logits


class BrierLoss(AdditiveCriterion):
    """Squared distance of the probabilities from the target (Brier 1950), the mean over valid pixels."""

    num_statistics = 2

    def __init__(self, ignore_index: int) -> None:
        super().__init__()
        self.ignore_index = ignore_index

    def statistics(self, outputs: ModelOutputs, target: Tensor) -> LossStatistics:
        """Return (sum of squares, number of valid pixels): sums, so the loss is exact for any batch split."""
        logits = F.interpolate(heads_of(outputs)[0].float(), target.shape[-2:], mode="bilinear", align_corners=True)
        target = target.long()  # a small type cannot hold every ignored id
        valid = target != self.ignore_index
        classes = F.one_hot(torch.where(valid, target, 0), logits.shape[1]).movedim(-1, 1)
        squares = (logits.softmax(1) - classes).square().sum(1)
        return torch.where(valid, squares, 0.0).sum(), valid.sum(dtype=torch.float64)

    def finalize(self, totals: LossStatistics) -> Tensor:
        """Return the mean; 0 without a valid pixel."""
        return totals[0] / totals[1].clamp(min=1).to(totals[0].dtype)


def evening(p: float = 0.5, darkest: float = 0.4) -> A.BasicTransform:
    """Return a transform that darkens images; segapp seeds it for each sample."""
    return A.RandomBrightnessContrast(brightness_limit=(-darkest, 0.0), contrast_limit=0.0, p=p)


def half_cosine(total_steps: int, end: float = 0.0) -> Callable[[int], float]:
    """Return the factor on the learning rate at a step, counted from 1; segapp passes `total_steps`."""
    return lambda step: end + (1 - end) * (1 + math.cos(math.pi * (step - 1) / total_steps)) / 2
