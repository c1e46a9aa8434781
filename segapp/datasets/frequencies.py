"""How often each class occurs in a data set: what class weights are computed from."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.dataset import SegmentationDataset


@dataclass(frozen=True)
class ClassFrequencies:
    """Counts over all masks of a data set, before any augmentation.

    Attributes:
        pixels: For each class its pixels.
        images: For each class the images in which it occurs.
        pixels_where_present: For each class the valid pixels of the images in which it occurs. `pixels` over these is
            the frequency of median-frequency balancing (Eigen & Fergus 2015, section 6.3.2).
        ignored_px: Pixels that count nowhere.
        num_images: All images.
    """

    pixels: tuple[int, ...]
    images: tuple[int, ...]
    pixels_where_present: tuple[int, ...]
    ignored_px: int
    num_images: int

    def warnings(self, names: Sequence[str]) -> list[str]:
        """What looks wrong about a training set with these counts, each in a sentence.

        Args:
            names: The class names.
        """
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
    """The counts over all masks of a data set; every mask is read once, and checked by that.

    Args:
        dataset: Its transform plays no part.
        threads: Masks decoded at a time.

    Raises:
        DataError: A mask cannot be used.
    """
    pixels = np.zeros(dataset.scheme.num_classes, np.int64)
    images = np.zeros_like(pixels)
    where_present = np.zeros_like(pixels)
    ignored_px = 0
    masked = [index for index, pair in enumerate(dataset.pairs) if pair.mask is not None]
    with ThreadPoolExecutor(max(1, threads)) as pool:
        for counts, num_ignored_px in pool.map(lambda index: _count(dataset, index), masked):
            pixels += counts
            images += counts > 0
            where_present += np.where(counts > 0, counts.sum(), 0)
            ignored_px += num_ignored_px
    return ClassFrequencies(
        pixels=tuple(pixels.tolist()),
        images=tuple(images.tolist()),
        pixels_where_present=tuple(where_present.tolist()),
        ignored_px=ignored_px,
        num_images=len(dataset),
    )


def _count(dataset: SegmentationDataset, index: int) -> tuple[NDArray[Any], int]:
    """Pixels of each class in one mask, and ignored ones."""
    mask = dataset.read_mask(index, (0, 0))
    is_valid = mask != dataset.scheme.ignore_index
    return np.bincount(mask[is_valid], minlength=dataset.scheme.num_classes), int(mask.size - is_valid.sum())
