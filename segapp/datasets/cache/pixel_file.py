"""A file of decoded images and masks that several processes fill and read together.

There are two files. `pixels` holds the images and masks one after the other. `index` holds a header and then one entry
for each record; the entry is appended after the record's bytes are written, so what a killed process leaves behind is
bytes without an entry, or a torn entry, which fails its check and is overwritten by the next one. All locks are record
locks of the kernel (fcntl(2)), which end with the process that holds them, however it ends.

Bytes are written with pwrite, so that a full disk is an error; a write to a mapped page would end the process.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import threading
import weakref
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.failpoints import failpoint

Pixels = NDArray[Any]

ENTRY = np.dtype(
    [
        ("key", "<u8"),
        ("stamp", "<u8"),
        ("offset", "<u8"),
        ("height", "<u4"),
        ("width", "<u4"),
        ("image_sum", "<u4"),
        ("mask_sum", "<u4"),
        ("check", "<u8"),
    ]
)
"""An entry of the index. `key` names the files and `stamp` their state; `image_sum` and `mask_sum` are CRC-32;
`check` makes the exclusive or of the entry's words `_ENTRY_MARK`."""

HEADER_BYTES = 64
_MAGIC = b"segapp pixels\n\0\0"
_TOKEN_BYTES = 8
_ENTRY_MARK = np.uint64(0x5E6A_99CA_C4ED_0001)
_ALIGN_BYTES = 64
_LOCK_APPEND = 1 << 61  # record locks may lie beyond the end of a file
_LOCK_RECORDS = 1 << 60


def make_header(digest: bytes, token: bytes) -> bytes:
    """Return the header of an index.

    Args:
        digest: 16 bytes; an index with another digest is not used.
        token: 8 bytes that name the file of pixels.
    """
    return (_MAGIC + digest + token).ljust(HEADER_BYTES, b"\0")


def read_token(index: str, digest: bytes) -> bytes | None:
    """Return the token in the header of an index; None if there is no index, or one with another header."""
    try:
        with open(index, "rb") as file:
            header = file.read(HEADER_BYTES)
    except OSError:
        return None
    token = header[len(_MAGIC) + len(digest) :][:_TOKEN_BYTES]
    return token if header == make_header(digest, token) else None


@dataclass(frozen=True)
class RecordFormat:
    """Types of the images and masks of a file.

    Attributes:
        mask: Type of a mask's ids.
        image: Type of an image's values.
        num_bands: B.
    """

    mask: np.dtype[Any]
    image: np.dtype[Any]
    num_bands: int

    @property
    def image_px_bytes(self) -> int:
        """Bytes of one pixel of an image."""
        return self.num_bands * self.image.itemsize

    def num_bytes(self, num_px: Any) -> Any:
        """Return the bytes of an image and its mask of so many pixels, a number or an array, in the file of pixels."""
        return _aligned(num_px * self.image_px_bytes) + _aligned(num_px * self.mask.itemsize)


def _aligned(num_bytes: Any) -> Any:
    return (num_bytes + _ALIGN_BYTES - 1) // _ALIGN_BYTES * _ALIGN_BYTES


class PixelFile:
    """One process's access to the two files. A pickled copy opens them again.

    Args:
        index: Path of the index, which has a header.
        pixels: Path of the pixels.
        format: Types of the images and masks.

    Raises:
        OSError: One of the files cannot be opened.
    """

    def __init__(self, index: str, pixels: str, format: RecordFormat) -> None:
        self._paths, self._format = (index, pixels), format
        self._index = os.open(index, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._index)
        self._pixels = os.open(pixels, os.O_RDWR | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._pixels)
        self._position = HEADER_BYTES
        self._threads = threading.Lock()  # the kernel's locks do not exclude threads of one process

    def __reduce__(self) -> tuple[Any, ...]:
        return PixelFile, (*self._paths, self._format)

    def new_entries(self) -> NDArray[Any]:
        """Return the entries appended since the last call, by any process, oldest first; damaged ones are left out."""
        size = os.fstat(self._index).st_size
        num_bytes = (size - self._position) // ENTRY.itemsize * ENTRY.itemsize
        if num_bytes <= 0:
            return np.empty(0, ENTRY)
        content = os.pread(self._index, num_bytes, self._position)
        content = content[: len(content) // ENTRY.itemsize * ENTRY.itemsize]
        entries = np.frombuffer(content, ENTRY)
        self._position += len(content)
        ends = entries["offset"].astype(np.int64) + _record_bytes_of(entries, self._format)
        return entries[is_whole(entries) & (ends <= os.fstat(self._pixels).st_size)]

    def pixels_bytes(self) -> int:
        """Return the size of the file of pixels."""
        return os.fstat(self._pixels).st_size

    @contextlib.contextmanager
    def storing(self, key: int) -> Iterator[bool]:
        """Hold the lock of a record while it is stored; yields False at once if another process holds it."""
        place = _LOCK_RECORDS + key % _LOCK_RECORDS
        with self._threads:
            try:
                fcntl.lockf(self._index, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, place)
            except (BlockingIOError, PermissionError):
                yield False
                return
            try:
                yield True
            finally:
                fcntl.lockf(self._index, fcntl.LOCK_UN, 1, place)

    def append(self, key: int, stamp: int, image: Pixels, mask: Pixels) -> NDArray[Any]:
        """Write a record and its entry, and return the entry (a 0-d array); the caller holds the record's lock.

        Raises:
            OSError: The bytes cannot be written: the disk is full, a quota is exceeded, or the device failed.
        """
        height, width = mask.shape
        with self._append_lock():
            offset = _aligned(os.fstat(self._pixels).st_size)
            os.ftruncate(self._pixels, offset + self._format.num_bytes(height * width))
        failpoint("cache.before_pixels")
        image, mask = np.ascontiguousarray(image), np.ascontiguousarray(mask)
        _write_at(self._pixels, image, offset)
        _write_at(self._pixels, mask, offset + _aligned(image.nbytes))
        entry = np.zeros((), ENTRY)
        sums = zlib.crc32(image.data), zlib.crc32(mask.data)
        for name, value in zip(ENTRY.names or (), (key, stamp, offset, height, width, *sums), strict=False):
            entry[name] = value
        entry["check"] = np.bitwise_xor.reduce(_words(entry)) ^ _ENTRY_MARK
        failpoint("cache.before_entry")
        with self._append_lock():
            num_entries = (os.fstat(self._index).st_size - HEADER_BYTES) // ENTRY.itemsize  # over a torn entry
            _write_at(self._index, entry.reshape(1), HEADER_BYTES + num_entries * ENTRY.itemsize)
        return entry

    @contextlib.contextmanager
    def _append_lock(self) -> Iterator[None]:
        fcntl.lockf(self._index, fcntl.LOCK_EX, 1, _LOCK_APPEND)
        try:
            yield
        finally:
            fcntl.lockf(self._index, fcntl.LOCK_UN, 1, _LOCK_APPEND)

    def views(self, entry: NDArray[Any]) -> tuple[Pixels, Pixels]:
        """Return read-only views of the image (H, W, B) and mask (H, W); pages are read when they are touched.

        Each call maps the record anew: the views' memory is given back with them, and no process keeps a mapping of a
        file that may be larger than its memory.

        Raises:
            OSError: The record cannot be mapped, or lies beyond the end of the file.
        """
        height, width = int(entry["height"]), int(entry["width"])
        offset = int(entry["offset"])
        length = self._format.num_bytes(height * width)
        if offset + length > self.pixels_bytes():
            raise OSError(f"{self._paths[1]} ends before byte {offset + length}")
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        mapped = mmap.mmap(self._pixels, offset + length - start, access=mmap.ACCESS_READ, offset=start)
        form, num_px = self._format, height * width
        image = np.ndarray((height, width, form.num_bands), form.image, mapped, offset - start)
        mask_start = offset - start + _aligned(num_px * form.image_px_bytes)
        mask = np.ndarray((height, width), form.mask, mapped, mask_start)
        return image, mask


def is_whole(entries: NDArray[Any]) -> NDArray[np.bool_]:
    """Return, for each entry, True if its check is right; an entry of zeros fails."""
    found: NDArray[np.bool_] = np.bitwise_xor.reduce(_words(entries), axis=-1) == _ENTRY_MARK
    return found


def has_sums(entry: NDArray[Any], image: Pixels, mask: Pixels) -> bool:
    """Return True if image and mask have the sums of their entry."""
    return bool(zlib.crc32(image.data) == entry["image_sum"] and zlib.crc32(mask.data) == entry["mask_sum"])


def live_bytes(entries: NDArray[Any], format: RecordFormat) -> int:
    """Return the bytes of the newest record of each key; the others were superseded."""
    _, newest = np.unique(entries["key"][::-1], return_index=True)
    return int(_record_bytes_of(entries[::-1][newest], format).sum())


def _record_bytes_of(entries: NDArray[Any], format: RecordFormat) -> NDArray[np.int64]:
    found: NDArray[np.int64] = format.num_bytes(entries["height"].astype(np.int64) * entries["width"])
    return found


def _words(entries: NDArray[Any]) -> NDArray[np.uint64]:
    """Return entries as 64-bit words, (..., words)."""
    return entries[..., None].view(np.uint64)


def _write_at(fd: int, array: NDArray[Any], offset: int) -> None:
    view = array.data.cast("B") if array.ndim and array.dtype.names is None else memoryview(array.tobytes())
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
