"""The numbers of a training process: precision, memory format, algorithms, TF32, and its heap.

The switches of torch and CUDA are set in one place, before CUDA starts, and undone at the end, for programs that use
segapp as a library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import sys
import warnings
from collections.abc import Iterator, MutableMapping, Sequence

import torch
from torch import nn

from segapp.accelerator import accelerator_of
from segapp.config import TrainConfig
from segapp.errors import ConfigError


def auto_precision(devices: Sequence[torch.device]) -> str:
    """Return the precision that `auto` stands for: amp-bf16 where every GPU has it, else amp-fp16; fp32 on CPUs."""
    if any(device.type == "cpu" for device in devices):
        return "fp32"
    return "amp-bf16" if all(accelerator_of(device).has_bf16(device) for device in devices) else "amp-fp16"


def uses_channels_last(section: TrainConfig, model: nn.Module, device: torch.device) -> bool:
    """Return True if the network is to work in NHWC.

    `auto` takes it where it is the faster format: on a GPU whose tensor cores make the convolutions (half precision, or
    float32 as TF32), for networks whose parameters are mostly those of convolutions. The precision is resolved before.
    A device that is neither CPU nor CUDA stands for a GPU that is planned for.
    """
    if section.channels_last != "auto":
        return section.channels_last
    if device.type == "cpu":
        return False
    if section.precision == "fp32" and not (section.tf32 and accelerator_of(device).has_tf32(device)):
        return False
    convolutions = [part.weight for part in model.modules() if isinstance(part, (nn.Conv2d, nn.ConvTranspose2d))]
    return 2 * sum(weight.numel() for weight in convolutions) >= sum(p.numel() for p in model.parameters())


_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
"""Parameters of mallopt(3). The threshold for mapping cannot be raised beyond 32 MiB; mapping nothing at all can."""


def keep_freed_memory() -> bool:
    """Make glibc's malloc of this process, and of those forked from it, keep freed memory.

    glibc maps every large block anew and unmaps it when it is freed, so that each activation of each step is paid for
    with page faults: over a third of a LR-ASPP step on two cores. Here the process keeps what it has once had; its peak
    grows by what fragmentation costs (1 to 10 % measured). Returns whether it could be done: only with glibc.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(_M_MMAP_MAX, 0)) and bool(libc.mallopt(_M_TRIM_THRESHOLD, -1))


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"

_WORKSPACE = ":4096:8"
"""Eight buffers of 4 MiB: with one buffer for each stream, cuBLAS repeats its results."""


@contextlib.contextmanager
def numerics(*, deterministic: bool, tf32: bool, cudnn_benchmark: bool) -> Iterator[None]:
    """Run the body of the `with` statement under these switches, and restore the present ones at its end.

    cuBLAS reads its variable at the first matrix product of the process and keeps it. So `deterministic` needs a
    process that has not used CUDA, or one that was started with the variable. Once CUDA has run, it stays set.

    Args:
        deterministic: use algorithms that repeat their results bit for bit; an operation that has none raises.
        tf32: float32 convolutions and matrix products on GPUs round their inputs to TF32 (10 bits of mantissa).
        cudnn_benchmark: cuDNN times its algorithms for each new shape; not where `deterministic`.

    Raises:
        ConfigError: `deterministic`, but CUDA has started in this process without cuBLAS's variable.
    """
    if deterministic and _has_used_cuda() and CUBLAS_VARIABLE not in os.environ:
        raise ConfigError(
            f"train.deterministic = true, but this process has used CUDA without {CUBLAS_VARIABLE}={_WORKSPACE}, which "
            "cuBLAS reads once: set it before the program starts, or train in a new process (segapp train)",
            key="train.deterministic",
            value=True,
        )
    with contextlib.ExitStack() as stack:
        stack.enter_context(_environment(os.environ, deterministic=deterministic))
        stack.enter_context(_algorithms_restored())
        torch.backends.cudnn.benchmark = cudnn_benchmark and not deterministic
        if deterministic:
            torch.backends.cudnn.deterministic = True
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if torch.cuda.is_available():  # the same switches change products on CPUs
            stack.callback(set_tf32, *_tf32())
            set_tf32(tf32, tf32)
        yield


def _has_used_cuda() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


def set_tf32(matmul: bool, convolution: bool) -> None:
    """Allow or forbid TF32 in matrix products and in convolutions.

    Through the older names: in torch 2.11, torch.compile still reads these, and raises if only the newer ones
    (`fp32_precision`) were set.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some versions of torch recommend the newer names
        torch.backends.cuda.matmul.allow_tf32 = matmul
        torch.backends.cudnn.allow_tf32 = convolution


def _tf32() -> tuple[bool, bool]:
    """Return whether matrix products and convolutions use TF32."""
    matmul, convolution = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    return matmul.fp32_precision == "tf32", convolution.fp32_precision == "tf32"


@contextlib.contextmanager
def _algorithms_restored() -> Iterator[None]:
    cudnn, deterministic = torch.backends.cudnn, torch.utils.deterministic
    kept = cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    is_on, warn_only = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory = kept  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(is_on, warn_only=warn_only)


@contextlib.contextmanager
def _environment(environ: MutableMapping[str, str], *, deterministic: bool) -> Iterator[None]:
    """Set what CUDA reads when it starts, also in the ranks of this process, unless the user has set it."""
    chosen = {}
    if deterministic:
        chosen[CUBLAS_VARIABLE] = _WORKSPACE
    # Segments that grow leave no fragments where sizes change; the driver offers them on Linux.
    if sys.platform == "linux" and torch.version.cuda and not any(name in environ for name in ALLOCATOR_VARIABLES):
        chosen[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"
    added = [name for name in chosen if name not in environ]
    environ.update({name: chosen[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            if name != CUBLAS_VARIABLE or not _has_used_cuda():
                environ.pop(name, None)
