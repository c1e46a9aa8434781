"""A batch tried for real: one step and one evaluation of black images, with the trainer's own engine and devices."""

from __future__ import annotations

import contextlib
import gc

import torch

from segapp.build.devices import DevicePlan
from segapp.build.network import build_network
from segapp.config import RunConfig
from segapp.memory.saved_plan import SavedMemoryPlan
from segapp.memory.simulation.jobs import SimulationJob
from segapp.memory.simulation.recorder import Recorder
from segapp.parallel import convert_sync_batchnorm
from segapp.precision import Precision
from segapp.train.planning.simulate import Simulator, eval_size
from segapp.train.recovery.memory_limit import build_budget
from segapp.train.step.engine import StepEngine
from segapp.train.telemetry.device_memory import DeviceMemoryTracker


def build_real_engine(
    config: RunConfig, devices: list[str], split: tuple[int, ...], recorder: Recorder | None = None
) -> tuple[StepEngine, Simulator]:
    """The engine of a config on devices of this machine, without its weights or its data.

    Args:
        config: the complete config; mode single or dp.
        devices: as torch calls them.
        split: samples on each.
        recorder: is told what the tensors are for.
    """
    recorder, simulator = recorder or Recorder(), Simulator(config)
    model = build_network(config.model, simulator.scheme.num_classes, with_weights=False).train()
    if config.parallel.sync_bn and len(devices) > 1:
        convert_sync_batchnorm(model)
    Precision(config.train.precision, torch.device(devices[0])).prepare(model.to(devices[0]))
    if config.train.channels_last:
        model.to(memory_format=torch.channels_last)
    recorder.tag(model.parameters(), "weights")
    recorder.tag(model.buffers(), "buffers")
    job = SimulationJob("dp" if len(devices) > 1 else "single", split)
    engine, _ = simulator.build_engine(job, model, devices, {}, recorder)
    return engine, simulator


def trial_step(config: RunConfig, devices: DevicePlan, saved_plan: SavedMemoryPlan) -> None:
    """Makes two steps of a full batch, and an evaluation of the largest image.

    Args:
        config: with the batch to try.
        devices: of this process.
        saved_plan: says how the batch is divided.

    Raises:
        torch.OutOfMemoryError: it does not fit.
    """
    split = saved_plan.best_split
    engine, simulator = build_real_engine(config, [str(device) for device in devices.devices], split)
    budget = build_budget(config.parallel, devices.devices, engine, DeviceMemoryTracker())
    try:
        with contextlib.nullcontext() if budget is None else budget.enforced():
            engine.network.train()
            batches = [simulator.batch(config.train.batch_size)] * min(2, config.train.accumulate)
            for _ in range(2):  # the second meets what the first leaves
                engine.step(batches)
            simulator.evaluate_black(engine, eval_size(config)[0])
        for device in {device for device in devices.devices if device.type == "cuda"}:
            torch.cuda.synchronize(device)
    finally:
        del engine, budget
        gc.collect()
