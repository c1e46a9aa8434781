"""Read the tags of a TIFF's first image: size, bands, type and layout of its pixels, which Pillow knows for few types.

Classic TIFF (TIFF 6.0, section 2) and BigTIFF, both byte orders. Only the tags are read, a few kilobytes.
"""

from __future__ import annotations

import importlib.util
import os
import struct
from dataclasses import dataclass
from typing import BinaryIO

from segapp.datasets.images.pixel_format import DTYPES, StoredPixels

TIFF_SUFFIXES = (".tif", ".tiff")

_MAX_ENTRIES = 4096
_MAX_VALUES = 64
_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_ORIENTATION, _BANDS, _TILE_WIDTH, _EXTRA, _FORMAT = 274, 277, 322, 338, 339
_WANTED = {_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _ORIENTATION, _BANDS, _TILE_WIDTH, _EXTRA, _FORMAT}
_TYPES = {1: "B", 3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 16: "Q", 17: "q"}
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
    """

    height_px: int
    width_px: int
    bands: int
    dtype: str
    photometric: int
    orientation: int
    has_alpha: bool
    is_tiled: bool

    @property
    def stored(self) -> StoredPixels:
        """What the pixels are."""
        is_picture = self.dtype in {"uint1", "uint2", "uint4", "uint8"} and (
            self.bands in {1, 3}
            or (self.photometric == CMYK and self.bands == 4)
            or (self.has_alpha and self.bands in {2, 4})
        )
        return StoredPixels(self.bands, self.dtype, is_picture)

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
        return _as_tags(_read_directory(file))
    except (struct.error, OverflowError, OSError) as error:
        raise ValueError(f"the directory of the TIFF is damaged ({error})") from error


def _as_tags(values: dict[int, tuple[int, ...]]) -> TiffTags:
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


def _read_directory(file: BinaryIO) -> dict[int, tuple[int, ...]]:
    """Return the first values of the tags that are wanted."""
    file.seek(0)
    start = file.read(16)
    if not is_tiff(start):
        raise ValueError("no TIFF")
    order, is_big = _MAGIC[start[:4]]
    offset = struct.unpack_from(order + "Q", start, 8)[0] if is_big else struct.unpack_from(order + "I", start, 4)[0]
    count_type, entry = ("Q", order + "HHQ8s") if is_big else ("H", order + "HHI4s")
    if offset > file.seek(0, os.SEEK_END):
        raise ValueError("the directory of the TIFF lies beyond its end")
    file.seek(offset)
    count = struct.unpack(order + count_type, file.read(struct.calcsize(count_type)))[0]
    if count > _MAX_ENTRIES:
        raise ValueError(f"the TIFF has {count} tags")
    size = struct.calcsize(entry)
    entries = file.read(count * size)
    found: dict[int, tuple[int, ...]] = {}
    for at in range(0, count * size, size):
        tag, kind, number, inline = struct.unpack_from(entry, entries, at)
        if tag in _WANTED and kind in _TYPES and number:
            values = _values(file, order, _TYPES[kind], min(number, _MAX_VALUES), inline)
            if found.setdefault(tag, values) != values:  # libraries differ in which of them they use
                raise ValueError(f"the TIFF has tag {tag} twice, with different values")
    return found


def _values(file: BinaryIO, order: str, kind: str, number: int, inline: bytes) -> tuple[int, ...]:
    """Return values that lie in an entry where they fit, else at the offset in it."""
    form = f"{order}{number}{kind}"
    size = struct.calcsize(form)
    if size > len(inline):
        file.seek(struct.unpack(order + ("Q" if len(inline) == 8 else "I"), inline)[0])
        inline = file.read(size)
    return struct.unpack_from(form, inline)
