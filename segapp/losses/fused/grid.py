"""Bilinear interpolation with small tables: for each output sample, its source samples and the fraction between them.

The fractions are computed in float64 and rounded once. `F.interpolate` computes them in the logits' precision, which
causes an error of 1e-5 of the gradient in float32. No atomics are used, so sums are deterministic.

Shapes: m images, C classes, R rows of a band, h x w of the source, H x W of the output; U (out, in) is an axis's
interpolation matrix.
"""

import contextlib
import functools
import itertools
import math

import torch
from torch import Tensor

from segapp.compat.torch import without_dispatch_modes
from segapp.losses.fused.checks import is_simulated

BLOCK_COLUMNS = 16
"""Source columns per block of the horizontal matrix: a compromise between large products and few zeros."""


class Axis:
    """One axis of a bilinear resampling.

    Output sample r is (1 - fraction[r]) source[lower[r]] + fraction[r] source[min(lower[r] + 1, size_in - 1)].

    Args:
        size_in: number of source samples.
        size_out: number of output samples.
        align_corners: as in `F.interpolate`.

    Attributes:
        lower: (size_out,) int64, non-decreasing.
        fraction: (size_out,) float64 in [0, 1].
        starts: for each source sample, the first output sample whose `lower` is at least it; then size_out.
    """

    def __init__(self, size_in: int, size_out: int, align_corners: bool) -> None:
        self.size_in, self.size_out = size_in, size_out
        sample = torch.arange(size_out, dtype=torch.float64, device="cpu")
        if align_corners:
            source = sample * ((size_in - 1) / (size_out - 1) if size_out > 1 else 0.0)
        else:
            source = (sample + 0.5) * (size_in / size_out) - 0.5
        source = source.clamp(0.0, float(size_in - 1))
        # 1e-9, because an exact multiple may come out as 7.999...: its row would become a separate cell.
        lower = torch.floor(source + 1e-9)
        self.lower, self.fraction = lower.long(), (source - lower).clamp(0.0, 1.0)
        self._sources: list[int] = self.lower.tolist()
        edges = torch.arange(size_in + 1, dtype=torch.int64, device="cpu")
        self.starts: list[int] = torch.searchsorted(self.lower, edges).tolist()

    @property
    def upper(self) -> Tensor:
        """The source sample after `lower`, but at most the last one; (size_out,) int64."""
        return (self.lower + 1).clamp(max=self.size_in - 1)

    def first_source(self, sample: int) -> int:
        """Return `lower` of an output sample."""
        return self._sources[sample]

    def last_source(self, sample: int) -> int:
        """Return `upper` of an output sample."""
        return min(self._sources[sample] + 1, self.size_in - 1)

    def matrix(self) -> Tensor:
        """Return U, (size_out, size_in) float64."""
        weights = torch.zeros(self.size_out, self.size_in, dtype=torch.float64, device="cpu")
        rows = torch.arange(self.size_out, device="cpu")
        weights[rows, self.lower] += 1 - self.fraction
        weights[rows, self.upper] += self.fraction
        return weights

    def adjoint_table(self, first: int, last: int, low: int, high: int) -> tuple[Tensor, Tensor]:
        """Return the output samples of first..last-1 that use each source sample of low..high-1, with their weights.

        Returns:
            samples: (high - low, S) int64, relative to `first`; padded with 0.
            weights: (high - low, S) float64; padded with 0.
        """
        begins = [max(first, self.starts[max(s - 1, 0)]) for s in range(low, high)]
        ends = [min(last, self.starts[min(s + 1, self.size_in)]) for s in range(low, high)]
        width = max(1, *(end - begin for begin, end in zip(begins, ends, strict=True)), 1)
        samples = torch.tensor(begins, device="cpu").view(-1, 1) + torch.arange(width, device="cpu")
        inside = samples < torch.tensor(ends, device="cpu").view(-1, 1)
        samples = torch.where(inside, samples, first)
        source = torch.arange(low, high, device="cpu").view(-1, 1)
        fraction = self.fraction[samples]
        weights = (1 - fraction) * (self.lower[samples] == source) + fraction * (self.upper[samples] == source)
        return samples - first, torch.where(inside, weights, 0.0)


class Grid:
    """Tables of one resampling in one dtype on one device; made by `grid_of`, which caches them.

    Args:
        low: (h, w).
        high: (H, W).
        align_corners: see `Axis`.
        dtype: dtype of the weights, float32 or float64.
        device: device of the tables.
        is_simulated: the tables on the device are simulated tensors; the numbers that Python reads are real.

    Attributes:
        rows: the vertical axis.
        columns: the horizontal axis.
        cells: (source row, first output row, last + 1) of the output rows between a source row and the next one.
        tallest_cell: the largest number of output rows in a cell.
        fractions: (H, 1) vertical fractions.
        pair_weights: (2, H): 1 - fraction and fraction.
        lower_rows: (H,) int64, the source row above each output row.
        upper_rows: (H,) int64, the source row below.
    """

    def __init__(
        self,
        low: tuple[int, int],
        high: tuple[int, int],
        align_corners: bool,
        dtype: torch.dtype,
        device: torch.device,
        *,
        is_simulated: bool = False,
    ) -> None:
        self.dtype, self.device, self._is_simulated = dtype, device, is_simulated
        with self._real_numbers():
            self.rows, self.columns = Axis(low[0], high[0], align_corners), Axis(low[1], high[1], align_corners)
            rows, columns = self.rows, self.columns
            pairs, upper_rows, upper = torch.stack([1 - rows.fraction, rows.fraction]), rows.upper, columns.upper
            fractions = rows.fraction.view(-1, 1)
            samples, weights = columns.adjoint_table(0, columns.size_out, 0, columns.size_in)
        self.cells = [(i, *span) for i, span in enumerate(itertools.pairwise(rows.starts)) if span[0] < span[1]]
        self.tallest_cell = max(stop - start for _, start, stop in self.cells)
        self.fractions, self.pair_weights = self._place(fractions, dtype), self._place(pairs, dtype)
        self._blocks = _BlockedMatrix(columns, dtype) if device.type == "cpu" and not is_simulated else None
        self.lower_rows, self.upper_rows = self._place(rows.lower), self._place(upper_rows)
        self._adjoints: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self._lower, self._upper = self._place(columns.lower), self._place(upper)
        self._fraction = self._place(columns.fraction, dtype)
        self._samples, self._weights = self._place(samples), self._place(weights, dtype)

    def _real_numbers(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which tables have values even in a simulation."""
        return without_dispatch_modes() if self._is_simulated else contextlib.nullcontext()

    def _place(self, table: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
        if self._is_simulated:
            return torch.empty(table.shape, dtype=dtype, device=self.device)
        return table.to(self.device, dtype)

    def gather_rows(self, gradient: Tensor, first: int, low: int, high: int) -> Tensor:
        """Return the transposed vertical interpolation of some output rows.

        Args:
            gradient: (m, C, R, W) of the output rows from `first` on.
            first: the first output row.
            low: the first source row that they depend on.
            high: the last one + 1.

        Returns:
            (m, C, high - low, W).
        """
        m, C, R, W = gradient.shape
        if (first, R) not in self._adjoints:
            with self._real_numbers():
                samples, weights = self.rows.adjoint_table(first, first + R, low, high)
                weights = weights.unsqueeze(-1)
            self._adjoints[first, R] = self._place(samples), self._place(weights, self.dtype)
        samples, weights = self._adjoints[first, R]
        picked = gradient.index_select(2, samples.flatten()).view(m, C, *samples.shape, W)
        return torch.sum(picked * weights, 3)

    def widen(self, values: Tensor, *, is_finite: bool = True) -> Tensor:
        """Return the horizontal interpolation, (..., w) -> (..., W); NaN reaches only neighbors unless `is_finite`."""
        if self._blocks is not None and is_finite and products_are_exact():
            return self._blocks.widen(values)
        return torch.lerp(values.index_select(-1, self._lower), values.index_select(-1, self._upper), self._fraction)

    def narrow(self, gradient: Tensor) -> Tensor:
        """Return the transpose of `widen`, (..., W) -> (..., w)."""
        if self._blocks is not None and products_are_exact():
            return self._blocks.narrow(gradient)
        picked = gradient.index_select(-1, self._samples.flatten())
        return torch.sum(picked.view(*gradient.shape[:-1], *self._samples.shape) * self._weights, -1)


class _BlockedMatrix:
    """The horizontal matrix as a batch of narrow blocks: about as fast as a copy, ten times faster than dense."""

    def __init__(self, axis: Axis, dtype: torch.dtype) -> None:
        w, W = axis.size_in, axis.size_out
        block = min(W, max(32, 1 << round(math.log2(max(1.0, BLOCK_COLUMNS * W / w)))))
        lower = axis.lower.tolist()
        lows = [lower[first] for first in range(0, W, block)]
        highs = [min(w - 1, lower[min(W, first + block) - 1] + 1) for first in range(0, W, block)]
        span = max(high - low + 1 for low, high in zip(lows, highs, strict=True))
        lows = [min(low, w - span) for low in lows]
        full = axis.matrix()
        blocks = torch.zeros(len(lows), block, span, dtype=torch.float64, device="cpu")
        for k, low in enumerate(lows):
            rows = full[k * block : (k + 1) * block, low : low + span]
            blocks[k, : rows.shape[0]] = rows
        self.down = blocks.to(dtype)
        self.up = self.down.transpose(1, 2).contiguous()
        self.columns = (torch.tensor(lows, device="cpu").view(-1, 1) + torch.arange(span, device="cpu")).flatten()
        self.num_blocks, self.block, self.span, self.w, self.W = len(lows), block, span, w, W

    def widen(self, values: Tensor) -> Tensor:
        flat = values.reshape(-1, self.w).index_select(1, self.columns)
        blocks = torch.bmm(flat.view(-1, self.num_blocks, self.span).transpose(0, 1), self.up)
        joined = blocks.transpose(0, 1).reshape(-1, self.num_blocks * self.block)
        return joined[:, : self.W].reshape(*values.shape[:-1], self.W)

    def narrow(self, gradient: Tensor) -> Tensor:
        flat = gradient.reshape(-1, self.W)
        if self.num_blocks * self.block != self.W:
            flat = torch.nn.functional.pad(flat, (0, self.num_blocks * self.block - self.W))
        blocks = torch.bmm(flat.view(-1, self.num_blocks, self.block).transpose(0, 1), self.down)
        joined = blocks.transpose(0, 1).reshape(-1, self.num_blocks * self.span)
        sums = gradient.new_zeros(joined.shape[0], self.w)
        return sums.index_add_(1, self.columns, joined).view(*gradient.shape[:-1], self.w)


def products_are_exact() -> bool:
    """Return True unless float32 matrix products use TF32 or bfloat16, which are too coarse for interpolation."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the precision was set only for one backend, with torch's newer settings
        return False


@functools.lru_cache(maxsize=64)
def dense_matrices(
    low: tuple[int, int], high: tuple[int, int], align_corners: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return U of the rows (H, h) and the transposed U of the columns (w, W); cached."""
    with torch.inference_mode(False), torch.no_grad():
        rows, columns = Axis(low[0], high[0], align_corners), Axis(low[1], high[1], align_corners)
        return rows.matrix().to(device, dtype), columns.matrix().T.contiguous().to(device, dtype)


def grid_of(low: tuple[int, int], high: tuple[int, int], align_corners: bool, dtype: torch.dtype, like: Tensor) -> Grid:
    """Return the tables of a resampling on the device of `like`, cached.

    For a simulated tensor they are simulated too and not cached, so that no fake tensor outlives its mode.
    """
    with torch.inference_mode(False), torch.no_grad():
        if is_simulated(like):
            return Grid(low, high, align_corners, dtype, like.device, is_simulated=True)
        return _cached_grid(low, high, align_corners, dtype, like.device)


_cached_grid = functools.lru_cache(maxsize=64)(Grid)
