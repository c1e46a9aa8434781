"""The report of an out-of-memory error, line by line by hand."""

from __future__ import annotations

from typing import Any

import pytest

from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker
from segapp.memory.oom import examine, report_lines
from segapp.run.events import Oom


def test_report_has_what_is_known():
    report = Oom(
        device="cuda:2",
        index=1,
        phase="backward",
        epoch=3,
        step=120,
        problem="CUDA out of memory",
        action="tried again",
        split=[2, 3, 1],
        requested_mib=2048.0,
        allocated_mib=750.0,
        reserved_mib=1000.0,
        fragmentation=0.25,
        total_mib=24220.0,
        others_mib=300.4,
        predicted_mib=[None, 900.6, 70.2],
        advice=["train less", "train more"],
    )
    assert report_lines(report) == [
        "out of memory on cuda:2 (device 1) in backward: tried again",
        "  when       epoch 3, after step 120",
        "  error      CUDA out of memory",
        "  memory     requested 2048.0 MiB, tensors 750.0 MiB, allocator 1000.0 MiB, of 24220.0 MiB, "
        "25 % of the allocator's is cache or fragments",
        "  split      2·3·1",
        "  predicted  -, 901, 70 MiB per device",
        "  others     300 MiB of the GPU are held by the driver and other processes",
        "  next move  1. train less",
        "             2. train more",
    ]


@pytest.mark.parametrize(
    ("others_mib", "others"),
    [(None, []), (3072.0, ["  others     3072 MiB of the GPU are held by the driver and other processes"])],
)
def test_report_says_what_is_unknown(others_mib, others):
    facts: dict[str, Any] = {"device": "cpu", "index": 0, "phase": "eval", "epoch": 1, "step": 0, "action": "the end"}
    report = Oom(**facts, problem="no memory", others_mib=others_mib, predicted_mib=[None, None])
    assert report_lines(report)[3:] == [
        "  memory     unknown",
        "  predicted  unknown: there is no plan and no measured step yet",
        *others,
    ]


def test_report_names_the_device_by_its_number_in_the_training():
    """A process of the second machine, whose only device is the third one."""
    memory = DeviceMemoryTracker([DeviceInfo(f"cpu:{i}", total_mib=100.0 * (i + 1)) for i in range(3)])
    report = examine(MemoryError("no memory"), memory, first=2)
    assert (report.device, report.index, report.total_mib, report.phase) == ("cpu:2", 2, 300.0, "start")
