"""Logits of the same images seen several ways: other scales, mirrored, in overlapping tiles; joined band by band.

A view is a tensor of logits for the whole image, of any resolution, or a sequence of tiles whose logits are averaged
where they overlap. Of several views the probabilities are averaged. Only a band of full resolution exists at a time.

Shapes: N images, m of them in a band, C classes, R rows of a band, h x w of logits, H x W of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segapp.losses.bands import CPU_BAND_BYTES, DEVICE_BAND_BYTES, BlockBand, BlockSweep
from segapp.losses.grid import grid_of
from segapp.losses.reference import compute_dtype


@dataclass(frozen=True)
class Tile:
    """Logits of a rectangle of the output.

    Attributes:
        logits: (N, C, h, w).
        top: first output row.
        left: first output column.
        size: height and width in output pixels.
        frame: height and width that the logits stand for, at least `size`: what lies beyond is padding.
        skip: columns of padding at the left of the frame; the rest of it is at the right and at the bottom.
        weights: (height,) and (width,) of `size`, whose products weight the tile's pixels where tiles overlap; None:
            all alike.
    """

    logits: Tensor
    top: int
    left: int
    size: tuple[int, int]
    frame: tuple[int, int]
    skip: int = 0
    weights: tuple[Tensor, Tensor] | None = None


View = Tensor | Sequence[Tile]


def check_views(views: Tensor | Sequence[View]) -> list[View]:
    """The views as a list.

    Raises:
        ValueError: no views, a view without tiles, or views of different images or classes.
    """
    found: list[View] = [views] if isinstance(views, Tensor) else list(views)
    if not found or not all(_tensors(view) for view in found):
        raise ValueError("there are no views: give at least one tensor of logits, or one tile")
    shapes = [tuple(tensor.shape) for view in found for tensor in _tensors(view)]
    if len({shape[:2] for shape in shapes}) > 1:
        raise ValueError(f"views have shapes {shapes}: N and C must agree")
    return found


def first_logits(views: Sequence[View]) -> Tensor:
    """One of the views' tensors: it tells N, C, dtype and device."""
    return _tensors(views[0])[0]


def _tensors(view: View) -> list[Tensor]:
    return [view] if isinstance(view, Tensor) else [tile.logits for tile in view]


def probability_bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(images, rows, mean probability (m, C, R, W) of the views), band by band."""
    for images, rows, values in _bands(views, size, align_corners):
        mean = torch.softmax(next(values), 1)
        for value in values:
            mean += torch.softmax(value, 1)
        yield images, rows, mean.div_(len(views))


def logit_bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(images, rows, logits (m, C, R, W) up to a shift of all classes), band by band; log-probabilities of several."""
    if len(views) > 1:
        for images, rows, mean in probability_bands(views, size, align_corners):
            yield images, rows, mean.clamp_min_(torch.finfo(mean.dtype).tiny).log_()
        return
    for images, rows, values in _bands(views, size, align_corners):
        yield images, rows, next(values)


def _bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool
) -> Iterator[tuple[slice, slice, Iterator[Tensor]]]:
    """Images, rows, and the views' values one after the other."""
    logits = first_logits(views)
    budget = CPU_BAND_BYTES if logits.device.type == "cpu" else DEVICE_BAND_BYTES
    sources = [
        _Tile(Tile(view, 0, 0, size, size), align_corners, budget)
        if isinstance(view, Tensor)
        else _Tiles(view, size, align_corners, budget)
        for view in views
    ]
    N, C = logits.shape[:2]
    row_bytes = C * size[1] * compute_dtype(logits).itemsize
    rows_per_band = max(1, min(size[0], budget // row_bytes))
    step = max(1, min(N, budget // (row_bytes * rows_per_band)))
    for first in range(0, N, step):
        images = slice(first, min(N, first + step))
        for row in range(0, size[0], rows_per_band):
            rows = slice(row, min(size[0], row + rows_per_band))
            yield images, rows, (source.values(images, rows) for source in sources)


class _Tile:
    """One tensor of logits as a source of bands."""

    def __init__(self, tile: Tile, align_corners: bool, budget: int) -> None:
        self.tile = tile
        logits = tile.logits.detach()
        low = (logits.shape[2], logits.shape[3])
        grid = grid_of(low, tile.frame, align_corners, compute_dtype(logits), logits.device)
        self._sweep = BlockSweep(logits, grid, slice(0, tile.frame[0]), None, budget)

    def values(self, images: slice, rows: slice) -> Tensor:
        """(m, C, R, width) of the tile's own rows."""
        first = self.tile.skip
        return BlockBand(self._sweep, images, rows).values[..., first : first + self.tile.size[1]]

    def weight(self, rows: slice) -> Tensor | None:
        """(R, width) weights of the tile's own rows, or None where all are 1."""
        if self.tile.weights is None:
            return None
        vertical, horizontal = self.tile.weights
        return vertical[rows].view(-1, 1) * horizontal


class _Tiles:
    """Overlapping tiles as a source of bands: the mean of their logits, weighted where they say so."""

    def __init__(self, tiles: Sequence[Tile], size: tuple[int, int], align_corners: bool, budget: int) -> None:
        self._width = size[1]
        self._sources = [_Tile(tile, align_corners, budget) for tile in tiles]

    def values(self, images: slice, rows: slice) -> Tensor:
        """(m, C, R, W); NaN where no tile is."""
        total: Tensor | None = None
        count: Tensor | None = None
        for source in self._sources:
            tile = source.tile
            start, stop = max(rows.start, tile.top), min(rows.stop, tile.top + tile.size[0])
            if start >= stop:
                continue
            part = source.values(images, slice(start - tile.top, stop - tile.top))
            if total is None or count is None:
                R = rows.stop - rows.start
                total = part.new_zeros(*part.shape[:2], R, self._width)
                count = part.new_zeros(R, self._width)
            place = slice(start - rows.start, stop - rows.start), slice(tile.left, tile.left + tile.size[1])
            weight = source.weight(slice(start - tile.top, stop - tile.top))
            total[:, :, *place] += part if weight is None else part.mul_(weight)
            count[place] += 1 if weight is None else weight
        if total is None or count is None:
            raise ValueError(f"no tile covers the output rows {rows.start} to {rows.stop - 1}: cover the whole output")
        return total.div_(count)
