"""Launch of the Triton kernels: upsampling cross-entropy and its gradient on CUDA, without waiting for the device.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from segapp.accelerator import accelerator_of, wide_sum
from segapp.losses.fused.block_sizes import KernelError, block_shape, buffers_of
from segapp.losses.fused.checks import NO_ID, is_capturing, poison_of, raise_reported, report_range
from segapp.losses.fused.grid import Axis
from segapp.losses.fused.pixel_sums import PixelOptions
from segapp.losses.fused.reference import compute_dtype
from segapp.losses.fused.triton_kernels import bad_ids_kernel, gather_kernel, loss_kernel


@functools.lru_cache(maxsize=64)
def _tables(
    low: tuple[int, int], high: tuple[int, int], align_corners: bool, dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """Return starts and fractions of the rows, and then of the columns, on the device: see `Axis`."""
    tables = []
    with torch.inference_mode(False):
        for size_in, size_out in zip(low, high, strict=True):
            axis = Axis(size_in, size_out, align_corners)
            tables.append(torch.tensor(axis.starts, dtype=torch.int32, device="cpu").to(device))
            tables.append(axis.fraction.to(device, dtype))
    return tables


_launch_lock = threading.Lock()
"""Replicas run in threads, and Triton compiles at the first launch of a shape."""

FP_FUSION = {"enable_fp_fusion": True}
"""Fuse multiplications and additions: Triton up to 3.9 does so by default, 3.10 does not."""


def cross_entropy_by_triton(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: PixelOptions,
    *,
    with_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the loss sum, the weight sum and the loss sum's gradient, without a host synchronization.

    Args:
        logits: (N, C, h, w), C up to `MAX_CLASSES`, any floating dtype and strides.
        target: (N, H, W) integers, any strides.
        weight: (C,) or None.
        options: options of the loss.
        with_gradient: compute the gradient.

    Returns:
        loss_sum and weight_sum, float64 scalars, and the gradient (N, C, h, w) in float32 (float64 for float64 logits).

    Raises:
        KernelError: a kernel could not be compiled or launched.
        ValueError: an earlier call had an id that is no class; in this call such an id makes the loss NaN.
    """
    if not is_capturing(target):
        raise_reported()
    C, dtype, device = logits.shape[1], compute_dtype(logits), logits.device
    num_programs, num_partials = buffers_of(tuple(logits.shape), target.shape[2], dtype, with_gradient)
    partial = torch.empty(num_partials, dtype=dtype, device=device)
    loss, count = torch.empty(2, num_programs, dtype=dtype, device=device)
    bad = torch.empty(num_programs, dtype=torch.int32, device=device)
    gradient = torch.empty(logits.shape, dtype=dtype, device=device) if with_gradient else None
    if weight is not None:
        weight = weight.to(device, dtype).contiguous()
    with launching(device):
        _launch(logits.detach(), target, weight, options, (partial, loss, count, bad), gradient)
        bounds = bounds_of_bad_ids(bad.sum(), target, C, options.ignore_index)
    poison = poison_of(bounds) if is_capturing(target) else report_range(bounds, C, options.ignore_index)
    return wide_sum(loss) + poison, wide_sum(count), gradient


@contextlib.contextmanager
def launching(device: torch.device) -> Iterator[None]:
    """Launch kernels on a device in the body of the `with` statement, one thread at a time.

    Raises:
        KernelError: for any error except an out-of-memory error, which others handle.
    """
    try:
        with _launch_lock, accelerator_of(device).current(device):
            yield
    except Exception as error:  # Triton, a C compiler, ptxas, a driver or a full disk may raise anything
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower():
            raise  # a smaller batch helps, another implementation does not
        raise KernelError(device, error) from error


def _launch(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    options: PixelOptions,
    buffers: tuple[Tensor, Tensor, Tensor, Tensor],
    gradient: Tensor | None,
) -> None:
    """Launch the kernels that fill the buffers (partial gradients, losses, weight sums, bad ids) and the gradient."""
    (N, C, h, w), (H, W), (partial, loss, count, bad) = logits.shape, target.shape[-2:], buffers
    dtype = compute_dtype(logits)
    block = block_shape((N, C, h, w), W, dtype)
    tables = _tables((h, w), (H, W), options.align_corners, dtype, logits.device)
    accelerator_of(logits.device).keep_with_graph(tables)
    num_groups, num_blocks = -(-h // block.CELLS), -(-w // block.SOURCES)
    cut: dict[str, Any] = {"C": C, "CELLS": block.CELLS, "SOURCES": block.SOURCES, **FP_FUSION}
    cut["ACC"] = tl.float64 if dtype == torch.float64 else tl.float32
    loss_kernel[(N * num_groups, num_blocks)](
        logits,
        target,
        loss if weight is None else weight,
        partial,
        loss,
        count,
        bad,
        *tables,
        h,
        w,
        num_groups,
        num_blocks,
        *logits.stride(),
        *target.stride(),
        options.ignore_index,
        **cut,
        KEEP=1.0 - options.label_smoothing,
        SHARE=options.label_smoothing / C,
        SMOOTH=options.label_smoothing > 0,
        HAS_WEIGHT=weight is not None,
        WITH_GRADIENT=gradient is not None,
        TILES=block.TILES,
        LANES=block.LANES,
        SPLIT=block.SPLIT,
        LONG_IDS=target.dtype == torch.int64,
        num_warps=block.num_warps,
    )
    if gradient is not None:
        gather_kernel[(N * h, -(-w // 32), -(-C // 32))](
            partial,
            gradient,
            h,
            w,
            num_groups,
            num_blocks,
            **cut,
            BC=32,
            BW=32,
            num_warps=4,
        )


def bounds_of_bad_ids(num_bad: Tensor, target: Tensor, num_classes: int, ignore_index: int) -> Tensor:
    """Return the smallest and the largest id that is no class, (2,) int64; smallest > largest if there is none.

    Args:
        num_bad: scalar; if it is 0, the target is not read.
        target: (N, H, W).
        num_classes: C.
        ignore_index: id of the pixels that are left out.
    """
    N, H, W = target.shape
    low, high = torch.empty(2, N * H, dtype=torch.int64, device=target.device)
    bad_ids_kernel[(N * H,)](
        num_bad,
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
        **FP_FUSION,
    )
    return torch.stack([low.amin(), high.amax()])
