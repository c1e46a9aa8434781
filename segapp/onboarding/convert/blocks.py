"""Cut large images and masks into blocks; a strip of each image is for validation, with a margin to the rest.

The strip runs across the longer side, at the position where its classes are most like the whole image's. No block of
one split shares a pixel with a block of the other, and the pixels between them, `margin_px` wide, are not used.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import read_header, shown
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.images.raster import Georeference, Window, encode_bands, read_bands, read_georeference
from segapp.datasets.images.reading import read_image
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES, has_rasterio
from segapp.datasets.masks import color_codes
from segapp.errors import ConfigError, DataError
from segapp.onboarding.convert.conversion import as_ids, encode_png, file_state, mask_target
from segapp.onboarding.layout import Drawing, Layout, Pair
from segapp.onboarding.survey.content import stored_pixels
from segapp.onboarding.survey.questions import Answer, open_question
from segapp.onboarding.survey.tree import Tree

MIN_BLOCK_PX = 64
_SIZES = (1024, 512, 256, 128)
_FEW_IMAGES = 4  # up to this many images, each gives a part to both splits; more are divided as whole images
_MAX_COUNTED_PX = 2**23
_MIN_SHARE = 0.001  # share of the pixels above which a class should be in both splits


@dataclass(frozen=True)
class Cut:
    """Rows and columns of the blocks of an image, and the share of its pixels in the margins."""

    train: tuple[Window, ...]
    val: tuple[Window, ...]
    unused_share: float


def margin_of(block_px: int) -> int:
    """Return the width of the unused pixels between training and validation blocks: a quarter of a block."""
    return block_px // 4


def plan_cut(size: tuple[int, int], strip: tuple[int, int] | None, block_px: int) -> Cut:
    """Return the blocks of an image of a height and a width, whose sides are about equal to `block_px`.

    The strip is the first and last (excluded) row or column for validation, along the longer side; without one, all
    blocks are training blocks.
    """
    length = max(size)
    margin = margin_of(block_px)
    sides = [((0, length), False)]
    if strip is not None:
        first, last = strip
        sides = [((0, first - margin), False), ((last + margin, length), False), ((first, last), True)]
    blocks: dict[bool, list[Window]] = {False: [], True: []}
    across = _edges(0, min(size), block_px)
    used_px = 0
    for (start, stop), is_val in sides:
        if stop - start < (1 if is_val else margin):  # too narrow to learn from
            continue
        used_px += (stop - start) * min(size)
        for along in _edges(start, stop, block_px):
            blocks[is_val] += [(along, other) if size[0] >= size[1] else (other, along) for other in across]
    return Cut(tuple(blocks[False]), tuple(blocks[True]), 1 - used_px / (size[0] * size[1]))


def _edges(start: int, stop: int, block_px: int) -> list[slice]:
    """Return nearly equal intervals of about `block_px`."""
    count = max(1, round((stop - start) / block_px))
    edges = [start + (stop - start) * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in pairwise(edges)]


def choose_strip(counts: NDArray[np.int64], length: int, share: float, margin: int) -> tuple[int, int] | None:
    """Return the strip whose classes are most like the whole image's, with each frequent class in both splits.

    The strip is its first and last (excluded) row or column; None if no training block would be left. Counts are the
    (P, K) pixels of each class in P equal parts of the longer side; `length` and `margin` are in pixels.
    """
    num_parts = len(counts)
    wide = max(1, round(share * length))
    best: tuple[float, tuple[int, int]] | None = None
    whole = counts.sum(axis=0)
    frequent = whole >= _MIN_SHARE * whole.sum()
    for first in sorted({length - wide, *range(0, length - wide + 1, max(1, wide // 4))}):
        last = first + wide
        if max(first, length - last) - margin < max(margin, 1):
            continue
        part = (np.arange(num_parts) + 0.5) * length / num_parts
        inside = counts[(part >= first) & (part < last)].sum(axis=0)
        outside = counts[(part < first - margin) | (part >= last + margin)].sum(axis=0)
        missing = int((frequent & ((inside == 0) | (outside == 0))).sum())
        difference = np.abs(inside / max(1, inside.sum()) - whole / max(1, whole.sum())).sum() / 2
        num_margins = (first > 0) + (last < length)
        score = missing + float(difference) + num_margins * margin / length
        if best is None or score < best[0] - 1e-9:
            best = score, (first, last)
    return best[1] if best is not None else None


def cut_into_blocks(tree: Tree, layout: Layout, block_px: int, share: float) -> Layout:
    """Return the layout of the blocks of a layout's images and masks; pairs of a split give blocks of that split.

    Of other images, `share` of the pixels are for validation. DataError is raised if an image is too small for both
    splits, or if image and mask differ in size.
    """
    if block_px < MIN_BLOCK_PX:
        raise ConfigError(f"--blocks {block_px}: blocks have at least {MIN_BLOCK_PX} px, such as --blocks 512")
    is_divided = any(pair.split for pair in layout.pairs)
    has_strips = not is_divided and len(layout.pairs) <= _FEW_IMAGES
    blocks: list[Pair] = []
    notes = []
    for pair in layout.pairs:
        image, mask = _Pixels(tree.root / pair.image), _Pixels(tree.root / pair.mask)
        if image.size != mask.size:
            raise DataError(
                f"{shown(pair.image)} has {image.size[1]} x {image.size[0]} px, its mask {shown(pair.mask)} "
                f"{mask.size[1]} x {mask.size[0]}: cut or resample one of them",
                path=pair.image,
            )
        strip = _strip_of(pair, image, mask, block_px, share) if has_strips else None
        cut = plan_cut(image.size, strip, block_px)
        if strip is not None:
            side = "rows" if image.size[0] >= image.size[1] else "columns"
            notes.append(
                f"{shown(pair.image)}: {side} {strip[0]} to {strip[1] - 1} validate; {cut.unused_share:.1%} of the "
                f"pixels are in the margins of {margin_of(block_px)} px and are not used"
            )
        for windows, split in ((cut.train, "train" if has_strips else pair.split), (cut.val, "val")):
            blocks += [_block(pair, image, mask, window, split) for window in windows]
    counts = Counter(block.split for block in blocks)
    said = ", ".join(f"{count} {split}" for split, count in counts.items() if split is not None)
    return Layout(
        f"{layout.name}-blocks",
        blocks,
        layout.confidence,
        (*layout.evidence, f"{len(blocks)} blocks of about {block_px} px" + (f": {said}" if said else "")),
        tuple(path for pair in layout.pairs for path in (pair.image, pair.mask)),
        title=f"{layout.name}, in blocks",
        notes=tuple(notes),
    )


def _strip_of(pair: Pair, image: _Pixels, mask: _Pixels, block_px: int, share: float) -> tuple[int, int]:
    """Return first and last (excluded) row or column of the validation strip; DataError for a small image."""
    strip = choose_strip(_counts(mask), max(image.size), share, margin_of(block_px))
    if strip is None:
        raise DataError(
            f"{shown(pair.image)}: {image.size[1]} x {image.size[0]} px are too few for training and validation "
            f"blocks of {block_px} px: use smaller ones, such as --blocks {block_px // 2}",
            path=pair.image,
        )
    return strip


def ask_for_blocks(tree: Tree, layout: Layout) -> None:
    """Raise OpenQuestionError for a single large image without a split, which can only be divided into blocks."""
    if len(layout.pairs) != 1 or layout.pairs[0].split is not None:
        return
    height, width = _Pixels(tree.root / layout.pairs[0].image).size
    answers = [
        Answer(str(size), f"about {round(height * width / size**2)} blocks")
        for size in _SIZES
        if max(height, width) >= 4 * size
    ]
    if answers:
        raise open_question(
            f"{shown(tree.root)} holds one image with a mask, of {width} x {height} px, which can be divided into "
            "training and validation images only as blocks; their side in px",
            "--blocks",
            answers,
        )


@dataclass(frozen=True)
class _Pixels:
    """The pixels of an image or a mask, read in windows if that is possible."""

    path: Path

    @property
    def is_tiff(self) -> bool:
        """True if it is read in windows."""
        return self.path.suffix.lower() in TIFF_SUFFIXES and has_rasterio()

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        header = read_header(self.path)
        return header.height_px, header.width_px

    def image(self, window: Window) -> NDArray[Any]:
        """Return pixels (H, W, B) of the image."""
        stored = read_header(self.path).stored
        if self.is_tiff and stored is not None:
            return read_bands(self.path, range(1, stored.bands + 1), window)
        return _whole_image(self.path)[window]

    def mask(self, window: Window) -> NDArray[Any]:
        """Return the ids (H, W) or the colors (H, W, 3) of the mask; ValueError for values that are no ids."""
        stored = read_header(self.path).stored
        if self.is_tiff and stored is not None:
            values = read_bands(self.path, (1, 2, 3) if stored.bands >= 3 else (1,), window)
            values = values if stored.bands >= 3 else values[..., 0]
        else:
            values = _whole_mask(self.path)[window]
        return as_ids(values, 65_535)


@lru_cache(maxsize=1)
def _whole_image(path: Path) -> NDArray[Any]:
    stored = read_header(path).stored
    if stored is None or stored.is_picture:
        return read_image(path)
    return read_image(path, PixelFormat(tuple(range(1, stored.bands + 1)), stored.dtype))


@lru_cache(maxsize=1)
def _whole_mask(path: Path) -> NDArray[Any]:
    return stored_pixels(path, as_rgb=False)[0]


def _counts(mask: _Pixels) -> NDArray[np.int64]:
    """Return the pixels of each value (P, K) in parts of the longer side, for evenly spread pixels."""
    height, width = mask.size
    step = max(1, math.ceil(math.sqrt(height * width / _MAX_COUNTED_PX)))
    rows = []
    for top in range(0, height, 512 * step):
        pixels = mask.mask((slice(top, min(top + 512 * step, height)), slice(0, width)))[::step, ::step]
        rows.append(color_codes(pixels) if pixels.ndim == 3 else pixels.astype(np.int32))
    codes = np.concatenate(rows)
    codes = codes if height >= width else codes.T
    values, inverse = np.unique(codes, return_inverse=True)
    inverse = inverse.reshape(codes.shape)
    return np.stack([np.bincount(line, minlength=len(values)) for line in inverse]).astype(np.int64)


def _block(pair: Pair, image: _Pixels, mask: _Pixels, window: Window, split: str | None) -> Pair:
    rows, columns = window
    name = f"{mask_target(pair.image)}/{rows.start:05}-{columns.start:05}"
    place = (rows.start, rows.stop, columns.start, columns.stop)
    drawing = Drawing(
        f"{shown(pair.image)}: rows {rows.start} to {rows.stop - 1}, columns {columns.start} to {columns.stop - 1}",
        ([(str(one.path), *file_state(one.path)) for one in (image, mask)], place),
        partial(mask.mask, window),
        image_bytes=partial(_image_bytes, image, window),
    )
    image_path = f"images/{name}.{'tif' if _is_written_as_tiff(image) else 'png'}"
    scene = (mask_target(pair.image),)
    return Pair(image_path, f"masks/{name}.png", split, scene=scene, group=pair.group, drawing=drawing)


def _is_written_as_tiff(image: _Pixels) -> bool:
    stored = read_header(image.path).stored
    return image.is_tiff or (stored is not None and not stored.is_picture)


def _image_bytes(image: _Pixels, window: Window, digest: str) -> bytes:
    pixels = image.image(window)
    if not _is_written_as_tiff(image):
        return encode_png(np.ascontiguousarray(pixels), digest)
    names = [f"band {band}" for band in range(1, pixels.shape[2] + 1)]
    place = read_georeference(image.path) if image.is_tiff else None
    if place is not None:
        a, b, c, d, e, f = place.transform
        row, column = window[0].start, window[1].start
        place = Georeference(place.crs, (a, b, c + a * column + b * row, d, e, f + d * column + e * row))
    is_rgb = pixels.dtype == np.uint8 and pixels.shape[2] == 3
    return encode_bands(pixels, names, digest, place, is_rgb=is_rgb)
