"""Errors that mean that memory was short, in the words of the libraries that raise them, and errors that do not."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from segapp.errors import ConfigError
from segapp.memory.oom import is_out_of_memory
from tests.support.gpu.fake_cuda import FakeGpu

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
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. Failed to allocate workspace"),
        RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("HIP error: out of memory\nHIP kernel errors might be asynchronously reported"),
        RuntimeError("miopenStatusAllocFailed"),
        RuntimeError("MPS backend out of memory (MPS allocated: 7.94 GB, max allowed: 9.07 GB)."),
        torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        dist.DistBackendError(f"{NCCL}version 2.27.5\nLast error:\nCuda failure 2 'out of memory'"),
        dist.DistBackendError(
            f"{NCCL}version 2.21.5\nLast error:\nFailed to CUDA calloc async 4194304 bytes, NCCL out of memory"
        ),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
        chained(LookupError("cuDNN"), RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED")),
        chained(ValueError("step failed"), chained(RuntimeError("x"), RuntimeError("CUDA out of memory."))),
    ],
    ids=lambda error: str(error)[:40],
)
def test_forms_of_out_of_memory_are_recognised(error):
    assert is_out_of_memory(error)


def test_words_of_the_installed_nccl_are_recognised():
    library = next((Path(torch.__file__).parents[1] / "nvidia").glob("nccl/lib/libnccl.so*"), None)
    if library is None:
        pytest.skip("no NCCL: this build of torch is without CUDA")
    command = ["grep", "-aoE", "Failed to (CUDA )?(host )?[mc]?alloc ", library]
    texts = set(subprocess.run(command, capture_output=True, text=True, timeout=280, check=True).stdout.splitlines())
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
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm(...)`"),
        RuntimeError("out of resource: shared memory, Required: 106496, Hardware limit: 101376"),
        dist.DistBackendError(f"{NCCL}version 2.27.5\nLast error:\nCuda failure 700 'an illegal memory access was'"),
        RuntimeError("It is possible that dataloader's workers are out of shared memory."),
        ConfigError("out of memory is what the CUDA driver will say: lower train.batch_size"),
        KeyError("CUDA out of memory"),
        RuntimeError(ENGINE),
    ],
    ids=lambda error: str(error)[:40],
)
def test_other_errors_are_not_taken_for_memory(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        (FakeGpu(free=100, total=24_000), True),
        (FakeGpu(free=12_000, total=24_000), False),
        (FakeGpu(is_lost=True), False),
    ],
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
def test_unclear_words_mean_memory_on_a_full_gpu_only(text, gpu, expected, fake_cuda):
    fake_cuda.gpus, fake_cuda.is_begun = [gpu], True
    assert is_out_of_memory(RuntimeError(text)) == expected
