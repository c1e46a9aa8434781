"""Recomputed blocks, chosen for a memory plan: estimated by a trace, confirmed by simulated steps. No torch here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from segapp.memory.peaks import PlannedPeaks, SimulationJob, Split, fit_model, splits_to_simulate
from segapp.memory.plan import Fit, Planner, PlanRow
from segapp.memory.recompute import DeviceCourse
from segapp.training.planning.pool import SimulationPool

Sets = tuple[tuple[str, ...], ...]
"""Names of blocks, one set per device in dp and per rank in ddp, else one set."""

MOST_TRIES = 3
"""Maximum number of simulated steps per choice: each corrects the next budget by the error of the estimate."""


class RecomputeSearch:
    """Finds ways to fit a step of a given number of images into the memory of the GPUs, and the fastest of them.

    Args:
        pool: simulates the config.
        job: job of the plan, without a split.
        planner: planner of the job, without recomputation.
        blocks: names of all blocks of the network.
    """

    def __init__(self, pool: SimulationPool, job: SimulationJob, planner: Planner, blocks: Sequence[str]) -> None:
        self._pool, self._job, self._blocks = pool, job, tuple(blocks)
        self._planners, self._gpus = {min(2, job.accumulate): planner}, planner.gpus
        self._num_sets = len(planner.gpus) if planner.has_split else 1

    def planner(self, accumulate: int) -> Planner:
        """Return the planner of steps with this number of micro-batches, without recomputation."""
        key = min(2, accumulate)
        if key not in self._planners:
            (known,) = self._planners.values()
            self._planners[key] = replace(known, model=self.model(((),) * self._num_sets, accumulate))
        return self._planners[key]

    def model(self, sets: Sets, accumulate: int) -> PlannedPeaks:
        """Return the peaks of every split with these blocks recomputed."""
        mode, first = self._job.mode, sets[0]
        alone = not (mode == "dp" and len(sets) > 1)
        kinds = list(dict.fromkeys(sets if alone else sets[1:]))
        splits = splits_to_simulate(mode, len(self._gpus))
        job = replace(self._job, accumulate=accumulate)
        jobs = [
            replace(job, split=split, recompute=(kind,) if alone else (first, kind))
            for kind in kinds
            for split in splits
        ]
        results = self._pool.simulate(jobs)
        models = {
            kind: fit_model(mode, results[i * len(splits) : (i + 1) * len(splits)]) for i, kind in enumerate(kinds)
        }
        if not alone:
            return replace(models[sets[1]], others=tuple(models[kind].others[0] for kind in sets[1:]))
        if len(kinds) == 1:
            return models[first]
        return replace(models[first], others=tuple(models[kind].first for kind in sets[1:]))

    def can_fit(self, row: PlanRow, accumulate: int) -> bool:
        """Return True if a split fits according to the estimate, with recomputed blocks if necessary."""
        return self._sets(self._courses(row.split, accumulate), self._budgets(accumulate)) is not None

    def fastest(self, candidates: Sequence[tuple[PlanRow, int]]) -> Fit | None:
        """Return the fastest way that fits, with recomputed blocks; None if there is none.

        Args:
            candidates: splits, with the number of micro-batches per step.
        """
        estimates = []
        for row, accumulate in candidates:
            courses = self._courses(row.split, accumulate)
            sets = self._sets(courses, self._budgets(accumulate))
            if sets is not None:
                estimates.append((_step_s(courses, sets, accumulate), row.fullest(self._gpus), row, accumulate))
        ordered = sorted(estimates, key=lambda each: each[:2])[:MOST_TRIES]
        return next(filter(None, (self._confirmed(row, accumulate) for _, _, row, accumulate in ordered)), None)

    def table(self, images: int) -> Iterator[Fit]:
        """Yield for each batch that divides the images of a step: no, chosen, and all blocks recomputed.

        Blocks are chosen if a faster split does not fit without recomputation.
        """
        for batch in (n for n in range(images, 0, -1) if images % n == 0):
            accumulate = images // batch
            rows = self.planner(accumulate).rows(batch)[0]
            plain = [self._plain(row, accumulate) for row in rows]
            if not plain:
                continue
            best = min(plain, key=lambda each: (not each.fits, each.step_s if each.fits else max(each.peak_mib)))
            yield best
            if not self._blocks or (best.fits and best.step_s <= min(each.step_s for each in plain)):
                continue
            chosen = self.fastest([(row, accumulate) for row in rows])
            if chosen is not None and chosen.recompute == "chosen":
                yield chosen
            split = best.split if chosen is None else chosen.split
            yield self.all(next(row for row in rows if row.split == split), accumulate)

    def all(self, row: PlanRow, accumulate: int) -> Fit:
        """Return a split with all blocks recomputed."""
        return self._simulated(row, (self._blocks,) * self._num_sets, accumulate, "all")

    def _plain(self, row: PlanRow, accumulate: int) -> Fit:
        sets: Sets = ((),) * self._num_sets
        step_s = _step_s(self._courses(row.split, accumulate), sets, accumulate)
        split, peak_mib = row.split, row.peak_mib
        return Fit(sum(split), accumulate, row.gpu0_bsz, split, "off", sets, peak_mib, row.fits, step_s)

    def _confirmed(self, row: PlanRow, accumulate: int) -> Fit | None:
        """Return the fastest choice for a split whose simulated step fits."""
        courses, budgets = self._courses(row.split, accumulate), self._budgets(accumulate)
        targets, tried, best = list(budgets), set[Sets](), None
        for _ in range(MOST_TRIES):
            sets = self._sets(courses, targets)
            if sets is None or sets in tried:
                break
            tried.add(sets)
            found = self._simulated(row, sets, accumulate, "chosen" if any(sets) else "off")
            if found.fits and (best is None or found.step_s < best.step_s):
                best = found
            targets = [
                target + budget - mib for target, budget, mib in zip(targets, budgets, found.tensors_mib, strict=True)
            ]
        if best is None:
            found = self.all(row, accumulate)
            best = found if found.fits else None
        return best

    def _simulated(self, row: PlanRow, sets: Sets, accumulate: int, name: str) -> Fit:
        """Return a split with these blocks recomputed, with the peaks of a simulated step."""
        job, planner = replace(self._job, accumulate=accumulate), self.planner(accumulate)
        if job.mode == "ddp":
            ranks = list(dict.fromkeys(zip(row.split, sets, strict=True)))
            results = self._pool.simulate([replace(job, split=(n,), recompute=(own,)) for n, own in ranks])
            of_rank = {rank: result.peak_mib()[0] for rank, result in zip(ranks, results, strict=True)}
            peaks = tuple(of_rank[rank] for rank in zip(row.split, sets, strict=True))
        else:
            peaks = self._pool.simulate([replace(job, split=row.split, recompute=sets)])[0].peak_mib()
        needed = tuple(
            round(planner.overhead.required_mib(i, planner.overhead.tensors_mib(i, mib)), 1)
            for i, mib in enumerate(peaks)
        )
        fits = all(mib <= gpu.total_mib for mib, gpu in zip(needed, planner.gpus, strict=True))
        courses = self._courses(row.split, accumulate)
        step_s, plain_s = (_step_s(courses, each, accumulate) for each in (sets, ((),) * len(sets)))
        saved = tuple(round(plain - mib, 1) + 0.0 for plain, mib in zip(row.tensors_mib, peaks, strict=True))
        found = sum(row.split), accumulate, row.gpu0_bsz, row.split, name, sets, needed, fits, step_s, peaks
        names = _short_names(sets[0], self._blocks) if len(set(sets)) == 1 else ()
        return Fit(*found, saved, step_s / plain_s, names)

    def _budgets(self, accumulate: int) -> list[float]:
        return [self.planner(accumulate).budget_mib(i) for i in range(len(self._gpus))]

    @functools.cache  # noqa: B019 - lives as long as one plan
    def _courses(self, split: Split, accumulate: int) -> tuple[DeviceCourse, ...]:
        return tuple(map(DeviceCourse.of_trace, self.planner(accumulate).model.traces(split)))

    def _sets(self, courses: Sequence[DeviceCourse], budgets: Sequence[float]) -> Sets | None:
        """Return the cheapest estimated set of each device; None if one of them can never fit."""
        found = []
        for course, budget in zip(courses, budgets, strict=True):
            chosen = course.cheapest(budget)
            if chosen is None:
                return None
            found.append(chosen)
        if self._num_sets == len(found):
            return tuple(found)
        every = {name for chosen in found for name in chosen}  # in mode model each block is on one device
        return (tuple(name for name in self._blocks if name in every),)


def _short_names(chosen: Sequence[str], blocks: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the largest modules that contain only chosen blocks.

    >>> _short_names(["a.0.x", "a.0.y", "a.1.x"], ["a.0.x", "a.0.y", "a.1.x", "a.1.y"])
    ('a.0', 'a.1.x')
    """
    others = [f"{name}." for name in blocks if name not in chosen]
    short = (
        next(
            outer
            for outer in itertools.accumulate(name.split("."), "{}.{}".format)
            if not any(o.startswith(f"{outer}.") for o in others)
        )
        for name in chosen
    )
    return tuple(dict.fromkeys(short))


def _step_s(courses: Sequence[DeviceCourse], sets: Sets, accumulate: int) -> float:
    """Return the time of the slowest device."""
    every = sets if len(sets) == len(courses) else sets * len(courses)
    return max(course.step_s(own, accumulate) for course, own in zip(courses, every, strict=True))
