"""Images and videos to predict, from files, folders and globs, with the metadata that is copied to the outputs.

The EXIF orientation is applied, as in training, so outputs are upright. The ICC profile is copied to the overlay. The
outputs of a GeoTIFF are GeoTIFFs with its coordinate system and transform, if rasterio is installed. Other metadata is
dropped.
"""

from __future__ import annotations

import glob
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from segapp.datasets.files import read_header, shown, tiff_tags
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.raster import Georeference, read_georeference
from segapp.datasets.images.reading import read_image
from segapp.datasets.images.tiff_tags import has_rasterio
from segapp.datasets.images.windows import image_windows
from segapp.errors import DataError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv"})


@dataclass(frozen=True)
class InputFile:
    """Image or video, and the name of its outputs: a relative path without suffix."""

    path: Path
    name: str

    @property
    def is_video(self) -> bool:
        """True for a video, by its suffix."""
        return self.path.suffix.lower() in VIDEO_SUFFIXES


def find_images(paths: Sequence[str | Path]) -> list[InputFile]:
    """Return the inputs of files, folders (recursively) and globs (`**` for any depth), without duplicates.

    Raises:
        DataError: a path does not exist, or a folder or a glob gives no image.
    """
    found: dict[Path, InputFile] = {}
    for given in map(Path, paths):
        for image in _files_of(given):
            found.setdefault(image.path.resolve(), image)
    return _distinct(list(found.values()))


def _files_of(given: Path) -> Iterator[InputFile]:
    if given.is_file():
        yield InputFile(given, given.stem)
    elif given.is_dir():
        yield from _below(given)
    elif glob.has_magic(str(given)):
        yield from _matching(given)
    else:
        raise DataError(f"{shown(given)} is neither a file nor a folder: check the path", path=given)


def _below(folder: Path) -> list[InputFile]:
    files = sorted(path for path in folder.rglob("*") if _is_picture(path))
    if not files:
        raise DataError(f"{shown(folder)} holds no image or video: supported suffixes are {_suffixes()}", path=folder)
    return [InputFile(path, str(path.relative_to(folder).with_suffix(""))) for path in files]


def _matching(pattern: Path) -> list[InputFile]:
    """Return the inputs that match a glob; their names are relative to the folder before the first wildcard.

    As in a shell, `*` and `**` skip hidden files; `**` does not follow links to folders, which may form cycles.
    """
    fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), pattern.parts[:-1]))
    parts = [part if part == "**" else re.sub(r"\*{2,}", "*", part) for part in pattern.relative_to(fixed).parts]
    if parts[-1] == "**":
        parts.append("*")
    wants_hidden = _has_hidden(parts)
    files = sorted(
        path
        for path in fixed.glob("/".join(parts))
        if _is_picture(path) and (wants_hidden or not _has_hidden(path.relative_to(fixed).parts))
    )
    if not files:
        raise DataError(
            f"{shown(pattern)} matches no image or video with one of the suffixes {_suffixes()}: check the pattern",
            path=pattern,
        )
    return [InputFile(path, str(path.relative_to(fixed).with_suffix(""))) for path in files]


def _has_hidden(parts: Iterable[str]) -> bool:
    return any(part.startswith(".") for part in parts)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES and path.is_file()


def _suffixes() -> str:
    return " ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))


def _distinct(images: list[InputFile]) -> list[InputFile]:
    """Make the names unique: equal ones (a.jpg, a.png) get their suffix, then a number."""
    names = Counter(image.name for image in images)
    taken: set[str] = set()
    result = []
    for image in images:
        name = image.name if names[image.name] == 1 else image.name + image.path.suffix
        base, number = name, 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name)
        result.append(InputFile(image.path, name))
    return result


MAX_PREDICTED_PX = 2**30
"""Limit of OpenCV."""


@dataclass(frozen=True)
class Picture:
    """An image in memory, or a large TIFF that is read in windows."""

    file: InputFile
    pixels: Any  # (H, W, B), as stored in the file, upright
    profile: bytes | None = None  # ICC profile
    georeference: Georeference | None = None  # of a GeoTIFF; the outputs are then GeoTIFFs too

    @property
    def num_px(self) -> int:
        """Number of pixels."""
        return int(self.pixels.shape[0] * self.pixels.shape[1])


def read_picture(file: InputFile, format: PixelFormat = RGB8) -> Picture:
    """Read an image with the bands and dtype of the network's input; DataError if it cannot be read."""
    header = read_header(file.path, max_pixels=MAX_PREDICTED_PX)
    pixels: Any = image_windows(file.path, format)
    if pixels is None:
        pixels = read_image(file.path, format, max_pixels=MAX_PREDICTED_PX)
    tags = tiff_tags(file.path)
    if tags is not None and has_rasterio() and tags.orientation == 1:
        georeference = read_georeference(file.path)
        if georeference is not None:
            return Picture(file, pixels, georeference=georeference)
    return Picture(
        file, pixels, _icc_profile(file) if header.format in {"PNG", "JPEG", "MPO", "TIFF", "WEBP"} else None
    )


def _icc_profile(file: InputFile) -> bytes | None:
    """Return the ICC profile of an RGB image; None if it is missing, damaged, or describes CMYK or gray."""
    try:
        with Image.open(file.path) as image:
            return image.info.get("icc_profile") if image.mode == "RGB" else None
    except Exception:
        return None
