"""Class frequencies of a data set, from which class weights are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.resources import ThreadPool

if TYPE_CHECKING:  # for annotations: it imports torch
    from segapp.datasets.dataset import SegmentationDataset


@dataclass(frozen=True)
class ClassFrequencies:
    """Counts over all masks of a data set, before any augmentation.

    Attributes:
        pixels: Number of pixels of each class.
        images: Number of images with each class.
        pixels_where_present: For each class, the valid pixels of the images with it. `pixels` over these is the
            frequency of median-frequency balancing (Eigen & Fergus 2015, section 6.3.2).
        ignored_px: Number of ignored pixels.
        num_images: Number of all images.
        classes_of_masks: The classes in each mask, in the order of the images that have one.
    """

    pixels: tuple[int, ...]
    images: tuple[int, ...]
    pixels_where_present: tuple[int, ...]
    ignored_px: int
    num_images: int
    classes_of_masks: tuple[tuple[int, ...], ...]

    def warnings(self, names: Sequence[str]) -> list[str]:
        """Return warnings about a training set with these counts, one sentence each."""
        absent = [name for name, count in zip(names, self.pixels, strict=True) if count == 0]
        if len(absent) == len(names):
            return ["every pixel of every mask is ignored: check data.label_map and data.ignore_index"]
        if len(names) == 2 and absent and self.ignored_px:
            return [
                f"{absent[0]} has no pixel, but {self.ignored_px} pixels are ignored: if the masks are black and "
                "white, set data.label_map to {255: 1} and data.ignore_index to -1"
            ]
        return [f"classes without a single pixel: {', '.join(absent)}"] if absent else []


def compute_class_frequencies(dataset: SegmentationDataset, *, threads: int = 2) -> ClassFrequencies:
    """Return the counts over all masks of a data set; every mask is read, and so checked, once.

    Args:
        dataset: The data set; its transform is not applied.
        threads: Number of decoding threads.

    Raises:
        DataError: A mask cannot be used.
    """
    pixels = np.zeros(dataset.scheme.num_classes, np.int64)
    images = np.zeros_like(pixels)
    where_present = np.zeros_like(pixels)
    ignored_px = 0
    classes_of_masks = []
    masked = [index for index, pair in enumerate(dataset.pairs) if pair.mask is not None]
    with ThreadPool(max(1, threads)) as pool:
        for counts, num_ignored_px in pool.map(lambda index: _count(dataset, index), masked):
            pixels += counts
            images += counts > 0
            where_present += np.where(counts > 0, counts.sum(), 0)
            ignored_px += num_ignored_px
            classes_of_masks.append(classes_in(counts))
    return ClassFrequencies(
        pixels=tuple(pixels.tolist()),
        images=tuple(images.tolist()),
        pixels_where_present=tuple(where_present.tolist()),
        ignored_px=ignored_px,
        num_images=len(dataset),
        classes_of_masks=tuple(classes_of_masks),
    )


def classes_in(counts: NDArray[Any]) -> tuple[int, ...]:
    """Return the classes with pixels, from the number of pixels of each class (C,)."""
    return tuple(np.flatnonzero(counts).tolist())


def _count(dataset: SegmentationDataset, index: int) -> tuple[NDArray[Any], int]:
    """Return the pixels of each class in one mask, (C,), and the number of ignored pixels."""
    mask = dataset.read_mask(index, (0, 0))
    return dataset.scheme.count(mask)
