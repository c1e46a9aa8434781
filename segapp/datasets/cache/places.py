"""Where a cache of decoded images lies: in a folder on a disk, or in memory that has no name in any file system."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import PIL

from segapp.datasets.cache.pixel_file import PixelFile, RecordFormat, live_bytes, make_header, read_token
from segapp.datasets.files import shown
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.resources import available_bytes

_FORMAT = 1
"""Version of the two files and of what the readers return; a change makes every cache start anew."""


@dataclass(frozen=True)
class CacheFiles:
    """The two files of a cache.

    Attributes:
        kind: "disk", or "ram".
        index: Path of the index.
        pixels: Path of the pixels.
        place: The place in words.
        owner: Keeps the files of a cache in memory alive; None in the other processes and on a disk.
    """

    kind: Literal["disk", "ram"]
    index: str
    pixels: str
    place: str
    owner: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        return CacheFiles, (self.kind, self.index, self.pixels, self.place)

    def free_bytes(self) -> int | None:
        """Return the room for more records; None if unknown."""
        if self.kind == "ram":
            return available_bytes()
        try:
            return shutil.disk_usage(os.path.dirname(self.pixels)).free
        except OSError:
            return None


def default_folder() -> Path:
    """Return the folder of the caches on disk: $XDG_CACHE_HOME/segapp/pixels."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "segapp" / "pixels"


def cache_digest(root: str, split: str, scheme: ClassScheme, pixels: PixelFormat = RGB8) -> bytes:
    """Return 16 bytes of everything but the files that the decoded pixels depend on.

    The libraries that decode belong to it: a JPEG's pixels may differ by one between their versions.
    """
    parts = (_FORMAT, os.path.realpath(root), split, repr(scheme), np.dtype(scheme.dtype).str, cv2.__version__)
    bands = () if pixels.bands is None else (pixels.bands, pixels.dtype)
    return hashlib.blake2b(
        repr((*parts, PIL.__version__, *bands)).encode("utf-8", "backslashreplace"), digest_size=16
    ).digest()


def disk_files(folder: Path, split: str, digest: bytes, dtype: np.dtype[Any], pixels: PixelFormat = RGB8) -> CacheFiles:
    """Return the files of one split in the folder of caches, made if they are missing or cannot be used.

    They start anew if the header is damaged or has another version, or if superseded records hold more room than the
    present ones. An index is replaced by renaming a new one over it: a process that uses the old files keeps them.

    Raises:
        OSError: The folder or its files cannot be made or opened.
    """
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in split)[:40]
    place = folder / f"{name}-{digest[:8].hex()}"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = CacheFiles("disk", str(place / "index"), "", shown(place))
    records = RecordFormat(dtype, pixels.numpy_dtype, pixels.num_bands)
    with _only_one_opens(place):
        token = read_token(files.index, digest)
        if token is None or not _is_usable(replace(files, pixels=str(_pixels(place, token))), records):
            token = _start_anew(place, digest)
        return replace(files, pixels=str(_pixels(place, token)))


@contextlib.contextmanager
def _only_one_opens(place: Path) -> Iterator[None]:
    """Hold the lock of a folder; flock(2) ends with its process, however that ends."""
    fd = os.open(place / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _pixels(place: Path, token: bytes) -> Path:
    return place / f"pixels-{token.hex()}"


def _is_usable(files: CacheFiles, records: RecordFormat) -> bool:
    """Return False if the pixels are missing, or mostly superseded."""
    try:
        file = PixelFile(files.index, files.pixels, records)
    except FileNotFoundError:
        return False
    live = live_bytes(file.new_entries(), records)
    return file.pixels_bytes() - live <= max(live, 2**28)


def _start_anew(place: Path, digest: bytes) -> bytes:
    """Make empty files in the place of any others, and return their token."""
    token = secrets.token_bytes(8)
    os.close(os.open(_pixels(place, token), os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    temporary = place / ".index"
    temporary.write_bytes(make_header(digest, token))
    os.replace(temporary, place / "index")
    for path in place.glob("pixels-*"):
        if path != _pixels(place, token):
            path.unlink(missing_ok=True)
    return token


def memory_files(digest: bytes) -> CacheFiles:
    """Return new, empty files in memory, which every process of this user can open while this one lives.

    They are memfds (memfd_create(2)): the kernel frees them with the last process that has them open, so that nothing
    is left after any kind of kill, and the size of /dev/shm does not limit them. Other processes open them through
    /proc/PID/fd.

    Raises:
        OSError: The system has no memfds, or they cannot be made.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system cannot share memory without a name (memfd_create)")
    owner = _Memfds(os.memfd_create("segapp-index"), os.memfd_create("segapp-pixels"))
    os.write(owner.index, make_header(digest, b"\0" * 8))
    folder = f"/proc/{os.getpid()}/fd"
    return CacheFiles("ram", f"{folder}/{owner.index}", f"{folder}/{owner.pixels}", "memory", owner)


class _Memfds:
    """Two open memfds, closed when they are no longer used."""

    def __init__(self, index: int, pixels: int) -> None:
        self.index, self.pixels = index, pixels
        weakref.finalize(self, os.close, index)
        weakref.finalize(self, os.close, pixels)
