"""Large TIFFs read in windows: only the requested part of an image or a mask is decoded.

A file that cannot be read, or does not have the pixel format of the data set, raises DataError. `measure_ranges` finds
the usual range of the values of each band, and `compare_ranges` compares values with `data.value_range`.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import (
    MAX_PIXELS,
    ImagePair,
    check_pixels,
    declared_nodata,
    shown,
    tiff_tags,
    turn_of_mask,
)
from segapp.datasets.images.pixel_format import DTYPES, RGB8, PixelFormat, Pixels, Range, StoredPixels, in_all_bands
from segapp.datasets.images.raster import Window, read_bands
from segapp.datasets.images.reading import bands_of, pixels_of, read_with_nodata
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES, TiffTags, is_large
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import (
    Ids,
    UnknownIdsError,
    count_ids,
    count_values,
    read_masks,
    stored_ids,
    train_ids,
    unknown_ids_error,
    windowed_tags,
)
from segapp.datasets.orientation import upright
from segapp.datasets.resources import READERS, evenly_spread, side_by_side
from segapp.errors import DataError, some_names

_BLOCK_PX = 2**22
_BLOCK_ROWS = 512
"""Height in pixels of which blocks of rows are a multiple, as most files' tiles are, so no tile is decoded twice."""


@dataclass(frozen=True)
class Windows:
    """An image (H, W, B) or a mask (H, W) in a file, indexed like a read-only array; each index reads the file."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Window], Pixels]  # returns the pixels of some rows and columns
    # Mask of the values of an image that are nodata, (H, W, B); None if the file declares none
    missing: Windows | None = None
    # Value of a mask -> number of its pixels in each cell, in rows; counted by the first `places_of`
    cells: dict[int, NDArray[np.int32]] = field(default_factory=dict, compare=False, repr=False)

    def __getitem__(self, key: slice | Window) -> Pixels:
        rows, columns = key if isinstance(key, tuple) else (key, slice(None))
        first, last, _ = rows.indices(self.shape[0])
        left, right, _ = columns.indices(self.shape[1])
        return self.read((slice(first, last), slice(left, right)))

    def row_blocks(self) -> Iterator[slice]:
        """Yield slices of rows that cover the array from top to bottom, with a few million pixels each."""
        step = _BLOCK_ROWS * max(1, _BLOCK_PX // (_BLOCK_ROWS * self.shape[1]))
        return (slice(top, min(top + step, self.shape[0])) for top in range(0, self.shape[0], step))


def image_windows(path: Path, pixels: PixelFormat) -> Windows | None:
    """Return an image for reading in windows; None if it is small or cannot be read this way."""
    tags = tiff_tags(path) if path.suffix.lower() in TIFF_SUFFIXES else None
    if tags is None or not tags.is_read_in_windows:
        return None
    check_pixels(path, tags.stored, pixels)
    if pixels.bands is None and tags.has_alpha:  # only the whole band shows if it is really alpha
        return None
    read, shape = partial(_read_window, path, tags, pixels), (tags.height_px, tags.width_px, pixels.num_bands)
    missing = None if tags.nodata is None else Windows(shape, np.dtype(bool), partial(read, 1))
    return Windows(shape, pixels.numpy_dtype, partial(read, 0), missing)


def _read_window(path: Path, tags: TiffTags, pixels: PixelFormat, result: int, window: Window) -> Any:
    """Return the pixels of a window (0) or their mask of nodata (1), as `read_with_nodata` of the whole."""
    return pixels.fill_nodata(read_bands(path, bands_of(tags, pixels), window), tags.nodata)[result]


@dataclass(frozen=True)
class _Places:
    """The pixels of a value in a large mask, cell by cell; one is found by reading its cell only."""

    mask: Windows
    value: int
    ends: NDArray[np.int64]  # number of the value's pixels up to the end of each cell

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, at: int) -> int:
        cell = int(np.searchsorted(self.ends, at, side="right"))
        of_cell, first = _cells(self.mask.shape)[cell], int(self.ends[cell - 1]) if cell else 0
        values = self.mask[of_cell]
        y, x = divmod(int(np.flatnonzero(values == self.value)[at - first]), values.shape[1])
        return int((of_cell[0].start + y) * self.mask.shape[1] + of_cell[1].start + x)


def places_of(mask: Pixels | Windows, value: int) -> NDArray[np.intp] | _Places:
    """Return the pixels of a mask (H, W) that have a value, each as row * W + column.

    In a large mask they are in the order of its cells, 512 x 512 pixels each, whether it is in memory or in windows. Of
    windows, only the number of pixels of each value in each cell is kept: 10 KB for 6 values in 12000 x 9000 pixels.
    """
    if not is_large(*mask.shape):
        return np.flatnonzero(mask == value)
    in_windows = mask if isinstance(mask, Windows) else Windows(mask.shape, mask.dtype, mask.__getitem__)
    if not in_windows.cells:
        in_windows.cells.update(_count_cells(in_windows))
    return _Places(in_windows, value, np.cumsum(in_windows.cells.get(value, [0])))


def _count_cells(mask: Windows) -> dict[int, NDArray[np.int32]]:
    cells, found = _cells(mask.shape), dict[int, NDArray[np.int32]]()
    for rows in mask.row_blocks():
        block = mask[rows]
        for number, (inside, columns) in enumerate(cells):
            if rows.start <= inside.start < rows.stop:
                values = block[inside.start - rows.start : inside.stop - rows.start, columns]
                for value, count in count_values(values).items():
                    found.setdefault(value, np.zeros(len(cells), np.int32))[number] = count
    return found


def _cells(size: tuple[int, ...]) -> list[Window]:
    """Return the cells of a mask, row by row; a block of rows holds whole ones."""
    tops, lefts = (range(0, length, _BLOCK_ROWS) for length in size)
    sides = product(zip(tops, [*tops[1:], size[0]], strict=True), zip(lefts, [*lefts[1:], size[1]], strict=True))
    return [(slice(*rows), slice(*columns)) for rows, columns in sides]


def load_image(
    path: Path, pixels: PixelFormat, *, max_pixels: int = MAX_PIXELS
) -> tuple[Pixels | Windows, NDArray[np.bool_] | Windows | None]:
    """Return an image, a large one in windows, and its mask of nodata, (H, W, B); None if it declares none."""
    image = image_windows(path, pixels)
    return read_with_nodata(path, pixels, max_pixels=max_pixels) if image is None else (image, image.missing)


def load_missing(path: Path, pixels: PixelFormat) -> NDArray[np.bool_] | Windows | None:
    """Return the mask of nodata of an image, (H, W, B); None for a file that declares none, which is not read."""
    return None if declared_nodata(path) is None else load_image(path, pixels)[1]


def load_ignored(pair: ImagePair, missing: NDArray[np.bool_] | Windows | None) -> NDArray[np.bool_] | Windows | None:
    """Return where the label of an image is ignored, (H, W, B): where it is `missing`, or outside its valid area."""
    if pair.valid_area is None:
        return missing
    area, missing_area = load_image(pair.valid_area, RGB8)

    def read(window: Window) -> Pixels:
        ignored = in_all_bands(area[window] == 0)
        for each in (missing_area, missing):
            ignored = ignored if each is None else ignored | in_all_bands(each[window])
        return ignored[..., None]

    return Windows((*area.shape[:2], 1), np.dtype(bool), read)


def mask_windows(path: Path, scheme: ClassScheme) -> Windows | None:
    """Return a mask for reading in windows; None if it is small or cannot be read this way."""
    tags = windowed_tags(path, rgb=scheme.rgb) if scheme.multilabel is None else None
    if tags is None:
        return None
    size = tags.height_px, tags.width_px
    return Windows(size, scheme.dtype, lambda at: train_ids(stored_ids(path, tags, at), path, scheme, tags.nodata))


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
        present, tags = Counter[int](), tiff_tags(paths[0])
        assert tags is not None
        for rows in windows.row_blocks():
            ids = stored_ids(paths[0], tags, (rows, slice(0, windows.shape[1])))
            present.update(count_ids(ids, paths[0], scheme, tags.nodata))
        raise unknown_ids_error(paths[0], scheme, present) from None


PERCENTILES = (0.5, 99.5)
"""Shares of the values of a class in a band, in percent, below the lower and the upper end of its range."""

_LEAST_PX = 100
"""Number of sampled pixels from which a class widens the ranges: fewer may be errors at borders."""

_MAX_IMAGES = 64
_MAX_PX = 2**17
"""Maximum number of pixels that are sampled from an image, evenly spread."""


def kinds_of_pixels(paths: Sequence[Path]) -> dict[StoredPixels, list[Path]]:
    """Return the files by the kind of their pixels, the most common first; unreadable files are left out."""

    def kind(path: Path) -> StoredPixels | None:
        try:
            return pixels_of(path)
        except DataError:
            return None

    found: dict[StoredPixels, list[Path]] = {}
    for path, stored in zip(paths, side_by_side(kind, paths, READERS), strict=True):
        if stored is not None:
            found.setdefault(stored, []).append(path)
    return dict(sorted(found.items(), key=lambda kind: -len(kind[1])))


def reduced_pixels(kinds: Iterable[StoredPixels]) -> StoredPixels | None:
    return next((stored for stored in kinds if RGB8.problem(stored) is not None), None)


def measure_ranges(pairs: Sequence[ImagePair], pixels: PixelFormat, scheme: ClassScheme) -> tuple[Range, ...]:
    """Return the range of each band (B): of the percentiles of each class, so that a rare class lies inside, too.

    Up to 64 images are measured; whole numbers are rounded outwards. Images whose pixels do not fit `pixels`, or that
    cannot be read, are left out; a mask that cannot be read counts as one class.

    Raises:
        DataError: none of the images can be read.
    """
    samples, ids = [], []
    problem: DataError | None = None
    for pair in evenly_spread(pairs, _MAX_IMAGES):
        try:
            samples.append(_spread_pixels(pair.image, pixels))
        except DataError as error:
            problem = problem or error
            continue
        ids.append(np.zeros(len(samples[-1]), np.int32))
        with contextlib.suppress(DataError, ValueError):  # of another size, or reported when the mask is used
            if pair.masks:
                turn = turn_of_mask(pair, scheme.mask_orientation)
                mask = mask_windows(pair.masks[0], scheme) or upright(read_masks(pair.masks, scheme), turn)
                ids[-1][:] = _spread(mask, mask.shape).ravel()
    if not samples:
        raise problem or DataError("there are no images to measure: check data.root and the split", key="data.root")
    values, classes = np.concatenate(samples), np.concatenate(ids)
    found, counts = np.unique(classes, return_counts=True)
    wide = [values[classes == each] for each in found[counts >= _LEAST_PX]] or [values]
    return tuple(
        _range([each[:, band] for each in wide], is_whole=pixels.dtype != "float32") for band in range(pixels.num_bands)
    )


def _spread(whole: Pixels | Windows, size: tuple[int, ...]) -> Pixels:
    """Return evenly spread pixels of an image (H, W, B), or of its mask (H, W), as (h, w, B) or (h, w)."""
    step = max(1, math.ceil(math.sqrt(size[0] * size[1] / _MAX_PX)))
    row_blocks = [*whole.row_blocks()] if isinstance(whole, Windows) else [slice(0, None)]
    return np.concatenate([whole[rows][-rows.start % step :: step, ::step] for rows in row_blocks])


def _spread_pixels(path: Path, pixels: PixelFormat) -> np.ndarray:
    """Return pixels (K, B) of an image, evenly spread; NaN for nodata."""
    image, missing = load_image(path, pixels)
    values = _spread(image, image.shape)
    values = values if missing is None else np.where(_spread(missing, missing.shape), np.nan, values)
    return values.reshape(-1, pixels.num_bands)


def nodata_note(paths: Sequence[Path], pixels: PixelFormat) -> str | None:
    """Return a sentence on the pixels without data of images, from up to 64 of them; None if none declares them."""
    values, shares = set[str](), []
    for path in evenly_spread(paths, _MAX_IMAGES):
        with contextlib.suppress(DataError):  # reported when the image is used
            nodata, share = declared_nodata(path), 0.0
            if nodata is not None and (share := float(np.isnan(_spread_pixels(path, pixels)).all(1).mean())):
                values.add(f"{nodata:.7g}")
            shares.append(share)
    what = f"of the pixels of the images are nodata ({some_names(sorted(values), 3)})"
    return f"{fmean(shares):.1%} {what}: ignored; gdal_edit.py -unsetnodata FILE makes them data" if values else None


def _range(classes: Sequence[np.ndarray], *, is_whole: bool) -> Range:
    finite = [each for values in classes if (each := values[np.isfinite(values)]).size]
    ends = np.array([np.percentile(values, PERCENTILES) for values in finite] or [(0.0, 1.0)])
    low, high = float(ends[:, 0].min()), float(ends[:, 1].max())
    low, high = (math.floor(low), math.ceil(high)) if is_whole else (float(f"{low:.5g}"), float(f"{high:.5g}"))
    return (float(low), float(high)) if high > low else (float(low), low + 1.0)


def compare_ranges(samples: Sequence[Pixels], pixels: PixelFormat) -> list[tuple[Literal["error", "warning"], str]]:
    """Return the bands of sampled pixels (K, B) that do not fit `data.value_range`, as one error or warning, or none.

    It is an error if 99 % of a band's values are clipped, so that the network gets a constant. A warning: half of them
    are, as in a CT window, or they fill less than 2 % of the range. NaN and infinite values do not count.
    """
    found: dict[Literal["error", "warning"], list[str]] = {"error": [], "warning": []}
    names = pixels.bands or (1, 2, 3)
    for band, (low, high) in enumerate(pixels.ranges if samples else ()):
        values = np.concatenate([each[np.isfinite(each[:, band]), band] for each in samples])
        tail = min(PERCENTILES[0], 100 * _LEAST_PX / max(1, values.size))  # a rare class may widen the range
        ends = np.percentile(values, (0, tail, 100 - tail, 100)) if values.size else (low, low, high, high)
        first, last = ends[1:3] if ends[1] < ends[2] else ends[::3]  # the extremes of a few bright dots on black
        clipped = np.count_nonzero((values < low) | (values > high)) / max(1, values.size)
        if clipped >= 0.5 or min(last, high) - max(first, low) < 0.02 * (high - low):
            what = f"{clipped:.1%} of the values are clipped to" if clipped >= 0.5 else "the values fill under 2% of"
            line = f"band {names[band]}: {what} [{low:.10g}, {high:.10g}] (measured: {first:.5g} to {last:.5g})"
            found["error" if clipped >= 0.99 else "warning"].append(line)
    return [(severity, some_names(lines, 3)) for severity, lines in found.items() if lines][:1]


def measure_pixels(
    paths: Sequence[Path], *, others: Sequence[Path] = (), are_bands: bool = False
) -> PixelFormat | None:
    """Return all bands of images that 8-bit RGB would reduce, without their ranges; None for others.

    Args:
        paths: the images for training.
        others: further images, which are of the same kind.
        are_bands: treat three 8-bit bands as bands too, not as RGB.

    Raises:
        DataError: the images differ, have a dtype that is not supported, or hold several images each.
    """
    kinds = kinds_of_pixels([*paths, *others])
    found = pixels_of(paths[0]) if are_bands else reduced_pixels(kinds)
    if found is None:
        return None
    if any((stored.bands, stored.dtype) != (found.bands, found.dtype) for stored in kinds):
        named = "; ".join(f"{len(own)} are {stored}, such as {shown(own[0])}" for stored, own in kinds.items())
        raise DataError(
            f"the images differ in bands or type: {named}: convert them to one kind, or move the others",
            key="data.dtype",
        )
    if found.pages or found.dtype not in DTYPES:
        first = kinds[found][0]
        raise DataError(f"{shown(first)}: {RGB8.problem(found)}", path=first)
    return PixelFormat(tuple(range(1, found.bands + 1)), found.dtype)


def config_values(pixels: PixelFormat) -> dict[str, str]:
    """Return the keys of the config's `data` section for these pixels, with their values as YAML."""
    ranges = [[int(end) if end == int(end) else end for end in pair] for pair in pixels.ranges]
    return {"bands": str(list(pixels.bands or (1, 2, 3))), "dtype": pixels.dtype, "value_range": str(ranges)}
