"""Choosing GPUs by what a fake nvidia-smi says, and living with one that fails."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from segapp.memory.gpus import GpuStatus, bare_uuid, order_by_free_memory, query_gpus
from tests.support.fault_table import case

LINES = """\
0, GPU-aaaa, 10, 24220, 4220, 20000, 535.1, Fast Card, 1, Disabled, Disabled, 50
1, GPU-bbbb, [N/A], 24220, 1000, 23220, 535.1, Fast Card, 2, Disabled, Disabled, [N/A]
2, GPU-cccc, 99, 11019, 11000, 19, 535.1, Small Card, 3, Disabled, Disabled, 80
"""


def fake_nvidia_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@case("G01", how="nvidia-smi says [N/A]", passes="nothing known of that number")
def test_three_gpus_are_parsed_one_without_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").write_text(LINES)
    fake_nvidia_smi(tmp_path, f"cat {tmp_path / 'out'}", monkeypatch)
    found = query_gpus()
    assert [gpu.uuid for gpu in found] == ["aaaa", "bbbb", "cccc"]
    assert (found[0].used_mib, found[0].total_mib, found[0].utilization, found[0].temperature) == (4220, 24220, 0.1, 50)
    assert (found[1].utilization, found[1].temperature) == (None, None)
    indices, reason = order_by_free_memory(["cccc", "aaaa", "bbbb"], found)
    assert indices == [2, 1]  # torch's numbers, not nvidia-smi's; the busy one is left out
    assert "cuda:0" in reason.partition("in use by other processes")[2]


@case("G01", how="nvidia-smi: no devices, NVML error, exit 1", passes="nothing known")
@pytest.mark.parametrize(
    "script", ["echo 'No devices were found'", "echo 'Failed to initialize NVML: Unknown Error'; exit 255", "exit 1"]
)
def test_failing_nvidia_smi_gives_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    fake_nvidia_smi(tmp_path, script, monkeypatch)
    assert query_gpus() == []


@case("G01", how="nvidia-smi hangs", passes="not waited for")
def test_hanging_nvidia_smi_is_ended_after_its_timeout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_nvidia_smi(tmp_path, "sleep 20", monkeypatch)
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
