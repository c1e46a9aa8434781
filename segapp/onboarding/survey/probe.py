"""A quick look at single files: size, number of values, whether the pixels are those of a mask or of a photograph."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import open_bytes, read_bytes, read_header
from segapp.datasets.images.raster import read_bands
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES
from segapp.errors import DataError

_MAX_PROBED_PX = 40_000_000
_FEW_VALUES = 64
_THUMBNAIL_PX = 48


@dataclass(frozen=True)
class Probe:
    """What a file holds.

    Attributes:
        size_px: upright height and width.
        num_values: distinct values or colours; None: too large to look.
        flatness: share of the pixels that equal their left neighbour.
        thumbnail: 48 x 48 of its pixels, as numbers.
    """

    size_px: tuple[int, int]
    num_values: int | None = None
    flatness: float = 0.0
    thumbnail: NDArray[np.int32] | None = None

    @property
    def mask_likeness(self) -> float:
        """1 for few values, less for flat areas with many values, near 0 for a photograph."""
        if self.num_values is None or self.num_values <= _FEW_VALUES:
            return 1.0
        return 0.7 if self.flatness >= 0.5 else 0.15

    @property
    def image_likeness(self) -> float:
        """1 for many values."""
        return 1.0 if self.num_values is None or self.num_values > _FEW_VALUES else 0.7


@lru_cache(maxsize=4096)
def probe(path: Path) -> Probe | None:
    """Return what a file holds; None if it cannot be read."""
    try:
        header = read_header(path)
        size = (header.height_px, header.width_px)
        if header.height_px * header.width_px > _MAX_PROBED_PX:
            return Probe(size)
        if header.stored is not None and not header.stored.is_picture and path.suffix.lower() in TIFF_SUFFIXES:
            pixels = read_bands(path, (1,))[..., 0]  # Pillow does not decode most types
        else:
            image = open_bytes(read_bytes(path), path)
            pixels = np.asarray(image if image.mode in ("L", "P", "1", "I", "I;16", "F") else image.convert("RGB"))
    except (DataError, OSError, ValueError, SyntaxError):
        return None
    if pixels.dtype.kind == "f":
        pixels = np.ascontiguousarray(pixels, np.float32).view(np.int32)  # different values stay different
    numbers = pixels.astype(np.int32)
    if numbers.ndim == 3:
        numbers = numbers @ np.array([65536, 256, 1], np.int32)
    rows = np.linspace(0, numbers.shape[0] - 1, _THUMBNAIL_PX).astype(int)
    columns = np.linspace(0, numbers.shape[1] - 1, _THUMBNAIL_PX).astype(int)
    flatness = float(np.mean(numbers[:, 1:] == numbers[:, :-1])) if numbers.shape[1] > 1 else 1.0
    return Probe(size, len(np.unique(numbers)), flatness, numbers[np.ix_(rows, columns)])


def are_all_alike(probes: list[Probe]) -> bool:
    """Return True for three or more masks of at least two values that are nearly the same: fields of view."""
    shown = [found.thumbnail for found in probes if found.thumbnail is not None]
    if len(shown) < 3:
        return False
    first = shown[0]
    _, counts = np.unique(first, return_counts=True)
    minority = 1 - counts.max() / first.size
    return minority > 0.04 and all(np.mean(other == first) > 0.96 for other in shown[1:])
