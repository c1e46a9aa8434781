"""Choosing GPUs by what a fake nvidia-smi says, and living with one that fails."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from segapp.memory import gpus
from segapp.memory.gpus import (
    GpuPoller,
    GpuStatus,
    bare_uuid,
    count_visible_gpus,
    order_by_free_memory,
    query_gpus,
)
from tests.support.fake_smi import THREE_GPUS, fake_smi
from tests.support.fault_table import case


@case("G01", how="nvidia-smi says [N/A]", passes="nothing known of that number")
def test_three_gpus_are_parsed_one_without_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text(THREE_GPUS)
    fake_smi(tmp_path, f"cat {tmp_path / 'out'}", monkeypatch)
    found = query_gpus()
    assert [gpu.uuid for gpu in found] == ["aaaa", "bbbb", "cccc"]
    assert (found[0].used_mib, found[0].total_mib, found[0].utilization, found[0].temperature) == (4220, 24220, 0.1, 50)
    assert (found[1].utilization, found[1].temperature) == (None, None)
    indices, reason = order_by_free_memory(["cccc", "aaaa", "bbbb"], found)
    assert indices == [2, 1]  # torch's numbers, not nvidia-smi's; the busy one is left out
    assert "cuda:0" in reason.partition("in use by other processes")[2]


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("", 0), ("-1", 0), ("0,2", 2), ("GPU-bbbb", 1), ("1,7,2", 1), ("2,GPU-aa,-1,0", 2), ("NoDevFiles", 0)],
)
def test_cuda_visible_devices_limits_the_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    fake_smi(tmp_path, f"printf '%s' '{THREE_GPUS}'", monkeypatch)
    assert count_visible_gpus({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}) == count


@case("G01", how="nvidia-smi: no devices, NVML error, exit 1", passes="nothing known")
@pytest.mark.parametrize(
    "script", ["echo 'No devices were found'", "echo 'Failed to initialize NVML: Unknown Error'; exit 255", "exit 1"]
)
def test_failing_nvidia_smi_gives_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_smi(tmp_path, script, monkeypatch)
    assert query_gpus() == []


@case("G01", how="nvidia-smi hangs", passes="not waited for")
def test_hanging_nvidia_smi_is_ended_after_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "sleep 20", monkeypatch)
    began = time.monotonic()
    assert query_gpus(timeout_s=0.5) == []
    assert time.monotonic() - began < 5


def test_gpus_are_taken_in_order_without_measurements() -> None:
    indices, reason = order_by_free_memory(["a", "b"], [])
    assert indices == [0, 1]
    assert "nvidia-smi" in reason


def test_freest_gpu_comes_first_when_all_are_busy() -> None:
    busy = [GpuStatus(u, "", used, 100.0, 0.9, None) for u, used in (("a", 80.0), ("b", 60.0))]
    assert order_by_free_memory(["a", "b"], busy)[0] == [1, 0]
    assert bare_uuid("GPU-12") == bare_uuid("12") == "12"


# --- asking again and again

EIGHT = "".join(
    f"{i}, GPU-{i:04}, {i}, 143771, {1000 + i}, 142771, 570.1, NVIDIA H200, {i}, Disabled, Disabled, 4{i}\n"
    for i in range(8)
)


def counting_smi(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a nvidia-smi of eight GPUs on the path; return the file that gets a byte at each start."""
    (folder / "out").write_text(EIGHT)
    fake_smi(folder, f"printf x >> {folder / 'starts'}\ncat {folder / 'out'}", monkeypatch)
    return folder / "starts"


def test_eight_gpus_start_one_nvidia_smi_a_period(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    starts = counting_smi(tmp_path, monkeypatch)
    poller = GpuPoller(period_s=0.5)
    began = time.monotonic()
    while time.monotonic() - began < 2.2:
        found = poller.poll()
        time.sleep(0.02)
    assert len(found) == 8
    assert 2 <= len(starts.read_text()) <= 5
    assert GpuPoller().period_s == 2.0


@pytest.mark.parametrize(("steps", "least"), [([1.99, 2.01] * 50, 101), ([1.85] * 100, 60), ([0.3] * 300, 40)])
def test_starts_follow_a_caller_at_one_a_period(
    steps: list[float], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock of our own: a caller every 2 s with some jitter is answered each time, and none more often."""
    now = [0.0]
    monkeypatch.setattr(gpus.time, "monotonic", lambda: now[0])
    asked: list[float] = []
    latest = gpus._LatestAnswer("test", lambda: asked.append(now[0]))
    latest.ask_again(2.0)
    for step in steps:
        now[0] += step
        latest.ask_again(2.0)
    assert least <= len(asked) <= 1 + (now[0] + 0.2) / 2.0


@pytest.mark.benchmark
def test_a_sample_of_eight_gpus_costs_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below 0.5 % of a core: 10 ms of this process every 2 s."""
    starts = counting_smi(tmp_path, monkeypatch)
    poller = GpuPoller(period_s=0.0, own_used_mib=lambda: {f"{i:04}": 1.0 for i in range(8)})
    poller.poll()
    costs_s = []
    for _ in range(10):
        began_s = time.process_time()
        poller.poll()
        while any(thread.name == "nvidia-smi" for thread in threading.enumerate()):
            time.sleep(0.005)
        costs_s.append(time.process_time() - began_s)
    print(f"a sample of eight GPUs: {1000 * min(costs_s):.1f} ms of this process, {min(costs_s) / 2:.2%} of a core")
    assert len(starts.read_text()) == 11
    assert min(costs_s) < 0.005 * 2.0


def test_own_memory_is_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counting_smi(tmp_path, monkeypatch)
    poller = GpuPoller(own_used_mib=lambda: {"0001": 77.0, "another": 5.0})
    deadline = time.monotonic() + 20
    while len(found := {gpu.uuid: gpu for gpu in poller.poll()}) < 9 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert [found[f"{i:04}"].used_mib for i in range(3)] == [1000, 77, 1002]
    assert (found["0001"].utilization, found["0001"].temperature) == (0.01, 41)
    assert found["another"] == GpuStatus("another", "", 5.0, None, None, None)


def test_own_memory_is_known_where_nvidia_smi_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_smi(tmp_path, "sleep 20", monkeypatch)
    used = iter(range(100))
    poller = GpuPoller(own_used_mib=lambda: {"a": float(next(used))})
    assert [poller.poll()[0].used_mib for _ in range(3)] == [0, 1, 2]


# --- whose processes

OWN = os.getpid()


@pytest.mark.parametrize(
    ("used_mib", "total_mib", "utilization", "expected"),
    [
        (100.0, 200.0, 0.5, True),
        (101.0, 200.0, 0.5, False),
        (100.0, 200.0, 0.51, False),
        (0.0, 200.0, 1.0, False),
        (100.0, 200.0, None, True),
        (None, 200.0, 0.0, False),
        (100.0, None, 0.0, False),
        (0.0, 0.0, 0.0, False),
    ],
)
def test_gpu_is_available_up_to_half_of_its_load_and_memory(
    used_mib: float | None, total_mib: float | None, utilization: float | None, expected: bool
) -> None:
    assert GpuStatus("u", "n", used_mib, total_mib, utilization, None).is_available == expected
