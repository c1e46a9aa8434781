"""A batch of upsampled logits, one band of output rows at a time; no tensor of size (N, C, H, W) exists.

A band lies between a few source rows, which are interpolated horizontally (*widened*) once. The gradient of a band is
transposed in the same way: weighted sums over its rows, and one transposed horizontal pass per source row.

Infinite logits are large numbers until a band is complete (`reference.bounded`).

The largest logit over the classes is subtracted *at low resolution*, unless a pixel's logits are used one by one.
Softmax and argmax are invariant to a shift of all classes, and interpolation is linear. So exp() is at most 1 without a
pass over the full resolution, and a large common offset costs no precision.

On the CPU, the output rows are cut into one part per torch thread, and one thread processes each part. A band is too
small for several threads: if data workers run on the same machine, synchronizing after every operation takes 2 to 3.5
times as long (measured). Rows are cut instead of images, so that small images share a band.

Shapes: N images, m of them in a band, C classes, R rows of a band, h x w of the logits, H x W of the output.
"""

from __future__ import annotations

import functools
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from segapp.compat.torch import dispatch_modes
from segapp.losses.fused.grid import Grid, grid_of
from segapp.losses.fused.reference import bounded, compute_dtype, is_finite, unbounded_

CPU_BAND_BYTES = 1600 << 10
"""Bytes of a thread's band, which fits the second-level cache: 1.2 to 2.4 MB are equally fast, 0.4 MB takes 1.6 x."""
DEVICE_BAND_BYTES = 32 << 20
"""Bytes of a band on other devices; larger, because launches cost more than memory traffic."""
WINDOW_ROWS = 8
"""Number of source rows that are widened together, if they fit into `WINDOW_BYTES`."""
WINDOW_BYTES = 800 << 10
"""Half a band."""
MIN_ROWS_OF_A_CELL = 3
"""With fewer output rows per source row, a band covers several source rows."""
MIN_CELL_BYTES = 200 << 10
"""The same limit if a cell of all images is smaller than this: calls would take longer than their work."""
MIN_SHARED_BYTES = 400 << 10
"""Smaller bands are processed by one thread: two threads contend for the interpreter and take 2 x as long."""
MIN_PART_BYTES = 1 << 20
"""Parts whose full-resolution logits have fewer bytes do not get their own thread."""

Result = TypeVar("Result")


class Band(Protocol):
    """Some output rows of some images; valid until the next band is requested.

    Attributes:
        images: indices of the images in the batch.
        rows: the output rows.
        values: (m, C, R, W) upsampled logits, minus the widened maximum if the sweep is shifted, in a buffer that may
            be overwritten.
    """

    images: slice
    rows: slice
    values: Tensor

    def add_gradient(self, gradient: Tensor) -> None:
        """Add the transposed interpolation of a gradient (m, C, R, W) to the gradient of the logits."""
        ...


def sweep_bands(
    work: Callable[[Iterator[Band]], Result],
    logits: Tensor,
    size: tuple[int, int],
    align_corners: bool,
    *,
    with_gradient: bool = False,
    is_shifted: bool = True,
) -> tuple[list[Result], Tensor | None]:
    """Call `work` with the bands of the upsampled logits, once for each part.

    Args:
        work: consumes the bands of a part, which are some output rows of all images; called without grad mode, possibly
            in another thread.
        logits: (N, C, h, w), any floating dtype and layout.
        size: (H, W).
        align_corners: as in `F.interpolate`.
        with_gradient: allocate a gradient for the bands' `add_gradient`.
        is_shifted: subtract the largest logit over the classes; False if a pixel's logits are used one by one, as in a
            sigmoid.

    Returns:
        The results of `work` in the order of the parts, which depends only on shapes and torch's number of threads;
        the gradient (N, C, h, w) in the compute dtype, or None.
    """
    grid = grid_of((logits.shape[2], logits.shape[3]), size, align_corners, compute_dtype(logits), logits)
    on_cpu = logits.device.type == "cpu"
    budget = CPU_BAND_BYTES if on_cpu else DEVICE_BAND_BYTES
    full_bytes = logits.shape[0] * logits.shape[1] * size[0] * size[1] * grid.dtype.itemsize
    kind, num_parts = plan_sweep(logits.shape, grid, full_bytes) if on_cpu else (BlockSweep, 1)
    parts = plan_parts(grid.cells, num_parts)
    values, is_inference = logits.detach(), torch.is_inference_mode_enabled()
    gradient = torch.zeros(logits.shape, dtype=grid.dtype, device=logits.device) if with_gradient else None

    def run(part: slice) -> tuple[Result, _Sweep]:
        # A thread does not inherit inference mode, without which it cannot write to tensors made in it.
        with torch.inference_mode(is_inference), torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            sweep = kind(values, grid, part, gradient, budget, is_shifted)
            return work(iter(sweep)), sweep

    # A dispatch mode, such as FakeTensorMode, is not active in other threads.
    if dispatch_modes() or (len(parts) == 1 and (not on_cpu or torch.get_num_threads() == 1)):
        done = [run(part) for part in parts]
    else:
        done = list(_single_threads(torch.get_num_threads(), os.getpid()).map(run, parts))
    for _, sweep in done:
        sweep.add_edge()
    return [result for result, _ in done], gradient


def plan_sweep(shape: tuple[int, ...], grid: Grid, full_bytes: int) -> tuple[type[_Sweep], int]:
    """Return the kind of bands and the number of parts, one per thread, for a batch on the CPU.

    Args:
        shape: (N, C, h, w) of the logits.
        grid: tables of the resampling.
        full_bytes: bytes of (N, C, H, W).
    """
    N, C, h = shape[:3]
    num_parts = max(1, min(torch.get_num_threads(), full_bytes // MIN_PART_BYTES))
    cell_bytes = N * C * grid.tallest_cell * grid.columns.size_out * grid.dtype.itemsize
    if grid.rows.size_out < MIN_ROWS_OF_A_CELL * h or cell_bytes < MIN_CELL_BYTES:
        return BlockSweep, num_parts
    return _CellSweep, num_parts if cell_bytes >= MIN_SHARED_BYTES else 1


def plan_parts(cells: list[tuple[int, int, int]], num_parts: int) -> list[slice]:
    """Cut the output rows between cells into parts of nearly equal size.

    Args:
        cells: (source row, first output row, last + 1).
        num_parts: number of parts; at most one per cell is returned.
    """
    num_parts = max(1, min(num_parts, len(cells)))
    edges = [len(cells) * k // num_parts for k in range(num_parts + 1)]
    return [slice(cells[low][1], cells[high - 1][2]) for low, high in itertools.pairwise(edges)]


@functools.lru_cache(maxsize=1)
def _single_threads(num_threads: int, process: int) -> ThreadPoolExecutor:
    """Return a pool of threads whose torch operators use one thread each; a forked process gets its own."""
    del process
    pool = ThreadPoolExecutor(num_threads, "band", initializer=torch.set_num_threads, initargs=(1,))
    all_started = threading.Barrier(num_threads + 1)
    for _ in range(num_threads):
        pool.submit(all_started.wait)
    all_started.wait()
    torch.set_num_threads(num_threads)  # set_num_threads in a thread also sets the default of threads started later
    return pool


class _Sweep:
    """Base class of the two kinds of sweeps over the output rows of a part: its source rows and their gradient.

    Neighboring parts share a source row. Its gradient belongs to the lower part; the upper part stores its contribution
    in `edge`, so that no two threads write to one row.
    """

    def __init__(
        self, logits: Tensor, grid: Grid, rows: slice, total: Tensor | None, budget: int, is_shifted: bool = True
    ) -> None:
        self.grid, self.rows, self.logits, self.gradient = grid, rows, logits, total
        self.is_shifted = is_shifted
        self.first_source, self.last_source = grid.rows.first_source(rows.start), grid.rows.last_source(rows.stop - 1)
        is_shared = rows.stop < grid.rows.size_out and grid.rows.first_source(rows.stop) == self.last_source
        self.edge = torch.zeros_like(total[:, :, self.last_source]) if is_shared and total is not None else None
        self.is_finite = is_finite(logits[:, :, self.first_source : self.last_source + 1])
        self.row_bytes = logits.shape[1] * grid.columns.size_out * grid.dtype.itemsize
        self.budget = budget

    def __iter__(self) -> Iterator[Band]:
        raise NotImplementedError

    def add_edge(self) -> None:
        """Add the shared row's contribution to the gradient; called for one part after the other."""
        if self.edge is not None and self.gradient is not None:
            self.gradient[:, :, self.last_source] += self.edge

    def wide_rows(self, images: slice, start: int, stop: int) -> Tensor:
        """Return source rows start..stop - 1, widened, minus their class maximum if shifted: (m, C, k, W)."""
        rows = self.logits[images, :, start:stop].to(self.grid.dtype)
        if self.is_shifted:
            rows = rows - rows.amax(1, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
        return self.grid.widen(rows if self.is_finite else bounded(rows), is_finite=self.is_finite)

    def add_wide_gradient(self, gradient: Tensor, images: slice, start: int) -> None:
        """Add the gradient (m, C, k, W) of widened source rows from `start` on."""
        assert self.gradient is not None
        rows, stop = self.grid.narrow(gradient), start + gradient.shape[2]
        if self.edge is not None and stop > self.last_source:
            self.edge[images] += rows[:, :, -1]
            rows, stop = rows[:, :, :-1], stop - 1
        self.gradient[images, :, start:stop] += rows

    def image_groups(self, rows: int) -> Iterator[slice]:
        """Yield the groups of images that fit into a band with this number of rows."""
        count = self.logits.shape[0]
        step = max(1, min(count, self.budget // (self.row_bytes * rows)))
        for first in range(0, count, step):
            yield slice(first, min(count, first + step))


class _CellSweep(_Sweep):
    """Sweep with bands between two neighboring source rows, taken from a sliding window of widened rows."""

    def __iter__(self) -> Iterator[Band]:
        rows_per_band = max(1, min(self.grid.tallest_cell, self.budget // self.row_bytes))
        C, W = self.logits.shape[1], self.grid.columns.size_out
        buffer: Tensor | None = None
        cells = [cell for cell in self.grid.cells if self.rows.start <= cell[1] < self.rows.stop]
        for images in self.image_groups(rows_per_band):
            if buffer is None:
                buffer = self.logits.new_empty(
                    (images.stop - images.start) * C * rows_per_band * W, dtype=self.grid.dtype
                )
            window = _Window(self, images)
            for source, start, stop in cells:
                window.slide(source)
                for row in range(start, stop, rows_per_band):
                    yield _CellBand(window, buffer, slice(row, min(stop, row + rows_per_band)), source)
            window.flush(self.last_source + 1)


class _Window:
    """A few widened source rows of some images, and the gradient accumulated so far."""

    def __init__(self, sweep: _CellSweep, images: slice) -> None:
        self.sweep, self.images, self.wide_images = sweep, images, images.stop - images.start
        self.wide = self.wide_gradient = sweep.logits.new_empty(0)
        self.base = self.end = sweep.first_source

    def slide(self, source: int) -> None:
        """Move the window so that it holds `source` and the row below it."""
        if min(source + 1, self.sweep.last_source) < self.end:
            return
        self.flush(source)
        rows = max(2, min(WINDOW_ROWS, WINDOW_BYTES // (self.sweep.row_bytes * self.wide_images)))
        end = min(source + rows, self.sweep.last_source) + 1
        self.wide = self.sweep.wide_rows(self.images, source, end)
        if self.sweep.gradient is not None:
            fresh = torch.zeros_like(self.wide)
            if self.end > source:
                fresh[:, :, : self.end - source] = self.wide_gradient[:, :, source - self.base :]
            self.wide_gradient = fresh
        self.base, self.end = source, end

    def flush(self, source: int) -> None:
        """Add the gradient of the rows above `source`, which no later band uses, to the total."""
        if self.sweep.gradient is not None and source > self.base:
            self.sweep.add_wide_gradient(self.wide_gradient[:, :, : source - self.base], self.images, self.base)


class _CellBand:
    """`Band` between `source` and the row below it."""

    def __init__(self, window: _Window, buffer: Tensor, rows: slice, source: int) -> None:
        self._window = window
        self.images, self.rows = window.images, rows
        self._pair = source - window.base, min(source + 1, window.sweep.last_source) - window.base
        m, C, _, W = window.wide.shape
        R = rows.stop - rows.start
        lower, upper = (window.wide[:, :, row : row + 1] for row in self._pair)
        fraction = window.sweep.grid.fractions[rows]
        self.values = torch.lerp(lower, upper, fraction, out=buffer[: m * C * R * W].view(m, C, R, W))
        if not window.sweep.is_finite:
            unbounded_(self.values)

    def add_gradient(self, gradient: Tensor) -> None:
        lower, upper = self._pair
        sums = torch.matmul(self._window.sweep.grid.pair_weights[:, self.rows], gradient)
        self._window.wide_gradient[:, :, lower] += sums[:, :, 0]
        self._window.wide_gradient[:, :, upper] += sums[:, :, 1]


class BlockSweep(_Sweep):
    """Sweep with bands over many source rows: few launches on a device, few operations at small scales."""

    def __iter__(self) -> Iterator[Band]:
        rows_per_band = max(1, min(self.rows.stop - self.rows.start, self.budget // self.row_bytes))
        for images in self.image_groups(rows_per_band):
            for row in range(self.rows.start, self.rows.stop, rows_per_band):
                yield BlockBand(self, images, slice(row, min(self.rows.stop, row + rows_per_band)))


class BlockBand:
    """`Band` over many source rows."""

    def __init__(self, sweep: BlockSweep, images: slice, rows: slice) -> None:
        self._sweep, self.images, self.rows = sweep, images, rows
        axis = sweep.grid.rows
        self._start, self._stop = axis.first_source(rows.start), axis.last_source(rows.stop - 1) + 1
        wide, grid = sweep.wide_rows(images, self._start, self._stop), sweep.grid
        lower, upper = grid.lower_rows[rows] - self._start, grid.upper_rows[rows] - self._start
        self.values = torch.lerp(wide.index_select(2, lower), wide.index_select(2, upper), grid.fractions[rows])
        if not sweep.is_finite:
            unbounded_(self.values)

    def add_gradient(self, gradient: Tensor) -> None:
        sums = self._sweep.grid.gather_rows(gradient, self.rows.start, self._start, self._stop)
        self._sweep.add_wide_gradient(sums, self.images, self._start)
