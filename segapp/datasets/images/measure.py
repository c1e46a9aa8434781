"""Measure the pixels of a data set: the bands and type of its files, and the usual range of the values of each band.

Shapes: B bands.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from segapp.datasets.files import shown
from segapp.datasets.images.pixel_format import DTYPES, RGB8, PixelFormat, Range, StoredPixels
from segapp.datasets.images.reading import pixels_of, read_image
from segapp.datasets.images.windows import image_windows
from segapp.errors import DataError

PERCENTILES = (0.5, 99.5)
"""Share of a band's values, in percent, below the lower and the upper end of its range."""

_MAX_IMAGES = 64
_MAX_PX = 2**17
"""Maximum number of pixels that are sampled from an image, evenly spread."""


def stored_pixels(paths: Sequence[Path]) -> tuple[StoredPixels, Path] | None:
    """Return the most common pixels that 8-bit RGB would reduce, and a file with them; None if there are none."""
    squeezed = ((stored, own[0]) for stored, own in _kinds(paths).items() if RGB8.problem(stored) is not None)
    return next(squeezed, None)


def _kinds(paths: Sequence[Path]) -> dict[StoredPixels, list[Path]]:
    """Return the files by the kind of their pixels, the most common first; unreadable files are left out."""
    found: dict[StoredPixels, list[Path]] = {}
    for path in paths:
        try:
            found.setdefault(pixels_of(path), []).append(path)
        except DataError:
            continue
    return dict(sorted(found.items(), key=lambda kind: -len(kind[1])))


def _check_alike(paths: Sequence[Path], wanted: StoredPixels) -> None:
    """Raise DataError with an example file per kind, if one format cannot read all bands of all files."""
    found = _kinds(paths)
    if any((stored.bands, stored.dtype) != (wanted.bands, wanted.dtype) for stored in found):
        named = "; ".join(f"{len(own)} are {stored}, such as {shown(own[0])}" for stored, own in found.items())
        raise DataError(
            f"the images differ in bands or type: {named}: convert them to one kind, or move the others",
            key="data.dtype",
        )


def measure_ranges(paths: Sequence[Path], pixels: PixelFormat) -> tuple[Range, ...]:
    """Return the range of each band (B): percentiles over up to 64 images, rounded outwards for whole numbers.

    Images whose pixels do not fit `pixels`, or that cannot be read, are left out.

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
        raise problem or DataError("there are no images to measure: check data.root and the split", key="data.root")
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


def measure_pixels(
    paths: Sequence[Path], *, others: Sequence[Path] = (), are_bands: bool = False
) -> PixelFormat | None:
    """Return all bands of images that 8-bit RGB would reduce, with their ranges; None for others.

    Args:
        paths: the images for training, which are measured.
        others: further images, which are of the same kind.
        are_bands: treat three 8-bit bands as bands too, not as RGB.

    Raises:
        DataError: the images differ, have a dtype that is not supported, or hold several images each.
    """
    squeezed = (pixels_of(paths[0]), paths[0]) if are_bands else stored_pixels([*paths, *others])
    if squeezed is None:
        return None
    found, first = squeezed
    _check_alike([*paths, *others], found)
    if found.pages or found.dtype not in DTYPES:
        raise DataError(f"{shown(first)}: {RGB8.problem(found)}", path=first)
    pixels = PixelFormat(tuple(range(1, found.bands + 1)), found.dtype)
    return replace(pixels, value_range=measure_ranges(paths, pixels))


def config_values(pixels: PixelFormat) -> dict[str, str]:
    """Return the keys of the config's `data` section for these pixels, with their values as YAML."""
    ranges = [[int(end) if end == int(end) else end for end in pair] for pair in pixels.ranges]
    return {"bands": str(list(pixels.bands or (1, 2, 3))), "dtype": pixels.dtype, "value_range": str(ranges)}
