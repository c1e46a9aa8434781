"""Scores and differences of runs on the same images, from the counts of their pixels. No torch here.

Differences have 95 % confidence intervals by a paired bootstrap over the images: they are drawn with
replacement, the same images for both models (Efron and Tibshirani, An Introduction to the Bootstrap, 1993), and the
scores are computed from the sums over the draw. The margin is the 95 % quantile of the distance between the draws'
differences and the measured difference, so the interval is symmetric. It covers only the choice of images; another
seed of the training also changes the difference.

Shapes: R runs, N images, C classes. Counts are int64 (N, C, 3), of pixels with a valid target: the pixels of a class in
both target and prediction, in the target, and in the prediction. A class that is not scored (`ignore_index` may be one)
has zeros.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.errors import DataError

MIN_IMAGES = 10
"""With fewer images, or fewer images with a class, there is no margin, because it would be too small."""
NUM_DRAWS = 2000
_CHUNK = 200  # draws that are processed together


@dataclass(frozen=True)
class ImageCounts:
    """Counts of the images of a split, predicted by one checkpoint."""

    names: tuple[str, ...]
    """Names of the images (`ImagePair.name`), in the order of the data set."""
    classes: tuple[str, ...]
    split: str
    counts: NDArray[np.int64]
    """(N, C, 3)."""
    total: NDArray[np.int64]
    """Confusion matrix of all images (C, C); with several classes per pixel, one matrix per class (C, 2, 2)."""


def iou_of(counts: NDArray[Any]) -> NDArray[np.float64]:
    """Return the IoU from counts (..., C, 3), float64 (..., C): NaN for a class in neither target nor prediction."""
    inter, target, predicted = np.moveaxis(np.asarray(counts, np.float64), -1, 0)
    union = target + predicted - inter
    return np.asarray(np.divide(inter, union, out=np.full(union.shape, np.nan), where=union > 0))


def mean_of_known(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the last axis of the values that are not NaN; NaN if there are none."""
    known = np.isfinite(values)
    count = known.sum(-1)
    total = np.where(known, values, 0.0).sum(-1)
    return np.asarray(np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0))


def fold_counts(names: Sequence[str], counts: Sequence[ImageCounts], num_images: int) -> dict[str, Any]:
    """Return scores and differences of runs from their counts; DataError if no image is common to all."""
    classes = [name for name in counts[0].classes if all(name in of_run.classes for of_run in counts)]
    places = [{name: place for place, name in enumerate(of_run.names)} for of_run in counts]
    images = [name for name in counts[0].names if all(name in of_run for of_run in places)]
    shared = np.stack([
        of_run.counts[np.ix_([at[name] for name in images], [of_run.classes.index(name) for name in classes])]
        for of_run, at in zip(counts, places, strict=True)
    ])  # fmt: skip
    is_same = (shared[..., 1] == shared[:1, ..., 1]).all((0, 2))  # masks with the same pixels of each class
    if not classes or not is_same.any():
        raise DataError(
            f"{', '.join(names)} have no {'image with the same mask' if classes else 'class'} in common: name a split "
            "that all have with --split, or compare runs of one data set",
            key="data.val_split",
        )
    shared, images = shared[:, is_same], [name for name, is_kept in zip(images, is_same, strict=True) if is_kept]
    iou = iou_of(shared.sum(1))  # (R, C)
    shared[:, :, ~np.isfinite(iou).all(0)] = 0  # a class without an IoU in one run is left out of all means
    miou, of_images = mean_of_known(iou_of(shared.sum(1))), mean_of_known(iou_of(shared))
    differences: list[Differences | None] = [None, *(differences_of(shared[0], of_run) for of_run in shared[1:])]
    effects = np.stack([np.zeros(len(images)) if diff is None else diff.effects for diff in differences])
    worst = np.argsort(-np.abs(np.nan_to_num(effects)).max(0), kind="stable")[:num_images]
    return {
        "names": list(names),
        "split": ", ".join(dict.fromkeys(of_run.split for of_run in counts)),
        "num_images": len(images),
        "num_left_out": max(len(of_run.names) for of_run in counts) - len(images),
        "classes": classes,
        "num_scored": int(np.isfinite(iou).all(0).sum()),
        "runs": [
            {
                "name": name,
                "miou": known(miou[run]),
                "iou": _by_class(classes, iou[run]),
                **({} if diff is None else {
                    "difference": known(diff.miou), "margin": known(diff.miou_margin),
                    "iou_difference": _by_class(classes, diff.iou), "iou_margin": _by_class(classes, diff.iou_margin),
                }),
            }
            for run, (name, diff) in enumerate(zip(names, differences, strict=True))
        ],
        "images": [
            {
                "name": images[place],
                "miou": [known(value) for value in of_images[:, place]],
                "effects": [known(value) for value in effects[1:, place]],
            }
            for place in worst.tolist()
        ],
    }  # fmt: skip


def known(value: float) -> float | None:
    """Return a number; None for NaN."""
    return None if math.isnan(value) else float(value)


def _by_class(classes: Sequence[str], values: Any) -> dict[str, float | None]:
    return {name: known(value) for name, value in zip(classes, values, strict=True)}


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
