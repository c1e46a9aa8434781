"""Out-of-memory errors: recognized in every form in which torch raises them, examined, and reported."""

import contextlib
import gc
import logging
import os
import re
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from segapp.accelerator import GPUS, Gpu, accelerator_of, gpu_of
from segapp.compat.torch import release_compiled_graphs
from segapp.failpoints import failpoint
from segapp.memory.counters import IDLE, DeviceMemoryTracker
from segapp.memory.peaks import PHASES
from segapp.parallel import current_replica
from segapp.parallel.replica_threads import failed_replica
from segapp.run import events
from segapp.run.words import dots, first_line

MIB = 2**20
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMG])i?B")
_UNITS = {"K": 1 / 1024, "M": 1.0, "G": 1024.0}

_OUT_OF_MEMORY = re.compile(
    r"(cuda|hip|[nr]ccl|triton|mps)[^\n]*out of memory"  # allocator, driver, Triton, NCCL's "Cuda failure 2"
    r"|(hipError|HIP_ERROR_)OutOfMemory|miopenStatusAllocFailed|rocblas_status_memory_error"
    r"|_ALLOC(ATION)?_FAILED"  # CUBLAS_STATUS_, CUSOLVER_STATUS_; CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ in cuDNN 9
    r"|Failed to (CUDA )?(host )?[mc]?alloc"  # NCCL's last line, behind "unhandled cuda error"
    r"|CUDNN_STATUS_NOT_SUPPORTED(?!_SHARED)[^\n]*(memory|workspace|alloc)"
    r"|DefaultCPUAllocator",
    re.IGNORECASE,
)

_PERHAPS_OUT_OF_MEMORY = re.compile(
    r"[Uu]nable to find (an engine to execute this computation|a valid cuDNN algorithm)"
    r"|CUDNN_STATUS_(NOT_INITIALIZED|EXECUTION_FAILED_(CUDART|CUDA_DRIVER|CUBLAS))"
    r"|STATUS_NOT_INITIALIZED[^\n]*Create\("
)
"""cuDNN and cuBLAS raise the same error if memory is short and if they do not support an operation."""

_STICKY = re.compile(
    r"illegal memory access|illegal instruction|device-side assert|misaligned address|launch failure|ECC error"
    r"|launch timed out|hardware stack error|invalid program counter|global/shared address space|NVLink|over nvlink"
    r"|tensor memory not completely freed|MPS client has been terminated|external entity outside of CUDA"
)
"""After one of these errors, every call of the process on its GPU fails, so a smaller batch does not help."""

_SHORT_FRAC = 0.1
"""A GPU with a smaller share of its memory free is considered short of memory."""

T = TypeVar("T")

logger = logging.getLogger("segapp")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if a device or this machine ran out of memory; also for errors raised from such an error."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__
    return not any(_STICKY.search(str(link)) for link in chain) and any(map(_is_out_of_memory, chain))


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return bool(_OUT_OF_MEMORY.search(text)) or (bool(_PERHAPS_OUT_OF_MEMORY.search(text)) and _is_a_gpu_full())


def _is_a_gpu_full() -> bool:
    """Return True if a GPU of this process is short of memory, or its allocator has refused some.

    Under a limit of ours the allocator refuses while the driver has plenty; cuDNN hides that in an error of its own.
    """
    used = [(gpu, device) for gpu in GPUS if gpu.is_initialized() for device in gpu.devices()]
    with contextlib.suppress(Exception):  # a device that does not answer has another problem
        for gpu, device in used:
            free_bytes, total_bytes = gpu.free_and_total_bytes(device)
            if free_bytes < _SHORT_FRAC * total_bytes or gpu.has_refused(device):
                return True
    return False


def oom_failpoint(point: str) -> None:
    """Raise `torch.OutOfMemoryError` if a test has armed `point`, `point.N` for replica N, or `point.rankN`."""
    replica = current_replica()
    names = [point, f"{point}.rank{os.environ.get('RANK', 0)}"]
    names += [] if replica is None else [f"{point}.{replica.index}"]
    for name in names:
        if failpoint(name) == "oom":
            raise torch.OutOfMemoryError(f"failpoint {name}")


def examine(error: BaseException, memory: DeviceMemoryTracker, first: int = 0) -> events.Oom:
    """Return the report of an error with the state of its device; call it before the error's frames are cleared.

    The caller adds the position of the training and its reaction. `first` is the index of this process's first device.
    """
    position, failed = failed_replica(error) or (0, memory.devices[first].device if memory.devices else "cpu")
    requested = _REQUESTED.search(str(error))
    report = events.Oom(
        device=str(failed),
        index=first + position,
        phase=memory.phase if memory.phase in (*PHASES, IDLE) else "start",
        step=0,
        action="",
        problem=first_line(error),
        requested_mib=float(requested[1]) * _UNITS[requested[2]] if requested else None,
    )
    device = torch.device(report.device)
    gpu = gpu_of(device)
    if gpu is None:
        total_mib = memory.devices[report.index].total_mib if report.index < len(memory.devices) else None
        return report.model_copy(update={"total_mib": total_mib})
    return report.model_copy(update=_read("its memory", lambda: _counters_of(gpu, device)) or {})


def _read(what: str, read: Callable[[], T]) -> T | None:
    """Return the result of `read`; None if the device does not answer, so that the rest can be reported."""
    try:
        return read()
    except Exception:
        logger.exception("after an out-of-memory error the device does not tell %s", what)
        return None


def _counters_of(gpu: Gpu, device: torch.device) -> dict[str, Any]:
    """Return the amounts of a GPU's memory, as fields of an `oom` event."""
    free, total = gpu.free_and_total_bytes(device)
    reserved, allocated = gpu.reserved_bytes(device), gpu.allocated_bytes(device)
    return {
        "fragmentation": max(0.0, 1 - allocated / reserved) if reserved else None,
        "allocated_mib": allocated / MIB,
        "reserved_mib": reserved / MIB,
        "total_mib": total / MIB,
        "others_mib": max(0.0, (total - free - reserved) / MIB),
    }


def release(error: BaseException, device: torch.device) -> None:
    """Free the memory that a failed step held."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)  # their local variables fill the memory
        seen = seen.__cause__ or seen.__context__
    gc.collect()
    release_compiled_graphs()
    _read("how to empty its cache", accelerator_of(device).empty_cache)


def headline(report: events.Oom) -> str:
    return f"out of memory on {report.device} (device {report.index}) in {report.phase}: {report.action}"


def report_lines(report: events.Oom) -> list[str]:
    lines = [
        headline(report),
        f"  when       epoch {report.epoch}, after step {report.step}",
        f"  error      {report.problem}",
        f"  memory     {_amounts(report)}",
    ]
    if report.split:
        lines.append(f"  split      {dots(report.split)}")
    predicted_mib = report.predicted_mib or []
    if any(mib is not None for mib in predicted_mib):
        shown = ", ".join("-" if mib is None else f"{mib:.0f}" for mib in predicted_mib)
        lines.append(f"  predicted  {shown} MiB per device")
    else:
        lines.append("  predicted  unknown: there is no plan and no measured step yet")
    if report.others_mib:
        lines.append(f"  others     {report.others_mib:.0f} MiB of the GPU are held by the driver and other processes")
    lines += [
        f"  {'' if number > 1 else 'next move':9s}  {number}. {text}"
        for number, text in enumerate(report.advice, start=1)
    ]
    return lines


def _amounts(report: events.Oom) -> str:
    words = [
        f"{label} {mib:.1f} MiB"
        for label, mib in (
            ("requested", report.requested_mib),
            ("tensors", report.allocated_mib),
            ("allocator", report.reserved_mib),
            ("of", report.total_mib),
        )
        if mib is not None
    ]
    if report.fragmentation is not None:
        words.append(f"{100 * report.fragmentation:.0f} % of the allocator's is cache or fragments")
    return ", ".join(words) or "unknown"
