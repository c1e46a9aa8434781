"""Upsampling and sums of the losses with torch's own operators at full resolution.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.accelerator import wide, wide_dtype, wide_sum
from segapp.losses.fused.checks import class_ids, has_values, is_simulated, valid_pixels
from segapp.losses.fused.grid import dense_matrices, products_are_exact

DENSE_SIDE = 32
"""Maximum side of logits for which a dense interpolation matrix is faster than `F.interpolate`."""


def compute_dtype(logits: Tensor) -> torch.dtype:
    """Return float64 for float64 logits, else float32: half precision is too coarse for a sum over pixels."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def upsample(logits: Tensor, size: tuple[int, int], align_corners: bool) -> Tensor:
    """Return logits (N, C, h, w) resampled bilinearly to (N, C, H, W) in `compute_dtype`.

    Small logits use two matrix products: half the time of `F.interpolate`, and more accurate.

    Args:
        logits: (N, C, h, w).
        size: (H, W).
        align_corners: as in `F.interpolate`.
    """
    values = logits.to(compute_dtype(logits))
    low = (values.shape[-2], values.shape[-1])
    if low == size:
        return values
    if not values.shape[0]:
        # The sum of no values is 0, and keeps the logits in the graph.
        return values.new_zeros(*values.shape[:2], *size) + values.sum()
    if not (is_plain := is_finite(values)):
        values = bounded(values)
    if max(low) <= DENSE_SIDE and has_values(values) and products_are_exact():
        rows, columns = dense_matrices(low, size, align_corners, values.dtype, values.device)
        full = torch.matmul(rows, torch.matmul(values, columns))
    else:
        full = F.interpolate(values, size=size, mode="bilinear", align_corners=align_corners)
    return full if is_plain else unbounded_(full)


def is_finite(values: Tensor) -> bool:
    """Return True if all values are known to be finite; False if the host cannot see them, or would have to wait."""
    if is_simulated(values):
        return values.is_cpu
    return values.is_cpu and has_values(values) and math.isfinite(values.detach().sum(dtype=compute_dtype(values)))


def bounded(values: Tensor) -> Tensor:
    """Return values with large numbers instead of infinities, which a weight of 0 removes: 0 times infinity is NaN."""
    large, result = torch.finfo(values.dtype).max / 2**8, values.clone()
    result.detach().clamp_(-large, large)  # not seen by autograd, so an infinite logit keeps its gradient
    return result


def unbounded_(values: Tensor) -> Tensor:
    """Replace the large numbers of `bounded`, also if multiplied by a weight of interpolation, by infinities, in place.

    Numbers above the square root of the largest one overflow; powers of two leave the others unchanged.
    """
    factor = 2.0 ** (math.frexp(torch.finfo(values.dtype).max)[1] // 2)
    return values.mul_(factor).mul_(1 / factor)


def target_weight_sum(target: Tensor, ignore_index: int, weight: Tensor | None) -> Tensor:
    """Return the sum over valid pixels of the target's class weight, a float64 scalar: the denominator of the mean.

    Args:
        target: (N, H, W) class ids.
        ignore_index: id of the pixels that are left out.
        weight: (C,), or None for 1.
    """
    if weight is None:
        return wide(valid_pixels(target, ignore_index).sum())
    ids, valid = class_ids(target, weight.numel(), ignore_index)
    return wide_sum(weight.to(target.device, wide_dtype(target.device))[ids] * valid)
