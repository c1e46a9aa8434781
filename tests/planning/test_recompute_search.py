"""The number of recomputed blocks, against steps whose memory and time are counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from segapp.memory.peaks import PhasePeak, SimulationJob, SimulationResult, StepTime, fit_model, splits_to_simulate
from segapp.memory.plan import GpuSpec, OverheadEstimate, Planner
from segapp.planning.plan import RecomputeSearch

KEPT_MIB = dict(zip("abcdefg", (70, 50, 40, 30, 20, 10, 5), strict=True))
"""Memory per image that a block keeps: 225 MiB in all. Each block takes a second per image."""

REVERSED_MIB = dict(zip("abcdefg", (5, 10, 20, 30, 40, 50, 70), strict=True))
"""A decoder, whose last blocks keep the most."""


@dataclass
class CountedSteps:
    """Instead of a pool: 100 MiB and the blocks that are kept; a pass takes 21 s per image, an update 3 s."""

    kept_mib: dict[str, int] = field(default_factory=KEPT_MIB.copy)
    jobs: list[SimulationJob] = field(default_factory=list)
    first_mib: float = 100.0
    """Memory of the first device without the blocks."""

    def simulate(self, jobs: Sequence[SimulationJob]) -> list[SimulationResult]:
        self.jobs += jobs
        return [self._result(job) for job in jobs]

    def _result(self, job: SimulationJob) -> SimulationResult:
        sets = job.recompute or ((),)
        of_devices = sets if len(sets) == len(job.split) else sets * len(job.split)
        if job.mode == "dp" and len(sets) == 2:
            of_devices = (sets[0], *sets[1:] * (len(job.split) - 1))
        peaks, times = [], []
        for samples, again in zip(job.split, of_devices, strict=True):
            kept = sum(mib for name, mib in self.kept_mib.items() if name not in again)
            fixed_mib = 100.0 if peaks else self.first_mib
            peaks.append({"backward": PhasePeak(fixed_mib + samples * kept)})
            times.append(StepTime(samples * (21.0 + len(again)), 3.0))
        return SimulationResult(tuple(peaks), times=tuple(times))


def search_of(
    mode: Any, *sizes_mib: float, kept_mib: dict[str, int] = KEPT_MIB, blocks: str = "abcdefg"
) -> tuple[RecomputeSearch, CountedSteps, Planner]:
    pool, job = CountedSteps(kept_mib), SimulationJob(mode, ())
    gpus = tuple(GpuSpec(mib) for mib in sizes_mib)
    model = fit_model(
        mode, pool.simulate([SimulationJob(mode, split) for split in splits_to_simulate(mode, len(gpus))])
    )
    planner = Planner(model, gpus, OverheadEstimate((0.0,) * len(gpus), tensor_frac=1.0))
    pool.jobs.clear()
    return RecomputeSearch(pool, job, planner, tuple(blocks)), pool, planner


@pytest.mark.parametrize(
    ("room_mib", "count"), [(225, 0), (224, 1), (155, 1), (154, 2), (66, 3), (65, 3), (64, 4), (5, 6), (4, 7), (0, 7)]
)
def test_fewest_first_blocks_that_fit_are_recomputed(room_mib, count):
    search, _, planner = search_of("single", 100 + 2 * room_mib)
    found = search.fastest([planner.row(2)], 3)
    assert found.blocks_per_device == (tuple("abcdefg"[:count]),)
    assert found.recompute == ("off" if not count else "all" if count == 7 else "chosen")
    assert found.fits
    assert found.peak_mib == (100 + 2 * sum(list(KEPT_MIB.values())[count:]),)
    assert found.step_s == 3 * 2 * (21 + count) + 3


def test_last_blocks_are_recomputed_if_they_keep_the_most():
    search, _, planner = search_of("single", 100 + 2 * 150, kept_mib=REVERSED_MIB)
    found = search.fastest([planner.row(2)], 1)
    assert found.blocks_per_device == (("f", "g"),)
    assert found.names == ("f", "g")


@pytest.mark.parametrize("mode", ["dp", "ddp"])
def test_each_device_recomputes_as_few_as_its_own_memory_needs(mode):
    search, pool, planner = search_of(mode, 100 + 3 * 225, 100 + 3 * 70, 100 + 2 * 155)
    found = search.fastest([planner.row(8, shares=(3, 3, 2))], 1)
    assert found.blocks_per_device == ((), ("a", "b", "c"), ("a",))
    assert found.step_s == 3 * (21 + 3) + 3
    assert len([job for job in pool.jobs if job.split in ((3, 3, 2), (3,), (2,))]) <= 2 * 3 * 4


@pytest.mark.timeout(30)
def test_search_ends_if_one_device_never_fits():
    """The number of device 0 is found in two tries, and that of the others in three."""
    search, pool, planner = search_of("dp", 100 + 3 * 20, 100 + 3 * 225, 100 + 2 * 155, blocks="abcdef")
    search.planner(1, search.all_blocks)
    pool.first_mib = 10_000.0  # more than was estimated
    assert search.fastest([planner.row(8, shares=(3, 3, 2))], 1) is None
    assert (tuple("abcdef"), (), ("a",)) in {job.recompute for job in pool.jobs}


@pytest.mark.parametrize("mode", ["dp", "ddp"])
def test_devices_with_equal_blocks_need_not_be_neighbors(mode):
    search, _, _ = search_of(mode, 10_000, 10_000, 10_000)
    model = search.planner(1, (("a",), ("a", "b"), ("a",))).model
    assert model.peak_mib((3, 4, 2)) == pytest.approx((100 + 3 * 155, 100 + 4 * 105, 100 + 2 * 155), rel=1e-9)


def test_split_that_needs_fewer_blocks_is_preferred():
    """Device 0 is small: with two of its four images elsewhere nothing is recomputed, and a step is as fast."""
    search, _, planner = search_of("dp", 100 + 3 * 220, 10_000)
    rows = [planner.row(6, gpu0_bsz) for gpu0_bsz in (3, 2, 1)]
    found = search.fastest(rows, 1)
    assert (found.split, found.blocks_per_device, found.step_s) == ((3, 3), (("a",), ()), 3 * 22 + 3)
    found = search.fastest(rows[1:], 1)
    assert (found.split, found.recompute) == ((2, 4), "off")


def test_all_devices_of_mode_model_share_one_choice():
    for sizes_mib, count in (((100 + 4 * 155, 10_000), 1), ((10_000, 10_000), 0)):
        search, _, planner = search_of("model", *sizes_mib)
        found = search.fastest([planner.row(4)], 1)
        assert found is not None
        assert found.blocks_per_device == (tuple("abcdefg"[:count]),)
