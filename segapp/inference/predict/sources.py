"""What is predicted: files, folders and globs of images and videos, each with the name that its outputs get."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from segapp.datasets.files import shown
from segapp.errors import DataError

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm"})
VIDEO_SUFFIXES = frozenset({".mp4", ".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv"})


@dataclass(frozen=True)
class ImageFile:
    """An image or a video and the name, without ending, that its outputs get (with folders for those found in one)."""

    path: Path
    name: str

    @property
    def is_video(self) -> bool:
        """Whether it holds more than one picture."""
        return self.path.suffix.lower() in VIDEO_SUFFIXES


def find_images(paths: Sequence[str | Path]) -> list[ImageFile]:
    """Files as given, every image and video below a folder, and what a glob names (`**` for any depth), each once.

    Raises:
        DataError: a path that is not there, a folder without images, a glob that names nothing.
    """
    found: dict[Path, ImageFile] = {}
    for given in map(Path, paths):
        for image in _files_of(given):
            found.setdefault(image.path.resolve(), image)
    return _distinct(list(found.values()))


def _files_of(given: Path) -> Iterator[ImageFile]:
    if given.is_file():
        yield ImageFile(given, given.stem)
    elif given.is_dir():
        yield from _below(given)
    elif glob.has_magic(str(given)):
        yield from _matching(given)
    else:
        raise DataError(f"{shown(given)} is neither a file nor a folder: check the path")


def _below(folder: Path) -> list[ImageFile]:
    files = sorted(path for path in folder.rglob("*") if _is_picture(path))
    if not files:
        raise DataError(f"{shown(folder)} holds no image: put files there that end in one of {_endings()}")
    return [ImageFile(path, str(path.relative_to(folder).with_suffix(""))) for path in files]


def _matching(pattern: Path) -> list[ImageFile]:
    """What a glob names; folders in their names begin where the pattern has its first wildcard.

    As in a shell, `*` and `**` leave hidden files out; `**` enters no linked folder, so that rings of them have an end.
    """
    fixed = Path(*_until_magic(pattern))
    parts = [part if part == "**" else re.sub(r"\*{2,}", "*", part) for part in pattern.relative_to(fixed).parts]
    if parts[-1] == "**":
        parts.append("*")
    wants_hidden = any(part.startswith(".") for part in parts)
    files = sorted(
        path
        for path in fixed.glob("/".join(parts))
        if _is_picture(path) and (wants_hidden or not _is_hidden(path.relative_to(fixed)))
    )
    if not files:
        raise DataError(f"{shown(pattern)} names no image or video that ends in one of {_endings()}: check the pattern")
    return [ImageFile(path, str(path.relative_to(fixed).with_suffix(""))) for path in files]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _until_magic(pattern: Path) -> Iterator[str]:
    for part in pattern.parts[:-1]:
        if glob.has_magic(part):
            return
        yield part


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES | VIDEO_SUFFIXES and path.is_file()


def _endings() -> str:
    return " ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))


def _distinct(images: list[ImageFile]) -> list[ImageFile]:
    """Where two images would get the same name (a.jpg, a.png), both keep their ending in it, then a number."""
    names: dict[str, int] = {}
    for image in images:
        names[image.name] = names.get(image.name, 0) + 1
    taken: set[str] = set()
    result = []
    for image in images:
        name = image.name if names[image.name] == 1 else image.name + image.path.suffix
        base, number = name, 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name)
        result.append(ImageFile(image.path, name))
    return result
