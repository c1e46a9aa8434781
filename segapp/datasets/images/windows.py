"""Large TIFFs read in windows: an image or a mask of which only the asked part is decoded.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from segapp.datasets.files import check_pixels, tiff_tags
from segapp.datasets.images.pixel_format import PixelFormat, Pixels
from segapp.datasets.images.raster import read_bands
from segapp.datasets.images.reading import bands_of
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import Ids, UnknownIdsError, ids_as_train_ids, read_masks, unknown_ids_error

Key = slice | tuple[slice, slice]

LARGE_PX = 2**22
"""Number of pixels from which an image is read in windows; below, decoding the whole costs a few milliseconds."""

_BLOCK_PX = 2**22
_BLOCK_ROWS = 512
"""Blocks of rows are a multiple of this high, as the tiles of most files are, so that no tile is decoded twice."""


@dataclass(frozen=True)
class _Windows:
    """A file that is indexed like a read-only array, by rows, or rows and columns; each index reads the file.

    Attributes:
        path: The file.
        shape: Of the whole array.
    """

    path: Path
    shape: tuple[int, ...]

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    def __getitem__(self, key: Key) -> Pixels:
        """Return the pixels of some rows, or of rows and columns.

        Raises:
            DataError: They cannot be read.
        """
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        first, last, _ = rows.indices(self.shape[0])
        left, right, _ = columns.indices(self.shape[1])
        return self._read((slice(first, last), slice(left, right)))

    def row_blocks(self) -> Iterator[slice]:
        """Yield rows from top to bottom that together are the array: a few million pixels where it is not very wide."""
        step = _BLOCK_ROWS * max(1, _BLOCK_PX // (_BLOCK_ROWS * self.shape[1]))
        return (slice(top, min(top + step, self.shape[0])) for top in range(0, self.shape[0], step))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Pixels:
        """Return the whole array."""
        return np.asarray(self[:], dtype)

    def _read(self, window: tuple[slice, slice]) -> Pixels:
        raise NotImplementedError


@dataclass(frozen=True)
class ImageWindows(_Windows):
    """An image (H, W, B) in the format of its data set.

    Attributes:
        bands: Bands of the file, counted from 1.
        dtype: Of the values.
    """

    bands: tuple[int, ...]
    dtype: np.dtype[Any]

    def _read(self, window: tuple[slice, slice]) -> Pixels:
        return read_bands(self.path, self.bands, window)


@dataclass(frozen=True)
class MaskWindows(_Windows):
    """A mask (H, W) as train ids.

    Attributes:
        scheme: Classes and the ids of the masks.
    """

    scheme: ClassScheme

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the train ids."""
        return self.scheme.dtype

    def stored(self, window: tuple[slice, slice]) -> Pixels:
        """Return the ids (H, W) or, with `scheme.rgb`, the colours (H, W, 3) of a window."""
        values = read_bands(self.path, (1, 2, 3) if self.scheme.rgb else (1,), window)
        return values if self.scheme.rgb else values[..., 0]

    def _read(self, window: tuple[slice, slice]) -> Pixels:
        return ids_as_train_ids(self.stored(window), self.path, self.scheme)


def image_windows(path: Path, pixels: PixelFormat, least_px: int | None = None) -> ImageWindows | None:
    """Return an image to be read in windows; None if it is smaller than `least_px` (`LARGE_PX`) or cannot be read so.

    Raises:
        DataError: The file cannot be read, or its pixels are not of this format.
    """
    tags = tiff_tags(path) if path.suffix.lower() in TIFF_SUFFIXES else None
    least_px = LARGE_PX if least_px is None else least_px
    if tags is None or tags.height_px * tags.width_px < least_px or not tags.can_be_read_in_windows:
        return None
    check_pixels(path, tags.stored, pixels)
    if pixels.bands is None and tags.has_alpha:  # whether it is opacity shows the whole alone
        return None
    bands = bands_of(tags, pixels)
    return ImageWindows(path, (tags.height_px, tags.width_px, len(bands)), bands, pixels.numpy_dtype)


def mask_windows(path: Path, scheme: ClassScheme) -> MaskWindows | None:
    """Return a mask to be read in windows; None if it is small or cannot be read so.

    Raises:
        DataError: The file cannot be read.
    """
    is_tiff_of_ids = path.suffix.lower() in TIFF_SUFFIXES and scheme.multilabel is None
    tags = tiff_tags(path) if is_tiff_of_ids else None
    if tags is None or tags.height_px * tags.width_px < LARGE_PX or not tags.can_be_read_in_windows:
        return None
    if tags.dtype == "float32" or tags.axes or tags.bands != (3 if scheme.rgb else 1):
        return None  # `read_mask` says what is wrong with it
    return MaskWindows(path, (tags.height_px, tags.width_px), scheme)


def mask_blocks(paths: Sequence[Path], scheme: ClassScheme) -> Iterator[Ids]:
    """Yield the mask of an image as train ids, (H, W), in blocks of rows; in one block where it is read whole.

    Args:
        paths: The mask, or the masks of its classes.
        scheme: Classes and the ids of the masks.

    Raises:
        UnknownIdsError: A mask holds ids that are no class, of all of which the message tells.
        DataError: It cannot be used.
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
            values, counts = np.unique(windows.stored((rows, slice(0, windows.shape[1]))), return_counts=True)
            present.update(dict(zip(values.tolist(), counts.tolist(), strict=True)))
        raise unknown_ids_error(paths[0], scheme, present) from None
