"""Read and write TIFFs with any number of bands, whole or in windows, with rasterio (the extra `geo`).

This is the only module that imports rasterio. Files are opened only as TIFFs, because GDAL's other formats may refer to
further files and addresses. A file that cannot be read raises DataError.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

import errno
import logging
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import ImagePair, check_same_size, damaged, read_header, shown, tiff_tags
from segapp.datasets.images.pixel_format import Pixels
from segapp.datasets.images.tiff_tags import TIFF_SUFFIXES, has_rasterio
from segapp.datasets.resources import READERS, side_by_side
from segapp.errors import DataError, install_command
from segapp.run.words import first_line

Window = tuple[slice, slice]

_CACHE_MIB = 64
"""Size of GDAL's cache of decoded blocks in each process; its default is a share of the machine's memory."""


_FILTERS = threading.RLock()


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Hide warnings about a missing georeference; in two threads at a time, one would keep the other's filters."""
    with _FILTERS, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def require_rasterio(path: Path, what: str) -> None:
    if not has_rasterio():
        raise DataError(f"{shown(path)}: {what} needs the package rasterio: {install_command('geo')}", path=path)


@contextmanager
def opened(path: Path, page: int | None = None) -> Iterator[Any]:
    """Open a TIFF, or one of its pages, counted from 1, as a rasterio data set."""
    require_rasterio(path, "a TIFF of this kind")
    if path.exists() and not path.is_file():  # GDAL would wait for a pipe
        raise damaged(path, "not a regular file")
    import rasterio
    from rasterio.errors import RasterioError, RasterioIOError

    logging.getLogger("rasterio").setLevel(logging.CRITICAL)  # damaged files raise
    options = {"GDAL_CACHEMAX": _CACHE_MIB, "GDAL_DISABLE_READDIR_ON_OPEN": "EMPTY_DIR", "GDAL_PAM_ENABLED": "NO"}
    full = path.absolute()  # rasterio takes a file "http:box:80?x.tif" for an address
    name = full if page is None else f"GTIFF_DIR:{page}:{full}"
    try:
        with rasterio.Env(**options):
            with _without_warnings():
                source = rasterio.open(name, driver="GTiff")
            with source:
                yield source
    except (RasterioError, RasterioIOError) as error:
        raise damaged(path, first_line(error)) from error


def read_bands(path: Path, bands: Sequence[int], window: Window | None = None) -> Pixels:
    """Return bands of a TIFF, counted from 1, as stored, shape (H, W, B); pages that are channels are bands."""
    with opened(path) as source:
        if max(bands) <= source.count:
            return _read(source, bands, window)
    tags = tiff_tags(path)
    if tags is None or tags.axes != "C" or max(bands) > len(tags.pages):
        raise damaged(path, f"it has no band {max(bands)}")
    planes = []
    for band in bands:
        with opened(path, tags.pages[band - 1]) as source:
            planes.append(_read(source, [1], window))
    return np.concatenate(planes, axis=2)


def _read(source: Any, bands: Sequence[int], window: Window | None) -> Pixels:
    rows, columns = window or (slice(0, source.height), slice(0, source.width))
    pixels = source.read(list(bands), window=((rows.start, rows.stop), (columns.start, columns.stop)))
    return np.ascontiguousarray(np.moveaxis(pixels, 0, -1))


@dataclass(frozen=True)
class Georeference:
    """Position of the pixels of a GeoTIFF."""

    crs: str | None  # coordinate system as WKT; None if the file has none
    # a to f of x = a column + b row + c and y = d column + e row + f, at the corner of a pixel
    transform: tuple[float, ...]


IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""Transform to columns and rows."""


def crs_name(crs: str) -> str | None:
    """Return the URN of a coordinate system (WKT), such as urn:ogc:def:crs:EPSG::32632; None if it has no code."""
    from rasterio.crs import CRS

    authority = CRS.from_wkt(crs).to_authority()
    return None if authority is None else f"urn:ogc:def:crs:{authority[0]}::{authority[1]}"


def outlines(values_HW: NDArray[Any], mask_HW: NDArray[np.bool_]) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield the regions of equal values, connected by the sides of pixels, as GeoJSON polygons in pixels."""
    from rasterio.features import shapes

    regions = shapes(values_HW, mask_HW, connectivity=4)
    with _without_warnings():
        first = list(islice(regions, 1))  # finds all of them
    yield from ((geometry, int(value)) for geometry, value in chain(first, regions))


def _profile(size: tuple[int, int], dtype: np.dtype[Any], count: int, place: Georeference | None) -> dict[str, Any]:
    """Return the options for writing a TIFF: compressed without loss, in tiles if it is large."""
    from rasterio.transform import Affine

    profile = {"driver": "GTiff", "height": size[0], "width": size[1], "count": count, "dtype": dtype.name}
    profile |= {"compress": "deflate"}
    if place is not None:
        profile |= {"crs": place.crs, "transform": Affine(*place.transform)}
    options: dict[str, Any] = {"tiled": True, "blockxsize": 256, "blockysize": 256} if min(size) >= 256 else {}
    return profile | options


def encode_bands(
    pixels: Pixels,
    names: Sequence[str],
    description: str,
) -> bytes:
    """Return a TIFF of bands (H, W, B) of any dtype, with names for the first bands and a description."""
    require_rasterio(Path(names[0]), "writing an image of several bands")
    import rasterio
    from rasterio.io import MemoryFile

    height, width, count = pixels.shape
    with _without_warnings(), rasterio.Env(GDAL_PAM_ENABLED="NO"), MemoryFile() as memory:
        with memory.open(
            **_profile((height, width), pixels.dtype, count, None),
            interleave="pixel",
            photometric="minisblack",
            alpha="no",
        ) as file:
            file.update_tags(TIFFTAG_IMAGEDESCRIPTION=description)
            for band, name in enumerate(names[:count], start=1):
                file.set_band_description(band, name)
            file.write(np.ascontiguousarray(np.moveaxis(pixels, -1, 0)))
        return bytes(memory.read())


def read_description(path: Path) -> str | None:
    """Return the description of a TIFF; None if it has none or cannot be read."""
    try:
        with opened(path) as source:
            description = source.tags().get("TIFFTAG_IMAGEDESCRIPTION")
    except DataError:
        return None
    return None if description is None else str(description)


def read_georeference(path: Path) -> Georeference | None:
    with opened(path) as source:
        if source.crs is None and source.transform.is_identity:
            return None
        return Georeference(None if source.crs is None else source.crs.to_wkt(), tuple(source.transform)[:6])


def has_control_points(path: Path) -> bool:
    with opened(path) as source:
        return bool(source.gcps[0])


def read_corners(paths: Sequence[Path]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the corners of TIFFs on the map, (N, 4, 2), around each one, and their sides in pixels, (N, 2).

    All are in the coordinate system of the first TIFF that has one. Corners are NaN if they are not known in it.
    """
    from rasterio.crs import CRS
    from rasterio.errors import RasterioError
    from rasterio.warp import transform

    def read(path: Path) -> tuple[str | None, NDArray[np.float64], tuple[int, int]]:
        try:
            with opened(path) as source:
                width, height, affine = source.width, source.height, source.transform
                crs = None if source.crs is None else source.crs.to_wkt()
        except DataError:  # the reader of the pixels reports it
            return None, np.full((4, 2), np.nan), (1, 1)
        a, b, c, d, e, f = tuple(affine)[:6]
        places = np.array([(0, 0), (width, 0), (width, height), (0, height)]) @ [[a, d], [b, e]] + (c, f)
        return crs, np.where(affine.is_identity, np.nan, places), (width, height)

    found = [*side_by_side(read, paths, READERS)]
    map_crs = next((crs for crs, corners, _ in found if crs is not None and np.isfinite(corners).all()), None)
    for crs, corners, _ in found:
        if crs != map_crs and np.isfinite(corners).all():
            try:
                xs, ys = transform(CRS.from_wkt(crs), CRS.from_wkt(map_crs), *corners.T) if crs else (np.nan, np.nan)
            except RasterioError:
                xs = ys = np.nan
            corners[:, 0], corners[:, 1] = xs, ys
    corners = np.array([corners for _, corners, _ in found])
    corners[~np.isfinite(corners).all((1, 2))] = np.nan
    return corners, np.array([sides_px for *_, sides_px in found], np.float64)


def check_same_place(pair: ImagePair) -> None:
    """Raise DataError if image and a mask are GeoTIFFs of other places or sizes; half a pixel is convention."""
    image = known_place(pair.image)
    for path in pair.files[1:]:
        mask = known_place(path)
        if image is None or mask is None:
            continue
        names = [None if place.crs is None else crs_name(place.crs) for place in (image, mask)]
        moved = np.abs(np.subtract(image.transform, mask.transform))
        # Programs place the corner or the center of the first pixel, so an offset of half a pixel is accepted.
        is_moved = (moved > max(map(abs, image.transform[:2])) * np.array([1e-4, 1e-4, 0.75, 1e-4, 1e-4, 0.75])).any()
        if is_moved or (None not in names and names[0] != names[1]):
            said = [f"{place.transform} of {name}" for place, name in zip((image, mask), names, strict=True)]
            raise DataError(
                f"{shown(path)}: its georeference is {said[1]}, its image {shown(pair.image)} has {said[0]}: "
                "warp the mask to the grid of the image, or remove the wrong one with gdal_edit.py -unsetgt",
                path=path,
            )
        check_same_size(replace(pair, mask=path), read_header(pair.image).size_px, read_header(path).size_px)


def known_place(path: Path) -> Georeference | None:
    """Return the georeference of a file; None if it has none, or none that can be read."""
    try:
        return read_georeference(path) if path.suffix.lower() in TIFF_SUFFIXES and has_rasterio() else None
    except DataError:  # the reader of the pixels reports it
        return None


class GeoTiffWriter:
    """Writer of a GeoTIFF from top to bottom: ids with or without a palette, or RGB (3 channels).

    Raises:
        OSError: The file cannot be written; also raised by `write` and `finish`.
    """

    def __init__(
        self,
        path: Path,
        size: tuple[int, int],
        georeference: Georeference,
        *,
        dtype: Any = np.uint8,
        channels: int = 1,
        palette: Sequence[tuple[int, int, int]] | None = None,
        nodata: int | None = None,
    ) -> None:
        import rasterio

        self._path, self._row, self._width = path, 0, size[1]
        self._written: list[tuple[Any, int]] = []  # windows, each with the checksum of its pixels
        color = {"photometric": "rgb"} if channels == 3 else {}
        profile = _profile(size, np.dtype(dtype), channels, georeference)
        with _storage_errors(), _without_warnings():
            self._file = rasterio.open(path, "w", **profile, nodata=nodata, BIGTIFF="IF_SAFER", **color)
        if palette is not None:
            self._file.write_colormap(1, {index: (*color, 255) for index, color in enumerate(palette)})

    def write(self, rows: NDArray[Any]) -> None:
        """Append rows (R, W) or (R, W, 3)."""
        planes = rows[None] if rows.ndim == 2 else np.moveaxis(rows, -1, 0)
        window = ((self._row, self._row + len(rows)), (0, self._width))
        self._row += len(rows)
        planes = np.ascontiguousarray(planes)
        self._written.append((window, _checksum(planes)))
        with _storage_errors():
            self._file.write(planes, window=window)

    def finish(self) -> None:
        """Close the file, and read it back: GDAL reports no error of the blocks and tags that it writes last."""
        with _storage_errors():
            self._file.close()
            with opened(self._path) as file:
                if any(_checksum(file.read(window=window)) != checksum for window, checksum in self._written):
                    raise OSError(errno.ENOSPC, NOT_WHOLE)


def _checksum(planes: NDArray[Any]) -> int:
    return zlib.crc32(planes.data)


NOT_WHOLE = "the file on the disk differs from what was written"


@contextmanager
def _storage_errors() -> Iterator[None]:
    import rasterio
    from rasterio.errors import RasterioError

    logging.getLogger("rasterio").setLevel(logging.CRITICAL)
    try:
        with rasterio.Env():  # otherwise GDAL prints its errors
            yield
    except (RasterioError, DataError) as error:
        raise OSError(errno.ENOSPC, NOT_WHOLE) from error
