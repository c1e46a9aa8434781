"""Focal loss (Lin et al., Focal Loss for Dense Object Detection, ICCV 2017, eq. 5), softmax form.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segapp.losses.additive import MeanCriterion
from segapp.losses.fused.checks import as_class_weight
from segapp.losses.fused.pixel_sums import pixel_cross_entropy, upsampled_sums
from segapp.losses.fused.reference import target_weight_sum


@dataclass(frozen=True)
class FocalSum:
    """Sum over valid pixels of alpha_t (1 - p_t)^gamma (-log p_t), with p_t the target's probability."""

    gamma: float
    alpha: Tensor | None
    num_differentiable: int = 1

    def __call__(self, values: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """See `PixelSums`."""
        nll = pixel_cross_entropy(values, ids)
        one_minus_p = (-torch.expm1(-nll)).clamp_min(torch.finfo(nll.dtype).tiny)
        loss = torch.where(valid, one_minus_p**self.gamma * nll, 0.0)
        if self.alpha is not None:
            loss = loss * self.alpha.to(loss.device, loss.dtype)[ids]
        return (loss.sum(),)


class CriterionFocal(MeanCriterion):
    """Focal loss: cross-entropy weighted by (1 - p_t)^gamma, so that well-classified pixels count less.

    Statistics: (loss sum, sum of alpha over valid pixels). With gamma = 0 it is `CriterionCE`.

    Args:
        gamma: focusing exponent, at least 0.
        alpha: one factor for each class, (C,), or None; a buffer.
        ignore_index: target id that counts nowhere.
        align_corners: as in `F.interpolate`.
        aux_weight: factor of each auxiliary head's loss.

    Raises:
        ValueError: gamma or alpha out of range.
    """

    alpha: Tensor | None

    def __init__(
        self,
        gamma: float = 2.0,
        alpha: Tensor | Sequence[float] | None = None,
        *,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        if not gamma >= 0:
            raise ValueError(f"gamma={gamma}: give a number of at least 0")
        self.gamma, self.ignore_index, self.align_corners = float(gamma), ignore_index, align_corners
        self.register_buffer("alpha", as_class_weight(alpha, "alpha"))

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss sum, sum of alpha) of one head."""
        function = FocalSum(self.gamma, self.alpha)
        (total,) = upsampled_sums(function, logits, target, self.align_corners, self.ignore_index)
        return total, self.denominator(target)

    def denominator(self, target: Tensor) -> Tensor:
        """Return the sum of alpha over the valid pixels."""
        return target_weight_sum(target, self.ignore_index, self.alpha)
