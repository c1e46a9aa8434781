"""Contents of masks: their values or colors, with numbers of pixels and masks, sampled evenly from a data set."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segapp.datasets.files import ImagePair, open_bytes, read_bytes, read_header, shown
from segapp.datasets.layouts.schemes import Color, Palettes, palette_of
from segapp.datasets.masks import (
    check_one_frame,
    color_codes,
    count_values,
    nodata_of,
    stored_ids,
    unscaled,
    whole_ids,
    windowed_tags,
)
from segapp.datasets.resources import MASK_READERS, READERS, evenly_spread, side_by_side
from segapp.errors import DataError

MAX_HEADERS, MAX_MASKS = 400, 2000
MAX_MASK_PX = 400_000_000  # pixels of the masks that are read: all masks of a small data set, so every value is found
MAX_COLORS = 256
"""Maximum number of colors that are counted in a mask, the most frequent; a mask with more is a photograph or lossy."""
UNREADABLE = (DataError, OSError, ValueError, SyntaxError)  # errors of `stored_pixels` for an unreadable mask

IGNORED = 255
"""The value of ignored pixels, also of those that are NaN in masks of floats."""

Value = int | Color
"""A value in masks of ids, or a color in RGB masks."""


@dataclass
class MaskContent:
    """Contents of masks."""

    num_masks: int = 0  # masks that were read
    num_all: int = 0  # all masks
    unread: dict[Path, str] = field(default_factory=dict)  # mask that could not be read -> why
    values: Counter[int] = field(default_factory=Counter)  # pixels by value, of masks of ids
    colors: Counter[Color] = field(default_factory=Counter)  # pixels by RGB color, of RGB masks
    masks_with: Counter[Value] = field(default_factory=Counter)  # masks by value or color
    nodata: dict[Value, float] = field(default_factory=dict)  # value or color -> the nodata of files that it stands for
    lossy: list[Path] = field(default_factory=list)  # masks that are JPEGs
    values_of: dict[Path, frozenset[Value]] = field(default_factory=dict)  # mask -> its values or colors
    colored: list[Path] = field(default_factory=list)  # masks with colors, or with a palette that says something
    palettes: Palettes = field(default_factory=Palettes)
    disagreement: str = ""  # sentence on the first palettes that disagree
    # height and width of every image whose header was read
    sizes_px: list[tuple[int, int]] = field(default_factory=list)

    @property
    def median_px(self) -> tuple[int, int]:
        return int(median(h for h, _ in self.sizes_px)), int(median(w for _, w in self.sizes_px))

    @property
    def pixels(self) -> dict[Value, int]:
        return dict(self.values) | dict(self.colors)

    def pixels_of(self, stored: Value) -> int:
        return self.colors[stored] if isinstance(stored, tuple) else self.values[stored]

    def share(self, stored: Iterable[Value]) -> float:
        return sum(map(self.pixels_of, stored)) / max(1, self.values.total() + self.colors.total())

    def percent(self, stored: Iterable[Value]) -> str:
        """Return the share of some values or colors as text: "4.2% of the pixels"."""
        share = self.share(stored)
        number = f"{share:.1%}" if share >= 0.01 else f"{share:.3%}" if share >= 1e-5 else "below 0.001%"
        return f"{number} of the pixels" + ("" if self.num_masks == self.num_all else " read")


def read_contents(pairs: Sequence[ImagePair], *, as_rgb: bool = False) -> MaskContent:
    """Read headers of images and complete masks, evenly over the pairs; unreadable files are counted.

    Masks of ids are read as colors with `as_rgb`, or if some masks are color images. DataError is raised if no image
    can be read, or if only some of the masks have colors.
    """
    found = side_by_side(_size, evenly_spread(pairs, MAX_HEADERS), READERS)
    sizes = [size for size in found if not isinstance(size, DataError)]
    if not sizes:
        raise DataError(f"none of {len(pairs)} images can be read, such as {_size(pairs[0])}")
    content = MaskContent(num_all=len(pairs), sizes_px=sizes)
    height, width = content.median_px
    chosen = evenly_spread(pairs, min(MAX_MASKS, max(20, MAX_MASK_PX // (height * width))))
    masks = [pair.mask for pair in chosen if pair.mask is not None]
    _count_all(content, masks, as_rgb=False)
    if content.values and (content.colors or as_rgb):
        _refuse_mixture(content)
        # Some masks were counted as ids, although the others show that all have colors.
        content = MaskContent(num_all=len(pairs), sizes_px=sizes)
        _count_all(content, masks, as_rgb=True)
    return content


def _refuse_mixture(content: MaskContent) -> None:
    """Raise DataError if masks without colors hold values that are not grays of the masks with colors."""
    colors = {*content.colors, *content.palettes.index_of}
    plain = [(mask, own) for mask, own in content.values_of.items() if mask not in content.colored]
    ids = [mask for mask, own in plain if any((value,) * 3 not in colors for value in own)]
    if ids and any(len({*color}) > 1 for color in colors):
        raise DataError(
            f"{len(ids)} masks hold ids, such as {shown(ids[0])}, and {len(content.colored)} hold colors, such as "
            f"{shown(content.colored[0])}: save all as ids, or all as colors"
        )


def _count_all(content: MaskContent, masks: Sequence[Path], *, as_rgb: bool) -> None:
    results = side_by_side(partial(count_pixels, as_rgb=as_rgb), masks, MASK_READERS, 4)
    for mask, counted in zip(masks, results, strict=True):
        if isinstance(counted, str):
            content.unread[mask] = counted
            continue
        values, colors, format, palette, nodata = counted
        content.num_masks += 1
        content.values.update(values)
        content.colors.update(colors)
        content.nodata.update(nodata)
        content.masks_with.update([*values, *colors])
        content.values_of[mask] = frozenset([*values, *colors])
        content.colored += [mask] if colors or palette else []
        content.disagreement = content.disagreement or content.palettes.add(mask, palette)
        if format in ("JPEG", "MPO"):
            content.lossy.append(mask)


def _size(pair: ImagePair) -> tuple[int, int] | DataError:
    try:
        header = read_header(pair.image)
    except DataError as error:
        return error
    return header.height_px, header.width_px


def count_pixels(
    path: Path, *, as_rgb: bool
) -> tuple[dict[int, int], dict[Color, int], str, Mapping[int, Color], dict[Value, float]] | str:
    """Return the pixels of one mask by value and by color, its format, palette and nodata; or why it cannot be read."""
    try:
        pixels, nodata, image = stored_pixels(path, as_rgb=as_rgb)
    except UNREADABLE as error:
        cure = "" if isinstance(error, DataError) else ": save it as PNG of ids"
        return (str(error).removeprefix(f"{shown(path)}: ") or type(error).__name__) + cure
    format, seen = "TIFF" if image is None else str(image.format), dict[Value, float]()
    if nodata is not None:
        value = int(nodata) if is_id(nodata) else IGNORED
        seen[value if pixels.ndim == 2 else (value, value, value)] = nodata
    if pixels.ndim == 2:
        return count_values(pixels), {}, format, {} if image is None else palette_of(image), seen
    histogram = count_values(color_codes(pixels))
    # One color more than a mask may have, so that a photograph is recognized.
    most = sorted(histogram, key=lambda code: -histogram[code])[: MAX_COLORS + 1]
    colors = {(code >> 16, code >> 8 & 255, code & 255): histogram[code] for code in most}
    return {}, colors, format, {}, seen


def is_id(nodata: float) -> bool:
    return 0 <= nodata <= 65_535


def stored_pixels(path: Path, *, as_rgb: bool) -> tuple[NDArray[np.uint8 | np.int64], float | None, Image.Image | None]:
    """Return the ids (H, W) or the colors (H, W, 3) of a mask as stored, its nodata, and how Pillow opens it.

    NaN and a nodata value that is no id become `IGNORED`. A large mask that is read in windows is not opened by Pillow.

    An error in UNREADABLE is raised if the file is damaged, or has numbers with fractions.
    """
    image: Image.Image | None = None
    if (tags := windowed_tags(path, rgb=True) or (None if as_rgb else windowed_tags(path, rgb=False))) is not None:
        pixels, nodata = stored_ids(path, tags), tags.nodata
    else:
        data = read_bytes(path)
        image = open_bytes(data, path)
        check_one_frame(image, path)
        nodata = nodata_of(image)
        is_colored = as_rgb or image.mode in ("RGB", "RGBA", "CMYK", "YCbCr", "LA", "PA")
        pixels = np.asarray(image.convert("RGB")) if is_colored else unscaled(np.asarray(image), image, data)
    if pixels.ndim == 3:
        return pixels, nodata, image
    # A nodata value that is an id may be a class, so its pixels are counted first.
    is_counted = nodata is None or is_id(nodata)
    pixels, is_missing = whole_ids(pixels, path, None if is_counted else nodata)
    pixels = np.where(is_missing, IGNORED, pixels) if is_missing.any() else pixels
    return pixels.astype(np.uint8 if pixels.dtype in (np.uint8, np.bool_) else np.int64), nodata, image
