"""Binary cross-entropy of each class (sigmoid), for targets with one class or several classes per pixel.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.accelerator import wide_sum
from segapp.losses.additive import MeanCriterion
from segapp.losses.fused.checks import as_class_weight, check_label_smoothing, has_values, own_classes
from segapp.losses.fused.pixel_sums import PixelOptions, upsampled_sums
from segapp.losses.fused.reference import target_weight_sum


@dataclass(frozen=True)
class BinaryCrossEntropySum:
    """Sum over valid pixels of the weighted mean over the classes of the binary cross-entropy; see `CriterionBCE`."""

    weight: Tensor | None  # (C,) with sum 1, or None for 1 / C
    pos_weight: float
    label_smoothing: float
    multilabel: bool
    num_differentiable: int = 1

    def __call__(self, values: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """See `PixelSums`."""
        own = own_classes(ids, values.shape[1], multilabel=self.multilabel).to(values.dtype)
        own = own * (1 - self.label_smoothing) + self.label_smoothing / 2
        factor = None if self.pos_weight == 1 else values.new_full((), self.pos_weight)
        losses = F.binary_cross_entropy_with_logits(values, own, reduction="none", pos_weight=factor)
        losses = mean_over_classes(losses, self.weight)
        return (wide_sum(torch.where(valid, losses, 0.0)).to(values.dtype),)


def mean_over_classes(losses: Tensor, weight: Tensor | None) -> Tensor:
    """Return the weighted mean (N, 1, R, W) of losses (N, C, R, W); weight (C,) with sum 1, or None for 1 / C."""
    if weight is None:
        return losses.mean(1, keepdim=True)
    return (losses * weight.to(losses.device, losses.dtype).view(1, -1, 1, 1)).sum(1, keepdim=True)


def normalised(weight: Tensor | Sequence[float] | None) -> Tensor | None:
    """Return class weights divided by their sum, (C,).

    Raises:
        ValueError: one is negative or not finite, or all are 0.
    """
    values = as_class_weight(weight)
    if values is None:
        return None
    if has_values(values) and not values.sum() > 0:
        raise ValueError(f"weight={values.tolist()}: give at least one class a weight above 0")
    return values / values.sum()


class CriterionBCE(MeanCriterion):
    """Binary cross-entropy: the class-weighted mean over valid pixels and classes; each class has its own sigmoid.

    Use it when a pixel may have several classes, or for binary segmentation with one logit (C = 1). It takes logits
    (N, C, h, w) and class ids (N, H, W). Statistics: (loss sum, number of valid pixels).

    Args:
        weight: factor of each class, (C,), or None for equal factors. The loss is divided by their sum.
        pos_weight: factor on the pixels that have the class, above 0.
        label_smoothing: the targets 0 and 1 become s / 2 and 1 - s / 2.
        multilabel: bit c of a target id is class c; otherwise a target id is one class.
        ignore_index: target id of the pixels that are left out.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head.

    Raises:
        ValueError: weight, pos_weight or label_smoothing out of range.

    Example:
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionBCE()(logits, target)), 4)
        0.6931
    """

    is_sigmoid = True
    weight: Tensor | None

    def __init__(
        self,
        weight: Tensor | Sequence[float] | None = None,
        *,
        pos_weight: float = 1.0,
        label_smoothing: float = 0.0,
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        check_label_smoothing(label_smoothing)
        if not 0 < pos_weight < float("inf"):
            raise ValueError(f"pos_weight={pos_weight}: give a number above 0")
        self.pos_weight, self.label_smoothing = float(pos_weight), float(label_smoothing)
        self.options = PixelOptions(align_corners, ignore_index, multilabel, is_sigmoid=True)
        self.register_buffer("weight", normalised(weight))

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss sum, number of valid pixels) of one head."""
        function = BinaryCrossEntropySum(self.weight, self.pos_weight, self.label_smoothing, self.options.multilabel)
        (total,) = upsampled_sums(function, logits, target, self.options)
        return total, self.denominator(target)

    def denominator(self, target: Tensor) -> Tensor:
        """Return the number of valid pixels."""
        return target_weight_sum(target, self.options.ignore_index, None)
