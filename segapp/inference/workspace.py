"""The memory of an inference: how many pixels fit, and overlapping tiles of which only the core is kept.

Images that fit are computed whole, so that networks with global context see the whole image.

Shapes: H x W pixels of an image.
"""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from segapp.datasets.resources import available_bytes
from segapp.errors import OutOfMemoryError
from segapp.inference.sliding import Inference, window_starts
from segapp.memory.ledger import StorageLedger

if TYPE_CHECKING:
    from segapp.models import SegmentationModel

MAX_HOST_BYTES = 2 << 30
"""Upper limit of the network's tensors on the CPU."""
KERNEL_FACTOR = 1.5
"""Allowance for workspaces of kernels, which the ledger does not record."""
MIN_SIDE_PX = 128
CPU_TILE_PX = 2**21
"""Pixels of a tile on a CPU: tiles of 6 million pixels are 5 % faster, and need three times as much memory."""
WINDOWED_TILE_PX = 4096
"""Side of the core of a sliding-window tile: as float32 RGB it takes about 200 MiB."""
MARGIN = 1 / 8
"""Width of the margin around the core, as a share of the side of a tile."""
SMALL_PX = 512 * 512
"""Images up to this size are computed whole without a measurement: MAX_HOST_BYTES is 8 KiB per pixel."""
_PROBE_PX = 256

Span = tuple[int, int, int, int]
"""Start and end of a tile along one axis, and start and end of its core."""


@dataclass
class Workspace:
    """Number of pixels that can be predicted at the same time."""

    max_px: int
    """Maximum number of pixels of the images of a batch, in total."""
    tile_px: int = sys.maxsize
    """Maximum number of pixels of a tile of an image that does not fit."""

    def halve(self) -> None:
        """Halve the number of pixels after an out-of-memory error.

        Raises:
            OutOfMemoryError: tiles already have their smallest size.
        """
        if self.max_px <= MIN_SIDE_PX**2:
            raise OutOfMemoryError(
                f"a tile of {MIN_SIDE_PX}x{MIN_SIDE_PX} px does not fit into memory: free memory on the device, or "
                "predict on another (parallel.devices)",
                key="parallel.devices",
            )
        self.max_px = max(self.max_px // 2, MIN_SIDE_PX**2)


def host_budget(num_sharing: int = 1) -> int:
    """Return the bytes for a network's tensors on the CPU if this number of networks compute at the same time."""
    return min(MAX_HOST_BYTES, (available_bytes() or 2 * num_sharing * MAX_HOST_BYTES) // (2 * num_sharing))


def pixels_within(num_bytes: float, bytes_per_px: float) -> int:
    """Return how many pixels fit, but at least the pixels of the smallest tile."""
    return max(MIN_SIDE_PX**2, int(num_bytes / bytes_per_px))


@torch.no_grad()
def measure_bytes_per_px(model: SegmentationModel, inference: Inference, device: torch.device) -> float:
    """Return the peak memory of a prediction per pixel, recorded on a small image; the model is in eval mode.

    Views and windows are computed one after the other, and only the low-resolution logits of each are kept, so the peak
    is the largest one's.
    """
    height, width = model.suitable_size(_PROBE_PX, _PROBE_PX)
    plain = replace(inference, scales=(1.0,), flip=False, window_px=model.fixed_size_px)
    with StorageLedger() as ledger:
        images = torch.zeros(1, model.in_channels, height, width, dtype=torch.uint8, device=device)
        views, size = plain.views_of_input(model, plain.preprocessing.normalize(images))
        plain.labels(views, size)
    peaks = ledger.peaks().get(str(device), {})
    peak = max((by_kind.total() for by_kind in peaks.values()), default=0)
    return KERNEL_FACTOR * max(1.0, *inference.scales) ** 2 * peak / (height * width)


class HostLimit:
    """Limit of an evaluation on the CPU, where the system kills a process that uses too much memory.

    A GPU needs no limit: its allocator raises an error, and the evaluation is repeated in windows.

    Args:
        num_sharing: number of evaluations that run on this machine at the same time.
        max_px: number of pixels of an image or a batch that fit; None: measured at the first large image.
    """

    def __init__(self, num_sharing: int = 1, max_px: int | None = None) -> None:
        self._num_sharing, self._max_px = num_sharing, max_px
        self._lock = threading.Lock()
        self._note: str | None = None
        self._is_told = False

    def fits(self, num_px: int, model: SegmentationModel, inference: Inference, device: torch.device) -> bool:
        """Return True if images with this many pixels in total are computed whole, as windows of `inference` are."""
        if device.type != "cpu" or inference.window_px is not None or num_px <= (self._max_px or SMALL_PX):
            return True
        with self._lock:
            if self._max_px is None:
                bytes_per_px = measure_bytes_per_px(model, inference, device)
                self._max_px = max(SMALL_PX, pixels_within(host_budget(self._num_sharing), bytes_per_px))
        return num_px <= self._max_px

    def tiles(self, size: tuple[int, int]) -> Iterator[ImageTile]:
        """Yield the tiles of an image that does not fit."""
        assert self._max_px is not None
        frame = tile_frame(size, self._max_px, tile_px=CPU_TILE_PX)
        self._note = self._note or (
            f"an image of {size[0]}x{size[1]} px does not fit into memory: images of more than "
            f"{self._max_px / 1e6:.1f} Mpx are evaluated in overlapping tiles, this one of {frame[0]}x{frame[1]} px; "
            "near the borders of tiles the result may differ slightly"
        )
        yield from tiles_of(size, frame)

    def take_note(self) -> str | None:
        """Return the message about tiles for the user, once; None if there is none."""
        note = None if self._is_told else self._note
        self._is_told |= note is not None
        return note


@dataclass(frozen=True)
class ImageTile:
    """A part of an image and its core, as (rows, columns)."""

    whole: tuple[slice, slice]
    """The part that the network sees."""
    core: tuple[slice, slice]
    """The kept part of `whole`, relative to its corner."""
    place: tuple[slice, slice]
    """The core in the image; the cores of all tiles cover the image exactly once."""

    @classmethod
    def of(cls, row: Span, column: Span) -> ImageTile:
        """Return the tile of a span along each axis."""
        (top, bottom, first, last), (left, right, start, stop) = row, column
        return cls(
            (slice(top, bottom), slice(left, right)),
            (slice(first - top, last - top), slice(start - left, stop - left)),
            (slice(first, last), slice(start, stop)),
        )


def tile_frame(
    size: tuple[int, int], max_px: int, *, tile_px: int = sys.maxsize, max_height: int | None = None
) -> tuple[int, int]:
    """Return height and width of a tile, margins included; the image's height and width if it fits into `max_px`.

    Tiles of an image that does not fit have at most `tile_px` pixels and `max_height` rows.
    """
    if size[0] * size[1] <= max_px:
        return size
    px = min(max_px, tile_px)
    side = max(MIN_SIDE_PX, math.isqrt(px) // 64 * 64)
    highest = max(MIN_SIDE_PX, min(side, max_height or side) // 64 * 64)
    height = _even_frame(size[0], min(size[0], highest))
    return height, _even_frame(size[1], min(size[1], max(side, px // height // 64 * 64)))


def _even_frame(side: int, frame: int) -> int:
    """Return the shortest frame, a multiple of 64, that covers an axis with as many tiles, for the least overlap."""
    num_tiles = len(tile_cores(side, frame))
    return min(frame, math.ceil(side / (1 + (num_tiles - 1) * (1 - 2 * MARGIN)) / 64) * 64)


def tile_cores(side: int, frame: int) -> list[tuple[int, int, int]]:
    """Return (start of the tile, start of its core, end of its core) along one axis; the cores cover the axis."""
    if frame >= side:
        return [(0, 0, side)]
    margin = int(frame * MARGIN)
    starts = [*range(0, side - frame, frame - 2 * margin), side - frame]
    edges = [0, *((a + frame + b) // 2 for a, b in itertools.pairwise(starts)), side]
    return [(start, edges[i], edges[i + 1]) for i, start in enumerate(starts)]


def tiles_of(size: tuple[int, int], frame: tuple[int, int]) -> Iterator[ImageTile]:
    """Yield the tiles of an image of height and width `size`, row by row."""
    rows, columns = (
        [(start, start + length, first, last) for start, first, last in tile_cores(side, length)]
        for side, length in zip(size, frame, strict=True)
    )
    yield from itertools.starmap(ImageTile.of, itertools.product(rows, columns))


def window_tiles(size: tuple[int, int], inference: Inference) -> Iterator[ImageTile]:
    """Yield the tiles of a large image, row by row, such that their sliding windows are windows of the whole image.

    The tile of a core includes all windows that reach into the core, and as few pixels more as the overlap allows.
    """
    assert inference.window_px is not None
    rows, columns = (
        _window_spans(side, min(window, side), inference.overlap)
        for side, window in zip(size, inference.window_px, strict=True)
    )
    yield from itertools.starmap(ImageTile.of, itertools.product(rows, columns))


def _window_spans(side: int, length: int, overlap: float) -> list[Span]:
    """Return the spans of tiles and of their cores along one axis; cores begin at the start of windows."""
    starts = window_starts(side, length, overlap)
    step = max(1, WINDOWED_TILE_PX // max(1, starts[1] - starts[0])) if len(starts) > 1 else 1
    edges = [0, *starts[step::step], side]
    spans = []
    for first, last in itertools.pairwise(edges):
        reaching = [start for start in starts if start + length > first and start < last]
        spans.append((reaching[0], reaching[-1] + length, first, last))
    return spans
