"""Cache of decoded images and masks (`data.cache`), filled at the first read of each image and read by all processes.

A record holds a seal (a checksum), an image and its mask. On a disk, every record is a file, written under a temporary
name and renamed. In memory, all records are in one anonymous file, and a record's seal is written last. So a process
may be killed at any moment, and two that store the same image at the same time write the same bytes.

A record belongs to one version of the image and mask: a file whose size or modification time has changed is decoded and
stored again. Every record is compared with its seal when it is first read in a run. No error here ends a training: an
image whose record cannot be stored or used is decoded.

Bytes are written with pwrite, so a full disk is an error; a write to a mapped page would end the process.

Shapes: H, W height and width in pixels; B bands.
"""

import contextlib
import fcntl
import hashlib
import mmap
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import cv2
import numpy as np
import PIL
from numpy.typing import NDArray

from segapp.datasets.files import ImagePair, shown
from segapp.datasets.images.pixel_format import RGB8, PixelFormat, Pixels
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.resources import available_bytes
from segapp.failpoints import failpoint

RESERVE_BYTES = 2**30
"""Free space that a cache leaves for checkpoints on a disk, or for the training in memory."""

FREE_SHARE = 0.25
"""Share of the free memory that `data.cache: auto` fills: the training needs memory later, too, and other programs."""

_FORMAT = 4
"""Version of the records and of the readers' results; if it changes, every cache starts empty."""
_ALIGN_BYTES = 64
_FULL, _NUM_DAMAGED = 0, 1
_STOPPED_FULL = -1


@dataclass(frozen=True)
class CacheFiles:
    """Location of the records of a split."""

    kind: Literal["disk", "ram"]
    path: str  # the folder of the records on a disk, or the file of the records in memory
    place: str  # in words

    def free_bytes(self) -> int | None:
        """Return the free space for more records; None if unknown."""
        if self.kind == "ram":
            return available_bytes()
        try:
            return shutil.disk_usage(self.path).free
        except OSError:
            return None


def disk_files(folder: Path, root: str, split: str, scheme: ClassScheme, pixels: PixelFormat = RGB8) -> CacheFiles:
    """Return the location of a split in the folder of caches; a missing folder is created.

    Its name is a hash of everything that the decoded pixels depend on, except the files. This includes the versions of
    the decoders: a JPEG's pixels may differ by one between them.

    Raises:
        OSError: The folder cannot be created.
    """
    parts = (_FORMAT, os.path.realpath(root), split, repr(scheme), scheme.dtype.str, cv2.__version__, PIL.__version__)
    bands = (pixels.fill,) if pixels.bands is None else (pixels.bands, pixels.dtype, pixels.fill)
    name = "".join(c if c.isalnum() or c in "-_" else "_" for c in split)[:40]
    place = folder / f"{name}-{_digest(map(str, (*parts, *bands)))}"
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    return CacheFiles("disk", str(place), shown(place))


def memory_files() -> CacheFiles:
    """Return a new, empty file in memory, which every process of this user can open while this process lives.

    It is a memfd (memfd_create(2)): the kernel frees it with the last process that has it open, so it never outlives a
    kill, and it is not limited by the size of /dev/shm. Other processes open it through /proc/PID/fd.

    Raises:
        OSError: The system has no memfds, or it cannot create one.
    """
    if not hasattr(os, "memfd_create"):
        raise OSError("this system cannot share memory without a name (memfd_create)")
    fd = os.memfd_create("segapp-pixels", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # access to a mapped page that was cut off ends a process
    files = CacheFiles("ram", f"/proc/{os.getpid()}/fd/{fd}", "memory")
    weakref.finalize(files, os.close, fd)
    return files


def choose_cache(name: str, num_bytes: int, promised_bytes: int = 0) -> tuple[Literal["ram", "none"], str]:
    """Return the choice of `data.cache: auto` for images and masks of `num_bytes` when decoded, and a sentence on it.

    All processes share them; `promised_bytes` of the free memory are for others.
    """
    free = available_bytes() or 0
    most = max(0, min(int(FREE_SHARE * free), free - RESERVE_BYTES) - promised_bytes)
    choice: Literal["ram", "none"] = "ram" if num_bytes <= most else "none"
    needed = f"data.cache = {choice}: decoded, the {name} images take {num_bytes >> 20:,} MiB"
    advice = "" if choice == "ram" else "; data.cache: disk decodes each image only once"
    return choice, f"{needed}, and {most >> 20:,} of {free >> 20:,} MiB of free memory are for them{advice}"


@dataclass(frozen=True)
class CacheState:
    """Fill state of a cache."""

    num_stored: int
    num_images: int
    stored_bytes: int
    missing_bytes: int  # space that the other images need
    stopped: str | None  # why no more records are stored; None while they are


class PixelCache:
    """Cache of the images and masks of one data set, by index; forked workers share its counters.

    `sizes` has height and width of every image in pixels, and `dtype` is the dtype of the masks.

    Raises:
        OSError: The location cannot be opened.
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
        self._stamps = [_stamp(pair) for pair in pairs]
        num_px = np.array([height * width for height, width in sizes])
        self._image_bytes = _aligned(num_px * pixels.num_bands * pixels.numpy_dtype.itemsize)
        self._record_bytes = _ALIGN_BYTES + self._image_bytes + _aligned(num_px * dtype.itemsize)
        # Anonymous shared memory, so that a worker immediately sees what another one found.
        self._is_checked = np.frombuffer(mmap.mmap(-1, max(1, len(pairs))), np.bool_)
        self._counters = np.frombuffer(mmap.mmap(-1, 16), np.int64)
        self._mapped: mmap.mmap | None = None
        if files.kind == "ram":
            ends = np.cumsum(self._record_bytes)
            self._starts = (ends - self._record_bytes).tolist()
            self._records = [Path(files.path)] * len(pairs)
            os.truncate(files.path, int(ends[-1]))
            with self._opened(0) as fd:  # once in each process: a new mapping would fault at every page again
                self._mapped = mmap.mmap(fd, int(ends[-1]), access=mmap.ACCESS_READ)
        else:
            keys = [_digest(os.path.abspath(path) for path in pair.files) for pair in pairs]
            names = [f"{key}-{stamp}" for key, stamp in zip(keys, self._stamps, strict=True)]
            self._starts = [0] * len(pairs)
            self._records = [Path(files.path, name) for name in names]
            present = dict(zip(keys, names, strict=True))
            for name in os.listdir(
                files.path
            ):  # of earlier versions of the files, or unfinished ones of killed processes
                if name.startswith(".") or present.get(name.partition("-")[0], name) != name:
                    Path(files.path, name).unlink(missing_ok=True)
        free, missing_bytes = files.free_bytes(), self.state().missing_bytes
        if free is not None and missing_bytes and missing_bytes + RESERVE_BYTES > free:
            self._counters[_FULL] = _STOPPED_FULL  # half a cache on a full disk does not help

    def __reduce__(self) -> tuple[Any, ...]:
        return PixelCache, (self.files, self._pairs, self._sizes, self._dtype, self._pixels)

    def get(self, index: int) -> tuple[Pixels, Pixels] | None:
        """Return read-only views of the image (H, W, B) and the mask (H, W); None if they are not stored.

        Each call maps a record on a disk anew: the memory is released with the views, and no process keeps a mapping of
        files that may be larger than its memory.
        """
        try:
            mapped = self._map(index) if self._mapped is None else self._mapped
        except FileNotFoundError:
            return None
        except (OSError, ValueError):  # truncated by another process
            self._forget(index)
            return None
        start = self._starts[index]
        seal = int.from_bytes(mapped[start : start + 8], "little")
        if not seal:
            return None
        image, mask = self._views(index, mapped)
        if not self._is_checked[index] and seal != _seal(image, mask):
            self._forget(index)
            return None
        self._is_checked[index] = True
        return image, mask

    @contextlib.contextmanager
    def _opened(self, index: int, flags: int = os.O_RDONLY) -> Iterator[int]:
        fd = os.open(self._records[index], flags | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _map(self, index: int) -> mmap.mmap:
        """Map a record on a disk, whose pages are read when they are accessed; ValueError if it is too short."""
        with self._opened(index) as fd:
            if not os.fstat(fd).st_size:  # a power cut leaves such files
                raise FileNotFoundError
            return mmap.mmap(fd, int(self._record_bytes[index]), access=mmap.ACCESS_READ)

    def _views(self, index: int, mapped: mmap.mmap) -> tuple[Pixels, Pixels]:
        place = self._starts[index] + _ALIGN_BYTES
        height, width = self._sizes[index]
        image = np.ndarray((height, width, self._pixels.num_bands), self._pixels.numpy_dtype, mapped, place)
        return image, np.ndarray((height, width), self._dtype, mapped, place + int(self._image_bytes[index]))

    def _forget(self, index: int) -> None:
        self._counters[_NUM_DAMAGED] += 1
        self._is_checked[index] = False
        with contextlib.suppress(OSError):  # the next record is stored in its place
            if self.files.kind == "ram":
                with self._opened(index, os.O_WRONLY) as fd:
                    os.pwrite(fd, bytes(8), self._starts[index])
            else:
                self._records[index].unlink()

    def put(self, index: int, image: Pixels, mask: Pixels) -> None:
        """Store an image and its mask as the readers return them, unless the files have changed since the run began.

        The next `get` compares the written bytes with the seal. If a write fails, no more records are stored, and the
        run continues.
        """
        is_unchanged = image.shape[:2] == self._sizes[index] and _stamp(self._pairs[index]) == self._stamps[index]
        if self._counters[_FULL] or not is_unchanged:
            return
        free = self.files.free_bytes()
        if free is not None and free < RESERVE_BYTES + image.nbytes + mask.nbytes:
            self._counters[_FULL] = _STOPPED_FULL
            return
        try:
            self._store(index, np.ascontiguousarray(image), np.ascontiguousarray(mask))
        except FileNotFoundError:
            pass  # another run removed the unfinished file as a killed process's, or the folder was removed
        except OSError as error:
            self._counters[_FULL] = error.errno or _STOPPED_FULL

    def _store(self, index: int, image: Pixels, mask: Pixels) -> None:
        if self.files.kind == "ram":
            with self._opened(index, os.O_WRONLY) as fd:
                self._write(index, fd, image, mask)
            return
        fd, unfinished = tempfile.mkstemp(prefix=".", dir=self.files.path)
        try:
            os.ftruncate(fd, int(self._record_bytes[index]))
            self._write(index, fd, image, mask)
            os.replace(unfinished, self._records[index])
        except BaseException:
            Path(unfinished).unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)

    def _write(self, index: int, fd: int, image: Pixels, mask: Pixels) -> None:
        start = self._starts[index]
        failpoint("cache.before_pixels")
        _write_at(fd, image, start + _ALIGN_BYTES)
        _write_at(fd, mask, start + _ALIGN_BYTES + int(self._image_bytes[index]))
        failpoint("cache.before_seal")
        os.pwrite(fd, _seal(image, mask).to_bytes(8, "little"), start)

    @property
    def num_damaged(self) -> int:
        """Number of records in this run that differed from their seals and were decoded again."""
        return int(self._counters[_NUM_DAMAGED])

    def state(self) -> CacheState:
        """Return the fill state of the cache, with the records of all processes."""
        is_stored = np.zeros(len(self._pairs), bool)
        with contextlib.suppress(OSError):  # someone removed the folder
            if self.files.kind == "ram":
                with self._opened(0) as fd:
                    is_stored[:] = [any(os.pread(fd, 8, start)) for start in self._starts]
            else:
                names = set(os.listdir(self.files.path))
                is_stored[:] = [record.name in names for record in self._records]
        return CacheState(
            num_stored=int(is_stored.sum()),
            num_images=len(self._pairs),
            stored_bytes=int(self._record_bytes[is_stored].sum()),
            missing_bytes=int(self._record_bytes[~is_stored].sum()),
            stopped=self._stopped(),
        )

    def _stopped(self) -> str | None:
        number = int(self._counters[_FULL])
        if number == _STOPPED_FULL:
            free = self.files.free_bytes() or 0
            return f"{free / 2**30:.1f} GiB are free there, of which {RESERVE_BYTES / 2**30:.0f} GiB stay free"
        return os.strerror(number) if number else None


def _seal(image: Pixels, mask: Pixels) -> int:
    """Return the checksum of a record, which is never 0."""
    return 1 << 32 | zlib.crc32(mask.data, zlib.crc32(image.data))


def _aligned(num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
    return (num_bytes + _ALIGN_BYTES - 1) // _ALIGN_BYTES * _ALIGN_BYTES


def _stamp(pair: ImagePair) -> str | None:
    """Return a text that changes with the sizes and modification times of the files; None if one does not exist."""
    try:
        stats = [os.stat(path) for path in pair.files]
    except OSError:
        return None
    return _digest(f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats)


def _digest(parts: Iterable[str]) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "backslashreplace"), digest_size=8).hexdigest()


def _write_at(fd: int, array: Pixels, offset: int) -> None:
    view = array.data.cast("B")
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
