"""Upsampling cross-entropy on CUDA: loss and gradient in one pass, without a full-resolution tensor or atomics.

One program takes the output rows between two source rows (a cell) of one image, and a block of output columns. It holds
the two source rows, widened to its columns, in registers; for each output row it makes the logits, their softmax and
the loss, and adds the gradient into two accumulators. Those leave through the transposed horizontal interpolation, a
small product, as the program's own partial result; a second kernel gathers the partial results of each logit. Every sum
has a fixed order, so the result is the same every time.

The formulae are those of `bands_cross_entropy`. Runs in Triton's interpreter (TRITON_INTERPRET=1) on the CPU too.

Shapes: N images, C classes, h x w of the logits, H x W of the target; BC classes, BX columns, BJ source columns of a
program, C and the numbers of columns rounded up.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import contextlib
import functools
import threading
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from segapp.losses.fused.bands_cross_entropy import CrossEntropyOptions
from segapp.losses.fused.checks import raise_reported, report_range
from segapp.losses.fused.grid import Axis
from segapp.losses.fused.reference import compute_dtype

NO_ID = 1 << 62
"""Above every class id."""


@triton.jit
def source_values(pointer, offset, mask, ACC: tl.constexpr):
    """Source logits (BC, BX) less their maximum over the classes; 0 for classes that do not exist."""
    values = tl.load(pointer + offset, mask=mask, other=-float("inf")).to(ACC)
    largest = tl.max(values, axis=0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    return tl.where(mask, values - largest[None, :], 0.0)


@triton.jit
def loss_kernel(
    logits_ptr,
    target_ptr,
    weight_ptr,
    partial_ptr,
    loss_ptr,
    count_ptr,
    bad_ptr,
    starts_ptr,
    row_fraction_ptr,
    lower_ptr,
    fraction_ptr,
    first_column_ptr,
    h,
    w,
    W,
    num_blocks,
    stride_n,
    stride_c,
    stride_h,
    stride_w,
    target_stride_n,
    target_stride_h,
    target_stride_w,
    ignore_index,
    LONG_IDS: tl.constexpr,
    C: tl.constexpr,
    KEEP: tl.constexpr,
    SHARE: tl.constexpr,
    BC: tl.constexpr,
    BX: tl.constexpr,
    BJ: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SMOOTH: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
):
    """Loss, weight sum and number of bad ids of a cell x block, and its share of the gradient, (2, C, BJ)."""
    cell = tl.program_id(0)
    block = tl.program_id(1)
    n = (cell // h).to(tl.int64)
    i = (cell % h).to(tl.int64)
    below = tl.minimum(i + 1, h - 1)
    classes = tl.arange(0, BC)
    columns = block * BX + tl.arange(0, BX)
    is_class = classes < C
    is_column = columns < W
    mask = is_class[:, None] & is_column[None, :]
    left = tl.load(lower_ptr + columns, mask=is_column, other=0)
    right = tl.minimum(left + 1, w - 1)
    across = tl.load(fraction_ptr + columns, mask=is_column, other=0.0).to(ACC)
    left_offset = left.to(tl.int64)[None, :] * stride_w
    right_offset = right.to(tl.int64)[None, :] * stride_w
    base = logits_ptr + n * stride_n + classes.to(tl.int64)[:, None] * stride_c
    start = source_values(base + i * stride_h, left_offset, mask, ACC)
    end = source_values(base + i * stride_h, right_offset, mask, ACC)
    above = start + across[None, :] * (end - start)
    start = source_values(base + below * stride_h, left_offset, mask, ACC)
    end = source_values(base + below * stride_h, right_offset, mask, ACC)
    slope = start + across[None, :] * (end - start) - above
    if HAS_WEIGHT:
        weight = tl.load(weight_ptr + classes, mask=is_class, other=0.0).to(ACC)
        total_weight = tl.sum(weight, axis=0)
    upper_gradient = tl.zeros((BC, BX), dtype=ACC)
    lower_gradient = tl.zeros((BC, BX), dtype=ACC)
    loss = tl.zeros((BX,), dtype=ACC)
    count = tl.zeros((BX,), dtype=ACC)
    bad = tl.zeros((BX,), dtype=tl.int32)
    first = tl.load(starts_ptr + i)
    last = tl.load(starts_ptr + i + 1)
    row_ptr = target_ptr + n * target_stride_n + first.to(tl.int64) * target_stride_h
    row_ptr = row_ptr + columns.to(tl.int64) * target_stride_w
    for row in range(first, last):
        down = tl.load(row_fraction_ptr + row).to(ACC)
        ids = tl.load(row_ptr, mask=is_column, other=0)
        if not LONG_IDS:
            ids = ids.to(tl.int32)
        row_ptr += target_stride_h
        labelled = is_column & (ids != ignore_index)
        in_range = (ids >= 0) & (ids < C)
        bad += (labelled & (in_range == 0)).to(tl.int32)
        ids = ids.to(tl.int32)
        valid = (labelled & in_range).to(ACC)
        values = above + down * slope
        shown = tl.where(is_class[:, None], values, -float("inf"))
        largest = tl.max(shown, axis=0)
        exponentials = tl.exp(shown - largest[None, :])
        total = tl.sum(exponentials, axis=0)
        log_total = largest + tl.log(total)
        own = classes[:, None] == ids[None, :]
        nll = log_total - tl.sum(tl.where(own, values, 0.0), axis=0)
        if HAS_WEIGHT:
            pixel_weight = tl.sum(tl.where(own, weight[:, None], 0.0), axis=0) * valid
        else:
            pixel_weight = valid
        count += pixel_weight
        if SMOOTH:
            if HAS_WEIGHT:
                spread = total_weight * log_total - tl.sum(weight[:, None] * values, axis=0)
                scale = KEEP * pixel_weight + SHARE * (total_weight * valid)
            else:
                spread = C * log_total - tl.sum(values, axis=0)
                scale = KEEP * pixel_weight + (SHARE * C) * valid
            loss += tl.where(valid > 0, KEEP * (pixel_weight * nll) + SHARE * spread, 0.0)
        else:
            scale = pixel_weight
            loss += tl.where(valid > 0, pixel_weight * nll, 0.0)
        if WITH_GRADIENT:
            scale = tl.where(valid > 0, scale / total, 0.0)
            gradient = exponentials * scale[None, :] - tl.where(own, (KEEP * pixel_weight)[None, :], 0.0)
            if SMOOTH:
                if HAS_WEIGHT:
                    gradient -= SHARE * (weight[:, None] * valid[None, :])
                else:
                    gradient -= tl.where(is_class[:, None], SHARE * valid[None, :], 0.0)
            lower_gradient += down * gradient
            upper_gradient += gradient - down * gradient
    place = cell.to(tl.int64) * num_blocks + block
    tl.store(loss_ptr + place, tl.sum(loss, axis=0))
    tl.store(count_ptr + place, tl.sum(count, axis=0))
    tl.store(bad_ptr + place, tl.sum(bad, axis=0))
    if WITH_GRADIENT:
        first_column = tl.load(first_column_ptr + block)
        if DOT:
            offsets = tl.arange(0, BJ)
            sources = first_column + offsets
            matrix = tl.where(left[:, None] == sources[None, :], 1.0 - across[:, None], 0.0)
            matrix += tl.where(right[:, None] == sources[None, :], across[:, None], 0.0)
            matrix = tl.where(is_column[:, None], matrix, 0.0)
            stored = is_class[:, None] & (sources[None, :] < w)
            out_ptr = partial_ptr + place * 2 * C * BJ + classes[:, None] * BJ + offsets[None, :]
            tl.store(out_ptr, tl.dot(upper_gradient, matrix, input_precision="ieee"), mask=stored)
            tl.store(out_ptr + C * BJ, tl.dot(lower_gradient, matrix, input_precision="ieee"), mask=stored)
        else:
            for k in range(0, BJ):
                column = tl.where(left == first_column + k, 1.0 - across, 0.0)
                column += tl.where(right == first_column + k, across, 0.0)
                column = tl.where(is_column, column, 0.0)
                out_ptr = partial_ptr + place * 2 * C * BJ + classes * BJ + k
                tl.store(out_ptr, tl.sum(upper_gradient * column[None, :], axis=1), mask=is_class)
                tl.store(out_ptr + C * BJ, tl.sum(lower_gradient * column[None, :], axis=1), mask=is_class)


@triton.jit
def gather_kernel(
    partial_ptr,
    gradient_ptr,
    first_column_ptr,
    first_block_ptr,
    last_block_ptr,
    h,
    w,
    num_blocks,
    C: tl.constexpr,
    BC: tl.constexpr,
    BJ: tl.constexpr,
    BW: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Adds the partial gradients of one source row, BW of its columns: from its own cell and from the one above."""
    cell = tl.program_id(0)
    i = cell % h
    classes = tl.arange(0, BC)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    is_class = classes < C
    is_column = columns < w
    first = tl.load(first_block_ptr + columns, mask=is_column, other=0)
    last = tl.load(last_block_ptr + columns, mask=is_column, other=-1)
    rows = i + tl.zeros((BW,), dtype=tl.int32)
    total = tl.zeros((BC, BW), dtype=ACC)
    for k in range(0, MAX_BLOCKS):
        block = first + k
        touches = is_column & (block <= last)
        offset = columns - tl.load(first_column_ptr + block, mask=touches, other=0)
        touches = touches & (offset >= 0) & (offset < BJ)
        place = cell.to(tl.int64) * num_blocks + block
        own_ptr = partial_ptr + (place[None, :] * 2 * C + classes[:, None]) * BJ + offset[None, :]
        mask = is_class[:, None] & touches[None, :]
        total += tl.load(own_ptr, mask=mask, other=0.0)
        above_ptr = own_ptr - (num_blocks * 2 - 1).to(tl.int64) * C * BJ
        total += tl.load(above_ptr, mask=mask & (rows > 0)[None, :], other=0.0)
        # Below the last source row lies itself.
        total += tl.load(own_ptr + C * BJ, mask=mask & (rows == h - 1)[None, :], other=0.0)
    n = (cell // h).to(tl.int64)
    out_ptr = gradient_ptr + ((n * C + classes[:, None]) * h + i) * w + columns[None, :]
    tl.store(out_ptr, total, mask=is_class[:, None] & is_column[None, :])


@triton.jit
def bad_ids_kernel(
    num_bad_ptr,
    target_ptr,
    low_ptr,
    high_ptr,
    H,
    W,
    target_stride_n,
    target_stride_h,
    target_stride_w,
    ignore_index,
    C: tl.constexpr,
    NO_BAD_ID: tl.constexpr,
    BX: tl.constexpr,
):
    """Smallest and largest bad id of one target row; looks only where the count says that there are any."""
    row = tl.program_id(0)
    low = tl.full((BX,), NO_BAD_ID, dtype=tl.int64)
    high = tl.full((BX,), -NO_BAD_ID, dtype=tl.int64)
    if tl.load(num_bad_ptr) > 0:
        row_ptr = target_ptr + (row // H).to(tl.int64) * target_stride_n + (row % H).to(tl.int64) * target_stride_h
        for start in range(0, W, BX):
            columns = start + tl.arange(0, BX)
            ids = tl.load(row_ptr + columns.to(tl.int64) * target_stride_w, mask=columns < W, other=0).to(tl.int64)
            is_bad = (columns < W) & (ids != ignore_index) & ((ids < 0) | (ids >= C))
            low = tl.minimum(low, tl.where(is_bad, ids, NO_BAD_ID))
            high = tl.maximum(high, tl.where(is_bad, ids, -NO_BAD_ID))
    tl.store(low_ptr + row, tl.min(low, axis=0))
    tl.store(high_ptr + row, tl.max(high, axis=0))


@dataclass(frozen=True)
class Shape:
    """How the loss kernel is cut; chosen so that no register spills (checked by compiling ahead of time).

    Attributes:
        BC: classes of a program, a power of two of at least 16.
        BX: output columns of a program.
        num_warps: warps of a program.
    """

    BC: int
    BX: int
    num_warps: int


def shape_of(num_classes: int, dtype: torch.dtype) -> Shape:
    """The cut for a number of classes."""
    BC = max(16, triton.next_power_of_2(num_classes))
    if dtype == torch.float64:
        return Shape(BC, 32 if BC <= 64 else 16, 4 if BC <= 32 else 8)
    if BC == 16:
        return Shape(BC, 64, 2)
    if BC == 32:
        return Shape(BC, 64, 4)
    return Shape(BC, 32 if BC <= 128 else 16, 4 if BC == 64 else 8)


@dataclass(frozen=True)
class _Tables:
    """The interpolation and the blocks of columns, on the device."""

    starts: Tensor
    row_fraction: Tensor
    lower: Tensor
    fraction: Tensor
    first_column: Tensor
    first_block: Tensor
    last_block: Tensor
    num_blocks: int
    BJ: int
    max_blocks: int


@functools.lru_cache(maxsize=64)
def _tables(
    low: tuple[int, int],
    high: tuple[int, int],
    align_corners: bool,
    dtype: torch.dtype,
    device: torch.device,
    BX: int,
) -> _Tables:
    with torch.inference_mode(False):
        rows, columns = Axis(low[0], high[0], align_corners), Axis(low[1], high[1], align_corners)
        num_blocks = -(-high[1] // BX)
        begins = torch.arange(num_blocks) * BX
        first = columns.lower[begins]
        last = columns.upper[(begins + BX).clamp(max=high[1]) - 1]
        sources = torch.arange(low[1])
        first_block = torch.searchsorted(last, sources)
        last_block = torch.searchsorted(first, sources, right=True) - 1

        def place(values: Tensor | list[int]) -> Tensor:
            return torch.as_tensor(values).to(device, torch.int32)

        return _Tables(
            starts=place(rows.starts),
            row_fraction=rows.fraction.to(device, dtype),
            lower=place(columns.lower),
            fraction=columns.fraction.to(device, dtype),
            first_column=place(first),
            first_block=place(first_block),
            last_block=place(last_block),
            num_blocks=num_blocks,
            BJ=max(16, triton.next_power_of_2(int((last - first).max()) + 1)),
            max_blocks=max(1, int((last_block - first_block).max()) + 1),
        )


_launch_lock = threading.Lock()
"""Replicas run in threads, and Triton compiles on the first launch of a shape."""


def cross_entropy_by_triton(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropyOptions,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Loss sum, weight sum and the loss sum's gradient; nothing is waited for.

    Args:
        logits: (N, C, h, w), C up to 256, any floating dtype and strides.
        target: (N, H, W) integers, any strides.
        weight: (C,) or None.
        options: the loss.
        with_gradient: whether the gradient is wanted.

    Returns:
        loss_sum and weight_sum, float64 scalars, and the gradient (N, C, h, w) in float32 (float64 for float64 logits).

    Raises:
        ValueError: an id that is no class, in an earlier call; in this one it makes the loss NaN.
    """
    raise_reported()
    N, C, h, w = logits.shape
    H, W = target.shape[-2:]
    dtype, device = compute_dtype(logits), logits.device
    shape = shape_of(C, dtype)
    tables = _tables((h, w), (H, W), options.align_corners, dtype, device, shape.BX)
    places = N * h * tables.num_blocks
    partial = torch.empty(places * 2 * C * tables.BJ if with_gradient else 1, dtype=dtype, device=device)
    loss, count = torch.empty(2, places, dtype=dtype, device=device)
    bad = torch.empty(places, dtype=torch.int32, device=device)
    gradient = torch.empty((N, C, h, w), dtype=dtype, device=device) if with_gradient else None
    cut: dict[str, Any] = {"C": C, "BC": shape.BC, "BJ": tables.BJ}
    cut["ACC"] = tl.float64 if dtype == torch.float64 else tl.float32
    with _launch_lock, torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        loss_kernel[(N * h, tables.num_blocks)](
            logits.detach(),
            target,
            loss if weight is None else weight.to(device, dtype).contiguous(),
            partial,
            loss,
            count,
            bad,
            tables.starts,
            tables.row_fraction,
            tables.lower,
            tables.fraction,
            tables.first_column,
            h,
            w,
            W,
            tables.num_blocks,
            *logits.stride(),
            *target.stride(),
            options.ignore_index,
            **cut,
            **loss_constants(options, C, weight is not None, with_gradient, dtype),
            BX=shape.BX,
            LONG_IDS=target.dtype == torch.int64,
            num_warps=shape.num_warps,
        )
        if gradient is not None:
            gather_kernel[(N * h, -(-w // 32))](
                partial,
                gradient,
                tables.first_column,
                tables.first_block,
                tables.last_block,
                h,
                w,
                tables.num_blocks,
                **cut,
                BW=32,
                MAX_BLOCKS=tables.max_blocks,
                num_warps=8 if shape.BC > 64 else 4,
            )
        bounds = _bounds_of_bad_ids(bad, target, C, options.ignore_index)
    loss_sum = loss.sum(dtype=torch.float64) + report_range(bounds, C, options.ignore_index)
    return loss_sum, count.sum(dtype=torch.float64), gradient


def loss_constants(
    options: CrossEntropyOptions, num_classes: int, has_weight: bool, with_gradient: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """The loss kernel's compile-time constants."""
    return {
        "KEEP": 1.0 - options.label_smoothing,
        "SHARE": options.label_smoothing / num_classes,
        "SMOOTH": options.label_smoothing > 0,
        "HAS_WEIGHT": has_weight,
        "WITH_GRADIENT": with_gradient,
        "DOT": dtype != torch.float64,
    }


def _bounds_of_bad_ids(bad: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """(2,) int64: smallest and largest id that is no class."""
    N, H, W = target.shape
    low, high = torch.empty(2, N * H, dtype=torch.int64, device=target.device)
    bad_ids_kernel[(N * H,)](
        bad.sum(),
        target,
        low,
        high,
        H,
        W,
        *target.stride(),
        ignore_index,
        C=num_classes,
        NO_BAD_ID=NO_ID,
        BX=128,
    )
    return torch.stack([low.amin(), high.amax()])
