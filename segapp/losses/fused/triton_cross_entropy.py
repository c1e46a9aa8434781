"""Launch of the Triton kernels: upsampling cross-entropy and its gradient on CUDA, without waiting for the device.

Shapes: N images, C classes, h x w of the logits, H x W of the target; BC classes, BX output columns and BJ source
columns of a program (see `triton_kernels`).
"""

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
from segapp.losses.fused.triton_kernels import bad_ids_kernel, gather_kernel, loss_kernel

NO_ID = 1 << 62
"""Larger than every class id."""


@dataclass(frozen=True)
class Shape:
    """Block sizes of the loss kernel, chosen so that no register spills (tested by compiling ahead of time).

    Attributes:
        BC: classes of a program, a power of two of at least 16.
        BX: output columns of a program.
        num_warps: warps of a program.
    """

    BC: int
    BX: int
    num_warps: int


def shape_of(num_classes: int, dtype: torch.dtype) -> Shape:
    """Return the block sizes for a number of classes."""
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
    """Tables of the interpolation and of the blocks of columns, on the device."""

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
"""Replicas run in threads, and Triton compiles at the first launch of a shape."""


def cross_entropy_by_triton(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: CrossEntropyOptions,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss sum, the weight sum and the loss sum's gradient, without a host synchronisation.

    Args:
        logits: (N, C, h, w), C up to 256, any floating dtype and strides.
        target: (N, H, W) integers, any strides.
        weight: (C,) or None.
        options: options of the loss.
        with_gradient: compute the gradient.

    Returns:
        loss_sum and weight_sum, float64 scalars, and the gradient (N, C, h, w) in float32 (float64 for float64 logits).

    Raises:
        ValueError: an earlier call had an id that is no class; in this call such an id makes the loss NaN.
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
    """Return the loss kernel's compile-time constants."""
    return {
        "KEEP": 1.0 - options.label_smoothing,
        "SHARE": options.label_smoothing / num_classes,
        "SMOOTH": options.label_smoothing > 0,
        "HAS_WEIGHT": has_weight,
        "WITH_GRADIENT": with_gradient,
        "DOT": dtype != torch.float64,
    }


def _bounds_of_bad_ids(bad: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """Return the smallest and the largest id that is no class, (2,) int64."""
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
