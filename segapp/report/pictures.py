"""Evaluation of a split for the report: scores, confusion matrix, and pictures of the images with the lowest mIoU.

Shapes: H x W pixels of an image, C classes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
import torch
from numpy.typing import NDArray

from segapp.build.trained import TrainedModel
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.inference.predict import blend, colorize
from segapp.inference.workspace import HostLimit
from segapp.metrics import SegmentationScores, counts_for
from segapp.report.image_counts import ImageCounts, count_split, counts_of, iou_of, mean_of_known, predict_pair
from segapp.report.render import data_url
from segapp.scores import count_scored, of_classes

PICTURE_PX = 480
WRONG_RGB = (214, 39, 140)


@dataclass(frozen=True)
class EvaluatedImage:
    """Scores and pictures of one image."""

    name: str
    miou: float
    classes: str
    """Number of classes that `miou` is the mean of: the classes of the image and its prediction."""
    pixel_accuracy: float | None
    pictures: dict[str, str]


@dataclass(frozen=True)
class SplitEvaluation:
    """Scores of a split, and its images with the lowest mIoU."""

    split: str
    scores: SegmentationScores
    matrix: NDArray[np.int64] | None
    """(C, C) counts of (target, prediction); None with several classes per pixel."""
    worst: list[EvaluatedImage]
    num_images: int
    images: ImageCounts
    """Counts of every image."""


def evaluate_split(
    trained: TrainedModel,
    dataset: SegmentationDataset,
    split: str,
    num_worst: int,
    progress: Callable[[int], None] = lambda _: None,
) -> SplitEvaluation:
    """Return the scores of a data set, and pictures of the images with the lowest mIoU.

    Every image is predicted, unless the run folder still has valid counts; those with pictures are predicted again.
    """
    scheme = trained.scheme
    multilabel = scheme.multilabel is not None
    images = count_split(trained, dataset, split, progress)
    total = counts_for(scheme.num_classes, scheme.ignore_index, multilabel=multilabel)
    total.matrix.copy_(torch.from_numpy(images.total))
    miou = mean_of_known(iou_of(images.counts))
    order = [int(index) for index in np.argsort(miou, kind="stable") if np.isfinite(miou[index])]
    host = HostLimit()
    worst = [evaluate_image(trained, dataset, index, host) for index in order[:num_worst]]
    matrix = None if multilabel else images.total
    return SplitEvaluation(split, total.scores(), matrix, worst, len(dataset), images)


def evaluate_image(
    trained: TrainedModel, dataset: SegmentationDataset, index: int, host: HostLimit | None = None
) -> EvaluatedImage:
    """Predict one image with a valid pixel, and return its scores and pictures."""
    image, target, labels = predict_pair(trained, dataset, index, host)
    scores = counts_of(trained, target, labels).scores()
    return EvaluatedImage(
        dataset.pairs[index].image.name,
        scores.miou or 0.0,
        of_classes(count_scored(scores.iou), trained.scheme.num_classes),
        scores.pixel_accuracy,
        pictures_of(dataset.pixels.as_rgb(image), target, labels, trained.scheme),
    )


def pictures_of(image: NDArray[Any], target: NDArray[Any], labels: NDArray[Any], scheme: ClassScheme) -> dict[str, str]:
    """Return reduced pictures of input, target, prediction and errors as `data:` addresses, by name.

    The image is uint8 (H, W, 3), RGB; `target` and `labels` are (H, W) class ids.
    """
    factor = min(1.0, PICTURE_PX / max(image.shape[:2]))
    size = max(1, round(image.shape[1] * factor)), max(1, round(image.shape[0] * factor))
    small = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
    target, labels = (
        cv2.resize(ids.astype(np.int32), size, interpolation=cv2.INTER_NEAREST) for ids in (target, labels)
    )
    valid = target != scheme.ignore_index
    truth = colorize(np.where(valid, target, 0), scheme)
    truth[~valid] = 0
    grey = np.repeat(cv2.cvtColor(small, cv2.COLOR_RGB2GRAY)[..., None], 3, axis=2)
    errors = np.where((valid & (labels != target))[..., None], np.array(WRONG_RGB, np.uint8), grey // 2 + 96)
    return {
        "input": data_url(small, ".jpg"),
        "target": data_url(truth, ".png"),
        "prediction": data_url(blend(small, labels, scheme), ".jpg"),
        "wrong pixels": data_url(errors.astype(np.uint8), ".jpg"),
    }
