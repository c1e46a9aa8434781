"""`segapp profile`: a few real steps, and where their time and memory go, by phase and by part of the model.

Model, criterion, optimizer and engine are the trainer's; where the data set is not here the images are black. Time is
taken at the borders of the phases, where a GPU is waited for, so a profiled step is slower than a free one. Memory is
followed in a step of its own, tensor by tensor.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from statistics import median

import torch
from torch import nn

from segapp.build.data import build_dataset, build_scheme, split_names
from segapp.build.devices import plan_devices
from segapp.config import RunConfig, load_config
from segapp.datasets.loader import Batch, LoadOptions, TrainLoader
from segapp.errors import ConfigError, DataError
from segapp.memory.report import aligned
from segapp.memory.simulation.jobs import PHASES, PhasePeak
from segapp.memory.simulation.recorder import PhaseMarks, Recorder
from segapp.train.build import seed_everything
from segapp.train.planning.simulate import Simulator, phase_peaks, watch_modules
from segapp.train.planning.trial_step import build_real_engine
from segapp.train.step.engine import StepEngine

WAIT = "data"
BAR_CELLS = 40
MAX_MODULES = 16


@dataclass(frozen=True)
class StepProfile:
    """What a step takes.

    Attributes:
        devices: that shared it.
        split: samples on each.
        source: where the images came from.
        phase_s: seconds by phase, medians; `data` is the wait for a batch.
        module_s: seconds of the forward pass by part of the model, inner parts not counted in outer ones.
        peaks: for each device and phase the highest moment.
        module_mib: activations alive at the first device's highest moment, by part of the model.
    """

    devices: tuple[str, ...]
    split: tuple[int, ...]
    source: str
    phase_s: dict[str, float]
    module_s: dict[str, float]
    peaks: tuple[dict[str, PhasePeak], ...]
    module_mib: dict[str, float] = field(default_factory=dict)


class Stopwatch:
    """Seconds by phase: a mark ends the phase before it; a GPU is waited for."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._phase, self._since = "", 0.0

    def mark(self, phase: str) -> None:
        """Another phase begins."""
        now = self.now()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def now(self) -> float:
        """Seconds, after everything that the device was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def print_profile(config_name: str | None, overrides: Sequence[str], num_steps: int, *, as_json: bool) -> None:
    """`segapp profile`.

    Raises:
        ConfigError: the config cannot be profiled in one process.
    """
    if config_name is None:
        raise ConfigError("--config FILE is missing: name a config, e.g. --config demo.yaml")
    found = profile_steps(load_config(config_name, overrides), num_steps)
    print(json.dumps(asdict(found), indent=2) if as_json else "\n".join(profile_lines(found)))


def profile_steps(config: RunConfig, num_steps: int = 3) -> StepProfile:
    """Runs steps of a config and looks at them.

    Args:
        config: the complete config; mode single or dp.
        num_steps: timed ones, after one to warm up.

    Raises:
        ConfigError: it needs several processes or stages, or does not suit this machine.
    """
    if not config.train.batch_size:
        raise ConfigError("train.batch_size = auto: a profile needs a number: add train.batch_size=8")
    plan = plan_devices(config.parallel)
    if plan.mode not in ("single", "dp"):
        raise ConfigError(f"parallel.mode = {plan.mode}: a profile runs in one process: use parallel.mode=dp or single")
    seed_everything(config.seed)
    devices = [str(device) for device in plan.devices]
    batches, source = _batches(config, num_steps + 2)
    recorder = Recorder()
    split = Simulator(config).split_on(len(devices))
    engine, _ = build_real_engine(config, devices, split, recorder)
    watch = Stopwatch(plan.devices[0])
    marks = PhaseMarks(watch.mark)
    marks.attach(engine.network, engine.precision)
    modules: defaultdict[str, float] = defaultdict(float)
    hooks = _time_modules(engine.model, watch, modules)
    steps = []
    engine.network.train()
    for number in range(num_steps + 1):
        watch.mark(WAIT)
        batch = next(batches)
        engine.step([batch])
        watch.mark("")
        if number == 0:
            modules.clear()
        else:
            steps.append(dict(watch.seconds))
        watch.seconds.clear()
    for hook in hooks:
        hook.remove()
    marks.mark = recorder.mark
    peaks, by_module = _followed(engine, next(batches), recorder, devices)
    return StepProfile(
        tuple(devices),
        split,
        source,
        {phase: median(step.get(phase, 0.0) for step in steps) for phase in (WAIT, *PHASES[:-1])},
        {name: seconds / num_steps for name, seconds in modules.items()},
        peaks,
        by_module,
    )


def _batches(config: RunConfig, count: int) -> tuple[_Batches, str]:
    simulator = Simulator(config)
    try:
        scheme = build_scheme(config.data)
        train_set = build_dataset(config.data, scheme, split_names(config.data)[0], is_training=True, seed=config.seed)
    except (DataError, OSError):
        return _Batches([simulator.batch(config.train.batch_size)] * count, None), "black images: the data is not here"
    loader = TrainLoader(train_set, config.train.batch_size, seed=config.seed, options=LoadOptions(config.data.workers))
    return _Batches([], loader), f"{len(train_set)} training images"


class _Batches:
    """Batches for as long as they are asked for."""

    def __init__(self, batches: list[Batch], loader: TrainLoader | None) -> None:
        self._loader, self._epoch = loader, 1
        self._left = iter(batches) if loader is None else loader.epoch(1)

    def __next__(self) -> Batch:
        batch = next(self._left, None)
        if batch is None:
            assert self._loader is not None
            self._epoch += 1
            self._left = self._loader.epoch(self._epoch)
            batch = next(self._left)
        return batch


def _time_modules(
    model: nn.Module, watch: Stopwatch, seconds: defaultdict[str, float]
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that add each part's own time; replicas take turns, so the stack is one."""
    stack: list[tuple[str, float]] = []
    since = [0.0]

    def switch(name: str | None) -> None:
        now = watch.now()
        if stack:
            seconds[stack[-1][0]] += now - since[0]
        if name is None:
            stack.pop()
        else:
            stack.append((name, now))
        since[0] = now

    hooks = []
    for name, part in model.named_modules():
        if name and name.count(".") < 2:
            hooks.append(part.register_forward_pre_hook(lambda *_, name=name: switch(name)))
            hooks.append(part.register_forward_hook(lambda *_: switch(None)))
    return hooks


def _followed(
    engine: StepEngine, batch: Batch, recorder: Recorder, devices: Sequence[str]
) -> tuple[tuple[dict[str, PhasePeak], ...], dict[str, float]]:
    """One more step, tensor by tensor."""
    watch_modules(engine.model, recorder, depth=2)
    recorder.tag(
        (t for s in engine.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)), "optimizer"
    )
    for parameter in engine.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: recorder.tag([p.grad], "gradients"))  # type: ignore[no-untyped-call]
    first_mark = recorder.num_marks
    with recorder:
        engine.step([batch])
        recorder.mark("idle")
    moments = recorder.peaks(first_mark)
    found = tuple(phase_peaks(moments.get(device, {})) for device in devices)
    highest = max(moments.get(devices[0], {}).values(), key=lambda moment: moment.num_bytes, default=None)
    by_module = {} if highest is None else {name: size / 2**20 for name, size in highest.by_module.items()}
    return found, by_module


def profile_lines(found: StepProfile) -> list[str]:
    """A table by phase with a picture, and a table by part of the model."""
    total_s = sum(found.phase_s.values()) or 1e-9
    lines = [f"split {'+'.join(map(str, found.split))} on {', '.join(found.devices)}; {found.source}", ""]
    peaks = found.peaks[0] if found.peaks else {}
    highest = max((peak.mib for peak in peaks.values()), default=0.0) or 1e-9
    rows: list[Sequence[str]] = [("phase", "ms", "share", "peak MiB", "time and memory")]
    for phase, seconds in found.phase_s.items():
        mib = peaks[phase].mib if phase in peaks else 0.0
        rows.append(
            (
                phase,
                f"{1000 * seconds:.1f}",
                f"{100 * seconds / total_s:.0f} %",
                f"{mib:.0f}" if mib else "-",
                "#" * round(BAR_CELLS * seconds / total_s) + " " + "=" * round(BAR_CELLS * mib / highest),
            )
        )
    lines += [
        *aligned(rows),
        f"{total_s:.3f} s a step, {sum(found.split) / total_s:.1f} images/s (# time, = memory)",
        "",
    ]
    for device, phases in zip(dict.fromkeys(found.devices), found.peaks, strict=False):
        if phases:
            phase = max(phases, key=lambda name: phases[name].mib)
            parts = sorted(phases[phase].by_kind.items(), key=lambda item: -item[1])[:6]
            lines.append(f"{device} at its fullest ({phase}): " + ", ".join(f"{k} {m:.0f}" for k, m in parts) + " MiB")
            lines += [f"  {mib:8.1f} MiB  {what}  {module}".rstrip() for mib, what, module in phases[phase].largest]
    return [*lines, "", *_module_table(found)]


def _module_table(found: StepProfile) -> list[str]:
    names = sorted(
        {*found.module_s, *found.module_mib}, key=lambda n: -(found.module_mib.get(n, 0.0) + found.module_s.get(n, 0.0))
    )[:MAX_MODULES]
    highest = max(found.module_mib.values(), default=0.0) or 1e-9
    rows: list[Sequence[str]] = [("part of the model", "forward ms", "kept MiB at the peak", "")]
    rows += [
        (
            name,
            f"{1000 * found.module_s.get(name, 0.0):.1f}",
            f"{found.module_mib.get(name, 0.0):.1f}",
            "=" * round(BAR_CELLS * found.module_mib.get(name, 0.0) / highest),
        )
        for name in names
    ]
    return aligned(rows)
