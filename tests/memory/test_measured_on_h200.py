"""Plans beside what an NVIDIA H200 took on 2026-11-26 (torch 2.11.0+cu130, driver 580.159, no expandable segments).

`measured_on_h200.json` has the peaks of 48 cases of tests/gpu/figures_plan.py. Many of them shared a process, so a case
also has the number of cuBLAS's workspaces that the process held. `allocations_on_h200.json.xz` has every allocation of
13 cases, two steps and an evaluation: positive numbers are bytes, negative ones free an allocation that was made as
many allocations ago. `frames_on_h200.json` has what lived at the peaks of these cases, in bytes by the innermost Python
function.
"""

import functools
import json
import lzma
from collections import Counter

import pytest

from segapp.memory.peaks import EVAL
from segapp.memory.plan import BLAS_MIB
from segapp.memory.split_check import FULL_FRAC, PLAIN_FRAC
from tests.gpu.figures_plan import network_config, planned_phases
from tests.support import ROOT
from tests.support.caching_allocator import MIB, least_bytes, replayed
from tests.support.own_process import in_own_process

DATA = ROOT / "tests" / "data"
ROWS = {
    (row["network"], row["precision"], row["divisor"]): row
    for row in json.loads((DATA / "measured_on_h200.json").read_text())
}
FAST = [("demo", "fp32", 4), ("cityscapes-fast", "amp-bf16", 4), ("camvid", "amp-bf16", 2)]
TRACED = json.loads(lzma.decompress((DATA / "allocations_on_h200.json.xz").read_bytes()))
FRAMES = {
    (case["network"], case["precision"], case["batch"]): case["bytes_by_frame"]
    for case in json.loads((DATA / "frames_on_h200.json").read_text())
}
KIND_OF_FRAME = {
    "module.py:convert": "weights",
    "rollback.py:_common_storage": "buffers",
    "rollback.py:_take_in": "buffers",
    "optimizers.py:allocate_state": "optimizer",
    "parameter.py:__deepcopy__": "average",
    "storage.py:clone": "average",
    "autograd": "backward",
}
"""What the Python function is for that allocated; "autograd": none, which its threads are. Others: the forward pass."""
KIND_OF_LEDGER = {"gradients": "backward", "temporaries": "backward"}
NAMES = [f"{case['network']}, {case['precision']}" for case in TRACED]


def events_of(case):
    """Return (number, bytes) of each allocation, with 0 bytes where it is freed."""
    events, count = [], 0
    for number in case["events"]:
        events.append((count, number) if number >= 0 else (count + number, 0))
        count += number >= 0
    return events


def held_by(case):
    """Return the workspaces that the process had before the case, as the peak of the case shows."""
    alone = replayed(events_of(case), expandable=False).peak_allocated
    return [int(BLAS_MIB * MIB)] * round((case["peak_allocated_bytes"] - alone) / (BLAS_MIB * MIB))


@functools.cache
def planned(key):
    """Return the planned peak of each phase."""
    return in_own_process(planned_phases, *key, is_small=False)


def highest(phases):
    """Return the peak of a step."""
    return max((peak for phase, peak in phases.items() if phase != EVAL), key=lambda peak: peak.mib)


@pytest.mark.parametrize("case", TRACED, ids=NAMES)
def test_model_of_the_allocator_takes_what_torch_took(case):
    """The segments of a process of its own are those of torch, one by one; others began with parts of segments."""
    own = replayed(events_of(case), expandable=False, held=held_by(case))
    if case["segments"] is not None:
        assert own.segments == case["segments"]
        assert own.peak_allocated == case["peak_allocated_bytes"]
    assert own.peak_allocated == pytest.approx(case["peak_allocated_bytes"], abs=8 * MIB)
    assert own.peak_reserved == pytest.approx(case["peak_reserved_bytes"], abs=16 * MIB)


@pytest.mark.parametrize("case", TRACED, ids=NAMES)
def test_room_is_enough_for_the_allocator_and_little_is_unused(case):
    events, held = events_of(case), held_by(case)
    live = replayed(events, expandable=True, held=held).peak_allocated
    for is_expandable, room in ((True, FULL_FRAC), (False, PLAIN_FRAC)):
        allowed = live / room
        least = least_bytes(events, expandable=is_expandable, held=held)
        assert least <= allowed + 2 * MIB, is_expandable
        taken = min(allowed, replayed(events, expandable=is_expandable, held=held).peak_reserved)
        assert 1 - taken / allowed <= 0.12, is_expandable


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "key",
    [pytest.param(key, marks=() if key in FAST else pytest.mark.slow, id="{}, {}, /{}".format(*key)) for key in ROWS],
)
def test_planned_peaks_are_near_the_measured_ones(key):
    row = ROWS[key]
    without = BLAS_MIB * (row["workspaces"] - 2)
    phases = planned(key)
    step_mib, eval_mib = highest(phases).mib + without, phases[EVAL].mib + without
    for mib, name in ((max(step_mib, eval_mib), "measured_mib"), (eval_mib, "measured_eval_mib")):
        assert mib == pytest.approx(row[name], rel=0.02, abs=96), name


def test_peaks_by_allocation_are_the_plans():
    """Beside workspaces of cuDNN and the loss, the plan of LR-ASPP has the bytes of the card to 0.1 MiB."""
    (case,) = [c for c, name in zip(TRACED, NAMES, strict=True) if name == "cityscapes-fast, amp-bf16"]
    live = replayed(events_of(case), expandable=True, held=held_by(case)).peak_allocated
    step_mib = highest(planned(("cityscapes-fast", "amp-bf16", 4))).mib
    assert step_mib == pytest.approx(live / MIB, abs=0.1)


@pytest.mark.parametrize(
    "key", [("cityscapes-fast", "amp-bf16", 4), ("camvid", "amp-bf16", 2)], ids=lambda key: ", ".join(key[:2])
)
def test_kinds_at_the_peak_are_those_of_the_card(key):
    """The parts of both peaks agree, so that errors of several MiB do not cancel out.

    The workspaces of cuBLAS were there before the first allocation of the case.
    """
    batch = int(network_config(*key, is_small=False).train.batch_size)
    measured, ours = Counter(), Counter()
    for frame, num_bytes in FRAMES[*key[:2], batch].items():
        measured[KIND_OF_FRAME.get(frame, "activations")] += num_bytes / MIB
    for kind, mib in highest(planned(key)).by_kind.items():
        ours[KIND_OF_LEDGER.get(kind, kind)] += mib
    assert ours.pop("workspaces") == 2 * BLAS_MIB
    assert ours.pop("build") < 0.01
    assert measured.keys() == {"weights", "buffers", "optimizer", "average", "activations"}
    assert ours.pop("activations") == pytest.approx(measured.pop("activations"), rel=0.025)
    assert ours == pytest.approx(dict(measured), abs=0.02)
