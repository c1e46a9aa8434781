"""Recomputed blocks for a memory plan: the first or the last blocks of the network, as few as fit. No torch here."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from segapp.memory.judge import fits
from segapp.memory.peaks import PlannedPeaks, SimulationJob, fit_model, splits_to_simulate
from segapp.memory.plan import Fit, Planner, PlanRow
from segapp.training.planning.pool import SimulationPool

Sets = tuple[tuple[str, ...], ...]
"""Names of blocks, one set per device in dp and per rank in ddp, else one set."""

MOST_TRIES = 3
"""Maximum number of splits that are tried with simulated steps, the fastest by estimate first."""


class RecomputeSearch:
    """Finds ways to fit a step of a given number of images into the memory of the GPUs, and the fastest of them.

    Every block keeps its activations until the end of the forward pass. The blocks at a high resolution keep the most
    for their time; they are the first ones of an encoder and the last ones of a decoder. So the first or the last
    blocks are recomputed, as many as necessary; a bisection with simulated steps finds their number.

    Args:
        pool: simulates the config.
        job: job of the plan, without a split.
        planner: planner of the job, without recomputation.
        blocks: names of all blocks of the network, in the order of definition.
    """

    def __init__(self, pool: SimulationPool, job: SimulationJob, planner: Planner, blocks: Sequence[str]) -> None:
        self._pool, self._job, self._blocks = pool, job, tuple(blocks)
        self._gpus = planner.gpus
        self._num_sets = len(planner.gpus) if planner.has_split else 1
        self._nothing: Sets = ((),) * self._num_sets
        self._all: Sets = (self._blocks,) * self._num_sets
        self._planners: dict[tuple[int, Sets], Planner] = {(min(2, job.accumulate), self._nothing): planner}

    def planner(self, accumulate: int, sets: Sets | None = None) -> Planner:
        """Return the planner of steps with this number of micro-batches and these blocks recomputed; None: no block."""
        key = min(2, accumulate), sets or self._nothing
        if key not in self._planners:
            known = next(iter(self._planners.values()))
            self._planners[key] = replace(known, model=self._model(key[1], accumulate))
        return self._planners[key]

    def most_frugal(self, accumulate: int) -> Planner:
        """Return the planner with all blocks recomputed."""
        return self.planner(accumulate, self._all)

    def _model(self, sets: Sets, accumulate: int) -> PlannedPeaks:
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

    def fastest(self, candidates: Sequence[tuple[PlanRow, int]]) -> Fit | None:
        """Return the fastest way that fits, with recomputed blocks if necessary; None if there is none.

        Args:
            candidates: splits, with the number of micro-batches per step.
        """
        estimates = []
        for row, accumulate in candidates:
            step_s = self._estimate_s(row, accumulate)
            if step_s is not None:
                estimates.append((step_s, row.fullest(self._gpus), row, accumulate))
        ordered = sorted(estimates, key=lambda each: each[:2])[:MOST_TRIES]
        return next(filter(None, (self._fewest(row, accumulate) for _, _, row, accumulate in ordered)), None)

    def _estimate_s(self, row: PlanRow, accumulate: int) -> float | None:
        """Return the seconds of a step, if memory and time are proportional to the recomputed blocks; None: no fit."""
        plain, frugal = self.planner(accumulate), self.most_frugal(accumulate)
        plain_s, frugal_s = (each.model.step_s(row.split, accumulate) for each in (plain, frugal))
        if row.fits:
            return plain_s
        tensors_mib = frugal.tensors_mib(frugal.model.peak_mib(row.split))
        if not frugal.all_fit(tensors_mib):
            return None
        needed = zip(self._gpus, row.peak_mib, frugal.required_mib(tensors_mib), strict=True)
        shares = [(most - gpu.total_mib) / (most - least) for gpu, most, least in needed if most > gpu.total_mib]
        return plain_s + max(shares, default=0.0) * (frugal_s - plain_s)

    def _fewest(self, row: PlanRow, accumulate: int) -> Fit | None:
        """Return a split with as few of the first or of the last blocks recomputed as fit, whichever is faster.

        None if not even all blocks are enough.
        """
        if row.fits and (plain := self._simulated(row, self._nothing, accumulate)).fits:
            return plain
        found = (self._bisected(row, accumulate, order) for order in (self._blocks, self._blocks[::-1]))
        return min((each for each in found if each.fits), key=lambda each: each.step_s, default=None)

    def _bisected(self, row: PlanRow, accumulate: int, order: Sequence[str]) -> Fit:
        """Return a split with the fewest blocks recomputed that fit, in an order of the blocks; all if none do.

        Devices with sets of their own are bisected at the same time, each by its own peak.
        """

        @functools.cache
        def with_first(*counts: int) -> Fit:
            chosen = [set(order[:count]) for count in counts]
            sets = tuple(tuple(name for name in self._blocks if name in names) for names in chosen)
            return self._simulated(row, sets, accumulate)

        least, most = [0] * self._num_sets, [len(order)] * self._num_sets
        while least != most:
            counts = [(low + high) // 2 for low, high in zip(least, most, strict=True)]
            found = with_first(*counts)
            fitting = [fits(mib, gpu.total_mib) for mib, gpu in zip(found.peak_mib, self._gpus, strict=True)]
            for i, is_enough in enumerate(fitting if self._num_sets > 1 else [found.fits]):
                if is_enough:
                    most[i] = counts[i]
                elif least[i] < most[i]:
                    least[i] = counts[i] + 1
        return with_first(*most)

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
        return self._simulated(row, self._all, accumulate)

    def _plain(self, row: PlanRow, accumulate: int) -> Fit:
        step_s = self.planner(accumulate).model.step_s(row.split, accumulate)
        split, peak_mib = row.split, row.peak_mib
        return Fit(sum(split), accumulate, row.gpu0_bsz, split, "off", self._nothing, peak_mib, row.fits, step_s)

    def _simulated(self, row: PlanRow, sets: Sets, accumulate: int) -> Fit:
        """Return a split with these blocks recomputed, with the peaks of a simulated step."""
        job, planner = replace(self._job, accumulate=accumulate), self.planner(accumulate)
        if job.mode == "ddp":
            ranks = list(dict.fromkeys(zip(row.split, sets, strict=True)))
            results = self._pool.simulate([replace(job, split=(n,), recompute=(own,)) for n, own in ranks])
            of_rank = dict(zip(ranks, results, strict=True))
            devices = [of_rank[rank] for rank in zip(row.split, sets, strict=True)]
            peaks = tuple(each.peak_mib()[0] for each in devices)
        else:
            (result,) = self._pool.simulate([replace(job, split=row.split, recompute=sets)])
            devices, peaks = [result], result.peak_mib()
        plain_s = planner.model.step_s(row.split, accumulate)
        step_s = max(each.step_s(accumulate) for each in devices) if any(sets) else plain_s
        saved = tuple(round(plain - mib, 1) + 0.0 for plain, mib in zip(row.tensors_mib, peaks, strict=True))
        name = "off" if not any(sets) else "all" if sets == self._all else "chosen"
        tensors_mib = planner.tensors_mib(peaks)
        needed = tuple(round(mib, 1) for mib in planner.required_mib(tensors_mib))
        is_enough = planner.all_fit(tensors_mib)
        found = sum(row.split), accumulate, row.gpu0_bsz, row.split, name, sets, needed, is_enough, step_s, peaks
        names = _short_names(sets[0], self._blocks) if len(set(sets)) == 1 else ()
        return Fit(*found, saved, step_s / plain_s, names)


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
