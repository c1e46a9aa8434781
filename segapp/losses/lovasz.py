"""Lovász-softmax loss (Berman et al., CVPR 2018): a convex surrogate of the mean IoU, image by image.

Shapes: N images, C classes, P = H W pixels of an image, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from segapp.losses.additive import MeanCriterion
from segapp.losses.dice import check_classes
from segapp.losses.fused.bands import Band, sweep_bands
from segapp.losses.fused.checks import check_inputs, check_target_range, class_ids, has_values, valid_pixels
from segapp.losses.fused.reference import compute_dtype, upsample


def jaccard_slopes(own_sorted: Tensor, valid_sorted: Tensor) -> Tensor:
    """Return the gradient of the Jaccard loss's Lovász extension in the sorted errors (Berman et al., alg. 1).

    The differences of successive Jaccard losses, in closed form: 1 / union where the pixel is of the class, and
    intersection / (union before x union after) where it is not; subtracting the losses would lose digits.

    Args:
        own_sorted: (P,) bool, the pixel is of the class; sorted by descending error, invalid pixels last.
        valid_sorted: (P,) bool in the same order.

    Returns:
        (P,) float64; 0 for invalid pixels.
    """
    own = own_sorted & valid_sorted
    other = ~own_sorted & valid_sorted
    size = own.sum().double()
    intersection = size - own.cumsum(0).double()
    union = size + other.cumsum(0).double()
    before = (union - other.double()).clamp_min(1.0)
    slopes = torch.where(
        own, 1 / union.clamp_min(1.0), torch.where(other, intersection / (before * union.clamp_min(1.0)), 0.0)
    )
    first = torch.arange(own.numel(), device=own.device) == 0
    return torch.where(size > 0, slopes, (first & valid_sorted).double())


def sorted_slopes(probability: Tensor, own: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss of one class of one image, and its derivative in each pixel's error |own - probability|.

    Args:
        probability: (P,) of the class.
        own: (P,) bool, the pixel is of the class.
        valid: (P,) bool.

    Returns:
        The loss, a scalar, and the derivatives (P,), both without gradient, in the probability's dtype.
    """
    error = torch.where(valid, (own.to(probability.dtype) - probability.detach()).abs(), -1.0)
    ranked, order = error.sort(descending=True, stable=True)
    ranked_slopes = jaccard_slopes(own[order], valid[order])
    slopes = torch.empty_like(error).scatter_(0, order, ranked_slopes.to(error.dtype))
    return (ranked.double() * ranked_slopes).sum().to(error.dtype), slopes


def class_shares(ids: Tensor, valid: Tensor, num_classes: int, classes: str) -> Tensor:
    """Return each class's factor in the image's mean, (C,) float64: 1 / number of counted classes, 0 for the others.

    Args:
        ids: (P,) int64 class ids.
        valid: (P,) bool.
        num_classes: C.
        classes: "present" or "all".
    """
    if classes == "all":
        counted = valid.any().expand(num_classes)
    else:
        counted = torch.stack([((ids == c) & valid).any() for c in range(num_classes)])
    return counted.double() / counted.sum().clamp_min(1)


def lovasz_of_image(logits: Tensor, target: Tensor, align_corners: bool, ignore_index: int, classes: str) -> Tensor:
    """Return the loss of one image, with torch's operators at full resolution; differentiable any number of times.

    Args:
        logits: (1, C, h, w).
        target: (H, W).
        align_corners: as in `F.interpolate`.
        ignore_index: id that counts nowhere.
        classes: "present" or "all".
    """
    probability = torch.softmax(upsample(logits, (target.shape[0], target.shape[1]), align_corners), 1)[0].flatten(1)
    ids, valid = class_ids(target.flatten(), logits.shape[1], ignore_index)
    shares = class_shares(ids, valid, logits.shape[1], classes)
    total = probability.sum() * 0.0
    for c, share in enumerate(shares.unbind()):
        own = (ids == c) & valid
        error = (own.to(probability.dtype) - probability[c]).abs()
        total = total + share.to(error.dtype) * (error * sorted_slopes(probability[c], own, valid)[1]).sum()
    return total


class _LovaszOfBatch(torch.autograd.Function):
    """Sum of the images' losses and its gradient in one pass; holds one image's probabilities at a time."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, align_corners: bool, ignore_index: int, classes: str
    ) -> Tensor:
        with_gradient = bool(ctx.needs_input_grad[0])
        total = torch.zeros((), dtype=compute_dtype(logits), device=logits.device)
        gradients = []
        for image in range(logits.shape[0]):
            image_logits = logits[image : image + 1].detach()
            loss, gradient = _loss_and_gradient(
                image_logits, target[image], align_corners, ignore_index, classes, with_gradient
            )
            total += loss
            gradients.append(gradient)
        ctx.save_for_backward(logits, target, torch.cat(gradients) if with_gradient else None)
        ctx.options = align_corners, ignore_index, classes
        return total

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, gradient = ctx.saved_tensors
        if torch.is_grad_enabled():
            images = range(logits.shape[0])
            losses = [lovasz_of_image(logits[i : i + 1], target[i], *ctx.options) for i in images]
            (exact,) = torch.autograd.grad(torch.stack(losses).sum(), logits, slopes[0], create_graph=True)
            return exact, None, None, None, None
        return (gradient * slopes[0]).to(logits.dtype), None, None, None, None


def _loss_and_gradient(
    logits: Tensor, target: Tensor, align_corners: bool, ignore_index: int, classes: str, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the loss of one image and its gradient (1, C, h, w); the gradient is empty unless `with_gradient`."""
    C, size = logits.shape[1], (target.shape[0], target.shape[1])
    dtype = compute_dtype(logits)
    held = torch.empty((C, *size), dtype=dtype, device=logits.device)

    def store_probabilities(bands: Iterator[Band]) -> None:
        for band in bands:
            held[:, band.rows] = torch.softmax(band.values, 1)[0]

    sweep_bands(store_probabilities, logits, size, align_corners)
    ids, valid = class_ids(target.flatten(), C, ignore_index)
    total = torch.zeros((), dtype=dtype, device=logits.device)
    mean_slope = torch.zeros_like(held[0])
    for c, share in enumerate(class_shares(ids, valid, C, classes).to(dtype).unbind()):
        own = (ids == c) & valid
        probability = held[c].flatten()
        loss, slopes = sorted_slopes(probability, own, valid)
        total += share * loss
        if with_gradient:
            slopes = torch.where(own, -slopes, slopes) * share
            held[c] = (probability * slopes).view(size)
            mean_slope += held[c]
    if not with_gradient:
        return total, logits.new_empty(0)

    def collect(bands: Iterator[Band]) -> None:
        # held is p_c g_c here; the softmax's derivative is p_c (g_c - sum_k p_k g_k).
        for band in bands:
            band.add_gradient(held[:, band.rows] - torch.softmax(band.values, 1) * mean_slope[band.rows])

    _, gradient = sweep_bands(collect, logits, size, align_corners, with_gradient=True)
    assert gradient is not None
    return total, gradient


class CriterionLovasz(MeanCriterion):
    """Lovász-softmax, averaged over the images with a valid pixel.

    Statistics: (sum of the images' losses, number of images with a valid pixel).

    Args:
        classes: "present": an image's loss is the mean over the classes in its target; "all": over every class.
        ignore_index: target id that counts nowhere.
        align_corners: as in `F.interpolate`.
        aux_weight: factor of each auxiliary head's loss.

    Raises:
        ValueError: classes has another value.
    """

    def __init__(
        self,
        classes: str = "present",
        *,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        check_classes(classes)
        self.classes, self.ignore_index, self.align_corners = classes, ignore_index, align_corners

    def head_sums(self, logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return (sum of the images' losses, number of images with a valid pixel) of one head."""
        check_inputs(logits, target)
        poison = check_target_range(target, logits.shape[1], self.ignore_index)
        options = self.align_corners, self.ignore_index, self.classes
        with torch.autocast(logits.device.type, enabled=False):
            if has_values(logits) and logits.shape[0]:
                total = _LovaszOfBatch.apply(logits, target, *options)
            else:
                parts = [lovasz_of_image(logits[i : i + 1], target[i], *options) for i in range(logits.shape[0])]
                total = torch.stack(parts).sum() if parts else logits.sum() * 0.0
        return (total if poison is None else total + poison), self.denominator(target)

    def denominator(self, target: Tensor) -> Tensor:
        """Return the number of images with a valid pixel."""
        return valid_pixels(target, self.ignore_index).flatten(1).any(1).sum().to(torch.float64)
