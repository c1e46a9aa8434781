"""Memory plan of a config, from simulations in other processes. No torch here."""

from __future__ import annotations

import functools
import itertools
import math
import os
import pickle
import queue
import subprocess
import sys
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

from segapp.assembly.pairs import build_pixels, build_scheme, px_bytes
from segapp.chunks import Mode
from segapp.config import RunConfig
from segapp.config.modes import auto_mode, check_mode
from segapp.datasets.resources import num_slots
from segapp.errors import ConfigError, RunError
from segapp.memory.peaks import (
    BlocksPerDevice,
    NetworkFacts,
    PlannedPeaks,
    SimulationJob,
    SimulationResult,
    fit_model,
    splits_to_simulate,
)
from segapp.memory.plan import (
    BLAS_MIB,
    LARGEST_BATCH,
    Fit,
    GpuSpec,
    MemoryPlan,
    OverheadEstimate,
    Planner,
    PlanRow,
    context_mib,
)
from segapp.memory.split_check import ALLOCATOR_VARIABLES, EXPANDABLE_SEGMENTS, tensor_frac
from segapp.places import keep_compiled_code
from segapp.run.words import printable
from segapp.waiting import progress_bar

MOST_TRIES = 3
"""Maximum number of splits that are tried with simulated steps, the one with the most free memory first."""
NUM_PROCESSES = 2
_TIMEOUT_S = 600.0


class SimulationPool:
    """Context manager: processes that simulate one config; each runs `python -P -m segapp.planning.simulate`.

    A process reads the config and then requests, and answers each with a result or an error, all of them pickled.
    """

    def __init__(self, config: RunConfig, num_processes: int = NUM_PROCESSES) -> None:
        keep_compiled_code()  # of a parent that imports torch only later
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}
        command, pipe = [sys.executable, "-P", "-m", "segapp.planning.simulate"], subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environ) for _ in range(num_processes)
        ]
        self._threads = ThreadPoolExecutor(num_processes)
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        for process in self._processes:
            _send(process, config.model_dump(mode="json"))
            self._idle.put(process)

    def __enter__(self) -> SimulationPool:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._threads.shutdown()  # before the pipes are closed, which its threads may still read
        for process in self._processes:
            for pipe in (process.stdin, process.stdout, process.stderr):
                with suppress(OSError):
                    assert pipe is not None
                    pipe.close()

    def facts(self, mode: Mode) -> NetworkFacts:
        """Return the facts about the network; meanwhile every process builds its model."""
        facts: NetworkFacts = self._ask([mode] * len(self._processes), "memory plan: building the model")[0]
        return facts

    def simulate(self, jobs: Sequence[SimulationJob]) -> list[SimulationResult]:
        """Run jobs and return the results in the same order.

        Raises:
            ConfigError: the config cannot be built.
            RunError: a simulation failed or exceeded the timeout.
        """
        return self._ask(jobs, "memory plan: simulated steps")

    def _ask(self, requests: Sequence[Mode | SimulationJob], label: str) -> list[Any]:
        answers: list[Any] = []
        try:
            with progress_bar(len(requests), label, unit="job") as progress:
                for answer in self._threads.map(self._exchange, requests, timeout=_TIMEOUT_S):
                    answers.append(answer)
                    progress(len(answers))
        except TimeoutError:
            raise RunError(
                f"a memory simulation did not answer within {_TIMEOUT_S:.0f} s: try a smaller model"
            ) from None
        return answers

    def _exchange(self, request: Mode | SimulationJob) -> Any:
        process = self._idle.get()
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            _send(process, request)
            answer = pickle.load(process.stdout)
        except (EOFError, pickle.UnpicklingError):
            last = (process.stderr.read().decode(errors="replace").strip().splitlines() or ["no reason given"])[-1]
            raise RunError(f"the memory simulation ended: {last}") from None
        finally:
            self._idle.put(process)
        if isinstance(answer, Exception):
            raise answer
        return answer


def _send(process: subprocess.Popen[bytes], value: Any) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # `_exchange` reports why the process ended
        pickle.dump(value, process.stdin)
        process.stdin.flush()


class RecomputeSearch:
    """Finds the split and the recomputed blocks with which a step fits the GPUs.

    Every block keeps its activations until the end of the forward pass. The blocks at a high resolution keep the most
    for their time; they are the first ones of an encoder and the last ones of a decoder. So the first or the last
    blocks are recomputed, as many as necessary; a bisection with simulated steps finds their number.

    Args:
        job: the simulation without a split and without recomputed blocks, which are replaced in each simulated step.
        planner: planner without recomputation, whose GPUs must hold the step.
        blocks: number of parameters of each block that can be recomputed, by name, in the order of definition.
    """

    def __init__(self, pool: SimulationPool, job: SimulationJob, planner: Planner, blocks: Mapping[str, int]) -> None:
        self._pool, self._job, self._blocks = pool, job, blocks
        self._gpus = planner.gpus
        self._num_choices = len(planner.gpus) if planner.has_split else 1
        """Number of devices whose blocks are chosen separately."""
        self.no_blocks: BlocksPerDevice = ((),) * self._num_choices
        self.all_blocks: BlocksPerDevice = (tuple(blocks),) * self._num_choices
        self._planners: dict[BlocksPerDevice, Planner] = {self.no_blocks: planner}

    def planner(self, blocks: BlocksPerDevice) -> Planner:
        if blocks not in self._planners:
            self._planners[blocks] = replace(self._planners[self.no_blocks], model=self._model(blocks))
        return self._planners[blocks]

    def _model(self, blocks: BlocksPerDevice) -> PlannedPeaks:
        """Return the peaks of every split with these blocks recomputed.

        In dp, device 0 is simulated with one of the others, once for each different choice of blocks on these.
        """
        mode, (first, *others) = self._job.mode, blocks
        is_dp = mode == "dp" and bool(others)
        choices = list(dict.fromkeys(others if is_dp else blocks))
        splits = splits_to_simulate(mode, len(self._gpus))
        jobs = [
            replace(self._job, split=split, recompute=(first, choice) if is_dp else (choice,))
            for choice in choices
            for split in splits
        ]
        results = iter(self._pool.simulate(jobs))
        models = {choice: fit_model(mode, list(itertools.islice(results, len(splits)))) for choice in choices}
        if is_dp:
            return replace(models[others[0]], others=tuple(models[choice].others[0] for choice in others))
        if len(choices) == 1:
            return models[first]
        return replace(models[first], others=tuple(models[choice].first for choice in others))

    def emptiest(self, rows: Sequence[PlanRow]) -> Fit | None:
        """Return the split whose fullest GPU has the most free memory, with recomputed blocks if necessary.

        None if no split fits.
        """
        first = sorted(filter(self._can_fit, rows), key=lambda row: row.rank(self._gpus))[:MOST_TRIES]
        return next(filter(None, map(self._fewest, first)), None)

    def _can_fit(self, row: PlanRow) -> bool:
        """Return True if a split is expected to fit, at least with all blocks recomputed."""
        if row.fits:
            return True
        planner = self.planner(self.all_blocks)
        return all(planner.fitting(planner.model.peak_mib(row.split)))

    def _fewest(self, row: PlanRow) -> Fit | None:
        """Return a split with the fewest first or last blocks recomputed that fit; None if not even all are enough.

        Of the two choices, the one with fewer parameters is taken: at a high resolution, blocks have few of them.
        """
        if row.fits and (plain := self.simulated(row, self.no_blocks)).fits:
            return plain
        both = (self._bisected(row, order) for order in (tuple(self._blocks), tuple(self._blocks)[::-1]))
        return min((fit for fit in both if fit.fits), key=self._num_params, default=None)

    def _num_params(self, fit: Fit) -> int:
        return sum(self._blocks[name] for names in fit.blocks_per_device for name in names)

    def _bisected(self, row: PlanRow, order: Sequence[str]) -> Fit:
        """Return a split with the fewest blocks recomputed that fit, in an order of the blocks; all if none do.

        The devices of dp and the ranks of ddp are bisected at the same time, each by its own peak.
        """

        # The last choice was often tried before, and a simulation takes seconds.
        @functools.cache
        def with_first(*counts: int) -> Fit:
            chosen = [set(order[:count]) for count in counts]
            blocks = tuple(tuple(name for name in self._blocks if name in names) for names in chosen)
            return self.simulated(row, blocks)

        least, most = [0] * self._num_choices, [len(order)] * self._num_choices
        while least != most:
            counts = [(low + high) // 2 for low, high in zip(least, most, strict=True)]
            fit = with_first(*counts)
            for i, is_enough in enumerate(fit.fitting if self._num_choices > 1 else [fit.fits]):
                if is_enough:
                    most[i] = counts[i]
                # A device whose search has ended keeps its number while others are still searched.
                elif least[i] < most[i]:
                    least[i] = counts[i] + 1
        return with_first(*most)

    def simulated(self, row: PlanRow, blocks: BlocksPerDevice) -> Fit:
        """Return a split with these blocks recomputed, with the peaks of a simulated step."""
        job, planner = self._job, self._planners[self.no_blocks]
        if job.mode == "ddp":
            ranks = list(zip(row.split, blocks, strict=True))
            different = list(dict.fromkeys(ranks))  # ranks with equal samples and blocks need the same memory
            jobs = [replace(job, split=(samples,), recompute=(names,)) for samples, names in different]
            result_of = dict(zip(different, self._pool.simulate(jobs), strict=True))
            peaks = tuple(result_of[rank].peak_mib()[0] for rank in ranks)
        else:
            (result,) = self._pool.simulate([replace(job, split=row.split, recompute=blocks)])
            peaks = result.peak_mib()
        required_mib = tuple(round(mib, 1) for mib in planner.overhead.required_mib(peaks))
        return Fit(row.split, blocks, required_mib, planner.fitting(peaks))


def choose_mode(config: RunConfig, num_gpus: int) -> Mode:
    """Return the parallel mode of a config on a number of GPUs.

    Raises:
        ConfigError: the config's mode, shares or batch do not fit the number of GPUs.
    """
    section, mode = config.parallel, config.parallel.mode
    if mode == "single" and num_gpus > 1:
        raise ConfigError(
            f"parallel.mode = single uses one GPU but --gpus names {num_gpus}: use dp, or name one", key="parallel.mode"
        )
    if mode == "model" and num_gpus < 2:
        raise ConfigError(
            "parallel.mode = model needs at least two GPUs but --gpus names 1: name all GPUs", key="parallel.mode"
        )
    if mode == "ddp" and 0 < config.train.batch_size < num_gpus:
        raise ConfigError(
            f"parallel.mode = ddp: {num_gpus} ranks cannot share train.batch_size = {config.train.batch_size}: "
            f"use {num_gpus} or more",
            key="parallel.mode",
        )
    if section.shares is not None and len(section.shares) != num_gpus and mode in ("auto", "dp", "ddp"):
        raise ConfigError(
            f"parallel.shares = {section.shares} is for {len(section.shares)} GPUs and --gpus names {num_gpus}: "
            "make them equal",
            key="parallel.shares",
            value=section.shares,
        )
    if mode == "auto":
        mode = auto_mode(config, num_gpus)[0]
    check_mode(config, mode)
    # One replica is the network itself, so there are no copies to predict.
    return "single" if mode == "dp" and num_gpus == 1 else mode


def plan_memory(
    config: RunConfig,
    gpus: Sequence[GpuSpec],
    *,
    mode: Mode | None = None,
    overhead: OverheadEstimate | None = None,
    most: int = LARGEST_BATCH,
) -> MemoryPlan:
    """Return the plan of a config on given GPUs.

    With `train.batch_size: auto`, the plan is for the largest batch of at most `most` images that fits. With
    `train.recompute: auto`, the recomputed blocks are chosen for the config's split, or together with an automatic
    split and batch.

    Raises:
        ConfigError: the config does not fit the GPUs, or cannot be built, or no batch fits.
    """
    is_auto = not config.train.batch_size
    small = with_batch(config, 2 * len(gpus)) if is_auto else config
    mode = mode or choose_mode(small, len(gpus))
    if overhead is None:
        environ = {ALLOCATOR_VARIABLES[-1]: EXPANDABLE_SEGMENTS, **os.environ}  # as a training sets it
        overhead = OverheadEstimate(context_mib(mode, len(gpus)), tensor_frac(environ))
    with SimulationPool(small) as pool:
        facts = pool.facts(mode)
        job = SimulationJob(mode, (), config.train.accumulate, eval_px=facts.eval_px, blas_mib=BLAS_MIB)
        results = pool.simulate([replace(job, split=split) for split in splits_to_simulate(mode, len(gpus))])
        model = fit_model(mode, results)
        planner = Planner(model, tuple(gpus), overhead, facts.smallest_chunk, facts.needs_samples)
        search = RecomputeSearch(pool, job, planner, facts.blocks)
        chosen: Fit | None = None
        if config.train.recompute == "auto":
            config, planner, chosen = _with_chosen(config, planner, search, facts.min_train_batch, most)
        elif is_auto:
            config = with_batch(config, _largest_batch(config, planner, facts.min_train_batch, most))
        return _assembled(config, planner, facts, chosen)


def _with_chosen(
    config: RunConfig, planner: Planner, search: RecomputeSearch, least: int, most: int
) -> tuple[RunConfig, Planner, Fit | None]:
    """Return the config with its batch, the planner with the recomputed blocks, and these blocks.

    An automatic batch is the largest that fits, if possible without recomputation. If a given batch does not fit in any
    way, all blocks are recomputed; None if its split is impossible.
    """
    is_auto = not config.train.batch_size
    if is_auto:
        try:
            count = _largest_batch(config, planner, least, most)
        except ConfigError:
            # Not even the smallest batch fits with all activations.
            count = _largest_batch(config, search.planner(search.all_blocks), least, most)
        config = with_batch(config, count)
    rows = _possible_rows(config, planner)
    chosen = search.emptiest(rows)
    if chosen is None and is_auto:
        raise _nothing_fits(planner, f"{config.train.batch_size} images")
    if not rows:
        return config, planner, None
    if chosen is None:
        row = min(rows, key=lambda row: row.fullest(planner.gpus))
        # Nothing fits, so the plan shows how much is missing in the best case.
        chosen = search.simulated(row, search.all_blocks)
    return config, search.planner(chosen.blocks_per_device), chosen


def _possible_rows(config: RunConfig, planner: Planner) -> Sequence[PlanRow]:
    """Return the splits of the batch that the config allows: one, or all if the split is automatic."""
    if planner.has_split and config.parallel.is_auto:
        return planner.rows(config.train.batch_size)[0]
    row = _current_row(config, planner)
    return () if row is None else (row,)


def _largest_batch(config: RunConfig, planner: Planner, least: int, most: int) -> int:
    """Return the largest batch that fits in training and in evaluation with the config's split."""
    if planner.model.mode == "ddp":
        least = max(least, len(planner.gpus))
    if planner.has_split:
        least = max(least, config.parallel.split.least_batch)
    allowed = range(least, most + 1)

    def fits(batch: int) -> bool | None:
        rows = _possible_rows(with_batch(config, batch), planner)
        return any(row.fits for row in rows) if rows else None  # BatchNorm refuses some small batches

    # The memory grows with the batch.
    count = bisect_left(allowed, True, key=lambda batch: fits(batch) is False)
    largest = next(filter(fits, reversed(allowed[:count])), None)
    if largest is None:
        tried = next((f"{batch} images" for batch in allowed if fits(batch) is not None), "no allowed batch")
        raise _nothing_fits(planner, tried)
    return largest


def _nothing_fits(planner: Planner, tried: str) -> ConfigError:
    sizes = ", ".join(f"{gpu.total_mib:.0f}" for gpu in planner.gpus)
    return ConfigError(
        f"train.batch_size = auto: {tried} would not fit {sizes} MiB: lower data.crop_px, or use a smaller model",
        key="train.batch_size",
    )


def with_batch(config: RunConfig, batch_size: int) -> RunConfig:
    return config.model_copy(update={"train": config.train.model_copy(update={"batch_size": batch_size})})


def _assembled(config: RunConfig, planner: Planner, facts: NetworkFacts, chosen: Fit | None) -> MemoryPlan:
    rows, refused = planner.rows(config.train.batch_size)
    if not rows:
        raise ConfigError(
            f"train.batch_size = {config.train.batch_size}: {refused[0][1]}",
            key="train.batch_size",
            value=config.train.batch_size,
        )
    current = _current_row(config, planner)
    max_batch, max_row = planner.largest_batch()
    return MemoryPlan(
        name=config.name,
        mode=planner.model.mode,
        batch_size=config.train.batch_size,
        gpus=planner.gpus,
        model=planner.model,
        overhead=planner.overhead,
        rows=rows,
        refused=refused,
        current=current,
        max_batch=max_batch,
        max_row=max_row,
        notes=_notes(config, planner, facts, chosen),
        ring_mib=ring_mib(config),
        network=facts,
        chosen=chosen,
    )


def ring_mib(config: RunConfig) -> float:
    sample_bytes = math.prod(config.data.crop_px) * px_bytes(build_pixels(config.data), build_scheme(config.data))
    slots = num_slots(config.train.accumulate) if config.data.workers else 0
    return round(slots * config.train.batch_size * sample_bytes / 2**20, 1)


def _current_row(config: RunConfig, planner: Planner) -> PlanRow | None:
    """Return the split of the config; None if it is automatic or not possible."""
    is_auto = planner.has_split and config.parallel.is_auto
    return None if is_auto else planner.row(config.train.batch_size, config.parallel.split)


def _precision(config: RunConfig, facts: NetworkFacts) -> str:
    """Return the planned precision, and with `train.precision: auto` what it depends on."""
    if config.train.precision != "auto":
        return config.train.precision
    part = facts.fp32_part
    why = "GPUs older than Ampere train in amp-fp16" if part is None else f"{printable(part)} asks for it"
    return f"{facts.precision} (auto: {why})"


def _notes(config: RunConfig, planner: Planner, facts: NetworkFacts, chosen: Fit | None) -> tuple[str, ...]:
    height, width = facts.eval_px
    crop = config.data.crop_px
    notes = [
        f"{facts.num_params / 1e6:.1f} M parameters, crops {crop[0]}x{crop[1]}, {_precision(config, facts)}, "
        f"accumulate {config.train.accumulate}; evaluation of {config.eval.batch_size} x {height}x{width} "
        f"({facts.eval_px_from})"
    ]
    if (epochs := config.model.freeze_epochs) is not None:
        notes.append(f"model.freeze ends after epoch {epochs}: planned for the epochs after it, which need more")
    if planner.model.mode == "ddp":
        notes.append("ddp: the reducer's buckets are modeled, the rest is the real step of one rank")
    if config.train.compile == "reduce-overhead":
        notes.append("train.compile = reduce-overhead: the memory of its CUDA graphs is not counted")
    if facts.loss_note:
        notes.append(facts.loss_note)
    if chosen is not None:
        notes.append(chosen.note)
    return tuple(notes)
