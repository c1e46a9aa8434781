"""Errors that mean that memory was short, in the words of the libraries that raise them, and errors that do not."""

from __future__ import annotations

import subprocess
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from segapp.errors import ConfigError
from segapp.memory.oom import is_out_of_memory

NCCL = "NCCL error in: ProcessGroupNCCL.cpp:3699, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
ENGINE = "FIND was unable to find an engine to execute this computation after trying 9 plans."


def chained(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.68 GiB"
        ),
        MemoryError(),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Failed to allocate workspace"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.OutOfMemoryError(
            "HIP out of memory. Tried to allocate 2.00 MiB. GPU 7 has a total capacity of 287.98 GiB"
        ),
        RuntimeError("HIP error: out of memory\nHIP kernel errors might be asynchronously reported"),
        RuntimeError("HIP error: hipErrorOutOfMemory"),
        RuntimeError("miopenStatusAllocFailed"),
        RuntimeError("MPS backend out of memory (MPS allocated: 7.94 GB, max allowed: 9.07 GB)."),
        RuntimeError("CUDA driver error: out of memory"),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        dist.DistBackendError(f"{NCCL}version 2.27.5\nLast error:\nCuda failure 2 'out of memory'"),
        dist.DistBackendError(
            f"{NCCL}version 2.21.5\nLast error:\nFailed to CUDA calloc async 4194304 bytes, NCCL out of memory"
        ),
        dist.DistBackendError(f"{NCCL}version 2.28.9\nLast error:\nFailed to CUDA calloc async 608 bytes"),
        RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        chained(LookupError("cuDNN"), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
        chained(ValueError("step failed"), chained(RuntimeError("x"), RuntimeError("CUDA out of memory."))),
    ],
    ids=lambda error: str(error)[:40],
)
def test_forms_of_out_of_memory_are_recognised(error: Exception) -> None:
    assert is_out_of_memory(error)


def texts_in(library: str, pattern: str) -> set[str]:
    """Texts of an installed library of NVIDIA's wheels, which come with CUDA builds of torch."""
    nvidia = Path(torch.__file__).parents[1] / "nvidia"
    found = next(nvidia.glob(library), None)
    if found is None:
        pytest.skip(f"no {library}: this build of torch is without CUDA")
    done = subprocess.run(["grep", "-aoE", pattern, found], capture_output=True, timeout=120, check=True)
    return set(done.stdout.decode().splitlines())


def test_words_of_the_installed_cudnn_are_recognised() -> None:
    texts = texts_in("cudnn/lib/libcudnn_graph.so*", "CUDNN_STATUS_[A-Z_]*ALLOC[A-Z_]*")
    assert len(texts) >= 2
    assert {text for text in texts if not is_out_of_memory(RuntimeError(f"cuDNN error: {text}"))} == set()


def test_words_of_the_installed_nccl_are_recognised() -> None:
    texts = texts_in("nccl/lib/libnccl.so*", "Failed to (CUDA )?(host )?[mc]?alloc ")
    assert len(texts) >= 2
    errors = [dist.DistBackendError(f"{NCCL}version 2\nLast error:\n{text}608 bytes") for text in texts]
    assert all(is_out_of_memory(error) for error in errors)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: device-side assert triggered"),
        chained(torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: an illegal memory access")),
        chained(LookupError("x"), RuntimeError("CUDA error: unspecified launch failure")),
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear with a non-contiguous input."),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        RuntimeError("out of resource: shared memory, Required: 106496, Hardware limit: 101376"),
        dist.DistBackendError(f"{NCCL}version 2.27.5\nLast error:\nCuda failure 700 'an illegal memory access was'"),
        RuntimeError("It is possible that dataloader's workers are out of shared memory."),
        RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"),
        ConfigError("out of memory is what the CUDA driver will say: lower train.batch_size"),
        KeyError("CUDA out of memory"),
        RuntimeError(ENGINE),
    ],
    ids=lambda error: str(error)[:40],
)
def test_other_errors_are_not_taken_for_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


def _dead(_index: int) -> tuple[int, int]:
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize(
    ("mem_get_info", "expected"),
    [(lambda _: (100, 24_000), True), (lambda _: (12_000, 24_000), False), (_dead, False)],
    ids=["full", "half-empty", "dead"],
)
@pytest.mark.parametrize(
    "text",
    [
        ENGINE,
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "cuDNN error: CUDNN_STATUS_EXECUTION_FAILED_CUDART",
    ],
    ids=["engine", "cublas", "cudnn", "cudart"],
)
def test_unclear_words_mean_memory_on_a_full_gpu_only(
    text: str, mem_get_info: Callable[[int], tuple[int, int]], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = types.SimpleNamespace(is_initialized=lambda: True, device_count=lambda: 1, mem_get_info=mem_get_info)
    monkeypatch.setattr(torch, "cuda", fake)
    assert is_out_of_memory(RuntimeError(text)) == expected
