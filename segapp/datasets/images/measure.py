"""Measure the pixels of a data set: the bands and type of its files, and the usual range of the values of each band.

Shapes: B bands.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from segapp.datasets.files import read_header
from segapp.datasets.images.pixel_format import DTYPES, RGB8, PixelFormat, Range, StoredPixels
from segapp.datasets.images.reading import read_image
from segapp.datasets.images.windows import image_windows
from segapp.errors import DataError

PERCENTILES = (0.5, 99.5)
"""Share of the values of a band, in percent, below the ends of its range."""

_MAX_IMAGES = 64
_MAX_PX = 2**17
"""Largest number of pixels taken of one image, evenly spread."""


def stored_pixels(paths: Sequence[Path]) -> StoredPixels | None:
    """Return the commonest pixels of the files that 8-bit RGB would squeeze; None if there are none."""
    found: Counter[StoredPixels] = Counter()
    for path in paths:
        try:
            stored = read_header(path).stored
        except DataError:
            continue
        if stored is not None and RGB8.problem(stored) is not None:
            found[stored] += 1
    return found.most_common(1)[0][0] if found else None


def measure_ranges(paths: Sequence[Path], pixels: PixelFormat) -> tuple[Range, ...]:
    """Return the range of each band (B): percentiles over up to 64 images, rounded outwards for whole numbers.

    Args:
        paths: the images; those of other pixels, or that cannot be read, are left out.
        pixels: bands and type.

    Raises:
        DataError: none of the images can be read.
    """
    samples = []
    problem: DataError | None = None
    for path in paths[:: max(1, len(paths) // _MAX_IMAGES)][:_MAX_IMAGES]:
        try:
            samples.append(_spread_pixels(path, pixels))
        except DataError as error:
            problem = problem or error
    if not samples:
        raise problem or DataError("there are no images to measure: check data.root and the split")
    values = np.concatenate(samples)
    return tuple(_range(values[:, band], is_whole=pixels.dtype != "float32") for band in range(pixels.num_bands))


def _spread_pixels(path: Path, pixels: PixelFormat) -> np.ndarray:
    """Return pixels (K, B) of an image, evenly spread."""
    image = image_windows(path, pixels) or read_image(path, pixels)
    step = max(1, math.ceil(math.sqrt(image.shape[0] * image.shape[1] / _MAX_PX)))
    if isinstance(image, np.ndarray):
        return image[::step, ::step].reshape(-1, pixels.num_bands)
    blocks = [image[rows][-rows.start % step :: step, ::step] for rows in image.row_blocks()]
    return np.concatenate(blocks).reshape(-1, pixels.num_bands)


def _range(values: np.ndarray, *, is_whole: bool) -> Range:
    finite = values[np.isfinite(values)]
    low, high = (float(value) for value in np.percentile(finite, PERCENTILES)) if finite.size else (0.0, 1.0)
    if is_whole:
        low, high = float(math.floor(low)), float(math.ceil(high))
    else:
        low, high = float(f"{low:.5g}"), float(f"{high:.5g}")
    return (low, high) if high > low else (low, low + 1.0)


def measure_pixels(paths: Sequence[Path], *, are_bands: bool = False) -> PixelFormat | None:
    """Return all bands of images that 8-bit RGB would squeeze, with their ranges; None for others or unread types.

    Args:
        paths: the images.
        are_bands: three bands of 8 bits are no RGB either.
    """
    found = read_header(paths[0]).stored if are_bands else stored_pixels(paths)
    if found is None or found.dtype not in DTYPES:
        return None
    pixels = PixelFormat(tuple(range(1, found.bands + 1)), found.dtype)
    return replace(pixels, value_range=measure_ranges(paths, pixels))


def config_values(pixels: PixelFormat) -> dict[str, str]:
    """Return the keys of the config's `data` section that say these pixels, with their values as YAML."""
    ranges = [[int(end) if end == int(end) else end for end in pair] for pair in pixels.ranges]
    return {"bands": str(list(pixels.bands or (1, 2, 3))), "dtype": pixels.dtype, "value_range": str(ranges)}
