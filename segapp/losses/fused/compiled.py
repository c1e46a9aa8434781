"""Upsampling cross-entropy on bands as one program for torch.compile: three loop nests instead of twenty operations.

Output rows are grouped into *cells*, the rows between two source rows; a chunk is K cells of m images, each padded to R
rows, the last chunk padded to K cells, so that one program serves a whole batch. At full resolution only the
exponentials of a chunk are stored. The formulae are those of `bands_cross_entropy`.

Shapes: m images of a chunk, C classes, K cells, R rows of a cell, W output columns; h source rows.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from segapp.losses.fused.bands_cross_entropy import UNDERFLOW, CrossEntropyOptions, cross_entropy_on_bands
from segapp.losses.fused.checks import check_target_range, valid_pixels
from segapp.losses.fused.grid import Grid, grid_of
from segapp.losses.fused.reference import compute_dtype

CHUNK_BYTES = 4 << 20
"""Bytes of a chunk: the compiled program is fastest with 2 to 4 MB; 8 MB take 15 to 45 % longer."""

ChunkSums = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Loss sum, weight sum, smallest sum of exponentials, gradient of the rows above and of the rows below."""


class CompilerMissingError(RuntimeError):
    """The chunk program could not be compiled on this machine."""


def chunk_sums(
    wide: Tensor,
    ids: Tensor,
    fraction: Tensor,
    weight: Tensor | None,
    smoothing: float,
    exact_maximum: bool,
    with_gradient: bool,
) -> ChunkSums:
    """Return the loss of a chunk and its gradient to the widened source rows.

    Args:
        wide: (m, C, K + 1, W) widened source rows less their maximum over the classes.
        ids: (m, K, R, W) int32 class ids, -1 where a pixel does not count.
        fraction: (K, R) vertical fractions.
        weight: (C,) class weights, or None.
        smoothing: label smoothing.
        exact_maximum: also subtract each pixel's own maximum.
        with_gradient: compute the last two entries; empty otherwise.
    """
    C = wide.shape[1]
    lam = fraction[None, None, :, :, None]
    above, below = wide[:, :, :-1].unsqueeze(3), wide[:, :, 1:].unsqueeze(3)
    values = above + (below - above) * lam
    own = ids.unsqueeze(1) == torch.arange(C, device=wide.device, dtype=ids.dtype).view(1, C, 1, 1, 1)
    if exact_maximum:
        largest = values.amax(1)
        exponentials = torch.exp(values - largest.unsqueeze(1))
        total = exponentials.sum(1)
        log_total = torch.log(total) + largest
    else:
        exponentials = torch.exp(values)
        total = exponentials.sum(1)
        log_total = torch.log(total)
    valid = ids >= 0
    counted = valid.to(wide.dtype)
    pixel_weight: Tensor = counted
    total_weight: Tensor | float = float(C)
    if weight is not None:
        per_class = weight.view(1, C, 1, 1, 1)
        pixel_weight, total_weight = torch.where(own, per_class, 0.0).sum(1) * counted, weight.sum()
    nll = log_total - torch.where(own, values, 0.0).sum(1)
    loss = (1 - smoothing) * torch.where(valid, pixel_weight * nll, 0.0).sum(dtype=torch.float64)
    scale = (1 - smoothing) * pixel_weight
    if smoothing:
        weighted = values.sum(1) if weight is None else (values * per_class).sum(1)
        spread = torch.where(valid, log_total * total_weight - weighted, 0.0)
        loss = loss + smoothing / C * spread.sum(dtype=torch.float64)
        scale = scale + (smoothing / C) * total_weight * counted
    sums = loss, pixel_weight.sum(dtype=torch.float64), total.amin()
    if not with_gradient:
        return *sums, loss.new_empty(0), loss.new_empty(0)
    gradient = exponentials * (scale / total).unsqueeze(1)
    gradient = gradient - torch.where(own, ((1 - smoothing) * pixel_weight).unsqueeze(1), 0.0)
    if smoothing:
        constant = counted.unsqueeze(1) if weight is None else per_class * counted.unsqueeze(1)
        gradient = gradient - (smoothing / C) * constant
    return *sums, (gradient * (1.0 - lam)).sum(3), (gradient * lam).sum(3)


def cross_entropy_on_cells(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropyOptions,
    *,
    with_gradient: bool,
    compiled: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return loss sum, weight sum and the loss sum's gradient; falls back to `cross_entropy_on_bands`.

    The program of a shape is compiled on its first use (20 s for the first, 2 s for another shape) and cached on disk.

    Args:
        logits: (N, C, h, w) on the CPU.
        target: (N, H, W) integers.
        weight: (C,) or None.
        options: options of the loss.
        with_gradient: compute the gradient.
        compiled: False runs the same program without a compiler, for tests.

    Raises:
        ValueError: an id that is no class.
    """
    program: Callable[..., ChunkSums] = chunk_sums
    if compiled:
        if (missing := _compiler_failure()) is not None:
            return _fall_back(logits, target, weight, options, with_gradient, missing)
        program = _compiled_program
    chunks = _Chunks(logits.detach(), target, weight, options, with_gradient)
    try:
        with torch.no_grad(), torch.autocast(logits.device.type, enabled=False):
            return chunks.run(program)
    except CompilerMissingError as error:
        return _fall_back(logits, target, weight, options, with_gradient, str(error))


def _fall_back(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropyOptions,
    with_gradient: bool,
    reason: str,
) -> tuple[Tensor, Tensor, Tensor | None]:
    _warn_once(f"the compiled loss is not available, using bands: {reason}")
    return cross_entropy_on_bands(logits, target, weight, options, with_gradient=with_gradient)


@functools.cache
def _warn_once(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


_compile_lock = threading.Lock()
"""torch.compile is not thread-safe, and replicas run in threads."""
_failures: list[str] = []
"""The reason why compiling failed in this process; it is not tried again."""


def _compiler_failure() -> str | None:
    return _failures[0] if _failures else None


@functools.cache
def _compiled() -> Callable[..., ChunkSums]:
    return torch.compile(chunk_sums, dynamic=False, fullgraph=True)


def _compiled_program(*arguments: Any) -> ChunkSums:
    with _compile_lock:
        try:
            return _compiled()(*arguments)
        except Exception as error:  # whatever a compiler, a linker or a full disk raises
            first = str(error).strip().splitlines()
            _failures.append(f"{type(error).__name__}: {first[0] if first else 'no message'}")
            raise CompilerMissingError(_failures[0]) from error


class _Chunks:
    """A batch cut into chunks of equal shape."""

    def __init__(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, options: CrossEntropyOptions, with_gradient: bool
    ) -> None:
        N, C, h, w = logits.shape
        H, W = target.shape[-2:]
        self.logits, self.target, self.options, self.with_gradient = logits, target, options, with_gradient
        self.dtype = compute_dtype(logits)
        self.grid: Grid = grid_of((h, w), (H, W), options.align_corners, self.dtype, logits.device)
        self.weight = None if weight is None else weight.to(logits.device, self.dtype)
        R = self.grid.tallest_cell
        cell_bytes = C * R * W * self.dtype.itemsize
        self.cells = max(1, min(h, round(CHUNK_BYTES / cell_bytes)))
        images = max(1, min(N, CHUNK_BYTES // (cell_bytes * self.cells)))
        self.images = next(m for m in range(images, 0, -1) if N % m == 0)
        padded = -(-h // self.cells) * self.cells
        self.row_ids = torch.zeros(padded, R, dtype=torch.int64, device="cpu")
        self.row_exists = torch.zeros(padded, R, dtype=torch.bool, device="cpu")
        fraction = torch.zeros(padded, R, dtype=torch.float64, device="cpu")
        for source, start, stop in self.grid.cells:
            self.row_ids[source, : stop - start] = torch.arange(start, stop, device="cpu")
            self.row_exists[source, : stop - start] = True
            fraction[source, : stop - start] = self.grid.rows.fraction[start:stop]
        self.fraction = fraction.to(self.dtype)

    def run(self, program: Callable[..., ChunkSums]) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return loss sum, weight sum and gradient."""
        loss_sum = weight_sum = 0.0
        gradient = self.logits.new_zeros(self.logits.shape, dtype=self.dtype) if self.with_gradient else None
        for first in range(0, self.logits.shape[0], self.images):
            images = slice(first, first + self.images)
            carried: Tensor | None = None
            for start in range(0, self.logits.shape[2], self.cells):
                loss, count, above, below = self._chunk(program, images, start)
                loss_sum, weight_sum = loss_sum + loss, weight_sum + count
                if gradient is not None:
                    carried = self._collect(gradient, images, start, above, below, carried)
        totals = torch.tensor([loss_sum, weight_sum], dtype=torch.float64, device="cpu")
        return totals[0].clone(), totals[1].clone(), gradient

    def _chunk(
        self, program: Callable[..., ChunkSums], images: slice, start: int
    ) -> tuple[float, float, Tensor, Tensor]:
        K, h = self.cells, self.logits.shape[2]
        rows = self.logits[images, :, start : min(start + K + 1, h)].to(self.dtype)
        if (short := K + 1 - rows.shape[2]) > 0:
            rows = torch.cat([rows, rows[:, :, -1:].expand(-1, -1, short, -1)], 2)
        wide = self.grid.widen(rows - rows.amax(1, keepdim=True))
        picked = self.row_ids[start : start + K]
        target = self.target[images].index_select(1, picked.flatten()).unflatten(1, picked.shape)  # type: ignore[no-untyped-call]
        exists = self.row_exists[start : start + K].view(1, K, -1, 1)
        valid = valid_pixels(target, self.options.ignore_index) & exists
        safe = torch.where(valid, target, 0)
        check_target_range(safe, self.logits.shape[1], self.options.ignore_index)
        ids = safe.to(torch.int32).masked_fill_(~valid, -1)
        lam = self.fraction[start : start + K]
        arguments = wide, ids, lam, self.weight, self.options.label_smoothing
        loss, count, smallest, above, below = program(*arguments, False, self.with_gradient)
        if not float(smallest) > UNDERFLOW:
            loss, count, _, above, below = program(*arguments, True, self.with_gradient)
        return float(loss), float(count), above, below

    def _collect(
        self, gradient: Tensor, images: slice, start: int, above: Tensor, below: Tensor, carried: Tensor | None
    ) -> Tensor:
        """Add the chunk's gradient; return that of the source row after the chunk, for the next chunk."""
        h = self.logits.shape[2]
        above[:, :, 1:] += below[:, :, :-1]
        if carried is not None:
            above[:, :, 0] += carried
        following = below[:, :, -1].clone()
        if start + self.cells >= h:  # rows from h on are repetitions of the last one
            last = h - 1 - start
            above[:, :, last] += above[:, :, last + 1 :].sum(2) + following
            above = above[:, :, : last + 1]
        gradient[images, :, start : start + above.shape[2]] += self.grid.narrow(above)
        return following
