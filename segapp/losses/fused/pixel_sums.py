"""Sums over the pixels of upsampled logits, without materializing these logits, for criteria that depend only on them.

The forward pass adds up the bands and saves no full-resolution tensor. The backward pass recomputes each band, with the
known derivative of the loss in every sum, and transposes the interpolation of its gradient.

Shapes: N images, C classes, h x w of the logits, H x W of the target, R rows of a band.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.accelerator import wide, wide_sum
from segapp.compat.torch import is_batched
from segapp.losses.fused.bands import Band, sweep_bands
from segapp.losses.fused.checks import checked_target, class_ids, is_eager, poisoned
from segapp.losses.fused.reference import compute_dtype, upsample

FULL_BYTES = 4 << 20
"""Upsampled logits smaller than this are computed whole: fewer operations, and little memory to save."""


@dataclass(frozen=True)
class PixelOptions:
    """Interpretation of logits and target.

    Attributes:
        align_corners: as in `F.interpolate`.
        ignore_index: target id of the pixels that are left out.
        multilabel: the target holds sets of classes: bit c of an id is class c.
        is_sigmoid: a pixel's logits are used one by one; otherwise a constant may be added to all of them.
        num_differentiable: number of differentiable sums; the others are counts.
        label_smoothing: share of the target that a cross-entropy spreads evenly over the classes.
    """

    align_corners: bool = True
    ignore_index: int = 255
    multilabel: bool = False
    is_sigmoid: bool = False
    num_differentiable: int = 1
    label_smoothing: float = 0.0

    def num_ids(self, num_classes: int) -> int:
        """Return the number of ids that a valid pixel can have."""
        return 1 << num_classes if self.multilabel else num_classes

    def read(self, target: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
        """Return the arguments of `PixelSums` from a part of the target (m, R, W)."""
        return class_ids(target.unsqueeze(1), self.num_ids(num_classes), self.ignore_index)


PixelSums = Callable[..., tuple[Tensor, ...]]
"""Function that returns sums over the valid pixels, each a vector or a scalar; the differentiable ones come first.

Its arguments are logits (N, C, R, W), up to an additive constant per pixel unless the options say sigmoid, int64 class
ids (N, 1, R, W), the bool mask of the valid pixels (N, 1, R, W), and the tensors given to `upsampled_sums`. It is a
module's function with plain settings, no method of a criterion: the backward pass calls it again, when the criterion's
attributes may have changed.
"""


def upsampled_sums(
    function: PixelSums,
    logits: Tensor,
    target: Tensor,
    options: PixelOptions,
    *args: Tensor | None,
    is_whole: bool = False,
) -> tuple[Tensor, ...]:
    """Return the sums of `function` over all pixels of the upsampled logits.

    Args:
        function: additive over pixels.
        logits: (N, C, h, w).
        target: (N, H, W) class ids.
        options: interpretation of both.
        args: class weights (C,), or None, if `function` takes them as its last argument; autograd saves them.
        is_whole: compute at full resolution, whatever its size.

    Returns:
        The sums: differentiable ones in float32 (float64 for float64 logits), counts in float64.

    Raises:
        TypeError: wrong dtypes.
        ValueError: shapes that do not fit, ids that are no class.
    """
    target, poison = checked_target(logits, target, options.num_ids(logits.shape[1]), options.ignore_index, *args)
    num_pixels = target.shape[0] * target.shape[-2] * target.shape[-1]
    full_bytes = num_pixels * logits.shape[1] * compute_dtype(logits).itemsize
    is_whole = is_whole or any(each is not None and each.requires_grad for each in args)
    if is_whole or full_bytes < FULL_BYTES or not is_eager(logits):
        sums = _at_full_resolution(_bound(function, args), logits, target, options)
    else:
        sums = _BandedSums.apply(logits, target, function, options, *args)
    return poisoned(sums[0], poison), *sums[1:]


def pixel_cross_entropy(values: Tensor, ids: Tensor, valid: Tensor) -> Tensor:
    """Return -log of the target's softmax probability, (N, 1, R, W), 0 for invalid pixels; arguments as `PixelSums`."""
    return F.cross_entropy(values, torch.where(valid, ids, -100).squeeze(1), reduction="none").unsqueeze(1)


def _bound(function: PixelSums, tensors: Sequence[Tensor | None]) -> PixelSums:
    return lambda *pixels: function(*pixels, *tensors)


def _at_full_resolution(
    function: PixelSums, logits: Tensor, target: Tensor, options: PixelOptions
) -> tuple[Tensor, ...]:
    with torch.autocast(logits.device.type, enabled=False):
        values = upsample(logits, (target.shape[-2], target.shape[-1]), options.align_corners)
        return function(values, *options.read(target, logits.shape[1]))


class _BandedSums(torch.autograd.Function):
    """The sums in one pass over bands, their gradient in another pass; second derivatives at full resolution."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, function: PixelSums, options: PixelOptions, *tensors: Tensor | None
    ) -> tuple[Tensor, ...]:
        def work(bands: Iterator[Band]) -> list[Tensor]:
            totals: list[Tensor] = []
            for band in bands:
                read = options.read(target[band.images, band.rows], logits.shape[1])
                sums = [wide(entry) for entry in function(band.values, *read, *tensors)]
                totals = [total + entry for total, entry in zip(totals, sums, strict=True)] if totals else sums
            return totals

        size = (target.shape[-2], target.shape[-1])
        parts, _ = sweep_bands(work, logits, size, options.align_corners, is_shifted=not options.is_sigmoid)
        sums = [torch.stack(entry).sum(0) for entry in zip(*parts, strict=True)]
        live = options.num_differentiable
        outputs = tuple(entry.to(compute_dtype(logits)) for entry in sums[:live]) + tuple(sums[live:])
        ctx.save_for_backward(logits, target, *tensors)
        ctx.options = function, options
        ctx.mark_non_differentiable(*outputs[live:])
        return outputs

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, *tensors = ctx.saved_tensors
        function, options = _bound(ctx.options[0], tensors), ctx.options[1]
        live = slopes[: options.num_differentiable]
        # Batched slopes exist only in this thread.
        if torch.is_grad_enabled() or not is_eager(logits) or any(map(is_batched, live)):
            with torch.enable_grad():
                sums = _at_full_resolution(function, logits, target, options)
            (gradient,) = torch.autograd.grad(sums[: len(live)], logits, live, create_graph=torch.is_grad_enabled())
        else:
            gradient = _gradient_on_bands(function, logits, target, options, live)
        return gradient, *(None,) * (3 + len(tensors))


@torch.inference_mode(False)
def _gradient_on_bands(
    function: PixelSums, logits: Tensor, target: Tensor, options: PixelOptions, slopes: Sequence[Tensor]
) -> Tensor:
    def work(bands: Iterator[Band]) -> None:
        for band in bands:
            ids, valid = options.read(target[band.images, band.rows], logits.shape[1])
            values = band.values.detach().requires_grad_()
            with torch.enable_grad():
                sums = function(values, ids, valid)[: len(slopes)]
            (gradient,) = torch.autograd.grad(sums, values, slopes)
            band.add_gradient(gradient)

    size = (target.shape[-2], target.shape[-1])
    _, gradient = sweep_bands(
        work, logits, size, options.align_corners, with_gradient=True, is_shifted=not options.is_sigmoid
    )
    assert gradient is not None
    return gradient.to(logits.dtype)


def cross_entropy_sums_of(
    values: Tensor, ids: Tensor, valid: Tensor, weight: Tensor | None, *, label_smoothing: float
) -> tuple[Tensor, Tensor]:
    """Return the sums of the valid pixels' cross-entropies and of their class weights, as `F.cross_entropy` has them.

    The weight is (C,) or None; `label_smoothing` is the share of the target spread evenly over the classes. For the
    other arguments see `PixelSums`.
    """
    weight = None if weight is None else weight.to(values.device, values.dtype)
    marked = torch.where(valid, ids, -100).squeeze(1)
    losses = F.cross_entropy(values, marked, weight, reduction="none", label_smoothing=label_smoothing)
    # Added here, because the sum within `F.cross_entropy` uses atomics on CUDA and is not deterministic.
    return wide_sum(losses), wide_sum(valid) if weight is None else wide_sum(wide(weight)[ids] * valid)
