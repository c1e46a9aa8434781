"""Read the tags of a TIFF: its pages, and the size, bands, dtype and layout of its pixels.

Pillow supports only a few dtypes, so tifffile reads the tags. The description that OME, ImageJ and tifffile write says
what the pages are.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import re
import struct
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np

from segapp.datasets.images.pixel_format import DTYPES, StoredPixels

TIFF_SUFFIXES = (".tif", ".tiff")

NODATA_TAG = 42113
"""GDAL_NODATA: the value of pixels without data, as text; GDAL has one for all bands of a file."""

LARGE_PX = 2**22
"""Number of pixels from which an image is read in windows; decoding a smaller one takes a few milliseconds."""

_MAX_PAGES = 4096
# Values of the tag SampleFormat.
_KINDS = {1: "uint", 2: "int", 3: "float", 4: "uint", 5: "complex", 6: "complex"}
_MAGIC = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")

_OF_GDAL = {34887, 34927, 50001, 50002, 52546}
"""Compressions that OpenCV and Pillow may not decode: LERC, WebP, JPEG XL."""

BLACK_IS_ZERO, RGB, CMYK, YCBCR = 1, 2, 5, 6
"""Values of the tag PhotometricInterpretation."""


@dataclass(frozen=True)
class TiffTags:
    """The tags of an image."""

    height_px: int  # rows as stored
    width_px: int  # columns as stored
    bands: int  # values per pixel
    dtype: str  # dtype of a value, as numpy names it; `uint1` and the like for bits that numpy has no dtype for
    photometric: int  # meaning of the values, such as `RGB`
    orientation: int  # as in EXIF; 1: upright
    has_alpha: bool  # the last band is marked as alpha
    compression: int = 1
    nodata: float | None = None  # value of pixels without data, which may be NaN; None if the file declares none
    # number in the file, from 1, of each full page: the first, and pages that are not smaller copies of it
    pages: tuple[int, ...] = (1,)
    # axes of the pages: "C" channels, "Z" depth, "T" time, several of them, "?" if unknown; "" for one page
    # page
    axes: str = ""

    @property
    def stored(self) -> StoredPixels:
        """The pixels as stored; pages that are channels count as bands."""
        if self.axes == "C" and self.bands == 1 and len(self.pages) > 1:  # else one directory is for all channels
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
    def has_plain_values(self) -> bool:
        """True if decoders return the values of the file: they are no indices of a palette, and not inverted."""
        is_plain = self.photometric in {BLACK_IS_ZERO, RGB, YCBCR} or self.dtype != "uint8"
        return is_plain and self.dtype in DTYPES

    @property
    def can_be_read_in_windows(self) -> bool:
        """True if rasterio is installed and reads any part of the image exactly like the whole."""
        return self.has_plain_values and self.orientation == 1 and has_rasterio()

    @property
    def is_read_in_windows(self) -> bool:
        """True for an image that rasterio reads, the whole as well as a part, whatever asks for it."""
        return is_large(self.height_px, self.width_px) and self.can_be_read_in_windows

    @property
    def is_read_by_rasterio(self) -> bool:
        """True for an image that is read in windows, and for a smaller one that other decoders may not read."""
        are_plain_bands = self.photometric == BLACK_IS_ZERO and self.bands == 3
        is_foreign = are_plain_bands or self.compression in _OF_GDAL
        return self.is_read_in_windows or (is_foreign and self.can_be_read_in_windows)


def is_large(height_px: int, width_px: int) -> bool:
    return height_px * width_px >= LARGE_PX


def has_rasterio() -> bool:
    return importlib.util.find_spec("rasterio") is not None


def is_tiff(start: bytes) -> bool:
    return start[:4] in _MAGIC


def parse_nodata(text: str | None, dtype: str) -> float | None:
    """Return the value of the tag `NODATA_TAG`; None without it, or if no pixel of a dtype can have its value.

    >>> parse_nodata("-9999", "int16"), parse_nodata("-9999", "uint8"), parse_nodata("-3.4e+38 ", "float32")
    (-9999.0, None, -3.3999999521443642e+38)
    """
    try:
        value = np.float64(str(text).rstrip("\0 "))
        with np.errstate(all="ignore"):
            stored = value.astype(dtype)
        return float(stored) if "float" in dtype or stored == value else None
    except (TypeError, ValueError):  # no number, or a dtype that numpy does not have
        return None


def read_tiff_tags(file: BinaryIO) -> TiffTags:
    """Return the tags of the first image of an open TIFF.

    Raises:
        ValueError: the file is no TIFF, or its directory is damaged.
    """
    import tifffile  # takes a quarter of a second, and most data sets have no TIFF

    logging.getLogger("tifffile").setLevel(logging.CRITICAL)  # the reader of the pixels reports damage
    try:
        file.seek(0)
        with tifffile.TiffFile(file) as tiff:
            first = tiff.pages.first
            tags = _as_tags(first.tags)
            pages = _full_pages(tiff, tags)
            return replace(tags, pages=pages, axes=_axes(first.description, len(pages)))
    except (struct.error, OverflowError, OSError, IndexError, TypeError, KeyError) as error:
        raise ValueError(f"the directory of the TIFF is damaged ({error})") from error


def _values(tags: Any, name: str, default: int) -> tuple[int, ...]:
    """Return the integers of a tag.

    Raises:
        ValueError: the tag is no integer, or occurs twice with different values, and libraries differ in which they
            use.
    """
    found = [tag.value for tag in tags.getall(name, ())] or [default]
    values = [value if isinstance(value, tuple) else (value,) for value in found]
    if len(set(values)) > 1:
        raise ValueError(f"the TIFF has tag {name} twice, with different values")
    return tuple(map(int, values[0]))


def _as_tags(tags: Any) -> TiffTags:
    bands = _values(tags, "SamplesPerPixel", 1)[0]
    bits, formats = _values(tags, "BitsPerSample", 1), _values(tags, "SampleFormat", 1)
    height_px, width_px = _values(tags, "ImageLength", 0)[0], _values(tags, "ImageWidth", 0)[0]
    if min(height_px, width_px, bands) < 1:
        raise ValueError("the TIFF has no size")
    if len(set(bits)) > 1 or len(set(formats)) > 1:
        raise ValueError(f"the bands of the TIFF differ in type (bits {bits}, sample formats {formats})")
    orientation = _values(tags, "Orientation", 1)[0]
    dtype = f"{_KINDS.get(formats[0], 'uint')}{bits[0]}"
    return TiffTags(
        height_px=height_px,
        width_px=width_px,
        bands=bands,
        dtype=dtype,
        photometric=_values(tags, "PhotometricInterpretation", BLACK_IS_ZERO)[0],
        orientation=orientation if 1 <= orientation <= 8 else 1,
        has_alpha=_values(tags, "ExtraSamples", 0)[-1] in {1, 2},
        compression=_values(tags, "Compression", 1)[0],
        nodata=parse_nodata(tags.valueof(NODATA_TAG), dtype),
    )


_AXIS_WORDS = {"C": "channels", "Z": "depth", "T": "time", "S": "samples", "I": "a series"}


def _axes(description: str, num_pages: int) -> str:
    r"""Return the axes of the planes of a file, the slowest first, from its description.

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
    """Return axis -> size of the planes in a description of OME, ImageJ or tifffile."""
    if "<OME" in description or "OME-XML" in description:
        found = {axis: re.search(rf'\bSize{axis}="(\d+)"', description) for axis in "TZC"}
        samples = re.search(r'\bSamplesPerPixel="(\d+)"', description)
        sizes = {axis: int(match[1]) for axis, match in found.items() if match}
        # SizeC counts the samples of a pixel too, and the axis C only the planes.
        return sizes | {"C": sizes.get("C", 1) // max(1, int(samples[1]) if samples else 1)}
    if description.startswith("ImageJ="):
        words = {"frames": "T", "slices": "Z", "channels": "C"}
        lines = dict(line.split("=", 1) for line in description.splitlines() if "=" in line)
        sizes = {axis: int(lines[word]) for word, axis in words.items() if lines.get(word, "").isdecimal()}
        images = lines.get("images", "1")
        return sizes or ({"I": int(images)} if images.isdecimal() else {})
    if description.startswith("{"):
        try:
            said = json.loads(description)
            return dict(zip(said["axes"][: said["axes"].index("Y")], said["shape"], strict=False))
        # Any program may write a description that begins with a brace.
        except (ValueError, KeyError, TypeError):
            return {}
    return {}


def _full_pages(tiff: Any, first: TiffTags) -> tuple[int, ...]:
    """Return the numbers of the full pages: not marked as smaller copies or masks, and more than half as large."""
    pages, offsets = [1], {tiff.pages.first.offset}
    for number in range(2, _MAX_PAGES):
        try:
            page = tiff.pages[number - 1]
        except (IndexError, ValueError):  # after the last page, or a damaged chain of pages
            break
        is_copy = _values(page.tags, "NewSubfileType", 0)[0] & 5
        is_small = 2 * page.imagelength <= first.height_px + 1 and 2 * page.imagewidth <= first.width_px + 1
        if not is_copy and not is_small:
            pages.append(number)
        if page.offset in offsets:  # a damaged chain loops
            break
        offsets.add(page.offset)
    return tuple(pages)
