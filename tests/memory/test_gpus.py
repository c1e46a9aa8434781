"""Choosing GPUs by what a fake nvidia-smi says, and living with one that fails."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segapp.memory import gpus
from segapp.memory.gpus import (
    GpuPoller,
    GpuStatus,
    bare_uuid,
    count_visible_gpus,
    is_first_pid_namespace,
    order_by_free_memory,
    processes_on,
    query_gpus,
)
from segapp.run.events import OtherProcess
from tests.support.fake_smi import THREE_GPUS, fake_smi
from tests.support.fault_table import case

AMD_STATIC = [
    {"gpu": 0, "asic": {"market_name": "Instinct MI210"}, "bus": {"bdf": "0000:0C:00.0"}},
    {"gpu": 1, "asic": {"market_name": "Instinct MI210"}, "bus": {"bdf": "0000:63:00.0"}},
]
AMD_METRIC = [
    {"gpu": 0, "usage": {"gfx_activity": {"value": 40, "unit": "%"}},
     "temperature": {"edge": {"value": 51, "unit": "C"}, "hotspot": {"value": 60, "unit": "C"}},
     "mem_usage": {"total_vram": {"value": 65520, "unit": "MB"}, "used_vram": {"value": 512, "unit": "MB"}}},
    {"gpu": 1, "usage": "N/A", "temperature": {"edge": "N/A", "hotspot": {"value": 60, "unit": "C"}},
     "mem_usage": {"total_vram": {"value": 65520, "unit": "MB"}, "used_vram": "N/A"}},
]  # fmt: skip
"""Answers of `amd-smi static` and `amd-smi metric`."""


@pytest.mark.parametrize("wrap", [lambda gpus: gpus, lambda gpus: {"gpu_data": gpus}], ids=["list", "named"])
def test_amd_smi_is_asked_where_nvidia_smi_is_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrap: Callable[[Any], Any]
) -> None:
    for name, answer in (("static", AMD_STATIC), ("metric", AMD_METRIC)):
        (tmp_path / name).write_text(json.dumps(wrap(answer)))
    fake_smi(tmp_path, "exit 9", monkeypatch)
    fake_smi(tmp_path, f"cat {tmp_path}/$1", monkeypatch, "amd-smi")
    gpus._amd_cards.cache_clear()
    assert query_gpus() == [
        GpuStatus("0000:0c:00.0", "Instinct MI210", 512.0, 65520.0, 0.4, 51.0),
        GpuStatus("0000:63:00.0", "Instinct MI210", None, 65520.0, None, 60.0),
    ]
    gpus._amd_cards.cache_clear()


@pytest.mark.parametrize("script", ["exit 9", "echo '[1]'", "echo '{}'", "echo Error"])
def test_amd_smi_that_says_something_else_is_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    fake_smi(tmp_path, script, monkeypatch, "amd-smi")
    gpus._amd_cards.cache_clear()
    assert gpus.ask_amd_smi() == []


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
    ("is_first", "listed", "expected"),
    [
        (True, [(OWN, 900.0), (2**22 + 1, 5.0)], [2**22 + 1]),
        (True, [(1, 5.0)], [1]),
        (False, [(OWN, 900.0), (1, 5.0)], [1]),  # ids of the container: both exist
        (False, [(OWN, None), (1, 5.0)], [1]),
        (False, [(1, 5.0)], []),  # this process is missing: the ids are the host's, and 1 may be anyone
        (False, [(OWN, 3.0), (1, 5.0)], []),  # too little memory: another process with the same number
        (False, [], []),
    ],
)
def test_processes_of_other_namespaces_are_not_confused(
    is_first: bool,
    listed: list[tuple[int, float | None]],
    expected: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = [f"GPU-a, {pid}, {'[N/A]' if mib is None else mib}, python" for pid, mib in listed]
    (tmp_path / "out").write_text("\n".join(lines))
    fake_smi(tmp_path, f"cat {tmp_path / 'out'}", monkeypatch)
    monkeypatch.setattr(gpus, "is_first_pid_namespace", lambda: is_first)
    assert [each.pid for each in processes_on("a", own_mib=500.0)] == expected


def test_pid_namespace_is_that_of_the_system() -> None:
    """The first namespace alone has kthreadd (kernel/kthread.c) as process 2."""
    if not os.path.exists("/proc/self/ns/pid"):
        pytest.skip("no pid namespaces")
    name = Path("/proc/2/comm")
    if is_first_pid_namespace() and name.exists():
        assert name.read_text() == "kthreadd\n"
    assert isinstance(is_first_pid_namespace(), bool)


def test_listed_processes_are_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = f"GPU-a, {OWN}, 900, python\nGPU-a, 1, [N/A], a, b\nGPU-b, 1, 3, c\nGPU-a, -, 3, c\n"
    (tmp_path / "out").write_text(lines)
    fake_smi(tmp_path, f"cat {tmp_path / 'out'}", monkeypatch)
    monkeypatch.setattr(gpus, "is_first_pid_namespace", lambda: True)
    assert processes_on("a") == [OtherProcess(pid=1, name="a, b", used_mib=None)]


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
