"""The report of an out-of-memory error, line by line by hand."""

from __future__ import annotations

import itertools

import pytest

from segapp.memory.oom import OomReport, OomSnapshot, oom_snapshot_of, report_lines
from segapp.run.events import LiveTensor, OtherProcess


def test_report_has_what_is_known() -> None:
    snapshot = OomSnapshot(
        device=1,
        name="cuda:2",
        phase="backward",
        requested_mib=2048.0,
        allocated_mib=750.0,
        reserved_mib=1000.0,
        total_mib=24220.0,
        largest=(LiveTensor(mib=512.0, what="a"), LiveTensor(mib=3.0, what="b")),
        others=(OtherProcess(pid=7, name="python", used_mib=300.4), OtherProcess(pid=8, name="x", used_mib=None)),
    )
    advice = ("train less", "train more")
    report = OomReport(snapshot, 3, 120, "CUDA out of memory", "tried again", (2, 3), (900.6, None), advice)
    assert report_lines(report) == [
        "out of memory on cuda:2 (device 1) in backward: tried again",
        "  when       epoch 3, after step 120",
        "  error      CUDA out of memory",
        "  memory     requested 2048.0 MiB, tensors 750.0 MiB, allocator 1000.0 MiB, of 24220.0 MiB, "
        "25 % of the allocator's is cache or fragments",
        "  split      2·3",
        "  predicted  901, - MiB per device",
        "  others     python (process 7) 300 MiB; x (process 8)",
        "  largest        512.0 MiB  a",
        "                   3.0 MiB  b",
        "  next move  1. train less",
        "             2. train more",
    ]


@pytest.mark.parametrize(
    ("others_mib", "others"),
    [(None, "none known"), (3072.0, "3072 MiB of the GPU are held by the driver and other processes")],
)
def test_report_says_what_is_unknown(others_mib: float | None, others: str) -> None:
    snapshot = OomSnapshot(0, "cpu", "eval", others_mib=others_mib)
    assert report_lines(OomReport(snapshot, 1, 0, "no memory", "the end", predicted_mib=(None, None)))[3:] == [
        "  memory     unknown",
        "  predicted  unknown: there is no plan and no measured step yet",
        f"  others     {others}",
    ]


@pytest.mark.parametrize(
    ("allocated_mib", "reserved_mib", "expected"),
    [(750.0, 1000.0, 0.25), (1001.0, 1000.0, 0.0), (0.0, 10.0, 1.0), (None, 10.0, None), (1.0, 0.0, None)],
)
def test_fragmentation_is_the_unused_share(
    allocated_mib: float | None, reserved_mib: float, expected: float | None
) -> None:
    snapshot = OomSnapshot(0, "cuda:0", "step", allocated_mib=allocated_mib, reserved_mib=reserved_mib)
    assert snapshot.fragmentation == expected


def test_snapshot_is_that_of_the_first_cause_with_one() -> None:
    errors = [ValueError("a"), ValueError("b"), ValueError("c")]
    for error, cause in itertools.pairwise(errors):
        error.__cause__ = cause
    assert oom_snapshot_of(errors[0]) is None
    for i in (2, 1):
        errors[i].snapshot = OomSnapshot(i, "", "")  # type: ignore[attr-defined]
        assert oom_snapshot_of(errors[0]) == OomSnapshot(i, "", "")
    errors[0].snapshot = "a picture"  # type: ignore[attr-defined]
    assert oom_snapshot_of(errors[0]) == OomSnapshot(1, "", "")
