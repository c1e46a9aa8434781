"""Triton kernels of upsampling cross-entropy: loss and gradient in one pass, no full-resolution tensor, no atomics.

The output pixels between two source rows and two source columns (a cell) depend on the same four source pixels. A
thread keeps some classes of these four in registers. For each column of the cell, it interpolates them to the column.
For each pixel of the column, it computes the logits, their softmax and the loss, and adds the gradient to two sums, one
per source row. A column's sums are then added to the sums of the four source pixels. So the loop over pixels, which
takes nearly all of the time, needs neither shared memory nor barriers: threads exchange only the softmax's maximum and
sum. A second kernel adds up the results of neighboring programs for the same source pixel. Every sum has a fixed order,
so the result is deterministic.

With y the upsampled logits of a pixel, t its target, w its class weights, W their sum and eps the smoothing:
loss = (1 - eps) w_t (lse(y) - y_t) + eps / C (W lse(y) - sum_c w_c y_c), and its derivative with respect to y_c is
((1 - eps) w_t + eps / C W) softmax(y)_c - (1 - eps) w_t [c = t] - eps / C w_c.

Logits are in units of ln 2, because `exp2` is one instruction and `exp` is four. The kernels also run in Triton's
interpreter (TRITON_INTERPRET=1). They have many parameters because a kernel takes only pointers, sizes, strides and
constants.

Shapes: N images, C classes, h x w of the logits, H x W of the target. A program has SOURCES x SPLIT x LANES threads:
    LANES threads share the classes of a pixel (thread `lane` has the classes lane, lane + LANES, ..., TILES in all),
    and SPLIT threads share the columns of a cell. The values for a thread's classes are a tuple of TILES tensors with
    one number per thread; Triton then keeps them in registers, in any memory layout of the logits and without padding
    TILES to a power of two.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,assignment"

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
NO_CLASS: tl.constexpr = tl.constexpr(-1e30)
"""Logit beyond the last class: its exponential is 0."""
LARGE: tl.constexpr = tl.constexpr(2.0**64)


@triton.jit
def zeros(like, TILES: tl.constexpr):
    """Return a tuple of zeros."""
    result = ()
    for _ in tl.static_range(TILES):
        result = result + (tl.zeros_like(like),)
    return result


@triton.jit
def add_scaled(values, scale, others, TILES: tl.constexpr):
    """Return values + scale * others for tuples and a tensor."""
    result = ()
    for t in tl.static_range(TILES):
        result = result + (values[t] + scale * others[t],)
    return result


@triton.jit
def difference(values, others, TILES: tl.constexpr):
    """Return values - others for tuples."""
    result = ()
    for t in tl.static_range(TILES):
        result = result + (values[t] - others[t],)
    return result


@triton.jit
def product_sum(values, others, TILES: tl.constexpr):
    """Return the sum of values * others over a thread's classes."""
    total = values[0] * others[0]
    for t in tl.static_range(1, TILES):
        total += values[t] * others[t]
    return total


@triton.jit
def sum_of_lanes(values, LANES: tl.constexpr):
    """Return, in every thread, the sum over the threads that share its pixel."""
    if LANES == 1:
        return values
    pixels = tl.reshape(values, (values.shape[0] // LANES, LANES))
    total = tl.sum(pixels, axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, pixels.shape), values.shape)


@triton.jit
def largest_of_lanes(values, LANES: tl.constexpr):
    """Return, in every thread, the maximum over the threads that share its pixel."""
    if LANES == 1:
        return values
    pixels = tl.reshape(values, (values.shape[0] // LANES, LANES))
    largest = tl.max(pixels, axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(largest, pixels.shape), values.shape)


@triton.jit
def sum_of_columns(values, SOURCES: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr):
    """Return, in every thread, the sum over the threads that share its cell and have its classes."""
    if SPLIT == 1:
        return values
    cells = tl.reshape(values, (SOURCES, SPLIT, LANES))
    total = tl.sum(cells, axis=1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(total, cells.shape), values.shape)


@triton.jit
def class_weights(weight_ptr, lane, C: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr, HAS_WEIGHT, ACC):
    """Return the weights of a thread's classes; 0 beyond the last class."""
    weight = ()
    for t in tl.static_range(TILES):
        is_class = lane < C - t * LANES
        if HAS_WEIGHT:
            weight = weight + (tl.load(weight_ptr + t * LANES + lane, mask=is_class, other=0.0).to(ACC),)
        elif (t + 1) * LANES <= C:
            weight = weight + (tl.full(lane.shape, 1.0, dtype=ACC),)
        else:
            weight = weight + (is_class.to(ACC),)
    return weight


@triton.jit
def source_logits(pointer, stride_c, lane, C: tl.constexpr, TILES: tl.constexpr, LANES: tl.constexpr, ACC):
    """Return the logits of a source pixel in units of ln 2, minus their maximum over the classes."""
    values = ()
    largest = tl.full(lane.shape, NO_CLASS, dtype=ACC)
    for t in tl.static_range(TILES):
        is_class = lane < C - t * LANES
        if (t + 1) * LANES <= C:
            value = tl.load(pointer).to(ACC) * LOG2_E
        else:
            value = tl.load(pointer, mask=is_class, other=0.0).to(ACC) * LOG2_E
            value = tl.where(is_class, value, NO_CLASS)
        pointer += LANES * stride_c
        values = values + (value,)
        largest = tl.maximum(largest, value)
    largest = largest_of_lanes(largest, LANES)
    shifted = ()
    for t in tl.static_range(TILES):
        value = values[t] - largest
        if (t + 1) * LANES > C:
            value = tl.where(lane < C - t * LANES, value, NO_CLASS)
        shifted = shifted + (value,)
    return shifted


@triton.jit
def store_source_row(
    out_ptr,
    left,
    right,
    C: tl.constexpr,
    TILES: tl.constexpr,
    SOURCES: tl.constexpr,
    SPLIT: tl.constexpr,
    LANES: tl.constexpr,
):
    """Store the partial gradient of a source row, (C, SOURCES + 1).

    `left` and `right` belong to the source columns left and right of each cell; the right one is the left one of the
    next cell.
    """
    index = tl.arange(0, SOURCES * SPLIT * LANES)
    lane = index % LANES
    source = index // (SPLIT * LANES)
    is_writer = index // LANES % SPLIT == 0
    for t in tl.static_range(TILES):
        stored = is_writer & (lane < C - t * LANES)
        left_sum = sum_of_columns(left[t], SOURCES, SPLIT, LANES)
        right_sum = sum_of_columns(right[t], SOURCES, SPLIT, LANES)
        before = tl.gather(right_sum, tl.maximum(index - SPLIT * LANES, 0), axis=0)
        pointer = out_ptr + (t * LANES + lane) * (SOURCES + 1) + source
        tl.store(pointer, left_sum + tl.where(source > 0, before, 0.0), mask=stored)
        tl.store(pointer + 1, right_sum, mask=stored & (source == SOURCES - 1))


@triton.jit
def loss_kernel(
    logits_ptr,
    target_ptr,
    weight_ptr,
    partial_ptr,
    loss_ptr,
    count_ptr,
    bad_ptr,
    row_starts_ptr,
    row_fraction_ptr,
    column_starts_ptr,
    column_fraction_ptr,
    h,
    w,
    num_groups,
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
    TILES: tl.constexpr,
    LANES: tl.constexpr,
    SPLIT: tl.constexpr,
    SOURCES: tl.constexpr,
    CELLS: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    SMOOTH: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    ACC: tl.constexpr,
):
    """Store the loss, weight sum and number of bad ids of CELLS x SOURCES cells, and their partial gradient.

    The partial gradient is (CELLS + 1, C, SOURCES + 1): its last source row and column are the first ones of the
    programs below and to the right.
    """
    block = tl.program_id(1)
    program = tl.program_id(0).to(tl.int64) * num_blocks + block
    n = (tl.program_id(0) // num_groups).to(tl.int64)
    first_cell = (tl.program_id(0) % num_groups) * CELLS
    index = tl.arange(0, SOURCES * SPLIT * LANES)
    lane = index % LANES
    source = block * SOURCES + index // (SPLIT * LANES)
    left = tl.minimum(source, w - 1)
    right = tl.minimum(source + 1, w - 1)
    first_column = tl.load(column_starts_ptr + left) + index // LANES % SPLIT
    end_column = tl.where(source < w, tl.load(column_starts_ptr + left + 1), 0)
    num_steps = tl.max((end_column - first_column + (SPLIT - 1)) // SPLIT, axis=0)
    base = logits_ptr + n * stride_n + lane.to(tl.int64) * stride_c
    left_ptr = base + left.to(tl.int64) * stride_w
    right_ptr = base + right.to(tl.int64) * stride_w
    target_ptr += n * target_stride_n
    out_ptr = partial_ptr + program * ((CELLS + 1) * C * (SOURCES + 1))
    # Of a source row: its left source pixel, and the right one minus the left one.
    offset = first_cell.to(tl.int64) * stride_h
    above = source_logits(left_ptr + offset, stride_c, lane, C, TILES, LANES, ACC)
    above_right = source_logits(right_ptr + offset, stride_c, lane, C, TILES, LANES, ACC)
    above_step = difference(above_right, above, TILES)
    zero = tl.zeros((SOURCES * SPLIT * LANES,), dtype=ACC)
    if SMOOTH:
        weight = class_weights(weight_ptr, lane, C, TILES, LANES, HAS_WEIGHT, ACC)
        lane_weight = weight[0]
        for t in tl.static_range(1, TILES):
            lane_weight += weight[t]
        total_weight = sum_of_lanes(lane_weight, LANES)
    upper_left = zeros(zero, TILES)
    upper_right = zeros(zero, TILES)
    loss = zero
    count = zero
    bad = tl.zeros((SOURCES * SPLIT * LANES,), dtype=tl.int32)
    for cell in range(first_cell, tl.minimum(first_cell + CELLS, h)):
        offset = tl.minimum(cell + 1, h - 1).to(tl.int64) * stride_h
        below = source_logits(left_ptr + offset, stride_c, lane, C, TILES, LANES, ACC)
        below_right = source_logits(right_ptr + offset, stride_c, lane, C, TILES, LANES, ACC)
        below_step = difference(below_right, below, TILES)
        lower_left = zeros(zero, TILES)
        lower_right = zeros(zero, TILES)
        first_row = tl.load(row_starts_ptr + cell)
        end_row = tl.load(row_starts_ptr + cell + 1)
        for step in range(0, num_steps):
            column = first_column + step * SPLIT
            is_column = column < end_column
            across = tl.load(column_fraction_ptr + column, mask=is_column, other=0.0).to(ACC)
            start = add_scaled(above, across, above_step, TILES)
            slope = difference(add_scaled(below, across, below_step, TILES), start, TILES)
            upper = zeros(zero, TILES)
            lower = zeros(zero, TILES)
            if SMOOTH:
                weight = class_weights(weight_ptr, lane, C, TILES, LANES, HAS_WEIGHT, ACC)
                start_sum = product_sum(weight, start, TILES)
                slope_sum = product_sum(weight, slope, TILES)
                upper_valid = zero
                lower_valid = zero
            totals = zero + 1.0
            row_ptr = target_ptr + first_row.to(tl.int64) * target_stride_h + column.to(tl.int64) * target_stride_w
            for row in range(first_row, end_row):
                down = tl.load(row_fraction_ptr + row).to(ACC)
                up = 1.0 - down
                ids = tl.load(row_ptr, mask=is_column, other=0)
                if not LONG_IDS:
                    ids = ids.to(tl.int32)
                row_ptr += target_stride_h
                labelled = is_column & (ids != ignore_index)
                in_range = (ids >= 0) & (ids < C)
                bad += (labelled & (in_range == 0)).to(tl.int32)
                ids = ids.to(tl.int32)
                is_valid = labelled & in_range
                if HAS_WEIGHT:
                    pixel_weight = tl.load(weight_ptr + ids, mask=is_valid, other=0.0).to(ACC)
                else:
                    pixel_weight = tl.where(is_valid, zero + 1.0, 0.0)
                count += pixel_weight
                scale = KEEP * pixel_weight
                target_upper = up * scale
                target_lower = down * scale

                values = add_scaled(start, down, slope, TILES)
                largest = values[0]
                for t in tl.static_range(1, TILES):
                    largest = tl.maximum(largest, values[t])
                largest = largest_of_lanes(largest, LANES)
                target_tile = ids - lane
                target_value = zero
                total = zero
                exponentials = ()
                upper_diff = ()
                lower_diff = ()
                for t in tl.static_range(TILES):
                    is_target = target_tile == t * LANES
                    shifted = values[t] - largest
                    target_value = tl.where(is_target, shifted, target_value)
                    exponential = tl.exp2(shifted)
                    total += exponential
                    exponentials = exponentials + (exponential,)
                    if WITH_GRADIENT:
                        upper_diff = upper_diff + (tl.where(is_target, upper[t] - target_upper, upper[t]),)
                        lower_diff = lower_diff + (tl.where(is_target, lower[t] - target_lower, lower[t]),)
                total = sum_of_lanes(total, LANES)

                # Each thread adds its part of the loss: its classes, and the first thread the logarithm.
                row_loss = -scale * target_value
                if SMOOTH:
                    smoothing = tl.where(is_valid, SHARE * total_weight, 0.0)
                    scale += smoothing
                    row_loss += tl.where(lane == 0, smoothing * largest, 0.0) - SHARE * (start_sum + down * slope_sum)
                    upper_valid += tl.where(is_valid, up, 0.0)
                    lower_valid += tl.where(is_valid, down, 0.0)
                if HAS_WEIGHT:
                    row_loss += tl.where(lane == 0, scale * tl.log2(total), 0.0)
                else:
                    # One logarithm per column, of the product: a logarithm takes 25 instructions.
                    totals *= tl.where(is_valid, total, 1.0)
                    row_loss += tl.where((totals > LARGE) & (lane == 0), 64.0, 0.0)
                    totals *= tl.where(totals > LARGE, 1.0 / LARGE, 1.0)
                loss += tl.where(is_valid, row_loss, 0.0)
                if WITH_GRADIENT:
                    scale = tl.where(is_valid, scale / total, 0.0)
                    upper = add_scaled(upper_diff, up * scale, exponentials, TILES)
                    lower = add_scaled(lower_diff, down * scale, exponentials, TILES)
            if not HAS_WEIGHT:
                loss += tl.where(lane == 0, tl.log2(totals), 0.0)
            if WITH_GRADIENT:
                if SMOOTH:
                    upper = add_scaled(upper, -SHARE * upper_valid, weight, TILES)
                    lower = add_scaled(lower, -SHARE * lower_valid, weight, TILES)
                upper_left = add_scaled(upper_left, 1.0 - across, upper, TILES)
                upper_right = add_scaled(upper_right, across, upper, TILES)
                lower_left = add_scaled(lower_left, 1.0 - across, lower, TILES)
                lower_right = add_scaled(lower_right, across, lower, TILES)
        if WITH_GRADIENT:
            store_source_row(out_ptr, upper_left, upper_right, C, TILES, SOURCES, SPLIT, LANES)
            out_ptr += C * (SOURCES + 1)
        above = below
        above_step = below_step
        upper_left = lower_left
        upper_right = lower_right
    if WITH_GRADIENT:
        store_source_row(out_ptr, upper_left, upper_right, C, TILES, SOURCES, SPLIT, LANES)
    tl.store(loss_ptr + program, tl.sum(loss, axis=0) * LN_2)
    tl.store(count_ptr + program, tl.sum(tl.where(lane == 0, count, 0.0), axis=0))
    tl.store(bad_ptr + program, tl.sum(tl.where(lane == 0, bad, 0), axis=0))


@triton.jit
def gather_kernel(
    partial_ptr,
    gradient_ptr,
    h,
    w,
    num_groups,
    num_blocks,
    C: tl.constexpr,
    SOURCES: tl.constexpr,
    CELLS: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
    ACC: tl.constexpr,
):
    """Sum the partial gradients of BC classes and BW columns of a source row.

    Each source pixel has a partial gradient from its own program. If it is the first one of its program in a direction,
    the previous program has another. The row below the last source row is the last row itself, so the last row also has
    the next one; the same holds for the last column.
    """
    n = (tl.program_id(0) // h).to(tl.int64)
    i = tl.program_id(0) % h
    classes = tl.program_id(2) * BC + tl.arange(0, BC)
    columns = tl.program_id(1) * BW + tl.arange(0, BW)
    rows = i + tl.zeros((BW,), dtype=tl.int32)
    total = tl.zeros((BC, BW), dtype=ACC)
    for of_row in tl.static_range(3):  # this program, the previous one, the next one
        row = rows - (of_row == 1)
        slot = row % CELLS + (of_row > 0)
        has_row = (row >= 0) & ((of_row != 1) | (slot == CELLS)) & ((of_row != 2) | (row == h - 1))
        for of_column in tl.static_range(3):
            column = columns - (of_column == 1)
            offset = column % SOURCES + (of_column > 0)
            has_column = (column >= 0) & (column < w)
            has_column = has_column & ((of_column != 1) | (offset == SOURCES)) & ((of_column != 2) | (column == w - 1))
            program = (n * num_groups + row // CELLS) * num_blocks + column // SOURCES
            start = (program * (CELLS + 1) + slot) * (C * (SOURCES + 1)) + offset
            mask = (classes < C)[:, None] & (has_row & has_column)[None, :]
            pointer = partial_ptr + start[None, :] + classes[:, None] * (SOURCES + 1)
            total += tl.load(pointer, mask=mask, other=0.0)
    out_ptr = gradient_ptr + ((n * C + classes[:, None]) * h + i) * w + columns[None, :]
    tl.store(out_ptr, total, mask=(classes < C)[:, None] & (columns < w)[None, :])


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
