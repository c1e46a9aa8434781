"""Drawn photographs of 2048x1024 pixels as PNGs of about 2.9 MB, the size of a Cityscapes image, with their masks."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np

from segapp.datasets.augment import TrainTransform
from segapp.datasets.cache import PixelCache, disk_files, memory_files
from segapp.datasets.dataset import SegmentationDataset, image_sizes
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme

NUM_CLASSES = 19
SCHEME = class_scheme("folder", classes=[f"class {i}" for i in range(NUM_CLASSES)])


def draw_pngs(folder: Path, num_images: int, size_px: tuple[int, int] = (1024, 2048)) -> tuple[ImagePair, ...]:
    """Draw images with the noise of a camera and masks of smooth regions, each with all classes."""
    height, width = size_px
    y, x = np.mgrid[:height, :width]
    pairs = []
    for i in range(num_images):
        rng = np.random.default_rng(i)
        waves = 127 + 60 * np.sin(x / 37 + i) + 50 * np.cos(y / 29)
        noise = rng.normal(0, 1.6, (height, width, 1)) + rng.normal(0, 0.9, (height, width, 3))
        pixels = np.clip(np.stack([waves, waves[::-1], waves[:, ::-1]], -1) + noise, 0, 255).astype(np.uint8)
        regions = ((np.sin(x / 190 + i) + np.cos(y / 130) + 2) * (NUM_CLASSES - 1) / 4).astype(np.uint8)
        image, mask = folder / f"{i:03}.png", folder / f"{i:03}_mask.png"
        cv2.imwrite(str(image), pixels)
        cv2.imwrite(str(mask), regions)
        pairs.append(ImagePair(image, mask, f"{i:03}"))
    return tuple(pairs)


def large_dataset(
    kind: str, pairs: tuple[ImagePair, ...], folder: Path, crop_px: tuple[int, int] = (768, 768)
) -> SegmentationDataset:
    """Return the training set with `data.cache: kind`; a cache on disk lies in `folder`."""
    cache = None
    if kind != "none":
        files = memory_files() if kind == "ram" else disk_files(folder, str(folder), "train", SCHEME)
        cache = PixelCache(files, pairs, image_sizes(pairs), SCHEME.dtype)
    return SegmentationDataset(pairs, SCHEME, TrainTransform(crop_px), cache=cache)
