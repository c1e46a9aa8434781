"""`segapp profile`: time and memory of a few real steps, by phase and by part of the model.

Model, criterion, optimizer and engine are built as for a training; the images are black if the data set is missing.
Times come from torch.profiler; a GPU is synchronized between phases, so a profiled step is slower than a normal one.
Memory is recorded tensor by tensor in an extra step.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import profile, record_function
from torch.utils.hooks import RemovableHandle

from segapp.accelerator import accelerator_of, gpu_of
from segapp.build.criterion import needs_distances
from segapp.build.data import build_dataset, build_load_options
from segapp.build.devices import plan_devices
from segapp.build.numerics import numerics, with_precision
from segapp.build.pairs import build_pixels, build_scheme, split_names
from segapp.build.step import build_layout
from segapp.build.trainer import seed_everything
from segapp.config import RunConfig, load_runnable, named_config
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import Batch
from segapp.datasets.resources import cores_of_rank
from segapp.datasets.workers import sample_seconds, wait_advice
from segapp.errors import ConfigError, DataError
from segapp.memory.ledger import StorageLedger
from segapp.memory.peaks import PHASES, PhasePeak
from segapp.parallel.distributed import Ranks
from segapp.run.words import aligned
from segapp.training.planning.simulate import phase_peaks, watch_modules
from segapp.training.planning.trial import blank_batch, build_trial_engine
from segapp.training.step.engine import StepEngine

WAIT = "data"
BAR_CELLS = 40
MAX_MODULES = 16
MODULE_DEPTH = 2


@dataclass(frozen=True)
class StepProfile:
    """Time and memory of a step.

    Attributes:
        split: samples on each device.
        phase_s: seconds by phase, means over the steps; `data` is the wait for a batch.
        module_s: seconds of the forward pass by module of the model, without its submodules; GPU time on a GPU.
        peaks: highest memory of each device, by phase.
        module_mib: activations by part of the model at the peak of the first device.
        advice: what to change if the device waits for data; None if it rarely does.
    """

    devices: tuple[str, ...]
    split: tuple[int, ...]
    source: str
    phase_s: dict[str, float]
    module_s: dict[str, float]
    peaks: tuple[dict[str, PhasePeak], ...]
    module_mib: dict[str, float]
    advice: str | None = None


def print_profile(config_name: str | None, overrides: Sequence[str], num_steps: int, *, as_json: bool) -> None:
    """Profile a config and print the tables, or JSON; ConfigError if it needs several processes or stages."""
    config = load_runnable(named_config(config_name, overrides), overrides)
    train = config.train
    if not train.batch_size:
        raise ConfigError(
            "train.batch_size = auto: a profile needs a number: add train.batch_size=8", key="train.batch_size"
        )
    with numerics(deterministic=train.deterministic, tf32=train.tf32, cudnn_benchmark=train.cudnn_benchmark):
        found = profile_steps(config, num_steps)
    print(json.dumps(asdict(found), indent=2) if as_json else "\n".join(profile_lines(found)))


def profile_steps(config: RunConfig, num_steps: int) -> StepProfile:
    """Run and measure steps of a config whose batch size is a number."""
    plan = plan_devices(config, is_one_process=True)
    if plan.mode not in ("single", "dp"):
        raise ConfigError(
            f"parallel.mode = {plan.mode}: a profile runs in one process: use parallel.mode=dp or single",
            key="parallel.mode",
            value=plan.mode,
        )
    config = with_precision(config, plan.devices)
    seed_everything(config.seed)
    devices = tuple(str(device) for device in plan.devices)
    source, batches, loader = _batches(config, plan.devices[0])
    ledger, spans = StorageLedger(), _Spans(plan.devices[0])
    gpu0_bsz = None if config.parallel.gpu0_bsz == "auto" else config.parallel.gpu0_bsz

    def mark(phase: str) -> None:
        spans.mark(phase)
        ledger.mark(phase)

    engine = build_trial_engine(config, build_layout(config, plan, gpu0_bsz), ledger.tag, mark)
    engine.network.train()
    phase_s, module_s = _time_steps(engine, batches, num_steps, spans)
    last = next(batches)
    peaks, module_mib = _record_step(engine, last, ledger, devices)
    advice = None if loader is None else _data_advice(loader, phase_s)
    return StepProfile(devices, tuple(engine.split_of(len(last))), source, phase_s, module_s, peaks, module_mib, advice)


def _batches(config: RunConfig, device: torch.device) -> tuple[str, Iterator[Batch], TrainLoader | None]:
    """Return the source of the images, endless batches for a device, and their loader; black images without data."""
    data, batch_size, has_distances = config.data, config.train.batch_size, needs_distances(config.loss)
    scheme = build_scheme(data)
    try:
        train_set = build_dataset(
            data,
            scheme,
            split_names(data)[0],
            is_training=True,
            seed=config.seed,
            has_distances=has_distances,
            ranks=Ranks(),
        )
    except (DataError, OSError):
        blank = blank_batch(scheme, batch_size, data.crop_px, build_pixels(data), has_distances=has_distances)
        return "black images: no data set found", itertools.repeat(blank), None
    options = build_load_options(data, train_set, device, batch_size)
    loader = TrainLoader(train_set, batch_size, seed=config.seed, options=options)
    batches = itertools.chain.from_iterable(loader.epoch(number) for number in itertools.count(1))
    return f"{len(train_set)} training images", batches, loader


def _data_advice(loader: TrainLoader, phase_s: Mapping[str, float]) -> str | None:
    """Return the advice if loading takes longer than the rest of a step; None if it does not.

    The first steps take batches that were loaded before, so the cost of a sample counts too.
    """
    busy_s = sum(phase_s.values()) - phase_s[WAIT]
    load_s = loader.batch_size * (sample_seconds(loader.dataset) or 0.0) / max(1, loader.workers)
    expected_s = max(0.0, load_s - busy_s) if loader.workers else load_s
    wait_s = max(phase_s[WAIT], expected_s)
    cache = loader.dataset.cache
    kind = "none" if cache is None else cache.files.kind
    return wait_advice(wait_s / (busy_s + wait_s), loader.workers, cores_of_rank(), kind)


class _Spans:
    """Annotations for torch.profiler: consecutive phases, and nested modules of the model."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._phase = contextlib.ExitStack()
        self._parts = threading.local()  # replicas run in threads

    def mark(self, phase: str) -> None:
        """Begin a phase after the GPU has finished the previous one."""
        self.end()
        self._phase.enter_context(record_function(f"phase:{phase}"))

    def end(self) -> None:
        """End the last phase."""
        accelerator_of(self._device).synchronize(self._device)
        self._phase.close()

    def annotate(self, model: nn.Module) -> list[RemovableHandle]:
        """Register hooks that annotate the forward pass of each part of a model."""
        hooks = []
        for name, part in model.named_modules():
            if name and name.count(".") < MODULE_DEPTH:
                hooks.append(part.register_forward_pre_hook(lambda *_, name=name: self._enter(name)))
                hooks.append(part.register_forward_hook(lambda *_: self._parts.stack.pop().close()))
        return hooks

    def _enter(self, name: str) -> None:
        span = contextlib.ExitStack()
        span.enter_context(record_function(f"module:{name}"))
        self._parts.stack = [*getattr(self._parts, "stack", ()), span]


def _time_steps(
    engine: StepEngine, batches: Iterator[Batch], num_steps: int, spans: _Spans
) -> tuple[dict[str, float], dict[str, float]]:
    """Return mean seconds by phase, and of the forward pass by part of the model."""
    engine.step([next(batches)])
    hooks = spans.annotate(engine.model)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it logs to stderr that a machine has no GPU
    with profile() as profiler:
        for _ in range(num_steps):
            spans.mark(WAIT)
            engine.step([next(batches)])
        spans.end()
    for hook in hooks:
        hook.remove()
    rows = [row for row in profiler.key_averages() if row.device_type.name == "CPU"]
    phase_s = {row.key: row.cpu_time_total / 1e6 / num_steps for row in rows}
    attribute = "device_time_total" if gpu_of(engine.device) else "cpu_time_total"
    inclusive = {
        row.key.removeprefix("module:"): getattr(row, attribute) / 1e6 / num_steps
        for row in rows
        if row.key.startswith("module:")
    }
    own = {
        name: max(0.0, seconds - sum(s for inner, s in inclusive.items() if inner.rpartition(".")[0] == name))
        for name, seconds in inclusive.items()
    }
    return {phase: phase_s.get(f"phase:{phase}", 0.0) for phase in (WAIT, *PHASES[:-1])}, own


def _record_step(
    engine: StepEngine, batch: Batch, ledger: StorageLedger, devices: Sequence[str]
) -> tuple[tuple[dict[str, PhasePeak], ...], dict[str, float]]:
    """Run a step with every tensor recorded; return the peaks by phase, and the activations by part of the model."""
    watch_modules(engine.model, ledger, depth=MODULE_DEPTH)
    states = (value for state in engine.optimizer.state.values() for value in state.values())
    ledger.tag((value for value in states if isinstance(value, torch.Tensor)), "optimizer")
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            hook: Any = parameter.register_post_accumulate_grad_hook
            hook(lambda p: ledger.tag([p.grad], "gradients"))
    first_mark = ledger.num_marks
    with ledger:
        engine.step([batch])
        ledger.mark("idle")
    moments = ledger.peaks(first_mark)
    highest = max(moments.get(devices[0], {}).values(), key=lambda moment: moment.num_bytes, default=None)
    by_module = {} if highest is None else {name: size / 2**20 for name, size in highest.by_module.items()}
    return tuple(phase_peaks(moments.get(device, {})) for device in devices), by_module


def profile_lines(found: StepProfile) -> list[str]:
    """Return the tables by phase and by part of the model as lines of text."""
    total_s = sum(found.phase_s.values()) or 1e-9
    peaks = found.peaks[0]
    highest_mib = max((peak.mib for peak in peaks.values()), default=0.0)
    rows: list[Sequence[str]] = [("phase", "ms", "share", "peak MiB", "time and memory")]
    for phase, seconds in found.phase_s.items():
        mib = peaks[phase].mib if phase in peaks else 0.0
        bars = f"{_bar('#', seconds, total_s)} {_bar('=', mib, highest_mib)}"
        share = f"{100 * seconds / total_s:.0f} %"
        rows.append((phase, f"{1000 * seconds:.1f}", share, f"{mib:.0f}" if mib else "-", bars))
    lines = [
        f"split {'+'.join(map(str, found.split))} on {', '.join(found.devices)}; {found.source}",
        "",
        *aligned(rows),
        f"{total_s:.3f} s per step, {sum(found.split) / total_s:.1f} images/s (# time, = memory)",
        *([found.advice] if found.advice else []),
        "",
    ]
    for device, phases in zip(dict.fromkeys(found.devices), found.peaks, strict=False):
        if phases:
            phase, peak = max(phases.items(), key=lambda item: item[1].mib)
            kinds = sorted(peak.by_kind.items(), key=lambda item: -item[1])[:6]
            lines.append(f"{device} at its peak ({phase}): " + ", ".join(f"{k} {m:.0f}" for k, m in kinds) + " MiB")
            lines += [f"  {mib:8.1f} MiB  {what}  {module}".rstrip() for mib, what, module in peak.largest]
    names = {*found.module_s, *found.module_mib}
    highest_mib = max(found.module_mib.values(), default=0.0)
    parts = [(name, found.module_s.get(name, 0.0), found.module_mib.get(name, 0.0)) for name in names]
    rows = [("part of the model", "forward ms", "kept MiB at the peak", "")]
    for name, seconds, mib in sorted(parts, key=lambda part: -part[1] - part[2])[:MAX_MODULES]:
        rows.append((name, f"{1000 * seconds:.1f}", f"{mib:.1f}", _bar("=", mib, highest_mib)))
    return [*lines, "", *aligned(rows)]


def _bar(character: str, value: float, full: float) -> str:
    return character * round(BAR_CELLS * value / full) if full else ""
