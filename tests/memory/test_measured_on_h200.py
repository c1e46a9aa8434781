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
from tests.support.own_process import in_own_process

MIB = 2**20
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


def live_mib(case):
    """Return the highest sum of the allocations, which torch rounds to 512 bytes, and of cuBLAS's workspaces before."""
    sizes, live, highest = [], 0, 0
    for number in case["events"]:
        if number >= 0:
            sizes.append(max(512, -(-number // 512) * 512))
        live += sizes[-1] if number >= 0 else -sizes[number]
        if number < 0:
            sizes[number] = 0
        highest = max(highest, live)
    return highest / MIB + BLAS_MIB * round((case["peak_allocated_bytes"] - highest) / (BLAS_MIB * MIB))


@functools.cache
def planned(key):
    """Return the planned peak of each phase."""
    return in_own_process(planned_phases, *key, is_small=False)


def highest(phases):
    """Return the peak of a step."""
    return max((peak for phase, peak in phases.items() if phase != EVAL), key=lambda peak: peak.mib)


def test_room_is_enough_for_the_allocator_and_little_is_unused():
    """The lowest limits over live tensors are those of the page on accuracy; nothing limited the cases."""
    assert 1.026 * FULL_FRAC <= 1 >= 1.16 * PLAIN_FRAC
    for key, row in ROWS.items():
        assert row["reserved_mib"] > 0.88 * row["measured_mib"] / PLAIN_FRAC, key


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
    step_mib = highest(planned(("cityscapes-fast", "amp-bf16", 4))).mib
    assert step_mib == pytest.approx(live_mib(case), abs=0.1)


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
