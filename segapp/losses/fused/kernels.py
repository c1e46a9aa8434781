"""Trial of the Triton kernels on a device, and their block sizes and buffers as plain numbers, without Triton.

The launch and the memory plan use the same numbers.

Shapes: N images, C classes, h x w of the logits, H x W of the target.
"""

import importlib
import importlib.util
import threading
import warnings
from dataclasses import dataclass
from types import ModuleType

import torch

from segapp.accelerator import accelerator_of
from segapp.places import keep_compiled_code

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


_NEEDS = (
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
            f"the Triton kernels of the loss cannot run on {device}: {self.reason}. {_NEEDS}; "
            'or give implementation="auto", which uses torch\'s operators then'
        )


_IS_INSTALLED = importlib.util.find_spec("triton") is not None

_lock = threading.Lock()
"""Replicas run in threads, but each device is tried only once."""
_results: dict[torch.device, str | None] = {}
"""Why the kernels cannot run on a device; None if they can."""
_warned: set[str] = set()


def has_kernels(device: torch.device) -> bool:
    """Return True if the Triton kernels run on a device; the first call launches a small one and waits for it.

    While a graph is captured or compiled, nothing is tried, and a device without a result is assumed to have kernels.
    """
    if not _IS_INSTALLED:
        return False
    if torch.compiler.is_compiling():
        return True
    if device not in _results:
        if accelerator_of(device).is_capturing():
            return True
        with _lock:
            # Another thread may have tried the device while this one waited.
            if device not in _results:
                try:
                    _try(device)
                    _results[device] = None
                except KernelError as error:
                    _results[device] = error.reason
                    _warn(error)
    return _results[device] is None


def note_failure(device: torch.device, error: KernelError) -> None:
    """Record that the kernels cannot run on a device after all; warn the first time that a reason occurs."""
    with _lock:
        _results[device] = error.reason
        _warn(error)


def _warn(error: KernelError) -> None:
    if error.reason not in _warned:
        _warned.add(error.reason)
        warnings.warn(
            f"the loss uses torch's operators instead of its Triton kernels, which is slower: {error.reason}. {_NEEDS}",
            RuntimeWarning,
            stacklevel=2,
        )


def load_kernels(device: torch.device) -> ModuleType:
    """Return `triton_cross_entropy`, which imports Triton.

    Raises:
        KernelError: Triton cannot be imported.
    """
    try:
        keep_compiled_code()
        return importlib.import_module("segapp.losses.fused.triton_cross_entropy")
    except Exception as error:  # Triton's import runs code of its back ends
        raise KernelError(device, error) from error


def _try(device: torch.device) -> None:
    """Launch the smallest kernel and check its result, on a separate stream, so that it waits for no other work.

    Raises:
        KernelError: it could not be launched, or its result is wrong.
    """
    kernels = load_kernels(device)
    with accelerator_of(device).new_stream(device), kernels.launching(device):
        ids = torch.tensor([[[0, 7, 255, -3]]], device=device)
        bounds = kernels.bounds_of_bad_ids(torch.ones((), dtype=torch.int64, device=device), ids, 5, 255).tolist()
        if bounds != [-3, 7]:
            raise RuntimeError(f"a kernel returned {bounds} instead of [-3, 7]")
