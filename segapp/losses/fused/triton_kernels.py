"""Triton kernels of upsampling cross-entropy: loss and gradient in one pass, no full-resolution tensor, no atomics.

One program computes the output rows between two source rows (a cell) of one image, for a block of output columns. It
holds the two source rows, interpolated to its columns, in registers; for each output row it computes the logits, their
softmax and the loss, and adds the gradient to two accumulators. The transposed horizontal interpolation of these, a
small matrix product, is the program's partial result; a second kernel sums the partial results of each logit. Every sum
has a fixed order, so the result is deterministic.

The formulae are those of `bands_cross_entropy`. The kernels also run in Triton's interpreter (TRITON_INTERPRET=1). They
have many parameters because a kernel takes pointers, sizes, strides and constants only.

Shapes: N images, C classes, h x w of the logits, H x W of the target; BC classes (C rounded up), BX output columns and
PITCH source columns of a program, BJ the latter rounded up.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def source_values(pointer, offset, mask, TRANSPOSED: tl.constexpr, ACC: tl.constexpr):
    """Return source logits (BC, BX) less their maximum over the classes; 0 for padded classes."""
    if TRANSPOSED:
        values = tl.trans(tl.load(tl.trans(pointer + offset), mask=tl.trans(mask), other=-float("inf"))).to(ACC)
    else:
        values = tl.load(pointer + offset, mask=mask, other=-float("inf")).to(ACC)
    largest = tl.max(values, axis=0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    return tl.where(mask, values - largest[None, :], 0.0)


# Neighbouring threads are to hold neighbouring columns, so that sums over the classes stay within a thread: a fifth of
# the instructions. Triton takes this layout from the loads: unless it sees that the classes of a column are adjacent in
# memory (stride_c of 1), and before 3.7 only if the load is transposed.
@triton.jit(do_not_specialize=["stride_c"])
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
    PITCH: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SMOOTH: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ACC: tl.constexpr,
    DOT: tl.constexpr,
):
    """Store the loss, weight sum and number of bad ids of a cell x block, and its partial gradient (2, C, PITCH)."""
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
    start = source_values(base + i * stride_h, left_offset, mask, TRANSPOSED, ACC)
    end = source_values(base + i * stride_h, right_offset, mask, TRANSPOSED, ACC)
    above = start + across[None, :] * (end - start)
    start = source_values(base + below * stride_h, left_offset, mask, TRANSPOSED, ACC)
    end = source_values(base + below * stride_h, right_offset, mask, TRANSPOSED, ACC)
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
        masked = tl.where(is_class[:, None], values, -float("inf"))
        largest = tl.max(masked, axis=0)
        exponentials = tl.exp(masked - largest[None, :])
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
            stored = is_class[:, None] & (offsets < PITCH)[None, :]
            out_ptr = partial_ptr + place * (2 * C * PITCH) + classes[:, None] * PITCH + offsets[None, :]
            tl.store(out_ptr, tl.dot(upper_gradient, matrix, input_precision="ieee"), mask=stored)
            tl.store(out_ptr + C * PITCH, tl.dot(lower_gradient, matrix, input_precision="ieee"), mask=stored)
        else:
            for k in range(0, PITCH):
                column = tl.where(left == first_column + k, 1.0 - across, 0.0)
                column += tl.where(right == first_column + k, across, 0.0)
                column = tl.where(is_column, column, 0.0)
                out_ptr = partial_ptr + place * (2 * C * PITCH) + classes * PITCH + k
                tl.store(out_ptr, tl.sum(upper_gradient * column[None, :], axis=1), mask=is_class)
                tl.store(out_ptr + C * PITCH, tl.sum(lower_gradient * column[None, :], axis=1), mask=is_class)


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
    PITCH: tl.constexpr,
    BW: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
    ACC: tl.constexpr,
):
    """Sum the partial gradients of BW columns of a source row: from its own cell and from the cell above."""
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
        touches = touches & (offset >= 0) & (offset < PITCH)
        # A half is the partial gradient of one source row: a program stores its upper row's, then its lower row's.
        half = (cell.to(tl.int64) * num_blocks + block) * 2
        own_ptr = partial_ptr + (half[None, :] * C + classes[:, None]) * PITCH + offset[None, :]
        mask = is_class[:, None] & touches[None, :]
        total += tl.load(own_ptr, mask=mask, other=0.0)
        # Triton compiles num_blocks = 1 as a Python integer, so the offset is taken from the tensor `half`.
        half_above = half - (num_blocks * 2 - 1)
        above_ptr = partial_ptr + (half_above[None, :] * C + classes[:, None]) * PITCH + offset[None, :]
        total += tl.load(above_ptr, mask=mask & (rows > 0)[None, :], other=0.0)
        # The row below the last source row is the last one itself.
        total += tl.load(own_ptr + C * PITCH, mask=mask & (rows == h - 1)[None, :], other=0.0)
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
    """Store the smallest and largest bad id of a target row; reads the row only if there are bad ids at all."""
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
