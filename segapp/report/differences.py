"""Scores and differences of runs on the same images, from the counts of their pixels. No torch here.

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
    total = shared.sum(1)  # (R, C, 3)
    scored, without = iou_of(total), iou_of(total[:, None] - shared)  # (R, C); (R, N, C), over all other images
    miou, of_images = mean_of_known(scored), mean_of_known(iou_of(shared))
    effects = (miou - miou[0])[:, None] - mean_of_known(without - without[0])  # (R, N)
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
                **({} if run == 0 else {
                    "difference": known(miou[run] - miou[0]),
                    "iou_difference": _by_class(classes, scored[run] - scored[0]),
                }),
            }
            for run, name in enumerate(names)
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
    return None if math.isnan(value) else float(value)


def _by_class(classes: Sequence[str], values: Any) -> dict[str, float | None]:
    return {name: known(value) for name, value in zip(classes, values, strict=True)}
