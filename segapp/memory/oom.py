"""Recognition of out-of-memory errors: of a device or of this machine, in every form in which torch raises them."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_OUT_OF_MEMORY = re.compile(
    r"(cuda|hip|nccl|triton)[^\n]*out of memory"  # allocator, driver, Triton, AcceleratorError, NCCL's "Cuda failure 2"
    r"|_ALLOC_FAILED"  # CUBLAS_STATUS_, CUDNN_STATUS_, CUSOLVER_STATUS_
    r"|CUDNN_STATUS_NOT_SUPPORTED[^\n]*(memory|workspace|alloc)"
    r"|DefaultCPUAllocator",
    re.IGNORECASE,
)

_PERHAPS_OUT_OF_MEMORY = re.compile(
    r"unable to find an engine to execute this computation"
    r"|Unable to find a valid cuDNN algorithm"
    r"|STATUS_NOT_INITIALIZED[^\n]*Create\("
)
"""cuDNN and cuBLAS say the same where memory is short and where they do not support an operation."""

_STICKY = re.compile(
    r"illegal memory access|illegal instruction|device-side assert|misaligned address|launch failure|ECC error"
)
"""After these errors every call of the process fails on its GPU: a smaller batch does not help."""

_SHORT_FRAC = 0.1
"""A GPU with a smaller share of its memory free is short of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a device, or this machine, had no memory left; also for errors raised from such an error."""
    chain = list(_causes(error))
    if any(_STICKY.search(str(each)) for each in chain):
        return False
    return any(_is_out_of_memory(each) for each in chain)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_OUT_OF_MEMORY.search(text)) or (bool(_PERHAPS_OUT_OF_MEMORY.search(text)) and _is_a_gpu_full())


def _is_a_gpu_full() -> bool:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    try:
        free_and_total = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    except Exception:  # a device that does not answer has another problem
        return False
    return any(free < _SHORT_FRAC * total for free, total in free_and_total)
