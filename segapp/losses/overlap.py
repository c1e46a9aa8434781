"""Losses of the overlap of prediction and target over the classes of a whole step: Dice and Tversky.

Soft Dice: Milletari et al., V-Net, 3DV 2016. Tversky: Salehi et al., MLMI 2017; with an exponent, focal Tversky:
Abraham and Khan, ISBI 2019.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segapp.accelerator import wide, wide_sum
from segapp.losses.additive import HeadCriterion, Statistics, reciprocal_or_zero
from segapp.losses.fused.checks import own_classes
from segapp.losses.fused.pixel_sums import PixelOptions, upsampled_sums


@dataclass(frozen=True)
class OverlapSums:
    """Per class over valid pixels: probability sum on the class's pixels, probability sum on all, number of pixels."""

    multilabel: bool = False
    num_differentiable: int = 2

    def __call__(self, values: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """See `PixelSums`."""
        probability = (torch.sigmoid(values) if self.multilabel else torch.softmax(values, 1)) * valid
        own = own_classes(ids, values.shape[1], multilabel=self.multilabel) & valid
        intersection = torch.where(own, probability, 0.0).sum((0, 2, 3))
        return intersection, probability.sum((0, 2, 3)), wide(own.sum((0, 2, 3)))


class _OverlapCriterion(HeadCriterion):
    """Mean over classes of a loss of intersection, probability mass and pixel count, each summed over the step.

    Statistics, each (heads, C): intersection, probability mass, pixel count.
    """

    num_statistics = 3

    def __init__(
        self, smooth: float, classes: str, multilabel: bool, ignore_index: int, align_corners: bool, aux_weight: float
    ) -> None:
        super().__init__(aux_weight)
        if not smooth >= 0:
            raise ValueError(f"smooth={smooth}: give a number of at least 0")
        check_classes(classes)
        self.smooth, self.classes, self.is_sigmoid = float(smooth), classes, multilabel
        self.options = PixelOptions(align_corners, ignore_index, multilabel, is_sigmoid=multilabel)

    def class_losses(self, intersection: Tensor, mass: Tensor, count: Tensor) -> Tensor:
        """Return the loss of each class, (C,), from its sums."""
        raise NotImplementedError

    def head_statistics(self, logits: Tensor, target: Tensor) -> Statistics:
        """Return (intersection, probability mass, pixel count) of one head, each (C,)."""
        return upsampled_sums(OverlapSums(self.options.multilabel), logits, target, self.options)

    def finalize_head(self, totals: Statistics) -> Tensor:
        """Return the loss of one head; 0 if no pixel was valid."""
        intersection, mass, count = totals
        counted = count > 0 if self.classes == "present" else (count.sum() > 0).expand_as(count)
        losses = torch.where(counted, self.class_losses(intersection, mass, count), 0.0)
        return (losses.sum() * reciprocal_or_zero(wide_sum(counted))).to(intersection.dtype)


class CriterionDice(_OverlapCriterion):
    """Dice loss: 1 - mean over classes of (2 intersection + smooth) / (cardinality + smooth), for the whole step.

    Use it when the foreground is small, usually added to cross-entropy. It takes logits (N, C, h, w) and class ids
    (N, H, W). Statistics, each (heads, C): intersection, probability mass, pixel count; cardinality is the sum of the
    last two.

    Args:
        smooth: added to numerator and denominator, at least 0.
        classes: "present": mean over the classes in the step's target; "all": over every class.
        multilabel: bit c of a target id is class c, and probabilities are sigmoids; otherwise softmax.
        ignore_index: target id of the pixels that are left out.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head.

    Raises:
        ValueError: smooth or classes out of range.

    Example:
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionDice(smooth=0.0)(logits, target)), 4)
        0.5
    """

    def __init__(
        self,
        smooth: float = 1.0,
        *,
        classes: str = "present",
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(smooth, classes, multilabel, ignore_index, align_corners, aux_weight)

    def class_losses(self, intersection: Tensor, mass: Tensor, count: Tensor) -> Tensor:
        """See the base class."""
        return 1 - (2 * intersection + self.smooth) * reciprocal_or_zero(mass + count + self.smooth)


class CriterionTversky(_OverlapCriterion):
    """Tversky loss: mean over classes of (1 - T)^gamma, for the whole step.

    T = (TP + smooth) / (TP + alpha FP + beta FN + smooth), with sums of probabilities. With alpha = beta = 0.5 and
    gamma = 1 it equals the Dice loss with twice the `smooth`.

    Use it when a missed pixel costs more than a false alarm (beta above alpha), or less. Shapes and statistics are the
    same as for `CriterionDice`.

    Args:
        alpha: weight of false positives, at least 0.
        beta: weight of false negatives, at least 0.
        gamma: exponent, above 0; below 1 it is the focal Tversky loss, which gives nearly correct classes more weight.
        smooth: added to numerator and denominator, at least 0.
        multilabel: bit c of a target id is class c, and probabilities are sigmoids; otherwise softmax.
        ignore_index: target id of the pixels that are left out.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head.

    Raises:
        ValueError: alpha, beta, gamma or smooth out of range.

    Example:
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionTversky(alpha=0.3, beta=0.7, smooth=0.0)(logits, target)), 4)
        0.5833
    """

    def __init__(
        self,
        alpha: float = 0.3,
        beta: float = 0.7,
        gamma: float = 1.0,
        *,
        smooth: float = 1.0,
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(smooth, "present", multilabel, ignore_index, align_corners, aux_weight)
        if not min(alpha, beta) >= 0:
            raise ValueError(f"alpha={alpha}, beta={beta}: give numbers of at least 0")
        if not gamma > 0:
            raise ValueError(f"gamma={gamma}: give a number above 0")
        self.alpha, self.beta, self.gamma = float(alpha), float(beta), float(gamma)

    def class_losses(self, intersection: Tensor, mass: Tensor, count: Tensor) -> Tensor:
        """See the base class."""
        mistakes = self.alpha * (mass - intersection) + self.beta * (count - intersection)
        missing = mistakes * reciprocal_or_zero(intersection + mistakes + self.smooth)
        # The derivative of a root is not finite at 0.
        return missing if self.gamma == 1 else missing.clamp_min(torch.finfo(missing.dtype).tiny) ** self.gamma


def check_classes(classes: str) -> None:
    """Raise ValueError unless classes is "present" or "all"."""
    if classes not in ("present", "all"):
        raise ValueError(f'classes={classes!r}: give "present" or "all"')
