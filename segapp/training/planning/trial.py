"""Try a batch: two steps and one evaluation of black images, with the engine and the devices of the training."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from segapp.build.devices import DevicePlan
from segapp.build.network import largest_phase
from segapp.build.pairs import build_pixels, build_scheme
from segapp.build.step import RealDevices, StepAssembler, StepLayout
from segapp.build.trained import read_trained
from segapp.config import RunConfig
from segapp.memory.counters import DeviceMemoryTracker
from segapp.memory.plan import SavedMemoryPlan
from segapp.training.planning.blank_data import blank_batch, evaluate_blank, evaluation_size
from segapp.training.recovery.memory_limit import build_memory_limit
from segapp.training.step.engine import StepEngine


def build_trial_engine(
    config: RunConfig,
    layout: StepLayout,
    tag: Callable[[Iterable[Tensor], str], None] = lambda tensors, kind: None,
) -> StepEngine:
    """Build the training's engine on devices of this machine, without its weights and its data.

    Args:
        config: the complete config; mode single or dp.
        layout: devices and split.
        tag: is told what tensors are for.
    """
    config = largest_phase(config)
    teacher = None if config.distill is None else read_trained(config.distill.teacher)
    assembler = StepAssembler(config, build_scheme(config.data), teacher)
    num_classes = assembler.scheme.num_classes
    parts = assembler.build_parts(layout, lambda _: [1.0] * num_classes, with_weights=False)
    tag(parts.model.parameters(), "weights")
    tag(parts.model.buffers(), "buffers")
    return assembler.assemble(parts, layout, RealDevices(tag=tag))


def trial_step(config: RunConfig, devices: DevicePlan, saved_plan: SavedMemoryPlan) -> None:
    """Make two steps of a full batch, and an evaluation of the largest image.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    scheme = build_scheme(config.data)
    shares = saved_plan.best_split if devices.mode == "dp" else None
    engine = build_trial_engine(config, StepLayout(devices.mode, devices.devices, shares=shares))
    limit = build_memory_limit(config.parallel.memory_budget_mib, devices.devices, engine, DeviceMemoryTracker())
    try:
        with contextlib.nullcontext() if limit is None else limit.enforced():
            engine.network.train()
            batch = blank_batch(
                scheme,
                config.train.batch_size,
                config.data.crop_px,
                build_pixels(config.data),
                has_distances=engine.criterion.task.needs_distances,
            )
            for _ in range(2):  # the second meets what the first leaves
                engine.step([batch] * min(2, config.train.accumulate))
            evaluate_blank(engine, config, scheme, evaluation_size(config)[0])
        for device in {device for device in devices.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)
    finally:
        del engine, limit
        gc.collect()
