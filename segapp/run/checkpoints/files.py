"""The files of a checkpoint folder: opening one only if it is intact, comparing two, copying, renaming damaged ones."""

import os
import shutil
import stat
from pathlib import Path
from typing import BinaryIO

from segapp.run.files import hash_file, hash_open, open_new


class DamagedError(Exception):
    """The bytes of a file are not those that were committed; the message continues a sentence after the file's name."""


def open_if_intact(path: Path, size_bytes: int, sha256: str | None) -> BinaryIO:
    """Open a file at its start if it has the committed size and hash.

    Args:
        path: The file.
        size_bytes: Committed size.
        sha256: Committed hash; None: compare only the size.

    Raises:
        DamagedError: Size or hash differ, or it is not a regular file.
        OSError: It cannot be read.
    """
    file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW), "rb")  # noqa: SIM115
    try:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise DamagedError("is not a file")
        if facts.st_size != size_bytes:
            raise DamagedError(f"is damaged: it has {facts.st_size} bytes instead of {size_bytes}")
        if sha256 is not None and hash_open(file)[0] != sha256:
            raise DamagedError("is damaged: its sha256 is not the one in manifest.json")
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file to a new one and fsync it; for file systems without hard links."""
    with open(source, "rb") as old, open(open_new(target), "wb") as new:
        shutil.copyfileobj(old, new, 2**20)
        new.flush()
        os.fsync(new.fileno())


def is_same_file(path: Path, other: Path) -> bool:
    """Return True if two paths are hard links to one file; False if one is missing."""
    try:
        one, two = os.lstat(path), os.lstat(other)
    except OSError:
        return False
    return (one.st_dev, one.st_ino) == (two.st_dev, two.st_ino)


def has_same_bytes(path: Path, other: Path) -> bool:
    """Return True if two files have the same content.

    Raises:
        OSError: One cannot be read.
    """
    if is_same_file(path, other):
        return True
    if path.is_symlink() or path.stat().st_size != other.stat().st_size:
        return False
    return hash_file(path) == hash_file(other)


def corrupt_name(path: Path) -> Path:
    """Return a free name for a damaged file: `last.pt.corrupt`, `last.pt.corrupt-2`, ..."""
    candidate, number = path.with_name(path.name + ".corrupt"), 2
    while os.path.lexists(candidate):
        candidate, number = path.with_name(f"{path.name}.corrupt-{number}"), number + 1
    return candidate


def reason_of(error: Exception) -> str:
    """Return an error's text, for an OSError without number and path."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
