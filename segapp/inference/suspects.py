"""Regions of masks that are probably wrong, found by a model that was not trained on them.

A region is a set of pixels, connected by their four neighbors, in which the mask has one class and the model predicts
one other class. As in confident learning (Northcutt et al., Confident Learning: Estimating Uncertainty in Dataset
Labels, JAIR 2021), the prediction counts if its probability reaches the threshold of its class, which is the mean
probability that the model gives to this class over the class's pixels in the masks. The mean over the region is
compared with the threshold, so a region is kept or dropped as a whole.

An image is scored by the soft minimum of the label quality of its pixels, which is the probability of the mask's class
(Lad and Mueller, Estimating Label Quality and Errors in Semantic Segmentation Data via Any Model, 2023).

Shapes: C classes, H x W pixels of an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import cv2
import numpy as np
from numpy.typing import NDArray

SOFTMIN_TEMPERATURE = 0.1
"""Temperature of the soft minimum, as in cleanlab."""

Kind = Literal["class", "missing", "outline"]
Source = TypeVar("Source")


@dataclass(frozen=True)
class SuspectedRegion:
    """A connected set of pixels with one class in the mask and another one in the prediction."""

    given: int  # class id in the mask
    suggested: int  # class id that the model predicts
    kind: Kind
    area_px: int
    box: tuple[int, int, int, int]  # left, top, width, height in pixels
    outline: NDArray[np.int32]  # (points, 2): x and y of the outer border's pixels
    quality: float  # mean probability of the mask's class
    confidence: float  # mean probability of the predicted class


class ClassCounts:
    """Sums over images from which the thresholds and the confusion rates are computed."""

    def __init__(self, num_classes: int) -> None:
        self.pairs = np.zeros((num_classes, num_classes), np.int64)  # pixels by mask's class and predicted class
        self._probability = np.zeros(num_classes)  # sum over the pixels of each mask's class

    def add(self, target: NDArray[Any], labels: NDArray[Any], quality: NDArray[Any]) -> None:
        """Add pixels with a class: their mask's classes, predicted classes, and probabilities of the mask's classes."""
        num_classes = len(self.pairs)
        joint = target.astype(np.int64) * num_classes + labels
        self.pairs += np.bincount(joint, minlength=num_classes**2).reshape(num_classes, num_classes)
        self._probability += np.bincount(target, quality, num_classes)

    @property
    def thresholds(self) -> NDArray[np.float64]:
        """The confident threshold of each class (C,); infinite for a class that no mask has."""
        totals = self.pairs.sum(1)
        found = np.full(len(totals), np.inf)
        np.divide(self._probability, totals, out=found, where=totals > 0)
        return found


def image_quality(quality: NDArray[np.floating[Any]], temperature: float = SOFTMIN_TEMPERATURE) -> float:
    """Return the soft minimum of the label quality of pixels with a class; 1 if there are none."""
    if quality.size == 0:
        return 1.0
    weights = np.exp((quality.min() - quality.astype(np.float64)) / temperature)
    return float((quality * weights).sum() / weights.sum())


def label_quality(probabilities: NDArray[Any], target: NDArray[Any], ignore_index: int) -> NDArray[np.float32]:
    """Return the probability (H, W) of the mask's class, from probabilities (C, H, W); 1 for pixels without a class."""
    has_class = target != ignore_index
    ids = np.where(has_class, target, 0).astype(np.int64)
    own = np.take_along_axis(probabilities, ids[None], 0)[0]
    return np.where(has_class, own, 1.0).astype(np.float32)


def find_regions(
    target: NDArray[Any],
    labels: NDArray[Any],
    quality: NDArray[Any],
    confidence: NDArray[Any],
    ignore_index: int,
    *,
    min_area_px: int,
) -> Iterator[SuspectedRegion]:
    """Yield the regions of an image in which the mask and the prediction disagree; all arrays are (H, W).

    Args:
        target: class ids of the mask.
        labels: predicted class ids.
        quality: probability of the mask's class.
        confidence: probability of the predicted class.
        ignore_index: target of pixels without a class, which belong to no region.
        min_area_px: minimum number of pixels of a region.
    """
    differs = (target != ignore_index) & (labels != target)
    pairs = np.where(differs, target.astype(np.int64) << 16 | labels, -1)
    for pair in np.unique(pairs[differs]).tolist():
        given, suggested = pair >> 16, pair & 0xFFFF
        parts, boxes = _parts(pairs == pair)
        mask_parts, mask_boxes = _parts(target == given)
        for number in np.flatnonzero(boxes[:, cv2.CC_STAT_AREA] >= min_area_px).tolist():
            if number == 0:
                continue  # the background
            left, top, width, height, area = boxes[number].tolist()
            place = slice(top, top + height), slice(left, left + width)
            own = parts[place] == number
            mask_area = mask_boxes[mask_parts[place][own][0], cv2.CC_STAT_AREA]
            around = slice(max(top - 1, 0), top + height + 1), slice(max(left - 1, 0), left + width + 1)
            grown = cv2.dilate((parts[around] == number).astype(np.uint8), _CROSS) > 0
            touches = bool((target[around][grown] == suggested).any())
            kind: Kind = "class" if 2 * area >= mask_area else "outline" if touches else "missing"
            borders, _ = cv2.findContours(
                own.astype(np.uint8), cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE, offset=(left, top)
            )
            yield SuspectedRegion(
                given,
                suggested,
                kind,
                area,
                (left, top, width, height),
                borders[0][:, 0],
                float(quality[place][own].mean()),
                float(confidence[place][own].mean()),
            )


_CROSS = cv2.getStructuringElement(cv2.MORPH_CROSS, (3, 3))


def _parts(is_in: NDArray[np.bool_]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the component of each pixel (H, W), 0 outside, and left, top, width, height and area of each component."""
    _, parts, boxes, _ = cv2.connectedComponentsWithStats(is_in.astype(np.uint8), connectivity=4)
    return parts, boxes


def rank_regions(
    counts: ClassCounts, regions: Iterable[tuple[Source, SuspectedRegion]]
) -> list[tuple[Source, SuspectedRegion, float]]:
    """Return the regions that pass the thresholds, the most suspicious first, with scores from -1 to 1.

    The score is the probability of the predicted class minus the probability of the mask's class, multiplied by the
    share of the mask's class that is not predicted as this other class. A confusion that the model makes everywhere has
    a low score.
    """
    thresholds, rates = counts.thresholds, counts.pairs / np.maximum(counts.pairs.sum(1, keepdims=True), 1)
    found = [
        (source, region, float((region.confidence - region.quality) * (1 - rates[region.given, region.suggested])))
        for source, region in regions
        if region.confidence >= thresholds[region.suggested]
    ]
    return sorted(found, key=lambda each: -each[2])
