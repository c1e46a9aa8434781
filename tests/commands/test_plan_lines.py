"""The text of a plan and the plan in a run's folder, line by line and field by field by hand."""

import json

import pytest

from segapp.commands.plan import gpu_lines, plan_as_json, plan_lines, split_table
from segapp.memory.peaks import Line, PlannedPeaks
from segapp.memory.plan import Fit, GpuSpec, MemoryPlan, OverheadEstimate, Planner, SavedMemoryPlan, read_saved_plan
from tests.support.device_lines import device_lines


def plan_of_one(total_mib):
    """Return a plan whose GPU needs 110 MiB."""
    memory = PlannedPeaks("single", device_lines(backward=Line(100.0)))
    own = Planner(memory, (GpuSpec(total_mib),), OverheadEstimate((10.0,), tensor_frac=1.0))
    return MemoryPlan("x", "single", 1, own.gpus, memory, own.overhead, own.rows(1)[0])


def plan_of_two(slope=1000.0, **fields):
    memory = PlannedPeaks(
        "dp",
        device_lines(backward=Line(1000.0, slope)),
        (device_lines(backward=Line(800.0, slope)),),
        device_lines(step=Line(400.0)),
    )
    gpus = GpuSpec(10_000.0, "GPU 0"), GpuSpec(9_000.0, "GPU 1")
    own = Planner(memory, gpus, OverheadEstimate((500.0, 700.0)))
    rows, _ = own.rows(2)
    return MemoryPlan("x", "dp", 2, own.gpus, memory, own.overhead, rows, current=rows[2], **fields)


@pytest.mark.parametrize(("total_mib", "end"), [(111.0, "+1 free"), (110.0, "+0 free"), (109.0, "-1 free  OVER")])
def test_gpu_is_over_only_if_it_lacks_memory(total_mib, end):
    plan = plan_of_one(total_mib)
    line = gpu_lines(plan, plan.best)[1]
    assert line.startswith("  GPU 0    ")
    assert line.endswith(f" 110 of {total_mib:.0f} MiB, backward, {end}")


def test_each_gpu_is_shown_at_the_phase_of_its_own_peak():
    plan = plan_of_two()
    ends = [line.partition(" of ")[2] for line in gpu_lines(plan, plan.rows[0])[1::2]]
    assert ends == ["10000 MiB, step, +9079 free", "9000 MiB, backward, +5353 free"]


def test_plan_names_its_batch_its_gpus_and_its_overhead():
    lines = plan_lines(plan_of_two(notes=("a note",)))
    assert lines[:2] == ["x: batch 2 on 2 GPUs (10000, 9000 MiB), mode dp", "a note"]
    # 500 + 2000 / 0.95 of 10000, and 700 + 1800 / 0.95 of 9000
    best = "best for batch 2: gpu0_bsz 1, split 1+1, fullest GPU 29 % with its overhead (ok; tensors only: "
    assert best in "\n".join(lines)
    assert "largest batch that fits: none, not even 1" in lines
    assert "overhead (assumed): 500/700 MiB per GPU for driver, context and libraries, 5 % for the allocator" in lines
    first_gpu = "GPU 0 is the first of parallel.devices; with auto, the GPU with the most free memory"
    assert first_gpu in lines
    assert not any("ring" in line for line in lines)
    ring = "host memory of the ring of batches: 152 MiB, in a training on a CPU"
    assert plan_lines(plan_of_two(ring_mib=151.9))[-1] == ring
    single = plan_lines(plan_of_one(200.0))
    assert first_gpu not in single
    assert single[0] == "x: batch 1 on 1 GPU (200 MiB), mode single"
    best = "best for batch 1: split 1, fullest GPU 55 % with its overhead (ok; tensors only: "
    assert any(line.startswith(best) for line in single)


def test_largest_batch_is_given_with_its_split():
    plan = plan_of_two(max_batch=17)
    at = plan_lines(MemoryPlan(**{**vars(plan), "max_row": plan.rows[1]}))
    assert "largest batch that fits: 17 at gpu0_bsz 1, split 1+1" in at
    one = plan_of_one(200.0)
    at = plan_lines(MemoryPlan(**{**vars(one), "max_batch": 1, "max_row": one.rows[0]}))
    assert "largest batch that fits: 1, split 1" in at


def test_split_table_marks_rows_and_groups_refused_values():
    few, none = "leaves 1 sample, too few for BatchNorm", "leaves no sample"
    refused = [(3, f"gpu0_bsz=3 {few}"), (9, f"gpu0_bsz=9 {none}"), (5, f"gpu0_bsz=5 {few}")]
    plan = plan_of_two(refused=tuple(refused))
    lines = split_table(plan)
    assert [line.split() for line in lines[:4]] == [
        ["gpu0_bsz", "split", "GPU", "0", "MiB", "GPU", "1", "MiB", "verdict"],
        ["0", "0+2", "921", "step", "3647", "backward", "ok"],
        ["1", "1+1", "2605", "backward", "2595", "backward", "ok", "<-", "best"],
        ["2", "2+0", "3658", "backward", "700", "idle", "ok", "<-", "config"],
    ]
    assert lines[4:] == [f"gpu0_bsz 3, 5 refused: {few}", f"gpu0_bsz 9 refused: {none}"]
    found = plan_as_json(plan)
    assert found["gpus_mib"] == [10_000, 9_000]
    assert [(row["gpu0_bsz"], row["split"]) for row in found["rows"]] == [(0, (0, 2)), (1, (1, 1)), (2, (2, 0))]
    assert [(each["gpu0_bsz"], each["reason"]) for each in found["refused"]] == refused


def test_saved_plan_by_hand_and_read_again(tmp_path):
    saved = SavedMemoryPlan.of_plan(plan_of_two(), 3, ["a note"])
    assert saved == SavedMemoryPlan(
        batch_size=2,
        accumulate=3,
        gpu0_bsz=1,
        best_split=(2, 0),
        splits=((0, 2), (1, 1), (2, 0)),
        tensors_mib=((400.0, 2800.0), (2000.0, 1800.0), (3000.0, 0.0)),
        slope_mib=1000.0,
        notes=("a note",),
    )
    path = tmp_path / "plan.json"
    saved.write(path)
    assert read_saved_plan(path) == saved
    assert SavedMemoryPlan.of_plan(plan_of_two(slope=-10.0), 1).slope_mib == 0


def test_saved_plan_that_cannot_be_read_is_none(tmp_path):
    path = tmp_path / "plan.json"
    assert read_saved_plan(path) is None
    SavedMemoryPlan.of_plan(plan_of_two(), 1).write(path)
    raw = json.loads(path.read_text())
    for damaged in ("{", "[]", json.dumps({**raw, "format": 2}), json.dumps({**raw, "splits": 3})):
        path.write_text(damaged)
        assert read_saved_plan(path) is None


def test_config_that_does_not_fit_has_its_next_moves():
    none, chosen = plan_of_one(109.0), Fit((1,), (("a", "b"), ()), (110.0,), (False,))
    for fields, move in (
        ({}, "add train.recompute=auto"),
        ({"max_row": none.rows[0]}, "halve train.batch_size and double train.accumulate, or add train.recompute=auto"),
        ({"chosen": chosen}, "lower data.crop_px"),
    ):
        assert f"  the config does not fit: {move}" in plan_lines(MemoryPlan(**{**vars(none), **fields}))
    assert "does not fit" not in "\n".join(plan_lines(plan_of_one(110.0)))
    saved = SavedMemoryPlan.of_plan(MemoryPlan(**{**vars(none), "chosen": chosen}), 1, ["a note"])
    assert saved.notes == ("a note", "train.recompute = auto: the memory plan chose 2/0 blocks to recompute")
    assert saved.recompute == chosen.blocks_per_device


def test_devices_with_other_blocks_have_lines_of_their_own():
    lines = [device_lines(backward=Line(100.0, slope)) for slope in (10.0, 20.0, 30.0)]
    for mode in ("dp", "ddp"):
        peaks = PlannedPeaks(mode, lines[0], tuple(lines[1:]))
        assert peaks.peak_mib((1, 2, 3)) == (110.0, 140.0, 190.0)
        assert PlannedPeaks(mode, lines[0], tuple(lines[1:2])).peak_mib((1, 2, 3))[2] == 160.0
    assert PlannedPeaks("ddp", lines[0]).peak_mib((0, 2)) == (100.0, 120.0)
