"""Cross-entropy over the hard pixels of a whole step (online hard example mining, Shrivastava et al., CVPR 2016).

The usual rule (HRNet, mmsegmentation) keeps the pixels whose target probability is below `threshold`; if they are fewer
than `min_kept`, it keeps the `min_kept` hardest. A sorted list cannot be added over chunks; a histogram can.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segapp.accelerator import wide_dtype
from segapp.losses.additive import HeadCriterion, Statistics, reciprocal_or_zero
from segapp.losses.fused.checks import as_class_weight
from segapp.losses.fused.pixel_sums import PixelOptions, pixel_cross_entropy, upsampled_sums

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
    place = bins
    if num_columns > 1:
        place = bins * num_columns + torch.arange(bins.numel(), device=bins.device) % num_columns
    empty = terms[0].new_zeros(num_bins * num_columns, len(terms))
    table = empty.index_put((place,), torch.stack(list(terms), 1), accumulate=True)
    return list(table.view(num_bins, num_columns, len(terms)).sum(1).unbind(1))


@dataclass(frozen=True)
class HardnessHistogram:
    """Loss, weight and count of the valid pixels by hardness: bin 0 holds all hard pixels, later bins easier ones."""

    limit: float  # loss above which a pixel is hard, -log(threshold)
    weight: Tensor | None  # (C,)
    num_differentiable: int = 1

    @property
    def num_bins(self) -> int:
        """Number of bins: bin 0, and the bins from the limit down to `SMALLEST_LOSS`."""
        return 2 + max(0, _bin_of(self.limit) - _bin_of(SMALLEST_LOSS))

    def bins(self, nll: Tensor) -> Tensor:
        """Return the bin of each loss, int64, in the shape of nll."""
        bits = nll.detach().float().clamp_min(SMALLEST_LOSS).view(torch.int32)
        easy = (_bin_of(max(self.limit, SMALLEST_LOSS)) + 1 - (bits >> DROPPED_BITS)).clamp(1, self.num_bins - 1)
        return torch.where(nll.detach() > self.limit, 0, easy).long()

    def __call__(self, values: Tensor, ids: Tensor, valid: Tensor) -> tuple[Tensor, ...]:
        """See `PixelSums`."""
        nll = pixel_cross_entropy(values, ids)
        bins = self.bins(nll).flatten()
        count = valid.to(wide_dtype(nll.device))
        weight = count if self.weight is None else self.weight.to(nll.device, count.dtype)[ids] * valid
        terms = [torch.where(valid, weight * nll, 0.0).flatten(), count.flatten()]
        if self.weight is not None:
            terms.append(weight.flatten())
        loss, counts, *weights = sums_by_bin(terms, bins, self.num_bins, CPU_COLUMNS if nll.is_cpu else DEVICE_COLUMNS)
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
        >>> logits, target = torch.zeros(1, 3, 8, 8), torch.zeros(1, 32, 32, dtype=torch.uint8)
        >>> round(float(CriterionOHEM(threshold=0.7)(logits, target)), 4)
        1.0986
    """

    num_statistics = 3
    weight: Tensor | None

    def __init__(
        self,
        threshold: float = 0.7,
        min_kept: int = 100_000,
        *,
        weight: Tensor | Sequence[float] | None = None,
        ignore_index: int = 255,
        align_corners: bool = True,
        aux_weight: float = 0.4,
    ) -> None:
        super().__init__(aux_weight)
        if not 0 < threshold <= 1:
            raise ValueError(f"threshold={threshold}: give a probability above 0 and up to 1")
        if min_kept < 0:
            raise ValueError(f"min_kept={min_kept}: give a number of pixels of at least 0")
        self.threshold, self.min_kept = float(threshold), int(min_kept)
        self.ignore_index, self.align_corners = ignore_index, align_corners
        self.register_buffer("weight", as_class_weight(weight))

    def head_statistics(self, logits: Tensor, target: Tensor) -> Statistics:
        """Return (loss, weight, count) of one head, each (bins,)."""
        histogram = HardnessHistogram(-math.log(self.threshold), self.weight)
        return upsampled_sums(histogram, logits, target, PixelOptions(self.align_corners, self.ignore_index))

    def finalize_head(self, totals: Statistics) -> Tensor:
        """Return the mean loss over the kept bins: bin 0, and each bin with fewer than `min_kept` pixels before it."""
        loss, weight, count = totals
        number = count.long()  # torch adds floating-point numbers in any order on CUDA
        kept = number.cumsum(0) - number < self.min_kept
        kept = kept | (torch.arange(kept.numel(), device=kept.device) == 0)
        kept_weight = torch.where(kept, weight, 0.0).sum()
        return (torch.where(kept, loss, 0.0).sum() * reciprocal_or_zero(kept_weight)).to(loss.dtype)
