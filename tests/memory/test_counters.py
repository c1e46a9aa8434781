"""The memory sampler against independent fakes: counters set by the test, and a fake nvidia-smi."""

from __future__ import annotations

import contextlib
import mmap
import resource
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from segapp.accelerator import CUDA
from segapp.memory import counters as sampler_module
from segapp.memory.counters import (
    AllocatorCounters,
    DeviceInfo,
    DeviceMemoryTracker,
    MemorySampler,
    ProcessCounters,
    host_memory_mib,
)
from segapp.memory.gpus import GpuPoller, GpuStatus
from segapp.run.events import EventWriter
from segapp.run.folder import RunFolder
from segapp.waiting import repeated
from tests.support.fake_smi import THREE_GPUS, fake_smi
from tests.support.fault_table import case
from tests.support.gpu.fake_cuda import FakeGpu
from tests.support.live_runs import seen, wait_for


class Counters:
    """An allocator whose numbers are set by the test."""

    def __init__(self) -> None:
        self.now, self.peak = 0.0, 0.0

    def use(self, mib: float) -> None:
        self.now = mib
        self.peak = max(self.peak, mib)

    def read(self) -> dict[str, float | None]:
        return {"allocated_mib": self.now, "reserved_mib": self.now + 1}

    def pop_peak_mib(self) -> float | None:
        peak, self.peak = self.peak, self.now
        return peak


def gpu_infos() -> list[DeviceInfo]:
    """Return devices in torch's order, which is not nvidia-smi's."""
    uuids = ("cccc", "aaaa", "bbbb")
    return [DeviceInfo(f"cuda:{i}", uuid=uuid, total_mib=1000.0, name=f"card {uuid}") for i, uuid in enumerate(uuids)]


def step(watch: DeviceMemoryTracker, counters: Counters, peaks: dict[str, float]) -> None:
    for phase, mib in peaks.items():
        watch.mark(phase)
        counters.use(mib)
        counters.use(10.0)
    watch.mark("data")


def test_each_phase_of_a_profiled_step_gets_its_own_peak():
    counters = Counters()
    assert DeviceMemoryTracker(["cpu"]).devices == (sampler_module.device_info_of(torch.device("cpu")),)
    watch = DeviceMemoryTracker([DeviceInfo("cuda:0", uuid="aaaa")], counters=[counters])
    peaks = {"forward": 300.0, "loss": 500.0, "backward": 500.0, "step": 120.0}  # the last phase names the peak
    watch.mark("data")
    watch.sample()  # asks for the profile of the steps that follow
    for _ in range(2):
        step(watch, counters, peaks)
    (found,) = watch.sample()
    assert found["phase_peak_mib"] == {"data": 10.0, **peaks}
    assert (found["peak_mib"], found["phase"]) == (500.0, "backward")
    assert (found["allocated_mib"], found["reserved_mib"]) == (10.0, 11.0)
    step(watch, counters, {"forward": 200.0})
    watch.mark("eval")
    watch.sample()
    counters.use(90.0)
    assert watch.sample()[0]["phase_peak_mib"]["eval"] == 90.0


def test_observed_peaks_restart_with_a_new_split():
    counters = Counters()
    watch = DeviceMemoryTracker([DeviceInfo("cuda:0", uuid="aaaa")], counters=[counters])
    watch.sample()
    step(watch, counters, {"forward": 900.0, "backward": 100.0})
    watch.reset_observed()
    step(watch, counters, {"forward": 400.0})
    assert watch.observed_mib() == [400.0]
    found = watch.sample()[0]
    assert found["peak_mib"] == 900.0  # of the interval, before the change too
    assert found["phase_peak_mib"] == {"data": 10.0, "forward": 400.0}


def test_peak_while_cudnn_times_algorithms_is_left_out():
    counters = Counters()
    watch = DeviceMemoryTracker([DeviceInfo("cuda:0", uuid="aaaa")], counters=[counters])
    counters.use(150.0)  # the weights arrive
    counters.use(100.0)

    def train(sizes: tuple[int, ...], mib: float, *, is_finished: bool = True) -> None:
        watch.begin_step(sizes)
        step(watch, counters, {"backward": mib})
        if is_finished:
            watch.end_step(sizes)

    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        train((3, 2), 36000.0, is_finished=False)  # the algorithms that are left are timed in the step's repetition
        assert watch.sample()[0]["peak_mib"] == 150.0
        train((3, 2), 35000.0)
        assert watch.sample()[0]["peak_mib"] is None
        train((3, 2), 400.0)
        train((5,), 30000.0)
        assert watch.observed_mib() == [400.0]
        train((5,), 700.0)
        assert watch.sample()[0]["peak_mib"] == 700.0
    with torch.backends.cudnn.flags(enabled=True, benchmark=False):
        train((1,), 800.0)
    assert watch.observed_mib() == [800.0]


def test_process_memory_equals_that_of_the_system():
    counters = ProcessCounters()
    counters.pop_peak_mib()
    first = counters.read()
    mapped = mmap.mmap(-1, 64 * 2**20)  # not from the heap, which may hold freed memory
    block = np.frombuffer(mapped, np.uint8)
    block[:] = 1
    after, peak = counters.read()["used_mib"], counters.pop_peak_mib()
    assert after - first["used_mib"] == pytest.approx(64, abs=8)
    assert after - 1 <= peak <= resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 + 1
    assert host_memory_mib() > peak
    assert set(ProcessCounters(2**22 + 1).read().values()) == {None}  # no such process
    assert first["utilization"] is None
    began = time.perf_counter()
    while time.perf_counter() - began < 0.1:
        block.sum()
    assert 0 < counters.read()["utilization"] <= 1


def test_peak_of_a_gpu_counts_from_the_last_reading(fake_cuda):
    fake_cuda.gpus = [FakeGpu(), FakeGpu(peak=5 * 2**20, allocated=2**20)]
    counters = AllocatorCounters(CUDA, torch.device("cuda:1"))
    assert [counters.pop_peak_mib() for _ in range(2)] == [5.0, 1.0]


def test_peak_that_cannot_be_reset_is_reported_all_the_same(monkeypatch):
    tried: list[Path] = []

    def refused(path: Path, _: bytes) -> int:
        tried.append(path)
        raise PermissionError

    monkeypatch.setattr(Path, "write_bytes", refused)
    counters = ProcessCounters()
    assert [(counters.pop_peak_mib() or 0) > 0 for _ in range(3)] == [True] * 3
    assert tried == [Path("/proc/self/clear_refs")]  # not tried again


def monitored(
    folder: Path,
    gpus: GpuPoller,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[DeviceMemoryTracker] = DeviceMemoryTracker,
) -> tuple[contextlib.AbstractContextManager[None], RunFolder]:
    monkeypatch.setattr(sampler_module, "MEMORY_S", 0.1)
    run = RunFolder.create(path=folder / "run")
    infos = gpu_infos()
    watch = kind(infos, counters=[Counters() for _ in infos])
    watch.mark("data")
    sampler = MemorySampler(EventWriter(run.events).write, watch, gpus=gpus)
    return repeated("memory sampler", sampler.poll), run


def test_three_gpus_are_matched_by_uuid(tmp_path, monkeypatch):
    (tmp_path / "out").write_text(THREE_GPUS)
    fake_smi(tmp_path, f"cat {tmp_path / 'out'}", monkeypatch)
    monitor, run = monitored(tmp_path, GpuPoller(), monkeypatch)
    with monitor:
        wait_for(lambda: any(event["devices"][0]["used_mib"] for event in seen(run.path, "memory")), 30)
    devices = seen(run.path, "memory")[-1]["devices"]
    assert [device["used_mib"] for device in devices] == [11000, 4220, 1000]
    assert [device["utilization"] for device in devices] == [0.99, 0.1, None]
    assert [device["temperature"] for device in devices] == [80, 50, None]
    assert devices[0]["name"] == "card cccc"


def test_total_memory_is_the_total_of_the_slice_that_torch_uses():
    """An older CUDA gives a MIG slice the uuid of its GPU; of another rank's GPU, only nvidia-smi knows the size."""
    whole = {"aaaa": GpuStatus("aaaa", "A100", 300.0, 81920.0, None, 51.0)}
    found = sampler_module.merged({"device": "cuda:0", "uuid": "aaaa", "total_mib": 9728.0}, whole)
    assert (found.total_mib, found.used_mib, found.temperature) == (9728.0, 300.0, 51.0)
    assert sampler_module.merged({"device": "cuda:0", "uuid": "aaaa", "total_mib": None}, whole).total_mib == 81920.0


def test_ranks_on_the_cpu_are_counted_by_their_process():
    counters = [Counters() for _ in range(3)]
    tracker = DeviceMemoryTracker([DeviceInfo("cpu", pid=pid) for pid in (7, 8, 7)], counters=counters)
    for of_device, mib in zip(counters, (10.0, 20.0, 30.0), strict=True):
        of_device.use(mib)
    assert [found["allocated_mib"] for found in tracker.sample()] == [10.0, 20.0, 10.0]


def test_driver_is_asked_about_own_gpus_alone(fake_cuda):
    """Asking about the GPU of another rank would make a context there."""
    fake_cuda.gpus = [FakeGpu(free=3 * 2**20, total=10 * 2**20), FakeGpu(), FakeGpu(is_lost=True)]
    infos = [DeviceInfo(f"cuda:{i}", uuid=uuid, is_own=i != 1) for i, uuid in enumerate(("a", "b", "c"))]
    tracker = DeviceMemoryTracker([DeviceInfo("cpu", pid=1), *infos, infos[0]])  # two logical devices on the first
    assert tracker.driver_used_mib() == {"a": 7.0}
    assert [str(device) for device in fake_cuda.asked_memory] == ["cuda:0", "cuda:2"]


@case("G01", how="nvidia-smi fails or hangs under a monitor", passes="its numbers are missing, one call, no storm")
@pytest.mark.parametrize("script", ["exit 9", "sleep 30"])
def test_failing_or_hanging_nvidia_smi_loses_only_its_numbers(tmp_path, monkeypatch, script):
    fake_smi(tmp_path, f"echo x >> {tmp_path / 'calls'}\n{script}", monkeypatch)
    monitor, run = monitored(tmp_path, GpuPoller(timeout_s=1.0, retry_s=60.0), monkeypatch)
    began = time.monotonic()
    with monitor:
        wait_for(lambda: len(seen(run.path, "memory")) >= 5, 30)
    assert time.monotonic() - began < 20  # leaving did not wait for it
    devices = seen(run.path, "memory")[-1]["devices"]
    assert [device["used_mib"] for device in devices] == [None] * 3
    assert [device["reserved_mib"] for device in devices] == [1.0] * 3
    assert (tmp_path / "calls").read_text().count("x") == 1  # no second call beside a hanging one, no repeated failures


def test_monitor_error_ends_neither_monitor_nor_training(tmp_path, monkeypatch):
    class FailingFirst(DeviceMemoryTracker):
        has_failed = False

        def sample(self):
            if not self.has_failed:
                self.has_failed = True
                raise ZeroDivisionError
            return super().sample()

    monitor, run = monitored(tmp_path, GpuPoller(retry_s=60.0), monkeypatch, FailingFirst)
    with monitor:
        wait_for(lambda: seen(run.path, "memory"), 20)
