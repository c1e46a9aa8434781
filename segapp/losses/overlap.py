"""Losses of the overlap of prediction and target: Dice and Tversky over a whole step, Lovász-softmax per image.

In plain torch, with the upsampled logits `full`, and both p and the one-hot target t set to 0 at ignored pixels:

    p, dims = full.softmax(1) * valid, (0, 2, 3)
    tp, fp, fn = (p * t).sum(dims), (p * (1 - t)).sum(dims), ((1 - p) * t).sum(dims)
    tversky = ((1 - (tp + smooth) / (tp + alpha * fp + beta * fn + smooth)) ** gamma)[t.sum(dims) > 0].mean()
    dice = (1 - (2 * tp + smooth) / (2 * tp + fp + fn + smooth))[t.sum(dims) > 0].mean()

Lovász-softmax of a class, with its p and t of an image's valid pixels, (P,) each; the loss is the mean over classes:

    errors, order = (t - p).abs().sort(descending=True)
    jaccard = 1 - (t.sum() - t[order].cumsum(0)) / (t.sum() + (1 - t[order]).cumsum(0))
    lovasz = (errors * jaccard.diff(prepend=jaccard.new_zeros(1))).sum()

Soft Dice: Milletari et al., V-Net, 3DV 2016. Tversky: Salehi et al., MLMI 2017; with an exponent, focal Tversky:
Abraham and Khan, ISBI 2019.

Shapes: N images, C classes, P = H W pixels of an image, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from segapp.accelerator import wide, wide_dtype, wide_sum
from segapp.chunks import check_choice, check_number
from segapp.losses.additive import HeadCriterion, LossStatistics, MeanCriterion, reciprocal_or_zero
from segapp.losses.fused.bands import Band, sweep_bands
from segapp.losses.fused.checks import checked_target, class_ids, class_masks, is_eager, poisoned, valid_pixels
from segapp.losses.fused.pixel_sums import PixelOptions, upsampled_sums
from segapp.losses.fused.reference import compute_dtype, upsample

CountedClasses = Literal["present", "all"]
"""The classes of which a mean is taken: those in the target, or all."""


def overlap_sums(multilabel: bool, values: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return per class the probability on its pixels and on all, and its number of pixels; see `PixelSums`."""
    probability = (torch.sigmoid(values) if multilabel else torch.softmax(values, 1)) * valid
    is_target = class_masks(ids, values.shape[1], multilabel=multilabel) & valid
    intersection = torch.where(is_target, probability, 0.0).sum((0, 2, 3))
    return intersection, probability.sum((0, 2, 3)), wide(is_target.sum((0, 2, 3)))


class CriterionTversky(HeadCriterion):
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
        >>> import torch
        >>> from segapp.losses import CriterionTversky
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionTversky(alpha=0.3, beta=0.7, smooth=0.0)(logits, target)), 4)
        0.5833
    """

    num_statistics = 3
    multilabel: bool
    hits = 1.0  # factor of TP
    classes: CountedClasses = "present"

    def __init__(
        self,
        *,
        alpha: float = 0.3,
        beta: float = 0.7,
        gamma: float = 1.0,
        smooth: float = 1.0,
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        self._set_options(ignore_index=ignore_index, align_corners=align_corners, multilabel=multilabel)
        self.alpha, self.beta = check_number("alpha", alpha), check_number("beta", beta)
        self.gamma, self.smooth = check_number("gamma", gamma, above=True), check_number("smooth", smooth)
        self.is_sigmoid = multilabel

    def head_statistics(self, logits: Tensor, target: Tensor) -> LossStatistics:
        """Return (intersection, probability mass, pixel count) of one head, each (C,)."""
        options = PixelOptions(
            self.align_corners, self.ignore_index, self.multilabel, is_sigmoid=self.is_sigmoid, num_differentiable=2
        )
        return upsampled_sums(partial(overlap_sums, self.multilabel), logits, target, options)

    def finalize_head(self, totals: LossStatistics) -> Tensor:
        """Return the loss of one head; 0 if no pixel was valid."""
        intersection, mass, count = totals
        counted = count > 0 if self.classes == "present" else (count.sum() > 0).expand_as(count)
        mistakes = self.alpha * (mass - intersection) + self.beta * (count - intersection)
        losses = mistakes * reciprocal_or_zero(self.hits * intersection + mistakes + self.smooth)
        if self.gamma != 1:  # the derivative of a root is not finite at 0
            losses = losses.clamp_min(torch.finfo(losses.dtype).tiny) ** self.gamma
        losses = torch.where(counted, losses, 0.0 * intersection)  # NaN if an id is no class
        return (losses.sum() * reciprocal_or_zero(wide_sum(counted))).to(intersection.dtype)


class CriterionDice(CriterionTversky):
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
        >>> import torch
        >>> from segapp.losses import CriterionDice
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionDice(smooth=0.0)(logits, target)), 4)
        0.5
    """

    hits = 2.0

    def __init__(
        self,
        *,
        smooth: float = 1.0,
        classes: CountedClasses = "present",
        multilabel: bool = False,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        check_choice("classes", classes, get_args(CountedClasses))
        super().__init__(
            alpha=1.0,
            beta=1.0,
            smooth=smooth,
            multilabel=multilabel,
            ignore_index=ignore_index,
            align_corners=align_corners,
            aux_weight=aux_weight,
        )
        self.classes = classes


HELD_BYTES = 64 << 20
"""Maximum size of the probabilities that are held at a time: as many images as fit, at least one."""
SORT_BYTES = 256 << 20
"""Temporary memory of one sort: as many classes of these images as fit are sorted together, at least one."""
CPU_SORT_BYTES = 16 << 20
"""The same limit on the CPU, where calls are cheap and the cache is small."""
BYTES_OF_A_SORTED_PIXEL = 40
"""Temporary bytes per pixel and class: keys, order, and the terms of the slopes."""


def jaccard_slopes(own_sorted: Tensor, num_valid: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the Jaccard loss's Lovász extension in the sorted errors (Berman et al., alg. 1).

    They are differences of successive Jaccard losses in closed form: 1 / union if the pixel has the class, and
    intersection / (union before x union after) if not; subtracting the losses would lose precision. `own_sorted` (...,
    P) says which pixels are valid and have the class, by descending error, invalid pixels last; `num_valid` is (...,
    1). The result is (..., P), 0 for invalid pixels.
    """
    rank = torch.arange(1, own_sorted.shape[-1] + 1, device=own_sorted.device)
    own_so_far = own_sorted.cumsum(-1)
    size = own_so_far[..., -1:]
    union = (size + rank - own_so_far).to(dtype)
    intersection = (size - own_so_far).to(dtype)
    slopes = torch.where(own_sorted, 1.0, intersection / (union - 1).clamp_min(1.0)) / union.clamp_min(1.0)
    # An absent class: the loss is the largest error.
    slopes = torch.where(size > 0, slopes, (rank == 1).to(dtype))
    return torch.where(rank <= num_valid, slopes, 0.0)


def sorted_slopes(probability: Tensor, is_target: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of some classes of some images, and its derivative in each pixel's error |target - probability|.

    All three are (..., P); the target is True for valid pixels of the class. The losses (...) are float64, the
    derivatives (..., P) have the probability's dtype; both have no gradient.
    """
    error = torch.where(valid, (is_target.to(probability.dtype) - probability.detach()).abs(), -1.0)
    ranked, order = error.sort(dim=-1, descending=True, stable=True)
    slopes = jaccard_slopes(is_target.gather(-1, order), valid.sum(-1, keepdim=True), error.dtype)
    return wide_sum(ranked * slopes, -1), torch.empty_like(error).scatter_(-1, order, slopes)


def class_pixels(ids: Tensor, valid: Tensor, classes: slice) -> Tensor:
    """Return which valid pixels are of each class, (m, k, P) bool, from ids and valid, (m, P) each."""
    numbers = torch.arange(classes.start, classes.stop, device=ids.device).view(1, -1, 1)
    return (ids.unsqueeze(1) == numbers) & valid.unsqueeze(1)


def class_shares(is_present: Tensor, valid: Tensor, classes: str) -> Tensor:
    """Return each class's factor in an image's mean, (m, C) float64: 1 / number of counted classes, else 0.

    `is_present` (m, C) says which classes have a valid pixel, `valid` (m, P) which pixels are valid.
    """
    counted = valid.any(-1, keepdim=True).expand_as(is_present) if classes == "all" else is_present
    return counted.to(wide_dtype(counted.device)) / counted.sum(-1, keepdim=True).clamp_min(1)


def lovasz_of_image(logits: Tensor, target: Tensor, align_corners: bool, ignore_index: int, classes: str) -> Tensor:
    """Return the loss of one image, logits (1, C, h, w) and target (H, W), with torch's operators at full resolution.

    It can be differentiated any number of times.
    """
    probability = torch.softmax(upsample(logits, (target.shape[0], target.shape[1]), align_corners), 1).flatten(2)
    ids, valid = class_ids(target.view(1, -1), logits.shape[1], ignore_index)
    is_target = class_pixels(ids, valid, slice(0, logits.shape[1]))
    shares = class_shares(is_target.any(-1), valid, classes).to(probability.dtype).unsqueeze(-1)
    error = (is_target.to(probability.dtype) - probability).abs()
    return (error * sorted_slopes(probability, is_target, valid.unsqueeze(1))[1] * shares).sum()


class _LovaszOfBatch(torch.autograd.Function):
    """Sum of the images' losses and its gradient in one pass; holds the probabilities of a few images at a time."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, *options: Any) -> Tensor:
        align_corners, ignore_index, classes = options
        with_gradient = bool(ctx.needs_input_grad[0])
        total = torch.zeros((), dtype=wide_dtype(logits.device), device=logits.device)
        gradients = []
        image_bytes = logits.shape[1] * target[0].numel() * compute_dtype(logits).itemsize
        step = max(1, HELD_BYTES // image_bytes)
        for first in range(0, logits.shape[0], step):
            images = slice(first, first + step)
            group = _Images(logits[images].detach(), target[images], align_corners, ignore_index)
            total += group.add_up(classes, with_gradient)
            if with_gradient:
                gradients.append(group.gradient())
        ctx.save_for_backward(logits, target, torch.cat(gradients) if with_gradient else None)
        ctx.options = options
        return total.to(compute_dtype(logits))

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():
            images = range(logits.shape[0])
            losses = [lovasz_of_image(logits[i : i + 1], target[i], *ctx.options) for i in images]
            (exact,) = torch.autograd.grad(torch.stack(losses).sum(), logits, slopes[0], create_graph=True)
            return exact, None, None, None, None
        return (gradient * slopes[0]).to(logits.dtype), None, None, None, None


class _Images:
    """Losses of some images with their probabilities in memory: logits (m, C, h, w), target (m, H, W)."""

    def __init__(self, logits: Tensor, target: Tensor, align_corners: bool, ignore_index: int) -> None:
        self.logits, self.size, self.align_corners = logits, (target.shape[1], target.shape[2]), align_corners
        self.ids, self.valid = class_ids(target.flatten(1), logits.shape[1], ignore_index)
        self.held = logits.new_empty((*logits.shape[:2], *self.size), dtype=compute_dtype(logits))
        self.mean_slope = torch.zeros_like(self.held[:, :1])
        budget = CPU_SORT_BYTES if logits.is_cpu else SORT_BYTES
        step = max(1, budget // (BYTES_OF_A_SORTED_PIXEL * target.numel()))
        C = logits.shape[1]
        self.chunks = [slice(c, min(C, c + step)) for c in range(0, C, step)]

        def store_probabilities(bands: Iterator[Band]) -> None:
            for band in bands:
                self.held[band.images, :, band.rows] = torch.softmax(band.values, 1)

        sweep_bands(store_probabilities, logits, self.size, align_corners)

    def add_up(self, classes: str, with_gradient: bool) -> Tensor:
        """Return the sum of the images' losses, float64; with gradient, `held` becomes p_c g_c with the slopes g."""
        is_present = [class_pixels(self.ids, self.valid, chunk).any(-1) for chunk in self.chunks]
        shares = class_shares(torch.cat(is_present, 1), self.valid, classes)
        total = torch.zeros((), dtype=wide_dtype(self.held.device), device=self.held.device)
        for chunk in self.chunks:
            is_target, probability = class_pixels(self.ids, self.valid, chunk), self.held[:, chunk].flatten(2)
            loss, slopes = sorted_slopes(probability, is_target, self.valid.unsqueeze(1))
            total += (loss * shares[:, chunk]).sum()
            if with_gradient:
                slopes = torch.where(is_target, -slopes, slopes).mul_(shares[:, chunk, None].to(slopes.dtype))
                self.held[:, chunk] *= slopes.view_as(self.held[:, chunk])
                self.mean_slope += self.held[:, chunk].sum(1, keepdim=True)
        return total

    def gradient(self) -> Tensor:
        """Return the gradient of the sum, (m, C, h, w), after `add_up`."""

        def collect(bands: Iterator[Band]) -> None:
            # The softmax's derivative is p_c (g_c - sum_k p_k g_k).
            for band in bands:
                mean = torch.softmax(band.values, 1) * self.mean_slope[band.images, :, band.rows]
                band.add_gradient(self.held[band.images, :, band.rows] - mean)

        _, gradient = sweep_bands(collect, self.logits, self.size, self.align_corners, with_gradient=True)
        assert gradient is not None
        return gradient


class CriterionLovasz(MeanCriterion):
    """Lovász-softmax, averaged over the images with a valid pixel.

    Use it when mIoU is the score that counts, added to cross-entropy or for the last epochs; it sorts the pixels of
    each class, which takes time. It takes logits (N, C, h, w) and class ids (N, H, W). Statistics: (sum of the images'
    losses, number of images with a valid pixel).

    Args:
        classes: "present": an image's loss is the mean over the classes in its target; "all": over all classes.
        ignore_index: target id of the pixels that are left out.
        align_corners: as in `F.interpolate`, but True by default.
        aux_weight: weight of the loss of each auxiliary head.

    Raises:
        ValueError: classes has another value.

    Example:
        >>> import torch
        >>> from segapp.losses import CriterionLovasz
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionLovasz()(logits, target)), 4)
        0.6667
    """

    def __init__(
        self,
        *,
        classes: CountedClasses = "present",
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        check_choice("classes", classes, get_args(CountedClasses))
        self._set_options(ignore_index=ignore_index, align_corners=align_corners)
        self.classes = classes

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum of the images' losses, number of images with a valid pixel) of one head."""
        target, poison = checked_target(logits, target, logits.shape[1], self.ignore_index)
        options = self.align_corners, self.ignore_index, self.classes
        with torch.autocast(logits.device.type, enabled=False):
            if is_eager(logits) and logits.shape[0]:
                total = _LovaszOfBatch.apply(logits, target, *options)
            else:
                parts = [lovasz_of_image(logits[i : i + 1], target[i], *options) for i in range(logits.shape[0])]
                total = torch.stack(parts).sum() if parts else logits.sum() * 0.0
        return poisoned(total, poison), self.denominator(target)

    def denominator(self, target: Tensor) -> Tensor:
        """Return the number of images with a valid pixel."""
        return wide(valid_pixels(target, self.ignore_index).flatten(1).any(1).sum())
