"""The plan's arithmetic, against splits counted out by hand and against the check of live splits."""

import itertools

import pytest

from segapp.chunks import SplitRequest
from segapp.commands.plan import plan_lines
from segapp.config import validate_config
from segapp.errors import ConfigError
from segapp.memory.peaks import (
    Line,
    PhaseLines,
    PhasePeak,
    PlannedPeaks,
    SimulationResult,
    fit_model,
    splits_to_simulate,
)
from segapp.memory.plan import (
    LARGEST_BATCH,
    GpuSpec,
    MemoryPlan,
    OverheadEstimate,
    Planner,
    SavedMemoryPlan,
    context_mib,
)
from segapp.planning.plan import _largest_batch
from tests.support.device_lines import device_lines

GPUS = tuple(GpuSpec(10_000.0, f"GPU {i}") for i in range(3))


def model(fixed0=1000.0, fixed=500.0, slope=1000.0, evaluation=300.0):
    first = device_lines(backward=Line(fixed0, slope), eval=Line(evaluation))
    idle = device_lines(step=Line(400.0), eval=Line(evaluation))
    return PlannedPeaks("dp", first, (device_lines(backward=Line(fixed, slope)),), idle)


def planner(memory=None, gpus=GPUS, smallest_chunk=1, **overhead):
    return Planner(
        memory or model(), gpus, OverheadEstimate((500.0,) * len(gpus), **overhead), smallest_chunk=smallest_chunk
    )


def brute_force_largest_batch(total_mib):
    """Every split of every batch up to 60, checked by adding up."""
    largest = 0
    for batch in range(1, 61):
        for g in range(batch + 1):
            rest = batch - g
            split = (g, *(rest // 2 + (i < rest % 2) for i in range(2)))
            need = [
                500 + mib / 0.95
                for mib in (
                    max(1000 + 1000 * g, 300) if g else 400,
                    *((500 + 1000 * k) if k else 0 for k in split[1:]),
                )
            ]
            if all(mib <= total_mib for mib in need):
                largest = max(largest, batch)
    return largest


def test_best_split_and_largest_batch_equal_a_full_search():
    own = planner()
    rows, refused = own.rows(9)
    assert not refused
    assert [row.gpu0_bsz for row in rows] == list(range(10))
    assert all(sum(row.split) == 9 for row in rows)
    plan = MemoryPlan("x", "dp", 9, GPUS, own.model, own.overhead, rows)
    assert plan.best.split == (3, 3, 3)
    assert own.largest_batch()[0] == brute_force_largest_batch(10_000) == 24
    for total_mib in range(2_900, 14_000, 1_110):
        largest, row = planner(gpus=(GpuSpec(total_mib),) * 3).largest_batch()
        assert largest == brute_force_largest_batch(total_mib), total_mib
        assert row.fits


def test_largest_batch_has_a_limit() -> None:
    largest, row = planner(gpus=(GpuSpec(10_000_000),) * 3).largest_batch()
    assert (largest, row is not None) == (LARGEST_BATCH, True)


def test_of_two_equal_splits_the_first_gpu_has_more():
    lines = device_lines(backward=Line(100.0, 1000.0))
    own = planner(PlannedPeaks("dp", lines, (lines,)), GPUS[:2])
    plan = MemoryPlan("x", "dp", 3, own.gpus, own.model, own.overhead, own.rows(3)[0])
    assert plan.rows[1].peak_mib == plan.rows[2].peak_mib[::-1]
    assert plan.best.split == (2, 1)


def test_splits_refused_by_batchnorm_are_left_out():
    rows, refused = planner(smallest_chunk=2).rows(5)
    assert [row.split for row in rows] == [(0, 3, 2), (5, 0, 0)]
    assert {value for value, _ in refused} | {row.gpu0_bsz for row in rows} == set(range(6))
    assert all("BatchNorm" in reason for _, reason in refused)


@pytest.mark.parametrize(
    ("mode", "num_gpus", "expected"),
    [("single", 1, 500.0), ("dp", 1, 500.0), ("dp", 2, 500.0), ("ddp", 2, 700.0), ("model", 2, 500.0)],
)
def test_only_ranks_have_buffers_of_nccl(mode, num_gpus, expected):
    assert context_mib(mode, num_gpus) == (expected,) * num_gpus
    assert context_mib(mode, num_gpus, driver_mib=0.0) == (expected - 500.0,) * num_gpus


def test_gpu_smaller_than_the_context_fits_no_split():
    own = planner(gpus=(GpuSpec(400.0),) * 3)
    assert own.largest_batch() == (0, None)
    first = own.rows(3)[0][0]
    assert "context" in first.reason
    assert (first.split, first.level, first.fits) == ((0, 2, 1), "won't fit", False)


@pytest.mark.parametrize(("mode", "largest"), [("dp", 2), ("ddp", 0)])
def test_only_ranks_need_a_sample_each(mode, largest):
    lines = device_lines(backward=Line(100.0, 10.0))
    gpus = (GpuSpec(120.0), GpuSpec(120.0), GpuSpec(110.0))  # room for one sample, one and none: 0.95 * 120 is 114
    own = Planner(PlannedPeaks(mode, lines, (lines,), lines), gpus, OverheadEstimate((0.0,) * 3))
    assert own.largest_batch()[0] == largest


def test_context_and_room_change_the_need():
    own = Planner(model(), GPUS, OverheadEstimate((700.0, 300.0, 300.0), 0.9))
    row = own.row(6, SplitRequest(2))
    assert row.tensors_mib == (3000.0, 2500.0, 2500.0)
    assert row.peak_mib[0] == pytest.approx(700 + 3000 / 0.9, abs=0.1)
    assert own.row(6, SplitRequest(6)).peak_mib[1:] == (300.0, 300.0), "without samples"


@pytest.mark.parametrize("mode", ["single", "model"])
def test_modes_without_gpu0_bsz_give_one_row(mode):
    lines = device_lines(backward=Line(100.0, 1000.0))
    gpus = GPUS[:1] if mode == "single" else GPUS
    own = Planner(
        PlannedPeaks(mode, lines, (lines, lines) if mode == "model" else ()),
        gpus,
        OverheadEstimate((0.0,) * len(gpus)),
    )
    rows, _ = own.rows(6)
    assert [row.gpu0_bsz for row in rows] == [None]
    expected = {"single": (6100.0,), "model": (6100.0,) * 3}
    assert rows[0].tensors_mib == expected[mode]
    assert own.largest_batch()[0] == 9


@pytest.mark.parametrize(
    ("mode", "num_devices", "split", "expected"),
    [
        ("single", 1, (7,), (321 + 7 * 2462,)),
        ("dp", 1, (7,), (321 + 7 * 2462,)),
        ("ddp", 3, (7, 0, 13), (321 + 7 * 2462, 321, 321 + 13 * 2462)),
        ("model", 2, (7, 0), (321 + 7 * 2462, 161 + 7 * 2623)),
        ("dp", 3, (7, 0, 13), (321 + 7 * 2462, 0, 161 + 13 * 2623)),
        ("dp", 3, (0, 1, 13), (502, 161 + 2623, 161 + 13 * 2623)),
    ],
)
def test_fit_recovers_a_known_law_in_every_mode(mode, num_devices, split, expected):
    def simulated(split):
        first = 321 + 2462 * split[0] if split[0] else 502
        others = [161 + 2623 * (split[0] if mode == "model" else part) for part in split[1:]]
        peaks = (PhasePeak(mib, {"weights": 100.0, "activations": mib - 100.0}) for mib in (first, *others))
        return SimulationResult(tuple({"backward": peak} for peak in peaks))

    fitted = fit_model(mode, [simulated(each) for each in splits_to_simulate(mode, num_devices)])
    assert fitted.peak_mib(split) == pytest.approx(expected, rel=1e-9)
    for peaks, mib in zip(fitted.peaks(split), expected, strict=True):
        assert peaks.keys() == ({"backward"} if mib else set())
        if mib:
            assert peaks["backward"].mib == pytest.approx(mib, rel=1e-9)
            kinds = {"weights": 100.0, "activations": mib - 100.0}
            assert peaks["backward"].by_kind == pytest.approx(kinds, rel=1e-9)


def test_few_and_many_samples_have_lines_of_their_own():
    """Up to 8 samples, a part that hardly grows determines the memory."""

    def simulated(split):
        (count,) = split
        peak = max(1000 + 10 * count, 280 + 100 * count)
        kinds = {"weights": 7.0 * (count > 8)}
        forward = PhasePeak(peak / 2, {"weights": 7.0})
        return SimulationResult(({"forward": forward, "backward": PhasePeak(peak, kinds), "step": forward},))

    fitted = fit_model("single", [simulated(split) for split in splits_to_simulate("single", 1)])
    for count in (3, 11, 20):
        assert fitted.peak_mib((count,)) == pytest.approx(simulated((count,)).peak_mib(), rel=1e-9)
        assert fitted.peaks((count,))[0]["backward"].by_kind == simulated((count,)).devices[0]["backward"].by_kind


def test_devices_without_samples_evaluate_too():
    """A dp training evaluates on all its devices, whatever their shares."""

    def simulated(split):
        backward = [PhasePeak(321 + 2462 * split[0]), *(PhasePeak(161 + 2623 * part) for part in split[1:])]
        evaluation = PhasePeak(900.0, {"weights": 100.0, "evaluation": 800.0})
        return SimulationResult(tuple({"backward": peak, "eval": evaluation} for peak in backward))

    assert simulated((1, 3, 0)).peak_mib() == (321 + 2462, 161 + 3 * 2623, 900.0)
    fitted = fit_model("dp", [simulated(each) for each in splits_to_simulate("dp", 3)])
    assert fitted.peak_mib((7, 1, 0)) == pytest.approx((321 + 7 * 2462, 161 + 2623, 900.0), rel=1e-9)
    assert fitted.peaks((7, 1, 0))[2] == {"eval": PhasePeak(900.0, {"weights": 100.0, "evaluation": 800.0})}


@pytest.mark.parametrize(
    ("smallest_chunk", "total_mib", "largest"), [(1, 120.0, 1), (2, 130.0, 2)]
)  # 110 / 0.95 = 115.8, 120 / 0.95 = 126.3, 130 / 0.95 = 136.8
def test_smallest_possible_batch_may_be_the_largest(smallest_chunk, total_mib, largest):
    memory, zero = PlannedPeaks("single", device_lines(backward=Line(100.0, 10.0))), OverheadEstimate((0.0,))
    found, row = Planner(memory, (GpuSpec(total_mib),), zero, smallest_chunk=smallest_chunk).largest_batch()
    assert (found, row.split) == (largest, (largest,))


@pytest.mark.parametrize(
    ("split", "others_mib", "largest"),
    [
        ({}, 10_000.0, 24),
        ({}, 4_000.0, 6),
        ({"gpu0_bsz": 5}, 10_000.0, 21),
        ({"gpu0_bsz": 5}, 2_000.0, 5),  # 6 to 8 are refused, and 9 do not fit
        ({"shares": [2, 4, 3]}, 10_000.0, 9),
        ({}, 2_000.0, "6 images"),
        ({"shares": [2, 4, 3]}, 2_000.0, "9 images"),
        ({"gpu0_bsz": "auto"}, 2_000.0, 8),
    ],
)
def test_automatic_batch_is_above_those_batchnorm_refuses(split, others_mib, largest):
    """In (10000 - 500) * 0.95 = 9025 MiB, each device has room for 8 samples."""
    config = validate_config({"name": "x", "data": {"format": "voc", "root": "x"}, "parallel": {"mode": "dp", **split}})
    few = planner(gpus=(GPUS[0], *[GpuSpec(others_mib)] * 2), smallest_chunk=2)
    if isinstance(largest, int):
        assert [_largest_batch(config, few, 2, most) for most in (4096, largest)] == [largest, largest]
    else:
        with pytest.raises(ConfigError, match=f"auto: {largest} would not fit 10000, 2000, 2000 MiB"):
            _largest_batch(config, few, 2, 4096)


def test_saved_plan_predicts_the_splits_it_has():
    one = SavedMemoryPlan(4, 1, None, (4,), ((4,),), ((70.0,),), 1.0)
    assert [one.predicted_mib(split) for split in (None, [4], [3])] == [(70.0,), (70.0,), ()]
    two = SavedMemoryPlan(4, 1, 0, (0, 4), ((0, 4), (1, 3)), ((10.0, 18.0), (11.0, 17.0)), 1.0)
    assert [two.predicted_mib(split) for split in (None, [1, 3])] == [(), (11.0, 17.0)]


def test_every_simulated_device_has_two_samples_or_none():
    """BatchNorm may refuse to train on one; a rank of ddp is simulated alone."""
    for mode, num_devices in itertools.product(("single", "dp", "ddp", "model"), (1, 3)):
        splits = splits_to_simulate(mode, num_devices)
        num_simulated = {"dp": min(num_devices, 2), "model": num_devices}.get(mode, 1)
        assert {len(split) for split in splits} == {num_simulated}
        assert {part for split in splits for part in split} & {1} == set()


def test_kinds_of_a_gpu_by_hand():
    kinds = {"activations": Line(60.0), "weights": Line(40.0)}
    lines = device_lines(backward=PhaseLines(Line(100.0), kinds))
    memory = PlannedPeaks("single", lines)
    own = Planner(memory, (GpuSpec(200.0),), OverheadEstimate((10.0,)))
    plan = MemoryPlan("x", "single", 1, own.gpus, memory, own.overhead, own.rows(1)[0])
    (at,) = [i for i, line in enumerate(plan_lines(plan)) if line.startswith("  GPU 0")]
    picture, kinds = plan_lines(plan)[at : at + 2]
    assert kinds.split() == ["activations", "60", "weights", "40", "overhead", "15"]  # 10 and 5 % of 105
    assert "115 of 200 MiB, backward, +85 free" in picture
