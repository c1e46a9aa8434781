"""Focal loss (Lin et al., Focal Loss for Dense Object Detection, ICCV 2017, eq. 5), in softmax and sigmoid form.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.losses.additive import MeanCriterion
from segapp.losses.binary import mean_over_classes, normalised
from segapp.losses.fused.checks import as_class_weight, own_classes
from segapp.losses.fused.pixel_sums import PixelOptions, pixel_cross_entropy, upsampled_sums
from segapp.losses.fused.reference import target_weight_sum


def focal(nll: Tensor, gamma: float) -> Tensor:
    """Return (1 - p)^gamma (-log p) from -log p."""
    one_minus_p = (-torch.expm1(-nll)).clamp_min(torch.finfo(nll.dtype).tiny)
    return one_minus_p**gamma * nll


@dataclass(frozen=True)
class FocalSum:
    """Sum over valid pixels of alpha_t (1 - p_t)^gamma (-log p_t), where p_t is the target's probability.

    With `multilabel`, a pixel adds the mean over the classes, weighted by alpha (C,) with sum 1, and p_t is a sigmoid.
    """

    gamma: float
    alpha: Tensor | None
    multilabel: bool
    num_differentiable: int = 1

    def __call__(self, values: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """See `PixelSums`."""
        if self.multilabel:
            own = own_classes(ids, values.shape[1], multilabel=True)
            losses = focal(F.softplus(torch.where(own, -values, values)), self.gamma)
            return (torch.where(valid, mean_over_classes(losses, self.alpha), 0.0).sum(),)
        loss = torch.where(valid, focal(pixel_cross_entropy(values, ids), self.gamma), 0.0)
        if self.alpha is not None:
            loss = loss * self.alpha.to(loss.device, loss.dtype)[ids]
        return (loss.sum(),)


class CriterionFocal(MeanCriterion):
    """Focal loss: cross-entropy weighted by (1 - p_t)^gamma, so that well-classified pixels count less.

    Use it when easy background pixels dominate the loss. It takes logits (N, C, h, w) and class ids (N, H, W).
    Statistics: (loss sum, sum of alpha over valid pixels). With gamma = 0 it equals `CriterionCE`. With `multilabel`,
    the statistics are (loss sum, number of valid pixels), and gamma = 0 gives `CriterionBCE`.

    Args:
        gamma: focusing exponent, at least 0.
        weight: alpha, the factor of each class, (C,), or None for equal factors.
        multilabel: bit c of a target id is class c, and probabilities are sigmoids; otherwise softmax.
        ignore_index: target id of the pixels that are left out.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head.

    Raises:
        ValueError: gamma or weight out of range.

    Example:
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionFocal(gamma=2.0)(logits, target)), 4)
        0.4883
    """

    alpha: Tensor | None

    def __init__(
        self,
        gamma: float = 2.0,
        weight: Tensor | Sequence[float] | None = None,
        *,
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        if not gamma >= 0:
            raise ValueError(f"gamma={gamma}: give a number of at least 0")
        self.gamma, self.is_sigmoid = float(gamma), multilabel
        self.options = PixelOptions(align_corners, ignore_index, multilabel, is_sigmoid=multilabel)
        self.register_buffer("alpha", normalised(weight) if multilabel else as_class_weight(weight))

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss sum, sum of alpha) of one head."""
        (total,) = upsampled_sums(FocalSum(self.gamma, self.alpha, self.is_sigmoid), logits, target, self.options)
        return total, self.denominator(target)

    def denominator(self, target: Tensor) -> Tensor:
        """Return the sum of alpha over the valid pixels; with `multilabel` the number of valid pixels."""
        return target_weight_sum(target, self.options.ignore_index, None if self.is_sigmoid else self.alpha)
