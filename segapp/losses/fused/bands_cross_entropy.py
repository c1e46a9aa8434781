"""Upsampling cross-entropy and its gradient to the low-resolution logits, band by band, in one pass.

With y the upsampled logits of a pixel, t its target, w its class weights, W their sum and eps the smoothing:
loss = (1 - eps) w_t (lse(y) - y_t) + eps / C (W lse(y) - sum_c w_c y_c), and its derivative with respect to y_c is
((1 - eps) w_t + eps / C W) softmax(y)_c - (1 - eps) w_t [c = t] - eps / C w_c.

Shapes: N images, m of them in a band, C classes, R rows of a band, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from segapp.losses.fused.bands import Band, sweep_bands
from segapp.losses.fused.checks import check_target_range, valid_pixels
from segapp.losses.fused.reference import CrossEntropySettings, compute_dtype

UNDERFLOW = 1e-30
"""Sum of exponentials below which each pixel's own maximum is subtracted: neighboring logits differ by 70 or more."""


def cross_entropy_on_bands(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropySettings,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss sum, the weight sum and the loss sum's gradient.

    Args:
        logits: (N, C, h, w) on the CPU.
        target: (N, H, W) integers.
        weight: (C,) or None.
        options: options of the loss.
        with_gradient: compute the gradient.

    Returns:
        loss_sum and weight_sum, float64 scalars, and the gradient (N, C, h, w) in float32 (float64 for float64 logits).

    Raises:
        ValueError: an id that is no class.
    """
    size = (target.shape[-2], target.shape[-1])

    def work(bands: Iterator[Band]) -> CrossEntropyTerms:
        terms = CrossEntropyTerms(weight, logits.shape[1], compute_dtype(logits), options)
        for band in bands:
            terms.add(band, target[band.images, None, band.rows], with_gradient)
        return terms

    try:
        parts, gradient = sweep_bands(work, logits, size, options.align_corners, with_gradient=with_gradient)
    except (IndexError, RuntimeError):
        check_target_range(target, logits.shape[1], options.ignore_index)
        raise
    sums = sum(part.loss_sum for part in parts), sum(part.weight_sum for part in parts)
    loss_sum, weight_sum = (torch.tensor(value, dtype=torch.float64, device="cpu") for value in sums)
    return loss_sum, weight_sum, gradient


class CrossEntropyTerms:
    """Running sums of loss and weight, and the constants that all bands share."""

    def __init__(
        self, weight: Tensor | None, num_classes: int, dtype: torch.dtype, options: CrossEntropySettings
    ) -> None:
        self.weight = None if weight is None else weight.to("cpu", dtype)
        self.options, self.dtype = options, dtype
        self.eps, self.share = options.label_smoothing, options.label_smoothing / num_classes
        self.total_weight = float(num_classes) if weight is None else float(weight.double().sum())
        per_class = torch.ones(num_classes, dtype=dtype, device="cpu") if self.weight is None else self.weight
        self.per_class = per_class.view(1, -1, 1, 1)
        self.loss_sum = self.weight_sum = 0.0

    def add(self, band: Band, target: Tensor, with_gradient: bool) -> None:
        """Add a band's loss, and its gradient; a band without valid pixels is skipped."""
        valid = valid_pixels(target, self.options.ignore_index)
        num_valid = int(torch.count_nonzero(valid))
        if num_valid == 0:
            return
        mask = None if num_valid == valid.numel() else valid
        ids = (target if mask is None else torch.where(mask, target, 0)).long()
        values = band.values
        target_values = values.gather(1, ids)
        weighted = (values * self.per_class).sum(1, keepdim=True) if self.eps else None
        total = values.exp_().sum(1, keepdim=True)
        log_total = total.log()
        if not float(total.min()) > UNDERFLOW:
            values = band.refill()
            largest = values.amax(1, keepdim=True)
            total = values.sub_(largest).exp_().sum(1, keepdim=True)
            log_total = total.log() + largest
        pixel_weight = None if self.weight is None else _masked(self.weight[ids], mask)
        self._add_loss(log_total, target_values, weighted, pixel_weight, mask, num_valid)
        if with_gradient:
            band.add_gradient(self._gradient(values, total, ids, pixel_weight, mask))

    def _add_loss(
        self,
        log_total: Tensor,
        target_values: Tensor,
        weighted: Tensor | None,
        pixel_weight: Tensor | None,
        mask: Tensor | None,
        num_valid: int,
    ) -> None:
        self.weight_sum += num_valid if pixel_weight is None else _sum(pixel_weight)
        nll = log_total - target_values
        nll = _masked(nll, mask) if pixel_weight is None else nll.mul_(pixel_weight)
        self.loss_sum += (1 - self.eps) * _sum(nll)
        if weighted is not None:
            self.loss_sum += self.share * _sum(_masked(log_total * self.total_weight - weighted, mask))

    def _gradient(
        self, exponentials: Tensor, total: Tensor, ids: Tensor, pixel_weight: Tensor | None, mask: Tensor | None
    ) -> Tensor:
        """Return the derivative with respect to the band's values (m, C, R, W), written into their buffer."""
        if pixel_weight is None:
            pixel_factor = torch.full_like(total, 1.0) if mask is None else mask.to(self.dtype)
            scale = _masked(total.reciprocal_(), mask)
        else:
            pixel_factor = pixel_weight
            numerator = pixel_factor
            if self.eps:
                smoothing = _masked(torch.full_like(pixel_factor, self.share * self.total_weight), mask)
                numerator = (1 - self.eps) * pixel_factor + smoothing
            scale = numerator / total
        exponentials.mul_(scale).scatter_add_(1, ids, pixel_factor * (self.eps - 1))
        if self.eps:
            constant = self.per_class * self.share
            exponentials.sub_(constant if mask is None else mask * constant)
        return exponentials


def _masked(values: Tensor, mask: Tensor | None) -> Tensor:
    return values if mask is None else values.mul_(mask)


def _sum(values: Tensor) -> float:
    return float(values.sum(dtype=torch.float64))
