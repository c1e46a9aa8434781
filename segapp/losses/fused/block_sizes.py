"""Block sizes and buffers of the Triton kernels as plain numbers, without Triton, and their error.

The launch and the memory plan use the same numbers.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

from dataclasses import dataclass

import torch

MAX_CLASSES = 320
"""The classes of a pixel are divided over at most the 32 threads of a warp, 10 per thread."""

_MOST_TILES, _MOST_TILES_FLOAT64 = 10, 5
"""More classes per thread would spill registers."""
_SOURCES = 16
"""Few: every cell of a program takes as many steps as its widest cell, and one in 20 cells is a column wider."""
_LEAST_THREADS, _MOST_THREADS = 32, 128
_MANY_THREADS = 1 << 15
"""Threads per image: a few images fill a large GPU, which runs about 30,000 to 70,000 threads at a time.

The number of images changes no block size, so the memory of a step grows linearly with the batch.
"""
_MOST_PIXELS = 128
"""Pixels per thread: many, because it loads source pixels and stores their gradients once for all of them."""
_MOST_CELLS = 8


@dataclass(frozen=True)
class BlockShape:
    """Block sizes of the loss kernel (see `triton_kernels`).

    With these sizes, a few registers (8 to 56 bytes) are spilled in one of forty specializations, and none in the
    others, for Triton 3.6 and 3.9 on compute capabilities 7.5 to 12.0 (`tests/losses/fused/test_triton_kernels.py`).

    Attributes:
        TILES: classes per thread.
        LANES: threads that share the classes of a pixel, a power of two.
        SPLIT: threads that share the columns of a cell, a power of two.
        SOURCES: source columns per program, a power of two.
        CELLS: source rows per program.
    """

    TILES: int
    LANES: int
    SPLIT: int
    SOURCES: int
    CELLS: int

    @property
    def num_warps(self) -> int:
        """Warps per program."""
        return self.SOURCES * self.SPLIT * self.LANES // 32


def block_shape(shape: tuple[int, ...], W: int, dtype: torch.dtype) -> BlockShape:
    """Return the block sizes.

    If an image has few cells or large ones, threads share them; if it has many small ones, a thread processes several.

    Args:
        shape: (N, C, h, w) of the logits; N changes nothing.
        W: columns of the output.
        dtype: the compute dtype.
    """
    _, C, h, w = shape
    most_tiles = _MOST_TILES_FLOAT64 if dtype == torch.float64 else _MOST_TILES
    LANES = SPLIT = CELLS = 1
    while LANES * most_tiles < C:
        LANES *= 2
    scale = W / w
    threads, pixels = h * w * LANES, scale**2
    while 2 * scale > SPLIT and LANES * SPLIT < _MOST_THREADS:
        if SPLIT * threads >= _MANY_THREADS and pixels / SPLIT <= _MOST_PIXELS:
            break
        SPLIT *= 2
    while CELLS < _MOST_CELLS and threads / (2 * CELLS) >= _MANY_THREADS and 2 * CELLS * pixels <= _MOST_PIXELS:
        CELLS *= 2
    num_threads = min(max(_SOURCES * SPLIT * LANES, _LEAST_THREADS), _MOST_THREADS)
    return BlockShape(-(-C // LANES), LANES, SPLIT, num_threads // (SPLIT * LANES), CELLS)


def buffers_of(shape: tuple[int, ...], W: int, dtype: torch.dtype, with_gradient: bool) -> tuple[int, int]:
    """Return the number of programs of the loss kernel, and the number of elements of the partial gradients.

    Each program stores a loss and a weight sum in the compute dtype, and its number of bad ids as int32.

    The programs of neighboring cells both store a partial gradient of the source pixels between them, so the partial
    gradients are (1 + 1 / CELLS) (1 + 1 / SOURCES) times as large as the logits in the compute dtype. For 19 classes
    and an output of 1024 x 2048 this is 1.59 times at a scale of 8 and 1.20 times at a scale of 4; for 150 classes and
    512 x 512 it is 1.69 and 1.27 times.

    Args:
        shape: (N, C, h, w) of the logits.
        W: columns of the output; its rows change no size.
        dtype: the compute dtype.
        with_gradient: compute the gradient.
    """
    N, C, h, w = shape
    block = block_shape(shape, W, dtype)
    num_programs = N * -(-h // block.CELLS) * -(-w // block.SOURCES)
    return num_programs, num_programs * (block.CELLS + 1) * C * (block.SOURCES + 1) if with_gradient else 1


NEEDS = (
    "Triton needs a C compiler, Python's headers and a cache folder that can be written (TRITON_CACHE_DIR); "
    "`segapp doctor` says what is missing"
)


class KernelError(RuntimeError):
    """The Triton kernels could not be imported, compiled or launched.

    Args:
        device: device on which the kernels should run.
        cause: the original error.

    Attributes:
        reason: the cause in one line.
    """

    def __init__(self, device: torch.device, cause: BaseException) -> None:
        lines = str(cause).strip().splitlines() or ["no message"]
        # A compiler's error ends with its cause.
        message = lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"
        self.reason = f"{type(cause).__name__}: {message[:300]}"
        super().__init__(
            f"the Triton kernels of the loss cannot run on {device}: {self.reason}. {NEEDS}; "
            'or give implementation="auto", which uses torch\'s operators then'
        )
