"""The report of an out-of-memory error, on devices that answer no question."""

from __future__ import annotations

import weakref

import pytest
import torch

from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker
from segapp.memory.oom import examine, release
from segapp.parallel import DataParallelModel, current_replica
from tests.support.gpu.fake_cuda import FakeCuda, FakeGpu


@pytest.fixture
def memory() -> DeviceMemoryTracker:
    return DeviceMemoryTracker([DeviceInfo("cpu", total_mib=mib) for mib in (100.0, 200.0, 300.0)])


def of_replica(position: int, message: str) -> RuntimeError:
    """An error with the mark of `ReplicaThreads`, which cannot run on a GPU that does not exist."""
    error = RuntimeError(message)
    error.__dict__["_replica"] = position, torch.device(f"cuda:{position}")
    return error


def test_report_has_the_device_of_the_replica_that_failed(memory: DeviceMemoryTracker) -> None:
    class Full(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            replica = current_replica()
            if replica is not None and replica.index == 1:  # the second that runs, on device 2
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
            return images

    with pytest.raises(torch.OutOfMemoryError) as caught:
        DataParallelModel(Full(), ["cpu"] * 3, gpu0_bsz=0)(torch.zeros(7, 2))
    report = examine(caught.value, memory)
    assert (report.device, report.index, report.total_mib) == ("cpu", 2, 300.0)
    assert report.problem == "CUDA out of memory. Tried to allocate 20.00 MiB"


def test_report_is_whole_where_cuda_calls_raise(memory: DeviceMemoryTracker, fake_cuda: FakeCuda) -> None:
    error = of_replica(1, "CUDA out of memory. Tried to allocate 2.00 GiB")
    fake_cuda.gpus = [FakeGpu(is_lost=True) for _ in range(3)]
    report = examine(error, memory)
    release(error, torch.device("cuda"))
    assert (report.device, report.index, report.requested_mib) == ("cuda:1", 1, 2048.0)
    assert report.allocated_mib is None


@pytest.mark.parametrize(
    ("free_gib", "allocated_gib", "reserved_gib", "others_mib", "fragmentation"),
    [(1, 18, 20, 3072.0, 0.1), (4, 21, 20, 0.0, 0.0), (6, 0, 20, 0.0, 1.0), (2, 1, 0, 22528.0, None)],
)
def test_report_has_the_counters_of_the_gpu(
    memory: DeviceMemoryTracker,
    fake_cuda: FakeCuda,
    free_gib: int,
    allocated_gib: int,
    reserved_gib: int,
    others_mib: float,
    fragmentation: float | None,
) -> None:
    """Of 24 GiB; worked by hand."""
    failed = FakeGpu(total=24 << 30, free=free_gib << 30, allocated=allocated_gib << 30, reserved=reserved_gib << 30)
    fake_cuda.gpus = [FakeGpu(), failed, FakeGpu()]
    report = examine(of_replica(1, "CUDA error: out of memory"), memory)
    assert (report.total_mib, report.reserved_mib) == (24576.0, 1024.0 * reserved_gib)
    assert (report.allocated_mib, report.others_mib) == (1024.0 * allocated_gib, others_mib)
    assert report.fragmentation == (None if fragmentation is None else pytest.approx(fragmentation))


@pytest.mark.parametrize("has_cause", [True, False])
def test_release_frees_what_a_failed_step_held(has_cause: bool) -> None:
    """The frames of an error, and of the one that it was raised from or after, hold the activations."""
    held: list[weakref.ref[torch.Tensor]] = []

    def deeper() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise RuntimeError("no memory")

    def step() -> None:
        inputs = torch.zeros(3)
        held.append(weakref.ref(inputs))
        try:
            deeper()
        except RuntimeError as inner:
            raise LookupError("no memory") from (inner if has_cause else None)

    with pytest.raises(LookupError) as caught:
        step()
    assert [ref() is None for ref in held] == [False, False]
    release(caught.value, torch.device("cpu"))
    assert [ref() is None for ref in held] == [True, True]


@pytest.mark.parametrize(
    ("amount", "mib"), [("512.00 KiB", 0.5), ("20.00 MiB", 20.0), ("1.50 GiB", 1536.0), ("many bytes", None)]
)
def test_requested_memory_is_read_in_any_unit(memory: DeviceMemoryTracker, amount: str, mib: float | None) -> None:
    error = RuntimeError(f"CUDA out of memory. Tried to allocate {amount}. GPU 0 has a total capacity of 23.68 GiB")
    assert examine(error, memory).requested_mib == mib
