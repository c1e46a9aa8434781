"""Cache of decoded images and masks (`data.cache`): filled by the first reader of each, read by all processes.

A record belongs to the image and mask as they are now: a file whose size or modification time changed is decoded and
stored anew, alone. Every record is compared with its sums when it is first read in a run. Nothing here ends a training:
a record that cannot be stored or used is decoded.

Shapes: H, W height and width in pixels; B bands.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.cache.pixel_file import ENTRY, PixelFile, RecordFormat, has_sums, is_whole
from segapp.datasets.cache.places import CacheFiles
from segapp.datasets.files import ImagePair
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, Pixels

RESERVE_BYTES = 2**30
"""Room that a cache leaves free, for checkpoints on a disk and for the training in memory."""

_NO_STAMP = 0
_FULL, _NUM_DAMAGED = 0, 1
_STOPPED_FULL = -1


@dataclass(frozen=True)
class CacheState:
    """How far a cache is.

    Attributes:
        num_stored: Images in it.
        num_images: Images of the data set.
        stored_bytes: Size of its file.
        missing_bytes: Room that the other images need.
        num_damaged: Records that differed from their sums and were decoded again, in this run.
        stopped: Why nothing more is stored; None while it is.
    """

    num_stored: int
    num_images: int
    stored_bytes: int
    missing_bytes: int
    num_damaged: int
    stopped: str | None


class PixelCache:
    """Cache of the images and masks of one data set, by index; forked workers share its table.

    Args:
        files: Where it lies.
        pairs: The files of the data set.
        sizes: Height and width of every image in pixels.
        dtype: Of the masks.
        pixels: Bands and type of the images.

    Raises:
        OSError: The files cannot be opened.
    """

    def __init__(
        self,
        files: CacheFiles,
        pairs: Sequence[ImagePair],
        sizes: Sequence[tuple[int, int]],
        dtype: np.dtype[Any],
        pixels: PixelFormat = RGB8,
    ) -> None:
        self.files = files
        self._pairs, self._sizes, self._dtype, self._pixels = tuple(pairs), tuple(sizes), dtype, pixels
        records = RecordFormat(dtype, pixels.numpy_dtype, pixels.num_bands)
        self._record_bytes = np.array([records.num_bytes(height * width) for height, width in sizes])
        self._file = PixelFile(files.index, files.pixels, records)
        self._keys = np.array([_key(pair) for pair in pairs], np.uint64)
        self._stamps = np.array([_stamp(pair) for pair in pairs], np.uint64)
        self._order = np.argsort(self._keys, kind="stable")
        # Anonymous shared memory, so that a worker sees at once what another one stored.
        self._table = _shared((len(pairs),), ENTRY)
        self._is_checked = _shared((len(pairs),), np.dtype(np.bool_))
        self._counters = _shared((2,), np.dtype(np.int64))
        self._refresh()
        self._stop_without_room()

    def __reduce__(self) -> tuple[Any, ...]:
        return PixelCache, (self.files, self._pairs, self._sizes, self._dtype, self._pixels)

    def get(self, index: int) -> tuple[Pixels, Pixels] | None:
        """Return read-only views of the image (H, W, B) and the mask (H, W); None if they are not stored."""
        if not self._is_stored(index):
            self._refresh()
            if not self._is_stored(index):
                return None
        entry = self._table[index : index + 1].copy()[0]
        try:
            image, mask = self._file.views(entry)
        except (OSError, ValueError):  # truncated by someone else
            self._forget(index)
            return None
        if not self._is_checked[index]:
            if not (is_whole(entry) and has_sums(entry, image, mask)):
                self._forget(index)
                return None
            self._is_checked[index] = True
        return image, mask

    def _is_stored(self, index: int) -> bool:
        return bool(self._stamps[index] != _NO_STAMP and self._table[index]["stamp"] == self._stamps[index])

    def _forget(self, index: int) -> None:
        self._table[index] = np.zeros((), ENTRY)
        self._counters[_NUM_DAMAGED] += 1

    def put(self, index: int, image: Pixels, mask: Pixels) -> None:
        """Store an image and its mask as the readers return them, unless they changed since the run began.

        The next `get` compares what was written with its sums. A failure to write ends the storing, not the run.
        """
        if self._counters[_FULL] or _stamp(self._pairs[index]) != self._stamps[index]:
            return
        key, stamp = int(self._keys[index]), int(self._stamps[index])
        try:
            free = self.files.free_bytes()
            if free is not None and free < RESERVE_BYTES + image.nbytes + mask.nbytes:
                self._counters[_FULL] = _STOPPED_FULL
                return
            with self._file.storing(key) as is_ours:
                if not is_ours:  # another process stores the same image
                    return
                self._refresh()
                if not self._is_stored(index):
                    self._table[index] = self._file.append(key, stamp, image, mask)
        except OSError as error:
            self._counters[_FULL] = error.errno or _STOPPED_FULL

    def _refresh(self) -> None:
        """Enter into the table what other processes stored since the last call."""
        entries = self._file.new_entries()
        if not len(entries):
            return
        places = np.searchsorted(self._keys, entries["key"], sorter=self._order)
        indices = self._order[np.minimum(places, len(self._order) - 1)]
        known = (self._keys[indices] == entries["key"]) & (self._stamps[indices] == entries["stamp"])
        self._table[indices[known]] = entries[known]

    @property
    def num_damaged(self) -> int:
        """Records that differed from their sums and were decoded again, in this run."""
        return int(self._counters[_NUM_DAMAGED])

    def state(self) -> CacheState:
        """Return how far the cache is."""
        self._refresh()
        is_stored = (self._table["stamp"] == self._stamps) & (self._stamps != _NO_STAMP)
        return CacheState(
            num_stored=int(is_stored.sum()),
            num_images=len(self._pairs),
            stored_bytes=self._file.pixels_bytes(),
            missing_bytes=int(self._record_bytes[~is_stored].sum()),
            num_damaged=self.num_damaged,
            stopped=self._stopped(),
        )

    def _stop_without_room(self) -> None:
        """Store nothing if what is missing does not fit; a half-filled disk would help nobody."""
        free, missing_bytes = self.files.free_bytes(), self.state().missing_bytes
        if free is not None and missing_bytes and missing_bytes + RESERVE_BYTES > free:
            self._counters[_FULL] = _STOPPED_FULL

    def _stopped(self) -> str | None:
        number = int(self._counters[_FULL])
        if not number:
            return None
        if number == _STOPPED_FULL:
            free = self.files.free_bytes() or 0
            return f"{free / 2**30:.1f} GiB are free there, of which {RESERVE_BYTES / 2**30:.0f} GiB stay free"
        return os.strerror(number)


def _shared(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return zeros in memory that forked processes share."""
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return np.ndarray(shape, dtype, mmap.mmap(-1, max(1, num_bytes)))


def _key(pair: ImagePair) -> int:
    """Return 64 bits of the names of the files."""
    return _number(os.path.abspath(path) for path in pair.files)


def _stamp(pair: ImagePair) -> int:
    """Return 64 bits of the names, sizes and modification times of the files; 0 if one of them is gone."""
    try:
        stats = [os.stat(path) for path in pair.files]
    except OSError:
        return _NO_STAMP
    return _number([str(_key(pair)), *(f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats)])


def _number(parts: Any) -> int:
    content = "\0".join(parts).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
