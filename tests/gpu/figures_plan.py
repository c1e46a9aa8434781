"""Planned against measured peaks of the networks of the shipped configs, and whether a run fits into its plan."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import cached_property, partial
from typing import Any

import torch

from segapp.assembly.devices import numerics
from segapp.assembly.pairs import build_pixels, build_scheme
from segapp.config import RunConfig, load_config
from segapp.inference.sliding import without_cudnn_benchmark
from segapp.memory.oom import is_out_of_memory
from segapp.memory.peaks import EVAL, PhasePeak, SimulationJob
from segapp.memory.plan import BLAS_MIB
from segapp.memory.split_check import tensor_frac
from segapp.planning.trial import blank_batch, build_trial_engine, evaluate_blank
from segapp.training.step.assembler import StepLayout
from segapp.training.step.engine import StepEngine
from tests.gpu.cases import Case
from tests.support import ROOT
from tests.support.plan_scores import memory_unused

MIB = 2**20

CONFIGS = sorted(path for path in (ROOT / "configs").glob("*.yaml") if "vitl" not in path.stem)
"""Of twelve networks, without those of a ViT-L. They are built without weights and without data."""

PRECISIONS = ("fp32", "amp-bf16")
WORKERS = 5
"""Processes that plan while the device is measured."""


Key = tuple[str, str, int]
"""Name of a config, precision, and divisor of its batch."""


def plan_cases(device: str) -> list[Case]:
    """Return a case for each network and precision: peaks of steps with a quarter of the batch, and in evaluation."""
    place = torch.device(device)
    is_gpu = place.type == "cuda"
    keys = [(path.stem, precision, 4) for precision in (PRECISIONS if is_gpu else PRECISIONS[:1]) for path in CONFIGS]
    plans = Plans(keys, WORKERS if is_gpu else 1, is_small=not is_gpu)
    return [Case("{}, {}, batch/{}".format(*key), partial(plan_row, plans, place, key)) for key in keys]


def network_config(name: str, precision: str, divisor: int, *, is_small: bool) -> RunConfig:
    """Return a shipped config with a part of its batch, without weights, teacher and data.

    Args:
        name: of the file in configs/.
        precision: of the training.
        divisor: of the config's batch.
        is_small: with crops of an eighth of the size, and a batch of two.
    """
    config = load_config(ROOT / "configs" / f"{name}.yaml", ["model.weights_backbone=null", "data.root=nowhere"])
    size = [_eighth(side) for side in config.data.crop_px] if is_small else list(config.data.crop_px)
    samples = 2 if is_small else max(2, int(config.train.batch_size) // divisor)
    train = config.train.model_copy(update={"precision": precision, "batch_size": samples})
    data = config.data.model_copy(update={"crop_px": tuple(size)})
    return config.model_copy(update={"train": train, "data": data, "distill": None})


def _eighth(side: int) -> int:
    return max(64, side // 8 // 32 * 32)


class Plans:
    """Plans that are made ahead in processes of their own, which see no card.

    Args:
        keys: the order in which they will be asked for.
        workers: processes; they start with the first question.
        is_small: of `network_config`.
    """

    def __init__(self, keys: Sequence[Key], workers: int, *, is_small: bool) -> None:
        self._keys, self._workers, self._is_small = keys, workers, is_small

    @cached_property
    def _plans(self) -> dict[Key, Future[tuple[float, float]]]:
        context = multiprocessing.get_context("spawn")  # a process with a card must not be forked
        pool = ProcessPoolExecutor(self._workers, mp_context=context, initializer=_without_cards)
        return {key: pool.submit(planned_peaks, *key, is_small=self._is_small) for key in self._keys}

    def peaks(self, key: Key) -> tuple[float, float]:
        """Return the planned peaks of the tensors, in MiB: of a step, and of an evaluation of the crop's size."""
        return self._plans[key].result()


def _without_cards() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def planned_phases(name: str, precision: str, divisor: int, *, is_small: bool) -> Mapping[str, PhasePeak]:
    """Plan the memory of one device, as `segapp plan` does: the peak of each phase."""
    from segapp.planning.simulate import build_simulator

    config = network_config(name, precision, divisor, is_small=is_small)
    job = SimulationJob("single", (int(config.train.batch_size),), eval_px=config.data.crop_px, blas_mib=BLAS_MIB)
    (phases,) = build_simulator(config).run(job).devices
    return phases


def planned_peaks(name: str, precision: str, divisor: int, *, is_small: bool) -> tuple[float, float]:
    """Return the planned peaks of a step and of an evaluation, in MiB."""
    phases = planned_phases(name, precision, divisor, is_small=is_small)
    return max(peak.mib for phase, peak in phases.items() if phase != EVAL), phases[EVAL].mib


def plan_row(plans: Plans, place: torch.device, key: Key) -> dict[str, Any]:
    """Return planned and measured peaks, and whether a run fits into its plan; without a card the plan alone."""
    name, precision, divisor = key
    is_gpu = place.type == "cuda"
    config = network_config(name, precision, divisor, is_small=not is_gpu)
    step_mib, eval_mib = plans.peaks(key)
    row: dict[str, Any] = {"network": name, "precision": precision, "batch": config.train.batch_size}
    row |= {"planned MiB": max(step_mib, eval_mib), "planned eval MiB": eval_mib}
    if not is_gpu:
        _peaks(config, place)  # as on a card, without a measurement
        return {**row, "measured MiB": None}
    measured_mib, measured_eval_mib, reserved_mib, timing_mib, timed_mib = _peaks(config, place)
    allowed_mib = max(step_mib, eval_mib) / tensor_frac(os.environ)  # what a plan leaves to the allocator
    fails = not _fits(config, place, allowed_mib)
    return {
        **row,
        "measured MiB": max(measured_mib, measured_eval_mib),
        "measured eval MiB": measured_eval_mib,
        "error %": 100 * (max(step_mib, eval_mib) / max(measured_mib, measured_eval_mib) - 1),
        "reserved MiB": reserved_mib,
        "timing MiB": timing_mib,
        "after timing MiB": timed_mib,
        "device MiB": torch.cuda.get_device_properties(place).total_memory / MIB,
        "allowed MiB": allowed_mib,
        "fails in plan": fails,
        "unused %": None if fails else 100 * memory_unused(allowed_mib, reserved_mib),
    }


def _peaks(config: RunConfig, place: torch.device) -> tuple[float, float, float, float, float]:
    """Return peaks in MiB.

    Of two steps with the algorithms that cuDNN recommends, which are compared with the plan; of an evaluation; what the
    allocator took until then; of the two steps in which cuDNN times its algorithms; and of two steps with those that it
    has chosen, as a training makes them.
    """
    engine = _engine(config, place)
    try:
        _reset(place)
        _steps(engine, config, is_timing=False)
        step_mib = _peak_mib(place)
        _reset(place)
        evaluate_blank(engine, config, build_scheme(config.data), config.data.crop_px)
        eval_mib = _peak_mib(place)
        reserved = torch.cuda.max_memory_reserved(place) / MIB if place.type == "cuda" else 0.0
        later = []
        for _ in range(2):
            _reset(place)
            _steps(engine, config)
            later.append(_peak_mib(place))
        return step_mib, eval_mib, reserved, later[0], later[1]
    finally:
        del engine
        _free(place)


def _fits(config: RunConfig, place: torch.device, allowed_mib: float) -> bool:
    """Return whether two steps and an evaluation run if the allocator may take so much and no more."""
    total_mib = torch.cuda.get_device_properties(place).total_memory / MIB
    torch.cuda.set_per_process_memory_fraction(min(1.0, allowed_mib / total_mib), place)
    engine = None
    try:
        engine = _engine(config, place)
        _steps(engine, config)
        evaluate_blank(engine, config, build_scheme(config.data), config.data.crop_px)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        del engine
        torch.cuda.set_per_process_memory_fraction(1.0, place)
        _free(place)
    return True


def _engine(config: RunConfig, place: torch.device) -> StepEngine:
    _free(place)
    engine = build_trial_engine(config, StepLayout("single", (place,)))
    engine.network.module.train()
    return engine


def _steps(engine: StepEngine, config: RunConfig, *, is_timing: bool = True) -> None:
    """Make two steps; cuDNN times its algorithms in them as in a training, or does not."""
    scheme, pixels = build_scheme(config.data), build_pixels(config.data)
    batch = blank_batch(scheme, int(config.train.batch_size), config.data.crop_px, pixels)
    train = config.train
    with (
        numerics(deterministic=train.deterministic, tf32=train.tf32),
        contextlib.nullcontext() if is_timing else without_cudnn_benchmark(),
    ):
        for _ in range(2):  # the second meets what the first leaves
            engine.step([batch])


def _reset(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)


def _peak_mib(place: torch.device) -> float:
    return torch.cuda.max_memory_allocated(place) / MIB if place.type == "cuda" else 0.0


def _free(place: torch.device) -> None:
    gc.collect()
    if place.type == "cuda":
        torch.cuda.empty_cache()
