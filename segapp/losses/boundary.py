"""Boundary loss (Kervadec et al., Boundary loss for highly unbalanced segmentation, MIDL 2019, eq. 5).

It is the integral of each class's probability over the signed distance to the class's boundary, in the level-set form.
The distance maps come with the target: they are computed when the samples are loaded, so no step waits for them.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from segapp.accelerator import wide_sum
from segapp.losses.additive import MeanCriterion, labels_of
from segapp.losses.fused.pixel_sums import PixelOptions, upsampled_sums
from segapp.losses.fused.reference import target_weight_sum


def signed_distance(squared: Tensor, dtype: torch.dtype) -> Tensor:
    """Return signed distances to the classes' boundaries in pixels, from the squared distances in a target.

    The squares are integers: outside a class, the squared distance to its nearest pixel; inside, minus the squared
    distance to the nearest pixel without the class; 0 for a class without a boundary. The result is the distance d
    outside and 1 - d inside: 0 at a class's outermost pixels, as in the authors' code.
    """
    distance = squared.abs().to(dtype).sqrt()
    return torch.where(squared < 0, 1 - distance, distance)


@dataclass(frozen=True)
class BoundarySum:
    """Sum over valid pixels of the mean over the classes of probability x signed distance."""

    is_sigmoid: bool = False
    num_differentiable: int = 1

    def __call__(self, values: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """See `PixelSums`; here, `ids` are the squared distances of each class."""
        probability = torch.sigmoid(values) if self.is_sigmoid else torch.softmax(values, 1)
        products = (probability * signed_distance(ids, values.dtype)).mean(1, keepdim=True)
        return (wide_sum(torch.where(valid, products, 0.0)).to(values.dtype),)


class CriterionBoundary(MeanCriterion):
    """Boundary loss: mean over valid pixels and classes of probability x signed distance to the class's boundary.

    Use it when thin or small structures have wrong contours, and add it with a small weight to Dice or cross-entropy:
    it may be negative, and does not train on its own. It takes logits (N, C, h, w) and a target (N, 1 + C, H, W): class
    ids, then the squared signed distances of each class (`signed_distance`). Statistics: (loss sum, number of valid
    pixels).

    Args:
        multilabel: bit c of a target id is class c, and probabilities are sigmoids; otherwise softmax.
        ignore_index: target id of the pixels that are left out.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head.

    Example:
        >>> target = torch.tensor([0, 4, 4, 4], dtype=torch.int32).view(1, 4, 1, 1).expand(1, 4, 32, 32)
        >>> round(float(CriterionBoundary()(torch.zeros(1, 3, 8, 8), target)), 4)
        0.6667
    """

    needs_distances = True

    def __init__(
        self,
        *,
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        self.is_sigmoid = multilabel
        self.options = PixelOptions(align_corners, ignore_index, multilabel, is_sigmoid=multilabel, has_maps=True)

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss sum, number of valid pixels) of one head."""
        (total,) = upsampled_sums(BoundarySum(self.is_sigmoid), logits, target, self.options)
        return total, self.denominator(target)

    def denominator(self, target: Tensor) -> Tensor:
        """Return the number of valid pixels."""
        return target_weight_sum(labels_of(target), self.options.ignore_index, None)
