"""Several logits of the same images (other scales, flipped, overlapping tiles), combined band by band.

A view is a tensor of logits of any resolution for the whole image, or a sequence of tiles whose logits are averaged in
their overlaps. The probabilities of several views are averaged. Full resolution exists for only one band at a time.

Shapes: N images, m of them in a band, C classes, R rows of a band, h x w of logits, H x W of the output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segapp.losses.fused.bands import CPU_BAND_BYTES, DEVICE_BAND_BYTES, BlockBand, BlockSweep
from segapp.losses.fused.grid import grid_of
from segapp.losses.fused.reference import compute_dtype


@dataclass(frozen=True)
class LogitsTile:
    """Logits of a rectangle of the output.

    Attributes:
        logits: (N, C, h, w).
        top: first output row.
        left: first output column.
        size: height and width in output pixels.
        frame: height and width that the logits cover, at least `size`; the remainder is padding.
        skip: columns of padding at the left of the frame; the other padding is at the right and at the bottom.
    """

    logits: Tensor
    top: int
    left: int
    size: tuple[int, int]
    frame: tuple[int, int]
    skip: int = 0


View = Tensor | Sequence[LogitsTile]


def check_views(views: Tensor | Sequence[View]) -> list[View]:
    """Return the views as a list.

    Raises:
        ValueError: no views, a view without tiles, or views with different N or C.
    """
    found: list[View] = [views] if isinstance(views, Tensor) else list(views)
    if not found or not all(_tensors(view) for view in found):
        raise ValueError("there are no views: give at least one tensor of logits, or one tile")
    shapes = [tuple(tensor.shape) for view in found for tensor in _tensors(view)]
    if len({shape[:2] for shape in shapes}) > 1:
        raise ValueError(f"views have shapes {shapes}: N and C must agree")
    return found


def first_logits(views: Sequence[View]) -> Tensor:
    """Return one tensor of the views, for N, C, dtype and device."""
    return _tensors(views[0])[0]


def _tensors(view: View) -> list[Tensor]:
    return [view] if isinstance(view, Tensor) else [tile.logits for tile in view]


def probability_bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool, *, is_sigmoid: bool = False
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (images, rows, mean probability (m, C, R, W) of the views), band by band; by softmax or sigmoid."""
    for images, rows, values in _bands(views, size, align_corners, is_shifted=not is_sigmoid):
        mean = _probability(next(values), is_sigmoid)
        for value in values:
            mean += _probability(value, is_sigmoid)
        yield images, rows, mean.div_(len(views))


def _probability(values: Tensor, is_sigmoid: bool) -> Tensor:
    return torch.sigmoid(values) if is_sigmoid else torch.softmax(values, 1)


def logit_bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool, *, is_sigmoid: bool = False
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Yield (images, rows, logits (m, C, R, W)), band by band; for a softmax up to an additive constant per pixel.

    For several views, these are the logits of the mean probability: for a softmax, its logarithm.
    """
    if len(views) > 1:
        for images, rows, mean in probability_bands(views, size, align_corners, is_sigmoid=is_sigmoid):
            info = torch.finfo(mean.dtype)
            if is_sigmoid:
                yield images, rows, mean.clamp_(info.tiny, 1 - info.eps).logit_()
            else:
                yield images, rows, mean.clamp_min_(info.tiny).log_()
        return
    for images, rows, values in _bands(views, size, align_corners, is_shifted=not is_sigmoid):
        yield images, rows, next(values)


def _bands(
    views: Sequence[View], size: tuple[int, int], align_corners: bool, *, is_shifted: bool
) -> Iterator[tuple[slice, slice, Iterator[Tensor]]]:
    """Yield images, rows, and an iterator over the views' values (m, C, R, W)."""
    logits = first_logits(views)
    budget = CPU_BAND_BYTES if logits.device.type == "cpu" else DEVICE_BAND_BYTES
    sources = [
        _SampledTile(LogitsTile(view, 0, 0, size, size), align_corners, budget, is_shifted)
        if isinstance(view, Tensor)
        else _Tiles(view, size, align_corners, budget, is_shifted)
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


class _SampledTile:
    """One tensor of logits as a source of bands."""

    def __init__(self, tile: LogitsTile, align_corners: bool, budget: int, is_shifted: bool) -> None:
        self.tile = tile
        logits = tile.logits.detach()
        low = (logits.shape[2], logits.shape[3])
        grid = grid_of(low, tile.frame, align_corners, compute_dtype(logits), logits)
        self.sweep = BlockSweep(logits, grid, slice(0, tile.frame[0]), None, budget, is_shifted)

    def values(self, images: slice, rows: slice) -> Tensor:
        """Return logits (m, C, R, width); `rows` are relative to the tile."""
        return BlockBand(self.sweep, images, rows).values[..., self._columns]

    def wide(self, images: slice) -> Tensor:
        """Return all source rows, widened: (m, C, h, width)."""
        return self.sweep.wide_rows(images, 0, self.tile.logits.shape[2])[..., self._columns]

    @property
    def _columns(self) -> slice:
        return slice(self.tile.skip, self.tile.skip + self.tile.size[1])


class _Row:
    """Tiles with the same rows, next to each other; they are joined once, before the rows are interpolated."""

    def __init__(self, sources: Sequence[_SampledTile], width: int) -> None:
        self._sources, self._width = sources, width
        self._grid, self._first = sources[0].sweep.grid, sources[0].tile
        self.top, self.bottom = self._first.top, self._first.top + self._first.size[0]
        self._wide: tuple[slice, Tensor] | None = None
        logits = self._first.logits
        self._count = torch.zeros(width, dtype=compute_dtype(logits), device=logits.device)
        for source in sources:
            self._count[self._place(source)] += 1

    def add(self, images: slice, rows: slice, total: Tensor, count: Tensor) -> None:
        """Add the tiles' contribution to the sums (m, C, R, W) of logits and (R, W) of their number."""
        start, stop = max(rows.start, self.top), min(rows.stop, self.bottom)
        own, place = slice(start - self.top, stop - self.top), slice(start - rows.start, stop - rows.start)
        wide, grid = self._joined(images), self._grid
        ends = wide.index_select(2, grid.lower_rows[own]), wide.index_select(2, grid.upper_rows[own])
        total[:, :, place] += torch.lerp(*ends, grid.fractions[own])
        count[place] += self._count

    @property
    def logits(self) -> Tensor:
        """Logits of one tile, for C, dtype and device."""
        return self._first.logits

    def clear(self) -> None:
        """Free the joined tiles."""
        self._wide = None

    def _joined(self, images: slice) -> Tensor:
        """Return the sum of the tiles' widened source rows, (m, C, h, W)."""
        if self._wide is None or self._wide[0] != images:
            logits = self._first.logits
            shape = (images.stop - images.start, *logits.shape[1:3], self._width)
            total = torch.zeros(shape, dtype=compute_dtype(logits), device=logits.device)
            for source in self._sources:
                total[..., self._place(source)] += source.wide(images)
            self._wide = images, total
        return self._wide[1]

    @staticmethod
    def _place(source: _SampledTile) -> slice:
        """Return the output columns of a tile."""
        return slice(source.tile.left, source.tile.left + source.tile.size[1])


class _Tiles:
    """Overlapping tiles as a source of bands: the mean of their logits."""

    def __init__(
        self, tiles: Sequence[LogitsTile], size: tuple[int, int], align_corners: bool, budget: int, is_shifted: bool
    ) -> None:
        self._width = size[1]
        rows: dict[tuple[int, ...], list[_SampledTile]] = {}
        for tile in tiles:
            key = (tile.top, tile.size[0], tile.frame[0], tile.logits.shape[2])
            rows.setdefault(key, []).append(_SampledTile(tile, align_corners, budget, is_shifted))
        self._rows = [_Row(sources, size[1]) for sources in rows.values()]

    def values(self, images: slice, rows: slice) -> Tensor:
        """Return logits (m, C, R, W); NaN outside the tiles. Called from top to bottom, it keeps few joined tiles."""
        for row in self._rows:
            if row.bottom <= rows.start or row.top >= rows.stop:
                row.clear()
        covering = [row for row in self._rows if row.top < rows.stop and row.bottom > rows.start]
        if not covering:
            raise ValueError(f"no tile covers the output rows {rows.start} to {rows.stop - 1}: cover the whole output")
        first = covering[0].logits
        shape = (images.stop - images.start, first.shape[1], rows.stop - rows.start, self._width)
        total = torch.zeros(shape, dtype=compute_dtype(first), device=first.device)
        count = total.new_zeros(shape[2:])
        for row in covering:
            row.add(images, rows, total, count)
        return total.div_(count)
