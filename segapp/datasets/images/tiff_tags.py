"""Read the tags of a TIFF: size, bands, type and layout of its pixels, which Pillow knows for few types; its pages.

Classic TIFF (TIFF 6.0, section 2) and BigTIFF, both byte orders. Only the tags are read, a few kilobytes. The
description that OME, ImageJ and tifffile write says what the pages are.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import struct
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

from segapp.datasets.images.pixel_format import DTYPES, StoredPixels

TIFF_SUFFIXES = (".tif", ".tiff")

_MAX_ENTRIES = 4096
_MAX_VALUES = 64
_MAX_DESCRIPTION_BYTES = 2**22
_MAX_PAGES = 4096
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_ORIENTATION, _BANDS, _TILE_WIDTH, _EXTRA, _FORMAT = 274, 277, 322, 338, 339
_SUBFILE, _DESCRIPTION = 254, 270
_WANTED = {
    _SUBFILE,
    _WIDTH,
    _HEIGHT,
    _BITS,
    _COMPRESSION,
    _PHOTOMETRIC,
    _ORIENTATION,
    _BANDS,
    _TILE_WIDTH,
    _EXTRA,
    _FORMAT,
    _DESCRIPTION,
}
_TYPES = {1: "B", 2: "s", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 16: "Q", 17: "q"}
_KINDS = {1: "uint", 2: "int", 3: "float", 4: "uint", 5: "complex", 6: "complex"}
_MAGIC = {b"II*\0": ("<", False), b"MM\0*": (">", False), b"II+\0": ("<", True), b"MM\0+": (">", True)}

BLACK_IS_ZERO, RGB, CMYK, YCBCR = 1, 2, 5, 6
"""Values of the tag PhotometricInterpretation."""


@dataclass(frozen=True)
class TiffTags:
    """The tags of an image.

    Attributes:
        height_px: rows as stored.
        width_px: columns as stored.
        bands: values per pixel.
        dtype: of a value, as numpy names it; `uint1` and the like for bits that numpy has no type for.
        photometric: meaning of the values, such as `RGB`.
        orientation: as in EXIF; 1: upright.
        has_alpha: the last band is marked as opacity.
        is_tiled: stored in tiles, not in strips.
        pages: number in the file, from 1, of each full page: the first, and those that are no smaller copies of it.
        axes: of the pages: "C" for channels, "Z" for depth, "T" for time, several of them, "?" if nothing says it;
            "" for one page.
    """

    height_px: int
    width_px: int
    bands: int
    dtype: str
    photometric: int
    orientation: int
    has_alpha: bool
    is_tiled: bool
    pages: tuple[int, ...] = (1,)
    axes: str = ""

    @property
    def stored(self) -> StoredPixels:
        """What the pixels are; pages that are channels are bands."""
        if self.axes == "C" and self.bands == 1:
            return StoredPixels(len(self.pages), self.dtype, is_picture=False)
        is_picture = self.dtype in {"uint1", "uint2", "uint4", "uint8"} and (
            self.bands in {1, 3}
            or (self.photometric == CMYK and self.bands == 4)
            or (self.has_alpha and self.bands in {2, 4})
        )
        return StoredPixels(self.bands, self.dtype, is_picture, self._pages_in_words() if self.axes else "")

    def _pages_in_words(self) -> str:
        kinds = [_AXIS_WORDS.get(axis, f"axis {axis}") for axis in self.axes if axis != "?"]
        said = f"{len(self.pages)} pages" if len(self.pages) > 1 else "several planes"
        return f"{said} ({' x '.join(kinds)}, axes {self.axes}YX)" if kinds else f"{said} of unsaid meaning"

    @property
    def can_be_read_in_windows(self) -> bool:
        """True if rasterio, which must be installed, reads any part of the image as the whole is read."""
        has_plain_values = self.photometric in {BLACK_IS_ZERO, RGB, YCBCR} or self.dtype != "uint8"
        return has_plain_values and self.orientation == 1 and self.dtype in DTYPES and has_rasterio()

    @property
    def upright_px(self) -> tuple[int, int]:
        """Height and width with the orientation applied."""
        size = (self.height_px, self.width_px)
        return size[::-1] if self.orientation in {5, 6, 7, 8} else size


def has_rasterio() -> bool:
    """Return True if the package rasterio is installed."""
    return importlib.util.find_spec("rasterio") is not None


def is_tiff(start: bytes) -> bool:
    """Return True if the first bytes of a file are those of a TIFF."""
    return start[:4] in _MAGIC


def read_tiff_tags(file: BinaryIO) -> TiffTags:
    """Return the tags of the first image of an open TIFF.

    Raises:
        ValueError: it is no TIFF, or its directory is damaged.
    """
    try:
        values, following, order, is_big = _read_directory(file)
        tags = _as_tags(values)
        pages = _full_pages(file, tags, following, order, is_big)
        axes = _axes(_description(values), len(pages))
        return replace(tags, pages=pages, axes=axes)
    except (struct.error, OverflowError, OSError) as error:
        raise ValueError(f"the directory of the TIFF is damaged ({error})") from error


def _as_tags(values: dict[int, tuple[Any, ...]]) -> TiffTags:
    bands = values.get(_BANDS, (1,))[0]
    bits, formats = values.get(_BITS, (1,)), values.get(_FORMAT, (1,))
    if _WIDTH not in values or _HEIGHT not in values or min(values[_WIDTH][0], values[_HEIGHT][0], bands) < 1:
        raise ValueError("the TIFF has no size")
    if len(set(bits)) > 1 or len(set(formats)) > 1:
        raise ValueError(f"the bands of the TIFF differ in type (bits {bits}, sample formats {formats})")
    orientation = values.get(_ORIENTATION, (1,))[0]
    return TiffTags(
        height_px=values[_HEIGHT][0],
        width_px=values[_WIDTH][0],
        bands=bands,
        dtype=f"{_KINDS.get(formats[0], 'uint')}{bits[0]}",
        photometric=values.get(_PHOTOMETRIC, (BLACK_IS_ZERO,))[0],
        orientation=orientation if 1 <= orientation <= 8 else 1,
        has_alpha=values.get(_EXTRA, (0,))[-1] in {1, 2},
        is_tiled=_TILE_WIDTH in values,
    )


_AXIS_WORDS = {"C": "channels", "Z": "depth", "T": "time", "S": "samples", "I": "a series"}


def _description(values: dict[int, tuple[Any, ...]]) -> str:
    data = values.get(_DESCRIPTION, (b"",))[0]
    return data.decode("utf-8", "replace").rstrip("\0") if isinstance(data, bytes) else ""


def _axes(description: str, num_pages: int) -> str:
    r"""Return the axes of the planes of a file, the slowest first, by its description.

    >>> _axes("ImageJ=1.53t\nimages=6\nchannels=2\nslices=3\n", 6)
    'ZC'
    >>> _axes('{"shape": [2, 48, 64], "axes": "CYX"}', 2), _axes("", 3), _axes("a photograph", 1)
    ('C', '?', '')
    """
    sizes = _said_sizes(description)
    wide = {axis: size for axis, size in sizes.items() if size > 1}
    if num_pages == 1:  # of a series of files, each has one plane; ImageJ's large stacks have one directory for all
        return "".join(wide) if description.startswith(("ImageJ=", "{")) else ""
    return "".join(wide) if math.prod(wide.values()) == num_pages else "?"


def _said_sizes(description: str) -> dict[str, int]:
    """Return axis -> size of the planes that a description of OME, ImageJ or tifffile names."""
    if "<OME" in description or "OME-XML" in description:
        found = {axis: re.search(rf'\bSize{axis}="(\d+)"', description) for axis in "TZC"}
        samples = re.search(r'\bSamplesPerPixel="(\d+)"', description)
        sizes = {axis: int(match[1]) for axis, match in found.items() if match}
        return sizes | {"C": sizes.get("C", 1) // max(1, int(samples[1]) if samples else 1)}
    if description.startswith("ImageJ="):
        words = {"frames": "T", "slices": "Z", "channels": "C"}
        lines = dict(line.split("=", 1) for line in description.splitlines() if "=" in line)
        sizes = {axis: int(lines[word]) for word, axis in words.items() if lines.get(word, "").isdigit()}
        images = lines.get("images", "1")
        return sizes or ({"I": int(images)} if images.isdigit() else {})
    if description.startswith("{"):
        try:
            said = json.loads(description)
            return dict(zip(said["axes"][: said["axes"].index("Y")], said["shape"], strict=False))
        except (ValueError, KeyError, TypeError):
            return {}
    return {}


def _full_pages(file: BinaryIO, first: TiffTags, offset: int, order: str, is_big: bool) -> tuple[int, ...]:
    """Return the numbers of the full pages: those not marked as smaller copies or masks, nor half as large or less."""
    pages, number, seen = [1], 1, set()
    while offset and offset not in seen and number < _MAX_PAGES:
        seen.add(offset)
        number += 1
        values, offset = _read_entries(file, offset, order, is_big)
        is_copy = values.get(_SUBFILE, (0,))[0] & 5
        sizes = (values.get(_HEIGHT, (0,))[0], values.get(_WIDTH, (0,))[0])
        is_small = 2 * sizes[0] <= first.height_px + 1 and 2 * sizes[1] <= first.width_px + 1
        if not is_copy and not is_small:
            pages.append(number)
    return tuple(pages)


def _read_directory(file: BinaryIO) -> tuple[dict[int, tuple[Any, ...]], int, str, bool]:
    """Return the first values of the tags that are wanted, the offset of the next directory, and the file's order."""
    file.seek(0)
    start = file.read(16)
    if not is_tiff(start):
        raise ValueError("no TIFF")
    order, is_big = _MAGIC[start[:4]]
    offset = struct.unpack_from(order + "Q", start, 8)[0] if is_big else struct.unpack_from(order + "I", start, 4)[0]
    return *_read_entries(file, offset, order, is_big), order, is_big


def _read_entries(file: BinaryIO, offset: int, order: str, is_big: bool) -> tuple[dict[int, tuple[Any, ...]], int]:
    """Return the first values of the wanted tags of a directory, and the offset of the next one."""
    count_type, entry = ("Q", order + "HHQ8s") if is_big else ("H", order + "HHI4s")
    if offset > file.seek(0, os.SEEK_END):
        raise ValueError("the directory of the TIFF lies beyond its end")
    file.seek(offset)
    count = struct.unpack(order + count_type, file.read(struct.calcsize(count_type)))[0]
    if count > _MAX_ENTRIES:
        raise ValueError(f"the TIFF has {count} tags")
    size = struct.calcsize(entry)
    entries = file.read(count * size)
    following = file.read(8 if is_big else 4)
    found: dict[int, tuple[Any, ...]] = {}
    for at in range(0, count * size, size):
        tag, kind, number, inline = struct.unpack_from(entry, entries, at)
        if tag in _WANTED and kind in _TYPES and number and (kind == 2) == (tag == _DESCRIPTION):
            most = _MAX_DESCRIPTION_BYTES if tag == _DESCRIPTION else _MAX_VALUES
            values = _values(file, order, _TYPES[kind], min(number, most), inline)
            if found.setdefault(tag, values) != values and tag != _DESCRIPTION:  # libraries differ in which they use
                raise ValueError(f"the TIFF has tag {tag} twice, with different values")
    is_whole = len(following) == (8 if is_big else 4)  # a file may end with its only directory
    return found, struct.unpack(order + ("Q" if is_big else "I"), following)[0] if is_whole else 0


def _values(file: BinaryIO, order: str, kind: str, number: int, inline: bytes) -> tuple[Any, ...]:
    """Return values that lie in an entry where they fit, else at the offset in it."""
    form = f"{order}{number}{kind}"
    size = struct.calcsize(form)
    if size > len(inline):
        file.seek(struct.unpack(order + ("Q" if len(inline) == 8 else "I"), inline)[0])
        inline = file.read(size)
    return struct.unpack_from(form, inline)
