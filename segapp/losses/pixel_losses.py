"""Losses that are sums over pixels: binary cross-entropy, focal loss, and cross-entropy over the hard pixels of a step.

In plain torch, with the upsampled logits `full` of the valid pixels, (P, C), and their target (P,):

    bce = F.binary_cross_entropy_with_logits(full, F.one_hot(target, C).float())
    nll = F.cross_entropy(full, target, reduction="none")
    focal = ((1 - (-nll).exp()) ** gamma * nll).mean()
    num_kept = max(min_kept, int((nll > -math.log(threshold)).sum()))
    ohem = nll.topk(min(num_kept, len(nll)))[0].mean()

Focal loss: Lin et al., Focal Loss for Dense Object Detection, ICCV 2017, eq. 5, in softmax and sigmoid form.

Online hard example mining: Shrivastava et al., CVPR 2016. The usual rule (HRNet, mmsegmentation) keeps the pixels whose
target probability is below `threshold`; if they are fewer than `min_kept`, it keeps the `min_kept` hardest. A sorted
list cannot be added over chunks; a histogram can.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

import math
import struct
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.accelerator import wide_dtype, wide_sum
from segapp.chunks import check_count, check_number
from segapp.losses.additive import HeadCriterion, LossStatistics, MeanCriterion, reciprocal_or_zero
from segapp.losses.fused.checks import as_class_weight, class_masks, has_values
from segapp.losses.fused.pixel_sums import PixelOptions, pixel_cross_entropy, upsampled_sums
from segapp.losses.fused.reference import target_weight_sum


def mean_over_classes(losses: Tensor, weight: Tensor | None) -> Tensor:
    """Return the weighted mean (N, 1, R, W) of losses (N, C, R, W); weight (C,) with sum 1, or None for 1 / C."""
    if weight is None:
        return losses.mean(1, keepdim=True)
    return (losses * weight.to(losses.device, losses.dtype).view(1, -1, 1, 1)).sum(1, keepdim=True)


@torch.inference_mode(False)
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


def binary_sum(
    pos_weight: float,
    smoothing: float,
    multilabel: bool,
    values: Tensor,
    ids: Tensor,
    valid: Tensor,
    weight: Tensor | None,
) -> tuple[Tensor]:
    """Return the sum over valid pixels of the mean binary cross-entropy over the classes; see `PixelSums`."""
    targets = class_masks(ids, values.shape[1], multilabel=multilabel).to(values.dtype)
    targets = targets * (1 - smoothing) + smoothing / 2
    factor = None if pos_weight == 1 else values.new_full((), pos_weight)
    losses = F.binary_cross_entropy_with_logits(values, targets, reduction="none", pos_weight=factor)
    return (wide_sum(torch.where(valid, mean_over_classes(losses, weight), 0.0)).to(values.dtype),)


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
        >>> import torch
        >>> from segapp.losses import CriterionBCE
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionBCE()(logits, target)), 4)
        0.6931
    """

    is_sigmoid = True
    multilabel: bool
    weight: Tensor | None

    def __init__(
        self,
        *,
        weight: Tensor | Sequence[float] | None = None,
        pos_weight: float = 1.0,
        label_smoothing: float = 0.0,
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        self._set_options(ignore_index=ignore_index, align_corners=align_corners, multilabel=multilabel)
        self.label_smoothing = check_number("label_smoothing", label_smoothing, most=1)
        self.pos_weight = check_number("pos_weight", pos_weight, above=True)
        self.register_buffer("weight", normalised(weight))

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss sum, number of valid pixels) of one head."""
        function = partial(binary_sum, self.pos_weight, self.label_smoothing, self.multilabel)
        options = PixelOptions(self.align_corners, self.ignore_index, self.multilabel, self.is_sigmoid)
        (total,) = upsampled_sums(function, logits, target, options, self.weight)
        return total, self.denominator(target)


def focal(nll: Tensor, gamma: float) -> Tensor:
    """Return (1 - p)^gamma (-log p) from -log p."""
    one_minus_p = (-torch.expm1(-nll)).clamp_min(torch.finfo(nll.dtype).tiny)
    return one_minus_p**gamma * nll


def focal_sum(
    gamma: float, multilabel: bool, values: Tensor, ids: Tensor, valid: Tensor, alpha: Tensor | None
) -> tuple[Tensor]:
    """Return the sum over valid pixels of alpha_t (1 - p_t)^gamma (-log p_t), p_t the target's probability.

    With `multilabel`, a pixel adds the mean over the classes, weighted by alpha, and p_t is a sigmoid.
    """
    if multilabel:
        is_target = class_masks(ids, values.shape[1], multilabel=True)
        losses = focal(F.softplus(torch.where(is_target, -values, values)), gamma)
        return (torch.where(valid, mean_over_classes(losses, alpha), 0.0).sum(),)
    loss = torch.where(valid, focal(pixel_cross_entropy(values, ids, valid), gamma), 0.0)
    if alpha is not None:
        loss = loss * alpha.to(loss.device, loss.dtype)[ids]
    return (loss.sum(),)


class CriterionFocal(MeanCriterion):
    """Focal loss: cross-entropy weighted by (1 - p_t)^gamma, so that well-classified pixels count less.

    Use it when easy background pixels dominate the loss. It takes logits (N, C, h, w) and class ids (N, H, W).
    Statistics: (loss sum, weight sum over valid pixels). With gamma = 0 it equals `CriterionCE`. With `multilabel`,
    the statistics are (loss sum, number of valid pixels), and gamma = 0 gives `CriterionBCE`.

    Args:
        gamma: focusing exponent, at least 0.
        weight: factor of each class (alpha in the paper), (C,), or None for equal factors.
        multilabel: bit c of a target id is class c, and probabilities are sigmoids; otherwise softmax.
        ignore_index: target id of the pixels that are left out.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head.

    Raises:
        ValueError: gamma or weight out of range.

    Example:
        >>> import torch
        >>> from segapp.losses import CriterionFocal
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionFocal(gamma=2.0)(logits, target)), 4)
        0.4883
    """

    multilabel: bool
    weight: Tensor | None

    def __init__(
        self,
        *,
        gamma: float = 2.0,
        weight: Tensor | Sequence[float] | None = None,
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        self._set_options(ignore_index=ignore_index, align_corners=align_corners, multilabel=multilabel)
        self.gamma, self.is_sigmoid = check_number("gamma", gamma), multilabel
        self.register_buffer("weight", normalised(weight) if multilabel else as_class_weight(weight))

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (loss sum, weight sum) of one head."""
        function = partial(focal_sum, self.gamma, self.multilabel)
        options = PixelOptions(self.align_corners, self.ignore_index, self.multilabel, self.is_sigmoid)
        (total,) = upsampled_sums(function, logits, target, options, self.weight)
        return total, self.denominator(target)

    def denominator(self, target: Tensor) -> Tensor:
        """Return the weight sum over the valid pixels; with `multilabel` the number of valid pixels."""
        return target_weight_sum(target, self.ignore_index, None if self.multilabel else self.weight)


DROPPED_BITS = 15
"""Number of mantissa bits of a float32 loss, of 23, that a bin ignores: 256 bins per octave, 0.4 % wide."""
SMALLEST_LOSS = 2.0**-24
"""Losses below this (float32's resolution at 1) fall into the last bin."""


DEVICE_COLUMNS = 64
"""Number of columns over which the pixels of a bin are spread on a device, so that few are added sequentially."""
CPU_COLUMNS = 1
"""The same on the CPU, which adds all pixels sequentially."""


def _bin_of(loss: float) -> int:
    """Return the bin of a positive float32: its leading bits, which increase with the value."""
    (bits,) = struct.unpack("<i", struct.pack("<f", loss))
    return int(bits) >> DROPPED_BITS


def sums_by_bin(terms: Sequence[Tensor], bins: Tensor, num_bins: int, num_columns: int) -> list[Tensor]:
    """Return the sum of each term by bin, (num_bins,) each; deterministic, and differentiable any number of times.

    On CUDA, accumulating `index_put` sorts the indices instead of using atomics on one address; early in a training all
    pixels are in one bin. A bin is spread over columns, because equal indices are added sequentially.

    The terms are (P,) each, float64; the CPU adds other dtypes in parallel, in any order. If the device has no float64,
    each column of a bin is added in float32: an error of 2e-6 of the loss for 3e5 pixels (measured). The bins are (P,).
    """
    index = bins * num_columns + torch.arange(bins.numel(), device=bins.device) % num_columns
    empty = terms[0].new_zeros(num_bins * num_columns, len(terms))
    table = empty.index_put((index,), torch.stack(list(terms), 1), accumulate=True)
    return list(table.view(num_bins, num_columns, len(terms)).sum(1).unbind(1))


def bins_of(nll: Tensor, threshold: float) -> tuple[Tensor, int]:
    """Return the bin of each loss, int64 (P,) for P losses, and the number of bins.

    Bin 0 holds the hard pixels; the others go from the threshold down to `SMALLEST_LOSS`.
    """
    limit, nll = -math.log(threshold), nll.detach().flatten()
    first = _bin_of(max(limit, SMALLEST_LOSS)) + 1
    num_bins = 1 + first - _bin_of(SMALLEST_LOSS)
    bits = nll.float().clamp_min(SMALLEST_LOSS).view(torch.int32)
    easy = (first - (bits >> DROPPED_BITS)).clamp(1, num_bins - 1)
    return torch.where(nll > limit, 0, easy).long(), num_bins


def hardness_histogram(
    threshold: float, values: Tensor, ids: Tensor, valid: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, weight and count of the valid pixels by hardness; see `PixelSums`."""
    nll = pixel_cross_entropy(values, ids, valid)
    count = valid.to(wide_dtype(nll.device))
    pixel_weight = count if weight is None else weight.to(nll.device, count.dtype)[ids] * valid
    terms = [torch.where(valid, pixel_weight * nll, 0.0).flatten(), count.flatten()]
    if weight is not None:
        terms.append(pixel_weight.flatten())
    num_columns = CPU_COLUMNS if nll.is_cpu else DEVICE_COLUMNS
    loss, counts, *weights = sums_by_bin(terms, *bins_of(nll, threshold), num_columns)
    return loss.to(nll.dtype), weights[0] if weights else counts, counts


class CriterionOHEM(HeadCriterion):
    """Cross-entropy averaged over the hard pixels of the step, by class weight.

    Use it when large easy areas, such as road and sky, hide the errors. It takes logits (N, C, h, w) and class ids
    (N, H, W). Statistics, each (heads, bins): loss, weight and count by hardness. Pixels in one bin (losses that agree
    to 0.4 %) are kept or dropped together. So the kept set is the same for every split of the step, and has at least
    `min_kept` pixels if there are enough.

    Args:
        threshold: pixels whose target probability is below this are hard, in (0, 1].
        min_kept: at least this many valid pixels of the *step* are kept.
        weight: factor of each class, (C,), or None for equal factors.
        ignore_index: target id of the pixels that are left out.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head; each head selects its own hard pixels.

    Raises:
        ValueError: threshold, min_kept or weight out of range.

    Example:
        >>> import torch
        >>> from segapp.losses import CriterionOHEM
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionOHEM(threshold=0.7)(logits, target)), 4)
        1.0986
    """

    num_statistics = 3
    weight: Tensor | None

    def __init__(
        self,
        *,
        threshold: float = 0.7,
        min_kept: int = 100_000,
        weight: Tensor | Sequence[float] | None = None,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        self._set_options(ignore_index=ignore_index, align_corners=align_corners)
        self.threshold = check_number("threshold", threshold, most=1, above=True)
        self.min_kept = check_count("min_kept", min_kept)
        self.register_buffer("weight", as_class_weight(weight))

    def head_statistics(self, logits: Tensor, target: Tensor) -> LossStatistics:
        """Return (loss, weight, count) of one head, each (bins,)."""
        options = PixelOptions(self.align_corners, self.ignore_index)
        return upsampled_sums(partial(hardness_histogram, self.threshold), logits, target, options, self.weight)

    def finalize_head(self, totals: LossStatistics) -> Tensor:
        """Return the mean loss over the kept bins: bin 0, and each bin with fewer than `min_kept` pixels before it."""
        loss, weight, count = totals
        number = count.long()  # torch adds floating-point numbers in any order on CUDA
        kept = number.cumsum(0) - number < self.min_kept
        kept = kept | (torch.arange(kept.numel(), device=kept.device) == 0)
        kept_weight = torch.where(kept, weight, 0.0).sum()
        return (torch.where(kept, loss, 0.0).sum() * reciprocal_or_zero(kept_weight)).to(loss.dtype)
