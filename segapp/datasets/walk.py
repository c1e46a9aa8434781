"""The files below a folder, listed in one pass for `init`, `check`, `predict` and the layouts of a training.

Names are compared in NFC, the composed form of Unicode: a Mac may store é as two characters, which look like one. Paths
keep the characters that they have on the disk.
"""

import os
import unicodedata
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from segapp.datasets.files import HEIF_SUFFIXES, shown
from segapp.errors import DataError

IMAGE_SUFFIXES = (
    ".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".gif", *HEIF_SUFFIXES,
)  # fmt: skip
"""Extensions of images, in any case; if several masks have the same stem, the extension listed first is used."""

_CURES = (
    ((".heic", ".heif"), "convert them, or install pillow-heif"),
    ((".npy", ".npz"), "name arrays for their contents (np.save as images.npy and masks.npy), with shapes that agree"),
    ((".mp4", ".avi", ".mov", ".mkv", ".webm"), "save the frames of videos with ffmpeg -i VIDEO frames/%06d.png"),
    ((".dcm", ".parquet", ".nii", ".gz", ".mat", ".h5", ".hdf5", ".zip", ".tar", ".avif",
      ".jxl", ".jp2", ".exr", ".psd", ".dng", ".nef", ".cr2", ".arw"), "save images and masks as PNG, TIFF or npy"),
)  # fmt: skip
"""Extensions of files with pixels that are not read as images, and what to do."""

_SYSTEM_NAMES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin",
                           "system volume information", "lost+found"})  # fmt: skip


@dataclass(frozen=True)
class Folder:
    """A folder below the start of a walk: its files, and those that are left out, in the order of their names."""

    path: str
    below: str  # its path below the start with a separator at the end; "" for the start
    real: str  # with links resolved
    files: list[str]
    hidden: list[str]  # with a dot first, such as a Mac's ._a.png, and files of a system (Thumbs.db); folders end in /
    links: frozenset[str]  # files that are links


def walk(
    start: str | os.PathLike[str], skip: Collection[str] = (), *, depth: int | None = None, hidden: bool = False
) -> Iterator[Folder]:
    """Yield a folder and the folders below it, each before those that it contains.

    Links to folders come last, so that a folder has its own path; one to a folder that was listed, or contains the
    start, is not followed. Hidden folders and the folders in `skip` (resolved) are left out, and so is a run, of which
    only `run.json` is named. With `hidden`, hidden folders and files are like others. `depth` limits the levels of
    folders; 1 is the start.

    Raises:
        DataError: A folder cannot be listed.
    """
    first = os.path.realpath(start)
    seen, waiting = set(skip) - {first}, deque([(os.fspath(start), "", first, 1)])
    while waiting:
        path, place, real, level = waiting.pop()
        if real in seen:
            continue
        seen.add(real)
        if is_below(first, real):  # a loop, whose files are not listed; it may lead out of the root
            yield Folder(path, place, real, [], [], frozenset())
            continue
        try:
            with os.scandir(path) as listing:
                entries = sorted(listing, key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(
                f"{shown(path)}: the folder cannot be listed ({error.strerror}): give this user permission to read it "
                f"(chmod +rx), or move it out of {shown(start)}",
                path=path,
            ) from error
        if real != first and any(entry.name == "run.json" for entry in entries):
            yield Folder(path, place, real, [], ["run.json"], frozenset())
            continue
        found = Folder(path, place, real, [], [], frozenset(entry.name for entry in entries if entry.is_symlink()))
        below = []
        for entry in entries:
            is_folder = _is_folder(entry)
            if not hidden and (entry.name[0] == "." or entry.name.lower() in _SYSTEM_NAMES):
                found.hidden.append(entry.name + "/" * is_folder)
            elif not is_folder:
                found.files.append(entry.name)
            elif level == depth:
                continue
            elif entry.is_symlink():
                waiting.appendleft((entry.path, f"{place}{entry.name}/", os.path.realpath(entry.path), level + 1))
            else:
                below.append((entry.path, f"{place}{entry.name}/", os.path.join(real, entry.name), level + 1))
        yield found
        waiting += reversed(below)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def is_below(path: str, folder: str) -> bool:
    """Return True if a path, with links resolved, is inside a folder."""
    return path.startswith(folder.rstrip(os.sep) + os.sep)


def others_note(names: Iterable[str]) -> str:
    """Return the number of files of other kinds, their extensions, and what to do; "" for none.

    >>> others_note(["a.heic", "b.HEIC", "notes.txt"])
    '3 files of other kinds (2 .heic, 1 .txt) not read: convert them, or install pillow-heif'
    """
    kinds = Counter(os.path.splitext(name)[1].lower() or "no extension" for name in names)
    cures = [cure for suffixes, cure in _CURES if not kinds.keys().isdisjoint(suffixes)]
    counts = [f"{count} {shown(kind)}" if len(kinds) > 1 else shown(kind) for kind, count in kinds.most_common(8)]
    named = ", ".join(counts) + (" and more" if len(kinds) > 8 else "")
    text = f"{kinds.total()} files of other kinds ({named}) not read" if kinds else ""
    return f"{text}: {'; '.join(cures)}" if cures else text


def left_out(others: Iterable[str], hidden: Collection[str]) -> list[str]:
    """Return sentences about the files of other kinds, and the hidden ones; none without such files."""
    first = f"{len(hidden)} hidden files and folders not read, such as {shown(next(iter(hidden), ''))}"
    return [*filter(None, [others_note(others)]), *[first] * bool(hidden)]


def has_cure(name: str) -> bool:
    """Return True for a file with pixels that are not read as an image."""
    return any(name.lower().endswith(suffixes) for suffixes, _ in _CURES)


def composed(text: str) -> str:
    """Return text in NFC, in which names that look alike are equal."""
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def on_disk(path: Path) -> Path:
    """Return the existing path that is equal in NFC; the path itself if there is none, or several."""
    if str(path).isascii() or os.path.lexists(path) or path == path.parent:
        return path
    parent = on_disk(path.parent)
    # On Linux two names that are equal in NFC may exist; then none of them is meant.
    same = [name for name in os.listdir(parent) if composed(name) == composed(path.name)] if parent.is_dir() else []
    return parent / (same[0] if len(same) == 1 else path.name)
