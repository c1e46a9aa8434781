"""The recomputed blocks, against steps whose memory is counted by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from segapp.chunks import SplitRequest
from segapp.memory.peaks import PhasePeak, SimulationJob, SimulationResult, fit_model, splits_to_simulate
from segapp.memory.plan import Fit, GpuSpec, OverheadEstimate, Planner
from segapp.planning.plan import RecomputeSearch

KEPT_MIB = dict(zip("abcdefg", (70, 50, 40, 30, 20, 10, 5), strict=True))
"""Memory per image that a block keeps: 225 MiB in all."""

NUM_PARAMS = dict(zip("abcdefg", (1, 3, 3, 10, 10, 33, 33), strict=True))
"""An encoder, whose first blocks have the highest resolution and the fewest channels."""


@dataclass
class CountedSteps:
    """Instead of a pool: 100 MiB and the blocks that are kept."""

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
        peaks: list[dict[str, PhasePeak]] = []
        for samples, again in zip(job.split, of_devices, strict=True):
            kept = sum(mib for name, mib in self.kept_mib.items() if name not in again)
            fixed_mib = 100.0 if peaks else self.first_mib
            peaks.append({"backward": PhasePeak(fixed_mib + samples * kept)})
        return SimulationResult(tuple(peaks))


def search_of(
    mode: Any, *sizes_mib: float, num_params: dict[str, int] = NUM_PARAMS
) -> tuple[RecomputeSearch, CountedSteps, Planner]:
    pool, job = CountedSteps(), SimulationJob(mode, ())
    gpus = tuple(GpuSpec(mib) for mib in sizes_mib)
    model = fit_model(
        mode, pool.simulate([SimulationJob(mode, split) for split in splits_to_simulate(mode, len(gpus))])
    )
    planner = Planner(model, gpus, OverheadEstimate((0.0,) * len(gpus), tensor_frac=1.0))
    pool.jobs.clear()
    return RecomputeSearch(pool, job, planner, num_params), pool, planner


@pytest.mark.parametrize(
    ("room_mib", "count"), [(225, 0), (224, 1), (155, 1), (154, 2), (66, 3), (65, 3), (64, 4), (5, 6), (4, 7), (0, 7)]
)
def test_fewest_first_blocks_that_fit_are_recomputed(room_mib, count):
    search, _, planner = search_of("single", 100 + 2 * room_mib)
    found = search.emptiest([planner.row(2)])
    assert found.blocks_per_device == (tuple("abcdefg"[:count]),)
    assert found.fits
    assert found.peak_mib == (100 + 2 * sum(list(KEPT_MIB.values())[count:]),)


@pytest.mark.parametrize(("of_a", "blocks"), [(90, "cdefg"), (88, "a")])
def test_blocks_of_the_end_with_fewer_parameters_are_recomputed(of_a, blocks):
    """To save 70 of 225 MiB, the first block is enough, or the last five, which have 89 parameters."""
    search, _, planner = search_of("single", 100 + 2 * 155, num_params=NUM_PARAMS | {"a": of_a})
    assert search.emptiest([planner.row(2)]).blocks_per_device == (tuple(blocks),)


@pytest.mark.parametrize("mode", ["dp", "ddp"])
def test_each_device_recomputes_as_few_as_its_own_memory_needs(mode):
    search, pool, planner = search_of(mode, 100 + 3 * 225, 100 + 3 * 70, 100 + 2 * 155)
    found = search.emptiest([planner.row(8, SplitRequest(shares=(3, 3, 2)))])
    assert found.blocks_per_device == ((), ("a", "b", "c"), ("a",))
    assert len([job for job in pool.jobs if job.split in ((3, 3, 2), (3,), (2,))]) <= 2 * 3 * 4


@pytest.mark.timeout(30)
def test_search_ends_if_one_device_never_fits():
    """The number of device 0 is found in two tries, and that of the others in three."""
    blocks = {name: NUM_PARAMS[name] for name in "abcdef"}
    search, pool, planner = search_of("dp", 100 + 3 * 20, 100 + 3 * 225, 100 + 2 * 155, num_params=blocks)
    search.planner(search.all_blocks)
    pool.first_mib = 10_000.0  # more than was estimated
    row = planner.row(8, SplitRequest(shares=(3, 3, 2)))
    assert search.emptiest([row]) is None
    assert (tuple("abcdef"), (), ("a",)) in {job.recompute for job in pool.jobs}


@pytest.mark.parametrize("mode", ["dp", "ddp"])
def test_devices_with_equal_blocks_need_not_be_neighbors(mode):
    search, _, _ = search_of(mode, 10_000, 10_000, 10_000)
    model = search.planner((("a",), ("a", "b"), ("a",))).model
    assert model.peak_mib((3, 4, 2)) == pytest.approx((100 + 3 * 155, 100 + 4 * 105, 100 + 2 * 155), rel=1e-9)


def test_split_with_the_most_free_memory_is_taken():
    """Of 760 and 1600 MiB, the fullest GPU is at 102 % with three images on device 0, 72 % with two, 77 % with one."""
    search, _, planner = search_of("dp", 100 + 3 * 220, 1600)
    rows = [planner.row(6, SplitRequest(gpu0_bsz)) for gpu0_bsz in (3, 1, 2)]
    assert search.emptiest(rows) == Fit((2, 4), ((), ()), (550.0, 1000.0), (True, True))
    assert search.emptiest(rows[:1]) == Fit((3, 3), (("a",), ()), (565.0, 775.0), (True, True))


def test_all_devices_of_mode_model_share_one_choice():
    for sizes_mib, count in (((100 + 4 * 155, 10_000), 1), ((10_000, 10_000), 0)):
        search, _, planner = search_of("model", *sizes_mib)
        found = search.emptiest([planner.row(4)])
        assert found is not None
        assert found.blocks_per_device == (tuple("abcdefg"[:count]),)


def test_gpu_that_is_full_without_its_blocks_ends_the_search():
    """Nothing is simulated but all blocks, for the planner."""
    search, pool, planner = search_of("dp", 100 + 3 * 225, 90)
    assert search.emptiest([planner.row(6, SplitRequest(shares=(3, 3)))]) is None
    assert {job.recompute for job in pool.jobs} == {(tuple("abcdefg"), tuple("abcdefg"))}
