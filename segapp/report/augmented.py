"""Pictures of training samples as a training sees them: augmented, aimed and mixed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import cv2
import numpy as np

from segapp.datasets.dataset import Sample, SegmentationDataset
from segapp.datasets.files import shown
from segapp.datasets.sampling import Order
from segapp.errors import DataError
from segapp.inference.predict import colorize
from segapp.report.render import data_url

PICTURE_PX = 320
"""Maximum of the longer side of a picture."""
IGNORED_RGB = (128, 128, 128)


@dataclass(frozen=True)
class AugmentedSample:
    """A training sample as a picture: image and mask side by side.

    Attributes:
        caption: File name, and the class that its crop is aimed at.
        picture: A `data:` address.
    """

    caption: str
    picture: str


def augmented_samples(dataset: SegmentationDataset, order: Order, most: int = 12) -> Iterator[AugmentedSample]:
    """Yield the first samples of the first epoch as pictures; images that cannot be read are left out."""
    for key in order(1)[:most]:
        try:
            sample = dataset[key]
        except DataError:
            continue
        aim = "" if key.aim is None else f", aimed at {dataset.scheme.names[key.aim]}"
        yield AugmentedSample(f"{shown(dataset.pairs[key.image].image)}{aim}", _side_by_side(sample, dataset))


def _side_by_side(sample: Sample, dataset: SegmentationDataset) -> str:
    scheme = dataset.scheme
    image = dataset.pixels.as_rgb(np.ascontiguousarray(sample.image.permute(1, 2, 0).numpy()))
    target = sample.target.numpy()
    factor = min(1.0, PICTURE_PX / max(target.shape))
    size = max(1, round(target.shape[1] * factor)), max(1, round(target.shape[0] * factor))
    is_ignored = target == scheme.ignore_index
    colors = colorize(np.where(is_ignored, 0, target), scheme)
    colors[is_ignored] = IGNORED_RGB
    pictures = [
        cv2.resize(image, size, interpolation=cv2.INTER_AREA),
        cv2.resize(colors, size, interpolation=cv2.INTER_NEAREST),
    ]
    return data_url(np.concatenate(pictures, 1), ".jpg")
