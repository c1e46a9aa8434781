"""Soft Dice loss (Milletari et al., V-Net, 3DV 2016) over the classes of a whole step.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segapp.losses.additive import HeadCriterion, Statistics, reciprocal_or_zero
from segapp.losses.fused.pixel_sums import upsampled_sums


@dataclass(frozen=True)
class DiceSums:
    """Per class over valid pixels: probability sum on the class's pixels, probability sum on all, number of pixels."""

    num_differentiable: int = 2

    def __call__(self, values: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """See `PixelSums`."""
        probability = torch.softmax(values, 1) * valid
        classes = torch.arange(values.shape[1], device=values.device).view(1, -1, 1, 1)
        own = (ids == classes) & valid
        intersection = torch.where(own, probability, 0.0).sum((0, 2, 3))
        return intersection, probability.sum((0, 2, 3)), own.sum((0, 2, 3)).to(torch.float64)


class CriterionDice(HeadCriterion):
    """Dice loss: 1 - mean over classes of (2 intersection + smooth) / (cardinality + smooth), for the whole step.

    Statistics, each (heads, C): intersection, probability mass, pixel count; cardinality is the sum of the last two.

    Args:
        smooth: added to numerator and denominator, at least 0.
        classes: "present": mean over the classes in the step's target; "all": over every class.
        ignore_index: target id that counts nowhere.
        align_corners: as in `F.interpolate`.
        aux_weight: factor of each auxiliary head's loss.

    Raises:
        ValueError: smooth or classes out of range.
    """

    num_statistics = 3

    def __init__(
        self,
        smooth: float = 1.0,
        *,
        classes: str = "present",
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        if not smooth >= 0:
            raise ValueError(f"smooth={smooth}: give a number of at least 0")
        check_classes(classes)
        self.smooth, self.classes = float(smooth), classes
        self.ignore_index, self.align_corners = ignore_index, align_corners

    def head_statistics(self, logits: Tensor, target: Tensor) -> Statistics:
        """Return (intersection, probability mass, pixel count) of one head, each (C,)."""
        return upsampled_sums(DiceSums(), logits, target, self.align_corners, self.ignore_index)

    def finalize_head(self, totals: Statistics) -> Tensor:
        """Return the Dice loss of one head; 0 where no pixel was valid."""
        intersection, mass, count = totals
        counted = count > 0 if self.classes == "present" else (count.sum() > 0).expand_as(count)
        dice = (2 * intersection + self.smooth) * reciprocal_or_zero(mass + count + self.smooth)
        loss = torch.where(counted, 1 - dice, 0.0).sum() * reciprocal_or_zero(counted.sum())
        return loss.to(intersection.dtype)


def check_classes(classes: str) -> None:
    """Raise ValueError unless classes is "present" or "all"."""
    if classes not in ("present", "all"):
        raise ValueError(f'classes={classes!r}: give "present" or "all"')
