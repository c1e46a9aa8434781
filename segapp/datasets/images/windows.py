"""Large TIFFs read in windows: only the requested part of an image or a mask is decoded.

A file that cannot be read, or does not have the pixel format of the data set, raises DataError.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from segapp.datasets.files import check_pixels, tiff_tags
from segapp.datasets.images.pixel_format import PixelFormat, Pixels
from segapp.datasets.images.raster import Window, read_bands
from segapp.datasets.images.reading import bands_of
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import Ids, UnknownIdsError, count_values, read_masks, train_ids, unknown_ids_error

LARGE_PX = 2**22
"""Number of pixels from which an image is read in windows; decoding a smaller one takes a few milliseconds."""

_BLOCK_PX = 2**22
_BLOCK_ROWS = 512
"""Height in pixels of which blocks of rows are a multiple, as most files' tiles are, so no tile is decoded twice."""


@dataclass(frozen=True)
class Windows:
    """An image (H, W, B) or a mask (H, W) in a file, indexed like a read-only array; each index reads the file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Window], Pixels]  # returns the pixels of some rows and columns

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, key: slice | Window) -> Pixels:
        """Return the pixels of some rows, or of rows and columns."""
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        first, last, _ = rows.indices(self.shape[0])
        left, right, _ = columns.indices(self.shape[1])
        return self.read((slice(first, last), slice(left, right)))

    def row_blocks(self) -> Iterator[slice]:
        """Yield slices of rows that cover the array from top to bottom, with a few million pixels each."""
        step = _BLOCK_ROWS * max(1, _BLOCK_PX // (_BLOCK_ROWS * self.shape[1]))
        return (slice(top, min(top + step, self.shape[0])) for top in range(0, self.shape[0], step))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Pixels:
        """Return the whole array."""
        return np.asarray(self[:], dtype)


def _stored_ids(path: Path, scheme: ClassScheme, window: Window) -> Pixels:
    """Return the ids (H, W) or, with `scheme.rgb`, the colors (H, W, 3) of a window of a mask."""
    values = read_bands(path, (1, 2, 3) if scheme.rgb else (1,), window)
    return values if scheme.rgb else values[..., 0]


def _train_ids(path: Path, scheme: ClassScheme, window: Window) -> Pixels:
    return train_ids(_stored_ids(path, scheme, window), path, scheme)


def image_windows(path: Path, pixels: PixelFormat, least_px: int | None = None) -> Windows | None:
    """Return an image for reading in windows; None below `least_px` (`LARGE_PX`) or if it cannot be read this way."""
    tags = tiff_tags(path) if path.suffix.lower() in TIFF_SUFFIXES else None
    least_px = LARGE_PX if least_px is None else least_px
    if tags is None or tags.height_px * tags.width_px < least_px or not tags.can_be_read_in_windows:
        return None
    check_pixels(path, tags.stored, pixels)
    if pixels.bands is None and tags.has_alpha:  # only the whole band shows if it is really alpha
        return None
    bands = bands_of(tags, pixels)
    read = partial(read_bands, path, bands)
    return Windows((tags.height_px, tags.width_px, len(bands)), pixels.numpy_dtype, read)


def mask_windows(path: Path, scheme: ClassScheme) -> Windows | None:
    """Return a mask for reading in windows; None if it is small or cannot be read this way."""
    is_tiff_of_ids = path.suffix.lower() in TIFF_SUFFIXES and scheme.multilabel is None
    tags = tiff_tags(path) if is_tiff_of_ids else None
    if tags is None or tags.height_px * tags.width_px < LARGE_PX or not tags.can_be_read_in_windows:
        return None
    if tags.dtype == "float32" or tags.axes or tags.bands != (3 if scheme.rgb else 1):
        return None  # `read_mask` reports the problem
    return Windows((tags.height_px, tags.width_px), scheme.dtype, partial(_train_ids, path, scheme))


def mask_blocks(paths: Sequence[Path], scheme: ClassScheme) -> Iterator[Ids]:
    """Yield the mask of an image, or the masks of its classes, as train ids (H, W) in blocks of rows.

    A file that is read as a whole is one block. An UnknownIdsError lists the ids of the whole mask.
    """
    windows = mask_windows(paths[0], scheme) if len(paths) == 1 else None
    if windows is None:
        yield read_masks(paths, scheme)
        return
    try:
        for rows in windows.row_blocks():
            yield windows[rows]
    except UnknownIdsError:  # of one block
        present = Counter[int]()
        for rows in windows.row_blocks():
            present.update(count_values(_stored_ids(paths[0], scheme, (rows, slice(0, windows.shape[1])))))
        raise unknown_ids_error(paths[0], scheme, present) from None
