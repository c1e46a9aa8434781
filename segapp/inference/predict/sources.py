"""Inputs of a prediction: images and videos from files, folders and globs, with the names of their outputs."""

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
    """Image or video, and the name of its outputs: a relative path without suffix."""

    path: Path
    name: str

    @property
    def is_video(self) -> bool:
        """True for a video, by its suffix."""
        return self.path.suffix.lower() in VIDEO_SUFFIXES


def find_images(paths: Sequence[str | Path]) -> list[ImageFile]:
    """Return the inputs of files, folders (recursively) and globs (`**` for any depth), without duplicates.

    Raises:
        DataError: a path does not exist, or a folder or a glob gives no image.
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
        raise DataError(f"{shown(given)} is neither a file nor a folder: check the path", path=given)


def _below(folder: Path) -> list[ImageFile]:
    files = sorted(path for path in folder.rglob("*") if _is_picture(path))
    if not files:
        raise DataError(f"{shown(folder)} holds no image or video: supported suffixes are {_suffixes()}", path=folder)
    return [ImageFile(path, str(path.relative_to(folder).with_suffix(""))) for path in files]


def _matching(pattern: Path) -> list[ImageFile]:
    """Return the inputs that match a glob; their names are relative to the folder before the first wildcard.

    As in a shell, `*` and `**` skip hidden files; `**` does not follow links to folders, which may form cycles.
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
        raise DataError(
            f"{shown(pattern)} matches no image or video with one of the suffixes {_suffixes()}: check the pattern",
            path=pattern,
        )
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


def _suffixes() -> str:
    return " ".join(sorted(IMAGE_SUFFIXES | VIDEO_SUFFIXES))


def _distinct(images: list[ImageFile]) -> list[ImageFile]:
    """Make the names unique: equal ones (a.jpg, a.png) get their suffix, then a number."""
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
