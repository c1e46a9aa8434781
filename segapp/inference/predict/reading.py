"""Images to predict, from files, folders and globs, with the metadata that is copied to the outputs.

The EXIF orientation is applied, as in training, so outputs are upright. The ICC profile is copied to the overlay. The
outputs of a GeoTIFF are GeoTIFFs with its coordinate system and transform, if rasterio is installed. Other metadata is
dropped.
"""

from __future__ import annotations

import fnmatch
import glob
import itertools
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from segapp.datasets.files import open_image, read_header, shown, tiff_tags
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.raster import IDENTITY, Georeference, has_control_points, read_georeference
from segapp.datasets.images.tiff_tags import has_rasterio
from segapp.datasets.images.windows import load_image
from segapp.datasets.walk import IMAGE_SUFFIXES, Folder, composed, is_below, left_out, on_disk, walk
from segapp.errors import ConfigError, DataError

Saved = Literal["labels", "color", "overlay", "confidence", "probabilities"]
SAVED: tuple[Saved, ...] = get_args(Saved)
"""Kinds of results; each has a folder with its name, and so have polygons."""


@dataclass(frozen=True)
class InputFile:
    """Image, and the name of its outputs: a relative path without suffix."""

    path: Path
    name: str


def find_images(paths: Sequence[str | Path], out: Path | None = None) -> tuple[list[InputFile], list[str]]:
    """Return the inputs of files, folders (recursively) and globs (`**` for any depth), without duplicates.

    The second list has sentences about files that are not read, such as hidden ones. The results in the folder `out`
    are not read either.

    Raises:
        DataError: a path does not exist, or a folder or a glob gives no image.
        ConfigError: a path is in the folder of the results.
    """
    results = [] if out is None else [os.path.realpath(out / kind) for kind in ("", *SAVED, "polygons")]
    found: dict[str, InputFile] = {}
    others, hidden = dict[str, None](), dict[str, None]()
    for given in (on_disk(Path(path)) for path in paths):
        if any(is_below(os.path.realpath(given) + os.sep, folder) for folder in results[1:]):
            raise ConfigError(
                f"{shown(given)} is in the folder of the results, {shown(results[0])}: choose another --out"
            )
        # A broken link counts as a file, so that the error names it instead of a pattern without a match.
        if given.is_file() or (given.is_symlink() and not given.exists()):
            found.setdefault(os.path.realpath(given), InputFile(given, given.stem))
            continue
        is_empty = True
        for folder, names in _places(given, results):
            hidden |= dict.fromkeys(os.path.join(folder.path, name) for name in folder.hidden)
            for name in names:
                path = os.path.join(folder.path, name)
                if not name.lower().endswith(IMAGE_SUFFIXES):
                    others[path] = None
                    continue
                # `realpath` of every file would ask the disk for each of its parents.
                is_link = name in folder.links and os.path.exists(path)
                real = os.path.realpath(path) if is_link else os.path.join(folder.real, name)
                found.setdefault(real, InputFile(Path(path), os.path.splitext(folder.below + name)[0]))
                is_empty = False
        if is_empty:
            what = "holds no" if given.is_dir() else "is a pattern that matches no"
            note = "; ".join([*left_out(others, hidden), f"supported suffixes: {' '.join(IMAGE_SUFFIXES)}"])
            raise DataError(f"{shown(given)} {what} image ({note}): check the path", path=given)
    return _distinct([*found.values()]), left_out(others, hidden)


def _places(given: Path, skip: Sequence[str]) -> Iterator[tuple[Folder, list[str]]]:
    """Yield the folders below a folder, or below the part of a glob before its first wildcard, with the files meant.

    As in a shell, `*` and `**` skip hidden files.
    """
    if given.is_dir():
        yield from ((folder, folder.files) for folder in walk(given, skip))
        return
    if not glob.has_magic(str(given)):
        raise DataError(f"{shown(given)} is neither a file nor a folder: check the path", path=given)
    fixed = [*itertools.takewhile(lambda part: not glob.has_magic(part), given.parts[:-1])]
    start, pattern = on_disk(Path(*fixed)), [composed(part) for part in given.parts[len(fixed) :]]
    # A final ** means the files of all folders.
    pattern += ["*"] * (pattern[-1] == "**")
    depth = None if "**" in pattern else len(pattern)
    if start.is_dir():
        for folder in walk(start, skip, depth=depth, hidden=any(part[0] == "." for part in pattern)):
            parts = composed(folder.below).split("/")[:-1]
            yield folder, [name for name in folder.files if _fits([*parts, composed(name)], pattern)]


def _fits(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return True if the parts of a path match the parts of a glob.

    >>> _fits(["a", "b", "x.png"], ["**", "*.png"]), _fits(["a", "x.png"], ["*.png"])
    (True, False)
    """
    if not pattern or not parts:
        return not pattern and not parts
    if pattern[0] == "**":
        return any(_fits(parts[number:], pattern[1:]) for number in range(len(parts)))
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _fits(parts[1:], pattern[1:])


def _distinct(images: list[InputFile]) -> list[InputFile]:
    """Make the names unique.

    If images of several folders have one name, all names begin at the folder that these have in common. In one folder,
    equal names (a.jpg, a.png) get their suffix, then a number (equal in NFC only).
    """
    names = [image.name for image in images]
    if len({*names}) < len({(image.name, image.path.parent) for image in images}):
        paths = [os.path.abspath(image.path) for image in images]
        common = os.path.commonpath([os.path.dirname(path) for path in paths])
        names = [os.path.splitext(os.path.relpath(path, common))[0] for path in paths]
    counts = Counter(map(composed, names))
    result: dict[str, InputFile] = {}
    for image, name in zip(images, names, strict=True):
        base = free = name if counts[composed(name)] == 1 else name + image.path.suffix
        numbers = itertools.count(2)
        while composed(free) in result:
            free = f"{base}-{next(numbers)}"
        result[composed(free)] = InputFile(image.path, free)
    return [*result.values()]


MAX_PREDICTED_PX = 2**30
"""Limit of OpenCV."""


@dataclass(frozen=True)
class Picture:
    """An image in memory, or a large TIFF that is read in windows."""

    file: InputFile
    pixels: Any  # (H, W, B), as stored in the file, upright
    profile: bytes | None = None  # ICC profile
    georeference: Georeference | None = None  # of a GeoTIFF; the outputs are then GeoTIFFs too
    unused_bands: str = ""  # a sentence about them
    has_control_points: bool = False  # which are not copied to the results
    missing: Any = None  # mask of the nodata of a GeoTIFF, (H, W, B); None if it declares none

    @property
    def num_px(self) -> int:
        return int(self.pixels.shape[0] * self.pixels.shape[1])


def read_picture(file: InputFile, format: PixelFormat = RGB8) -> Picture:
    """Read an image with the bands and dtype of the network's input; DataError if it cannot be read."""
    header = read_header(file.path, max_pixels=MAX_PREDICTED_PX)
    pixels, missing = load_image(file.path, format, max_pixels=MAX_PREDICTED_PX)
    unused, georeference, has_points = format.unused_bands(header.stored), None, False
    tags = tiff_tags(file.path) if has_rasterio() else None
    if tags is None:
        missing = None  # a PNG cannot declare nodata
    else:
        georeference = read_georeference(file.path) if tags.orientation == 1 else None
        has_points = georeference is None and has_control_points(file.path)
        georeference = georeference or (None if missing is None else Georeference(None, IDENTITY))
    profile = _icc_profile(file) if header.format in {"PNG", "JPEG", "MPO", "TIFF", "WEBP"} else None
    return Picture(file, pixels, profile, georeference, unused, has_points, missing)


def _icc_profile(file: InputFile) -> bytes | None:
    """Return the ICC profile of an RGB image; None if it is missing, damaged, or describes CMYK or gray."""
    try:
        with open(file.path, "rb") as opened, open_image(opened, file.path, MAX_PREDICTED_PX) as image:
            return image.info.get("icc_profile") if image.mode == "RGB" else None
    except Exception:
        return None
