"""Decode images: 8-bit ones as RGB, and bands of any dtype as they are stored.

Most images are decoded by OpenCV from bytes in memory (its file functions crash on names that are not UTF-8), the bands
of a TIFF by rasterio. PNGs are verified first, because a damaged one may decode without an error. No value is scaled or
dropped silently: an image that does not have the pixel format of the data set raises DataError, and so does a file that
is missing, damaged, truncated or too large.

Shapes: H, W the upright height and width in pixels; B bands.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from segapp.datasets.files import (
    MAX_PIXELS,
    check_pixels,
    damaged,
    exif_orientation,
    is_complete,
    open_bytes,
    read_bytes,
    read_header,
    shown,
    tiff_tags,
)
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, Pixels, StoredPixels
from segapp.datasets.images.png import decode_png
from segapp.datasets.images.raster import read_bands, require_rasterio
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES, TiffTags, is_tiff
from segapp.datasets.orientation import upright
from segapp.errors import DataError

# OpenCV's messages about damaged files would mix with our output; such files raise DataError.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_PLAIN_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"}


def read_image(path: Path, pixels: PixelFormat = RGB8, *, max_pixels: int = MAX_PIXELS) -> Pixels:
    return read_with_nodata(path, pixels, max_pixels=max_pixels)[0]


def read_with_nodata(
    path: Path, pixels: PixelFormat = RGB8, *, max_pixels: int = MAX_PIXELS
) -> tuple[Pixels, NDArray[np.bool_] | None]:
    """Return an image in the format of its data set, shape (H, W, B), with its EXIF orientation applied.

    In the format `RGB8`, gray, palette and CMYK images are converted to RGB and alpha is dropped. In other formats the
    bands are returned exactly as stored. Of an animation, the first frame is read. Nodata of a TIFF is replaced by the
    mean of its band; the second result is its mask (`PixelFormat.fill_nodata`).

    A TIFF that can be read in windows may have more than `max_pixels`.
    """
    stored, tags = _read(path, pixels, max_pixels)
    return pixels.fill_nodata(stored, tags.nodata if tags is not None and tags.has_plain_values else None)


def _read(path: Path, pixels: PixelFormat, max_pixels: int) -> tuple[Pixels, TiffTags | None]:
    """Return an image as stored, and its tags if it is a TIFF."""
    data = None if path.suffix.lower() in TIFF_SUFFIXES else read_bytes(path)  # a TIFF may be too large
    tags = tiff_tags(path) if data is None or is_tiff(data) else None
    if tags is not None:
        check_pixels(path, tags.stored, pixels)
        is_large = tags.height_px * tags.width_px > max_pixels
        # Only the whole band shows if it is really alpha.
        if pixels.bands is not None or (tags.is_read_by_rasterio and (is_large or not tags.has_alpha)):
            return _read_tiff(path, tags, pixels, max_pixels), tags
    data = read_bytes(path) if data is None else data
    image = open_bytes(data, path, max_pixels)
    check_complete(data, image, path)
    if pixels.bands is None and (plain := decode_png(data, image)) is not None:
        return plain if plain.ndim == 3 else cv2.cvtColor(plain, cv2.COLOR_GRAY2RGB), None
    if pixels.bands is None:
        return _read_rgb(data, path, max_pixels, tags, pixels), tags
    stored = _decode_all_bands(data, path, max_pixels)
    check_pixels(path, StoredPixels(stored.shape[2], str(stored.dtype), is_picture=False), pixels)
    return np.ascontiguousarray(stored[..., [band - 1 for band in pixels.bands]]), None


def _read_tiff(path: Path, tags: TiffTags, pixels: PixelFormat, max_pixels: int) -> Pixels:
    """Return the bands of a TIFF, or RGB of a large image, upright."""
    require_rasterio(path, f"a TIFF of pixels {tags.stored}")
    if not tags.can_be_read_in_windows and tags.height_px * tags.width_px > max_pixels:
        raise DataError(
            f"{shown(path)}: too large ({tags.width_px}x{tags.height_px} pixels; at most {max_pixels} are read of a "
            "rotated TIFF or one with a palette): save it upright and without a palette",
            path=path,
        )
    return upright(read_bands(path, bands_of(tags, pixels)), tags.orientation)


def bands_of(tags: TiffTags, pixels: PixelFormat) -> tuple[int, ...]:
    """Return the bands of a TIFF for an image in this format; for RGB, the band of a gray image is repeated."""
    return pixels.bands or ((1, 2, 3) if tags.bands >= 3 else (1, 1, 1))


def _read_rgb(
    data: bytes, path: Path, max_pixels: int, tags: TiffTags | None, pixels: PixelFormat
) -> NDArray[np.uint8]:
    """Return an 8-bit image as RGB."""
    image = decode(data, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_ANYDEPTH)  # applies the orientation
    if image is None:
        return _decode_rgb_with_pillow(data, path, max_pixels)
    if image.dtype != np.uint8:
        stored = decode(data, cv2.IMREAD_UNCHANGED)
        num_bands = 1 if stored is None or stored.ndim == 2 else stored.shape[2]
        check_pixels(path, StoredPixels(num_bands, str(image.dtype), is_picture=False), pixels)
    if tags is not None and tags.bands in {2, 4} and tags.has_alpha:
        _check_alpha(data, path, tags, pixels)
    return image


def _check_alpha(data: bytes, path: Path, tags: TiffTags, pixels: PixelFormat = RGB8) -> None:
    """Check that the band of a TIFF that is marked as alpha is one: some programs mark any fourth band."""
    stored = decode(data, cv2.IMREAD_UNCHANGED)
    is_opacity = stored is None or stored.ndim < 3 or bool(np.isin(stored[..., -1], (0, 255)).all())
    if not is_opacity:
        check_pixels(path, StoredPixels(tags.bands, tags.dtype, is_picture=False), pixels)


def pixels_of(path: Path) -> StoredPixels:
    """Return the kind of an image's pixels; a band that is marked as alpha is checked by its values."""
    header = read_header(path)
    stored = header.stored or StoredPixels(3, "uint8", is_picture=True)
    tags = tiff_tags(path) if header.format == "TIFF" else None
    if tags is None or not stored.is_picture or not tags.has_alpha or tags.bands not in {2, 4}:
        return stored
    try:
        _check_alpha(read_bytes(path), path, tags)
    except DataError:
        return replace(stored, is_picture=False)
    return stored


def _decode_all_bands(data: bytes, path: Path, max_pixels: int) -> Pixels:
    """Return all bands (H, W, B) of an image that is not a TIFF, upright; RGB for a palette."""
    pixels = decode(data, cv2.IMREAD_UNCHANGED)
    if pixels is None:
        return _decode_rgb_with_pillow(data, path, max_pixels)
    image = open_bytes(data, path, max_pixels)
    if pixels.ndim == 2:
        pixels = pixels[..., None]
    elif image.mode in {"LA", "PA"}:  # OpenCV spreads gray over three bands
        pixels = pixels[..., [0, 3]]
    elif pixels.shape[2] >= 3:
        pixels = pixels[..., [2, 1, 0, *range(3, pixels.shape[2])]]
    return upright(pixels, exif_orientation(image))


def decode(data: bytes, flags: int) -> Pixels | None:
    try:
        return cv2.imdecode(np.frombuffer(data, np.uint8), flags)
    except cv2.error:
        return None


def _decode_rgb_with_pillow(data: bytes, path: Path, max_pixels: int) -> NDArray[np.uint8]:
    """Return the image as Pillow decodes it, for formats that OpenCV does not support; raise if it cannot."""
    image = open_bytes(data, path, max_pixels)
    if image.mode not in _PLAIN_MODES:
        raise damaged(path, f"no decoder for {image.format} of mode {image.mode}")
    try:
        return np.array(ImageOps.exif_transpose(image).convert("RGB"), dtype=np.uint8)
    except Exception as error:  # damaged pixel data is reported by Pillow as any of a dozen exception types
        raise damaged(path, error) from error


def check_complete(data: bytes, image: Image.Image, path: Path) -> None:
    """Raise DataError for a truncated file or a PNG with wrong checksums; `image` cannot be used afterwards."""
    if not is_complete(data, str(image.format)):
        raise damaged(path, f"truncated {image.format}: its end is missing")
    if image.format == "PNG":
        try:
            image.verify()
        except Exception as error:  # as above
            raise damaged(path, error) from error
