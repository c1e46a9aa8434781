"""A drawn data set of many bands, written by tifffile: the class of a pixel is visible in one band each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

CLASSES = ("low", "left", "right")


def draw_bands(seed: int, size: tuple[int, int], num_bands: int, dtype: str) -> tuple[NDArray[Any], NDArray[np.uint8]]:
    """Return an image (H, W, B) with values up to 4000 (uint8: 250) and its mask (H, W) of three classes."""
    rng = np.random.default_rng(seed)
    mask = np.zeros(size, np.uint8)
    mask[size[0] // 3 :, : size[1] // 2] = 1
    mask[size[0] // 3 :, size[1] // 2 :] = 2
    top = 250 if dtype == "uint8" else 4000
    image = rng.integers(0, top // 4, (*size, num_bands))
    for band in range(num_bands):
        image[..., band] += (mask == band % 3) * (top // 2)
    return image.astype(dtype), mask


def write_band_data(
    root: Path, num_images: int = 4, size: tuple[int, int] = (40, 48), num_bands: int = 4, dtype: str = "uint16"
) -> dict[str, Any]:
    """Write images and masks below `root/train` and `root/val`, and return the `data` section of their config."""
    for split in ("train", "val"):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        for number in range(num_images):
            image, mask = draw_bands(number + 100 * (split == "val"), size, num_bands, dtype)
            tifffile.imwrite(
                root / "images" / split / f"{number}.tif", image, photometric="minisblack", planarconfig="contig"
            )
            Image.fromarray(mask).save(root / "masks" / split / f"{number}.png")
    return {
        "format": "folder",
        "root": str(root),
        "classes": list(CLASSES),
        "crop_px": [32, 32],
        "workers": 0,
        "bands": list(range(1, num_bands + 1)),
        "dtype": dtype,
        "value_range": [[0, 250 if dtype == "uint8" else 4000]],
    }
