"""Loss of mask classification: a set of queries, each with a class and a mask, is matched to the classes of an image.

Cheng et al., "Masked-attention Mask Transformer for Universal Image Segmentation" (Mask2Former, CVPR 2022), section
3.2; for semantic segmentation, every class in an image is one mask. In plain torch, with the logits x and targets t of
the matched masks, (M, L) each, and the class logits of all queries, whose label is C without a match:

    bce = F.binary_cross_entropy_with_logits(x, t)
    dice = (1 - (2 * (x.sigmoid() * t).sum(1) + 1) / (x.sigmoid().sum(1) + t.sum(1) + 1)).mean()
    classes = F.cross_entropy(class_logits, labels, torch.tensor([*[1.0] * C, no_object]))
    loss = class_factor * classes + bce_factor * bce + dice_factor * dice

The published loss samples random points of each
mask. Here all pixels count, so nothing is random: each logit covers a cell of pixels, and the target of a cell is each
class's share of its area.

Shapes: N images, P predictions (the last one first, then one per earlier block), Q queries, C classes, h x w of the
    mask logits, L = h w cells, H x W of the target.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.accelerator import wide_dtype
from segapp.chunks import check_count, check_number
from segapp.losses.additive import AdditiveCriterion, LossStatistics, as_whole, reciprocal_or_zero
from segapp.losses.cross_entropy import CriterionCE
from segapp.losses.fused.checks import check_inputs, check_target_range, class_ids, is_simulated, poisoned
from segapp.losses.fused.reference import compute_dtype


class CriterionMaskClassification(AdditiveCriterion):
    """Cross-entropy of the queries' classes, and binary cross-entropy and Dice loss of the matched masks.

    Use it with eomt, or with another model of queries. Statistics: (class loss sum, BCE sum, Dice sum, number of masks,
    weight sum of the classes). The last two depend only on the target: an image with k classes has min(k, Q) matches.
    The masks' terms are divided by the number of masks of the whole step, the classes' term by its weight sum.
    Images without a valid pixel are left out.

    It takes outputs (mask logits (N, Q, h, w), class logits (N, Q, C + 1)) of the last prediction, then the same pair
    of each earlier block, and class ids (N, H, W).

    Args:
        num_queries: Q.
        num_classes: C, without "no object".
        class_factor: factor of the cross-entropy of the queries' classes, here and in the cost of a match.
        bce_factor: factor of the binary cross-entropy of the masks.
        dice_factor: factor of the Dice loss of the masks.
        no_object: weight in the cross-entropy of the class "no object", the target of queries without a match.
        ignore_index: target id of the pixels that are left out.
        align_corners: value for the upsampling of the semantic logits in an evaluation.
        aux_weight: weight of the loss of each earlier block.

    Raises:
        ValueError: num_queries is less than 1, or a factor is negative.

    Example:
        >>> import torch
        >>> from segapp.losses import CriterionMaskClassification
        >>> outputs, target = (torch.zeros(1, 2, 8, 8), torch.zeros(1, 2, 4)), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionMaskClassification(num_queries=2, num_classes=3)(outputs, target)), 4)
        7.8878
    """

    is_linear = True
    num_statistics = 5

    def __init__(
        self,
        num_queries: int,
        num_classes: int,
        *,
        class_factor: float = 2.0,
        bce_factor: float = 5.0,
        dice_factor: float = 5.0,
        no_object: float = 0.1,
        ignore_index: int = 255,
        align_corners: bool = False,
        aux_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.num_queries = check_count("num_queries", num_queries, least=1)
        self.num_classes = check_count("num_classes", num_classes, least=1)
        self.class_factor = check_number("class_factor", class_factor)
        self.bce_factor = check_number("bce_factor", bce_factor)
        self.dice_factor = check_number("dice_factor", dice_factor)
        self.no_object, self.aux_weight = check_number("no_object", no_object), check_number("aux_weight", aux_weight)
        self._set_options(ignore_index=ignore_index, align_corners=align_corners)

    @property
    def task(self) -> AdditiveCriterion:
        """The cross-entropy of the semantic logits, which the network returns in evaluation mode."""
        return CriterionCE(ignore_index=self.ignore_index, align_corners=self.align_corners)

    def terms(self, totals: LossStatistics) -> dict[str, Tensor]:
        """Return the three terms over all predictions, without weights."""
        return dict(zip(("class", "mask_bce", "mask_dice"), _means(totals), strict=True))

    def statistics(self, outputs: Any, target: Tensor) -> LossStatistics:
        """Return the sums of a chunk.

        Args:
            outputs: mask and class logits of each prediction; see the class.
            target: class ids (N, H, W); H and W are multiples of h and w.

        Raises:
            ValueError: shapes that do not fit, ids that are no class.
        """
        predictions = list(zip(as_whole(outputs)[::2], outputs[1::2], strict=True))
        masks = predictions[0][0]
        check_inputs(masks, target)
        with torch.autocast(masks.device.type, enabled=False):
            areas, poison = self._areas(masks, target)
            pair_losses = [_pair_losses(mask_logits, areas) for mask_logits, _ in predictions]
            logs = [F.log_softmax(class_logits.to(areas.dtype), -1) for _, class_logits in predictions]
            costs = torch.stack([self._cost(*both) for both in zip(pair_losses, logs, strict=True)], 1)
            matches = match_queries(costs, areas.sum(2) > 0)
            rows = [
                self._sums(pairs, log, match, areas.sum((1, 2)) > 0)
                for pairs, log, match in zip(pair_losses, logs, matches.unbind(1), strict=True)
            ]
            columns = (torch.stack(column) for column in zip(*rows, strict=True))
            class_sum, bce, dice = (column[0] + self.aux_weight * column[1:].sum() for column in columns)
        return poisoned(class_sum, poison), bce, dice, *self.target_statistics(target)[3:]

    def target_statistics(self, target: Tensor) -> LossStatistics:
        """Return the statistics with numerators 0; see the base class."""
        ids, valid = class_ids(target.flatten(1), self.num_classes, self.ignore_index)
        present = torch.zeros(len(ids), self.num_classes + 1, dtype=torch.bool, device=target.device)
        present.scatter_(1, torch.where(valid, ids, self.num_classes), True)
        num_masks = present[:, :-1].sum(1).clamp_max(self.num_queries).to(wide_dtype(target.device))
        weights = num_masks + self.no_object * (self.num_queries - num_masks)
        zero = torch.zeros((), device=target.device)
        return zero, zero, zero, num_masks.sum(), torch.where(num_masks > 0, weights, 0.0).sum()

    def finalize(self, totals: LossStatistics) -> Tensor:
        """Return the weighted sum of the terms; 0 if no pixel was valid."""
        classes, bce, dice = _means(totals)
        loss = self.class_factor * classes + self.bce_factor * bce + self.dice_factor * dice
        return loss.to(totals[0].dtype)

    def _areas(self, masks: Tensor, target: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the share of each cell that each class covers, (N, C, L), and the scalar of `check_target_range`."""
        (N, H, W), (h, w), C = target.shape, masks.shape[-2:], self.num_classes
        if H % h or W % w:
            raise ValueError(f"masks of {h}x{w} do not divide a target of {H}x{W}: pad the images to a multiple")
        poison = check_target_range(target, C, self.ignore_index)
        cells = target.view(N, h, H // h, w, W // w).permute(0, 2, 4, 1, 3).reshape(N, -1, h * w)
        ids, valid = class_ids(cells, C, self.ignore_index)
        areas = torch.zeros(N, C, h * w, dtype=compute_dtype(masks), device=masks.device)
        areas.scatter_add_(1, ids, valid.to(areas.dtype))  # small whole numbers: exact in any order
        return areas / cells.shape[1], poison

    def _cost(self, pairs: tuple[Tensor, Tensor], logs: Tensor) -> Tensor:
        """Return the cost of each match, (N, Q, C): the loss, with -probability instead of the cross-entropy."""
        bce, dice = pairs
        pixels = self.bce_factor * bce + self.dice_factor * dice
        return (pixels - self.class_factor * logs[..., :-1].exp()).detach()

    def _sums(self, pairs: tuple[Tensor, Tensor], logs: Tensor, match: Tensor, counts: Tensor) -> tuple[Tensor, ...]:
        """Return the sums of one prediction: class loss, BCE, Dice.

        `logs` are log-probabilities (N, Q, C + 1), `match` is the query of each class or -1, (N, C), and `counts` (N,)
        says which images have valid pixels.
        """
        (N, Q, _), C = logs.shape, self.num_classes
        is_matched = match >= 0
        queries = match.clamp_min(0)
        bce, dice = (torch.where(is_matched, losses.gather(1, queries[:, None])[:, 0], 0.0).sum() for losses in pairs)
        classes = torch.arange(C, device=logs.device).expand(N, C)
        labels = torch.full((N, Q + 1), C, device=logs.device)  # slot Q is for the classes without a query
        labels = labels.scatter(1, torch.where(is_matched, match, Q), classes)[:, :Q]
        is_object = (labels < C).to(logs.dtype)
        weights = (is_object + self.no_object * (1 - is_object)) * counts[:, None]
        return -(logs.gather(2, labels[..., None])[..., 0] * weights).sum(), bce, dice


def _pair_losses(masks: Tensor, areas: Tensor) -> tuple[Tensor, Tensor]:
    """Return BCE and Dice loss of each query's mask with each class of its image, (N, Q, C) each, differentiable.

    No tensor of queries x classes x cells is made.

    With x the logits and t the areas of a class, BCE is the sum of softplus(x) over the valid area minus the sum of
    x t, and Dice is 1 - (2 sum(sigmoid(x) t) + 1) / (sum(sigmoid(x)) + sum(t) + 1). The masks' logits are (N, Q, h, w).
    """
    logits = masks.flatten(2).to(areas.dtype)
    valid, by_class = areas.sum(1, keepdim=True), areas.transpose(1, 2)
    share = reciprocal_or_zero(valid.sum(2, keepdim=True))
    bce = ((F.softplus(logits) * valid).sum(2, keepdim=True) - logits @ by_class) * share
    probability = logits.sigmoid()
    both = (probability * valid).sum(2, keepdim=True) + areas.sum(2)[:, None]
    return bce, 1 - (2 * (probability @ by_class) + 1) / (both + 1)


def _means(totals: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the means of class loss, BCE and Dice."""
    classes, bce, dice, num_masks, weights = totals
    masks = reciprocal_or_zero(num_masks)
    return classes * reciprocal_or_zero(weights), bce * masks, dice * masks


@torch.no_grad()
def match_queries(costs: Tensor, is_present: Tensor) -> Tensor:
    """Return the query that is matched to each present class, with the least total cost.

    The Hungarian method runs on the host (scipy), so this call waits for the device once, with one copy of all costs.
    Every image is matched separately; the result does not depend on the other images.

    Costs (N, P, Q, C) that are not finite are treated as large ones; `is_present` (N, C) says which classes an image
    has. The result is (N, P, C), -1 for classes that are absent or, if an image has more than Q classes, unmatched.
    """
    N, P, _, C = costs.shape
    if is_simulated(costs):  # a memory plan, where tensors have no values
        return torch.zeros(N, P, C, dtype=torch.int64, device=costs.device)
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    presence = is_present[:, None, None].expand(N, P, 1, C).to(costs.dtype)
    on_host = torch.cat([costs, presence], 2).cpu().numpy()
    matches = np.full((N, P, C), -1, np.int64)
    for image, of_image in enumerate(on_host):
        classes = np.flatnonzero(of_image[0, -1])
        for number, table in enumerate(of_image[:, :-1]):
            large = np.finfo(table.dtype).max / (4 * C)  # a sum of C of them stays finite
            queries, columns = linear_sum_assignment(np.nan_to_num(table[:, classes], nan=large).clip(-large, large))
            matches[image, number, classes[columns]] = queries
    return torch.from_numpy(matches).to(costs.device)
