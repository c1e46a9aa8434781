"""Samples: an image and its target as tensors, a function of (seed, epoch, index) alone.

Images are uint8, a quarter of the bytes to transfer, and are normalised on the device.

Shapes: H, W height and width in pixels.
"""

import mmap
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import cv2
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.datasets.files import ImagePair, check_same_size, read_header, shown
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.masks import read_image, read_mask
from segapp.datasets.sampling import mix_seed
from segapp.errors import DataError

Pixels = NDArray[Any]

_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Sample:
    """One image and its target.

    Attributes:
        image: RGB, shape (3, H, W), uint8, not normalised.
        target: Train ids and `ignore_index`, shape (H, W), uint8 or int16.
        index: Index in the data set.
    """

    image: Tensor
    target: Tensor
    index: int


class Transform(Protocol):
    """Transform of an image and its mask; a function of both and the seed alone."""

    def __call__(self, image: Pixels, mask: Pixels, seed: int) -> tuple[Pixels, Pixels]:
        """Return the transformed image (H, W, 3) and mask (H, W)."""
        ...


class SegmentationDataset(torch.utils.data.Dataset[Sample]):
    """Image and mask pairs as samples; `dataset[(epoch, index)]` is the same in every process and call.

    Args:
        pairs: The files. The target of a pair without a mask is all `scheme.ignore_index`.
        scheme: Classes and the ids of the masks.
        transform: Applied with a seed of (seed, epoch, index); None: no transform, full size.
        seed: Seed of the augmentation.
        cache: "ram" keeps decoded images and masks in memory shared by all workers, filled at the first read.

    Raises:
        DataError: No pairs; or with "ram", a header cannot be read or the decoded data exceed the free memory.
        ValueError: `cache` is neither "none" nor "ram".
    """

    def __init__(
        self,
        pairs: Sequence[ImagePair],
        scheme: ClassScheme,
        transform: Transform | None = None,
        *,
        seed: int = 0,
        cache: Literal["none", "ram"] = "none",
    ) -> None:
        if not pairs:
            raise DataError("the data set has no images: check data.root and the split")
        if cache not in {"none", "ram"}:
            raise ValueError(f"cache={cache!r}: use 'none' or 'ram'")
        self.pairs = tuple(pairs)
        self.scheme = scheme
        self.transform = transform
        self.seed = seed
        self._cache = RamCache(image_sizes(self.pairs), scheme.dtype) if cache == "ram" else None

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, key: tuple[int, int]) -> Sample:
        """Return the sample of (epoch, index).

        Raises:
            DataError: The image or the mask cannot be used, or the transform fails; the message names the file.
        """
        epoch, index = key
        image, mask = self.read(index)
        if self.transform is not None:
            try:
                image, mask = self.transform(image, mask, mix_seed("sample", self.seed, epoch, index))
            except Exception as error:
                raise DataError(
                    f"{shown(self.pairs[index].image)}: the augmentation failed ({type(error).__name__}: {error}): "
                    "check data.crop_px, data.scale and data.resize_px"
                ) from error
        target = mask if mask.flags.owndata and mask.flags.writeable else mask.copy()
        return Sample(to_planes(image), torch.from_numpy(np.ascontiguousarray(target)), index)

    def read(self, index: int) -> tuple[Pixels, Pixels]:
        """Return the decoded image (H, W, 3) and mask (H, W) of train ids, before the transform; read-only.

        Raises:
            DataError: One of the files cannot be used, or their sizes differ.
        """
        cached = self._cache.get(index) if self._cache is not None else None
        if cached is not None:
            return cached
        pair = self.pairs[index]
        image = read_image(pair.image)
        mask = self.read_mask(index, image.shape[:2])
        check_same_size(pair, image.shape[:2], mask.shape[:2])
        if self._cache is not None:
            self._cache.put(index, image, mask, pair)
        return image, mask

    def read_mask(self, index: int, size_px: tuple[int, ...]) -> Pixels:
        """Return the mask (H, W) of train ids; without a file, all `ignore_index`, of size `size_px`."""
        mask = self.pairs[index].mask
        if mask is None:
            return np.full(size_px, self.scheme.ignore_index, self.scheme.dtype)
        return read_mask(mask, self.scheme)


def to_planes(image: Pixels) -> Tensor:
    """Return a copy of an image (H, W, 3) as a tensor (3, H, W)."""
    height, width = image.shape[:2]
    planes = np.empty((3, height, width), np.uint8)
    cv2.mixChannels([image], list(planes), [0, 0, 1, 1, 2, 2])
    return torch.from_numpy(planes)


def image_sizes(pairs: Sequence[ImagePair]) -> list[tuple[int, int]]:
    """Return the upright (height, width) of every image in pixels, from the headers."""
    headers = (read_header(pair.image) for pair in pairs)
    return [(header.height_px, header.width_px) for header in headers]


class RamCache:
    """Decoded images and masks in anonymous memory that forked workers share; pages are allocated when filled.

    A pickled copy (for a spawned process) starts empty.

    Args:
        sizes: Height and width of every image.
        dtype: Of the masks.

    Raises:
        DataError: The images do not fit into the free memory.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], dtype: np.dtype[Any]) -> None:
        self._sizes = list(sizes)
        self._dtype = dtype
        lengths = [_aligned(h * w * 3) + _aligned(h * w * dtype.itemsize) for h, w in sizes]
        self._offsets = [_aligned(len(sizes)) + int(offset) for offset in np.cumsum([0, *lengths[:-1]])]
        num_bytes = _aligned(len(sizes)) + sum(lengths)
        _check_memory(num_bytes)
        self._buffer = mmap.mmap(-1, num_bytes)
        self._lock = multiprocessing.Lock()  # a memory barrier: no process may see a flag before its pixels

    def __reduce__(self) -> tuple[Any, ...]:
        return RamCache, (self._sizes, self._dtype)

    def get(self, index: int) -> tuple[Pixels, Pixels] | None:
        """Return read-only views of the image (H, W, 3) and the mask (H, W); None if not cached yet."""
        with self._lock:
            is_filled = self._buffer[index] != 0
        return self._views(index, is_writeable=False) if is_filled else None

    def put(self, index: int, image: Pixels, mask: Pixels, pair: ImagePair) -> None:
        """Store an image and its mask.

        Raises:
            DataError: The image's size is not the one in its header.
        """
        if image.shape[:2] != self._sizes[index]:
            raise DataError(f"{shown(pair.image)}: the image changed during the run: start the run again")
        image_view, mask_view = self._views(index, is_writeable=True)
        image_view[:] = image
        mask_view[:] = mask
        with self._lock:
            self._buffer[index] = 1

    def _views(self, index: int, *, is_writeable: bool) -> tuple[Pixels, Pixels]:
        height, width = self._sizes[index]
        offset = self._offsets[index]
        image = np.ndarray((height, width, 3), np.uint8, self._buffer, offset)
        mask = np.ndarray((height, width), self._dtype, self._buffer, offset + _aligned(height * width * 3))
        image.flags.writeable = mask.flags.writeable = is_writeable
        return image, mask


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGN_BYTES) * _ALIGN_BYTES


def _check_memory(num_bytes: int) -> None:
    """Raise DataError if a cache does not fit into the free memory."""
    available = available_bytes()
    if available is not None and num_bytes > available:
        raise DataError(
            f"data.cache=ram needs {num_bytes / 2**30:.1f} GiB for the decoded images, {available / 2**30:.1f} GiB of "
            "memory are free: set data.cache to none"
        )


def available_bytes() -> int | None:
    """Return the memory available without swapping, within the container's limit; None if unknown."""
    available: list[int] = []
    group = Path("/sys/fs/cgroup")
    try:
        available.append(_counters(Path("/proc/meminfo"))["MemAvailable:"] * 1024)
        limit = int((group / "memory.max").read_text())
        used = int((group / "memory.current").read_text()) - _counters(group / "memory.stat")["file"]
        available.append(limit - used)
    except (OSError, ValueError, KeyError):
        pass  # no Linux, no control group, or no limit ("max")
    return min(available, default=None)


def _counters(path: Path) -> dict[str, int]:
    """Return the numbers of a file of "name number" lines."""
    words = (line.split() for line in path.read_text().splitlines())
    return {word[0]: int(word[1]) for word in words if len(word) > 1}
