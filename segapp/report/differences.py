"""Differences of two models on the same images, with 95 % confidence by a paired bootstrap over the images.

The images are drawn with replacement, the same images for both models (Efron and Tibshirani, An Introduction to the
Bootstrap, 1993), and the scores are computed from the sums over the draw. The margin is the 95 % quantile of the
distance between the draws' differences and the measured difference, so the interval is symmetric. It covers only the
choice of images; another seed of the training also changes the difference.

Shapes: N images, C classes; counts have shape (N, C, 3), as in `image_counts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.report.image_counts import iou_of, mean_of_known

MIN_IMAGES = 10
"""With fewer images, or fewer images with a class, there is no margin, because it would be too small."""
NUM_DRAWS = 2000
_CHUNK = 200  # draws that are processed together


@dataclass(frozen=True)
class Differences:
    """Scores of the second model minus scores of the first model; NaN if one of them does not have the score."""

    miou: float
    """Difference of the mean over the classes that have an IoU in both."""
    miou_margin: float
    """The true difference is within `miou` ± `miou_margin` with 95 % confidence; NaN with too few images."""
    iou: NDArray[np.float64]
    """(C,)."""
    iou_margin: NDArray[np.float64]
    """(C,)."""
    effects: NDArray[np.float64]
    """For each image, (N,): `miou` minus the same difference over all other images."""


def differences_of(first: NDArray[np.int64], second: NDArray[np.int64], seed: int = 0) -> Differences:
    """Return the differences of two models from their counts (N, C, 3) of the same images."""
    both = np.stack([first, second]).astype(np.float64)  # (2, N, C, 3)
    total = both.sum(1)
    iou = _iou_difference(total)
    miou = mean_of_known(iou)
    num_images = len(first)
    rng = np.random.default_rng(seed)
    distances = np.empty((NUM_DRAWS, 1 + len(iou)))
    for start in range(0, NUM_DRAWS, _CHUNK):
        times = rng.multinomial(num_images, np.full(num_images, 1 / num_images), _CHUNK)  # of each image in a draw
        drawn = _iou_difference(np.einsum("dn,rncs->rdcs", times.astype(np.float64), both, optimize=True))
        distances[start : start + _CHUNK, 0] = np.abs(mean_of_known(drawn) - miou)
        distances[start : start + _CHUNK, 1:] = np.abs(drawn - iou)
    has_class = (both[..., 1:] > 0).any((0, -1)).sum(0)  # images with each class
    is_enough = np.concatenate([[num_images], has_class]) >= MIN_IMAGES
    margins = np.full(len(is_enough), np.nan)
    margins[is_enough] = np.nanquantile(distances[:, is_enough], 0.95, axis=0)
    without = _iou_difference(total[:, None] - both)  # (N, C)
    return Differences(float(miou), float(margins[0]), iou, margins[1:], miou - mean_of_known(without))


def _iou_difference(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return the IoU of the second model minus the IoU of the first, (..., C), from counts (2, ..., C, 3)."""
    return np.asarray(iou_of(counts[1]) - iou_of(counts[0]))
