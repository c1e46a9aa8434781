"""Block sizes and buffers of the Triton kernels as plain numbers, and their error; without Triton itself.

The launch and the memory plan agree on the numbers.

Shapes: N images, C classes, h x w of the logits, H x W of the target; BC classes and BX output columns of a program.
"""

from __future__ import annotations

import functools
import traceback
from dataclasses import dataclass

import torch

from segapp.compat.torch import without_dispatch_modes
from segapp.losses.fused.grid import Axis

MAX_CLASSES = 256
"""The kernel holds all classes of a pixel in registers."""


@dataclass(frozen=True)
class BlockShape:
    """Block sizes of the loss kernel.

    With them at most six registers (24 bytes) are spilled, and mostly none, for Triton 3.6 and 3.9 on compute
    capabilities 7.5 to 12.0 (`python -m tests.support.gpu.kernel_usage`), except at scales below 3: there the product
    after the last row spills some hundred bytes.

    Attributes:
        BC: classes of a program, a power of two of at least 16.
        BX: output columns of a program.
        num_warps: warps of a program.
    """

    BC: int
    BX: int
    num_warps: int


def block_shape(num_classes: int, dtype: torch.dtype) -> BlockShape:
    """Return the block sizes for a number of classes and a compute dtype."""
    BC = power_of_two(num_classes)
    if dtype == torch.float64:
        return BlockShape(BC, 32 if BC <= 64 else 16, 4 if BC <= 32 else 8)
    if BC == 16:
        return BlockShape(BC, 64, 2)
    if BC == 32:
        return BlockShape(BC, 64, 4)
    return BlockShape(BC, 32 if BC <= 128 else 16, 4 if BC == 64 else 8)


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least the number and 16, the least side of Triton's dot."""
    return max(16, 1 << (number - 1).bit_length())


@dataclass(frozen=True)
class ColumnBlocks:
    """Blocks of output columns, and the source columns that each of them depends on.

    Attributes:
        first: the first source column of each block.
        last: the last one.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    @property
    def pitch(self) -> int:
        """The largest number of source columns of a block: the width of its partial results."""
        return 1 + max(last - first for first, last in zip(self.first, self.last, strict=True))


@functools.lru_cache(maxsize=256)
def column_blocks(w: int, W: int, align_corners: bool, BX: int) -> ColumnBlocks:
    """Return the blocks of BX of the W output columns that are interpolated from w source columns."""
    with without_dispatch_modes(), torch.inference_mode(False):
        columns = Axis(w, W, align_corners)
        lower, upper = columns.lower.tolist(), columns.upper.tolist()
    starts = range(0, W, BX)
    return ColumnBlocks(tuple(lower[x] for x in starts), tuple(upper[min(x + BX, W) - 1] for x in starts))


@dataclass(frozen=True)
class Buffers:
    """Numbers of elements of the launch's temporary tensors.

    Attributes:
        num_places: programs of the loss kernel; each stores a loss and a weight sum in the compute dtype, and how many
            of its ids are bad as int32.
        num_partials: elements of the partial gradients, in the compute dtype.
    """

    num_places: int
    num_partials: int


def buffers_of(shape: tuple[int, ...], W: int, align_corners: bool, dtype: torch.dtype, with_gradient: bool) -> Buffers:
    """Return the sizes of the temporary tensors.

    Each program stores the gradient of two source rows, so the partial gradients take 2 pitch W / (BX w) times the
    logits in the compute dtype: 2.5 times at a scale of 8 and 19 classes, 4 times for 150 classes.

    Args:
        shape: (N, C, h, w) of the logits.
        W: columns of the output; its rows change no size.
        align_corners: as in `F.interpolate`.
        dtype: the compute dtype.
        with_gradient: compute the gradient.
    """
    N, C, h, w = shape
    blocks = column_blocks(w, W, align_corners, block_shape(C, dtype).BX)
    num_places = N * h * len(blocks.first)
    return Buffers(num_places, num_places * 2 * C * blocks.pitch if with_gradient else 1)


_NEEDS = (
    "Triton needs a C compiler, Python's headers and a cache folder that can be written (TRITON_CACHE_DIR); "
    "`segapp doctor` says what is missing"
)
_DEFECT = "This is a defect of segapp, not of this machine: report it with the output of `segapp doctor`"


class KernelError(RuntimeError):
    """The Triton kernels could not be imported, compiled or launched.

    Args:
        device: where they were to run.
        cause: what was raised instead.

    Attributes:
        reason: the cause in one line.
        is_own: True if segapp's own code around the kernels raised it: the kernels themselves may run.
        next_move: what to do about it, a sentence without its period.
    """

    def __init__(self, device: torch.device, cause: BaseException) -> None:
        lines = str(cause).strip().splitlines() or ["no message"]
        # A compiler's error ends with its cause.
        message = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        self.reason = f"{type(cause).__name__}: {message[:300]}"
        self.is_own = _innermost_module(cause).startswith("segapp.")
        self.next_move = _DEFECT if self.is_own else _NEEDS
        super().__init__(
            f"the Triton kernels of the loss cannot run on {device}: {self.reason}. {self.next_move}; "
            'or give implementation="auto", which uses torch\'s operators then'
        )


def _innermost_module(error: BaseException) -> str:
    """Return the name of the Python module that raised an error, or called the operator that did."""
    frames = list(traceback.walk_tb(error.__traceback__))
    return str(frames[-1][0].f_globals.get("__name__", "")) if frames else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True for an out-of-memory error of a device: a smaller batch helps, another implementation does not."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()
