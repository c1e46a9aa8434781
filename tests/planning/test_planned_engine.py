"""The engine that the memory planner simulates is the one that trains, and the workspaces of cuBLAS next to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from torch import nn

from segapp.assembly.devices import plan_devices
from segapp.chunks import Mode
from segapp.config import RunConfig
from segapp.memory.counters import DeviceMemoryTracker
from segapp.memory.ledger import StorageLedger
from segapp.memory.peaks import SimulationJob
from segapp.parallel.distributed import Ranks
from segapp.planning.simulate import Simulator, build_simulator
from segapp.run.events import EventLog, EventWriter
from segapp.run.folder import RunFolder
from segapp.session.build import build_trainer
from segapp.training.context import RunContext
from segapp.training.pulse import Liveness
from segapp.training.signals import StopSignals
from segapp.training.step.engine import StepEngine
from tests.support.own_process import in_own_process
from tests.support.runs import merged, train

CASES: dict[str, dict[str, Any]] = {
    "one device": {"train": {"batch_size": 6, "precision": "fp32", "ema": None}},
    "three devices, half weights, average": {
        "parallel": {"mode": "dp", "devices": ["cpu"] * 3, "shares": [1, 2, 3]},
        "train": {"batch_size": 6, "precision": "fp16", "ema": 0.9},
        "optim": {"name": "sgd", "lr": 0.01, "clip_grad_norm": 1.0},
    },
    "distillation on two devices": {
        "parallel": {"mode": "dp", "devices": ["cpu"] * 2, "shares": [2, 4]},
        "train": {"batch_size": 6, "precision": "fp32", "ema": None},
        "distill": {"critic_width": 8},
    },
}


def description(engine: StepEngine) -> dict[str, Any]:
    """Return types, shapes, precisions and settings of everything that a step consists of."""
    update, precision = engine.update, engine.precision
    return {
        "model": {name: type(module).__name__ for name, module in engine.model.named_modules()},
        "parameters": {name: (tuple(p.shape), p.dtype) for name, p in engine.model.named_parameters()},
        "buffers": {name: (tuple(b.shape), b.dtype) for name, b in engine.model.named_buffers()},
        "network": wrappers(engine.network.module),
        "split": engine.network.split_of(6),
        "criterion": [type(part).__name__ for part in engine.criterion.modules()],
        "optimizer": type(update.optimizer).__name__,
        "groups": [
            {key: value for key, value in group.items() if isinstance(value, (int, float, bool, tuple))}
            | {"params": [(tuple(p.shape), p.dtype) for p in group["params"]]}
            for group in update.optimizer.param_groups
        ],
        "precision": (precision.name, precision.input_dtype, precision.scaler is not None),
        "average": None if update.average is None else type(update.average.module).__name__,
        "participants": [type(participant).__name__ for participant in engine.participants],
        "clip": update.clip_grad_norm,
    }


def wrappers(network: nn.Module) -> list[str]:
    """Return the types from the outermost wrapper to the model."""
    inner = getattr(network, "module", None) or getattr(network, "model", None)
    return [type(network).__name__, *(wrappers(inner) if isinstance(inner, nn.Module) else [])]


def planned_engines(configs: list[RunConfig]) -> list[dict[str, Any]]:
    found = []
    for config in configs:
        shares = tuple(config.parallel.shares or [int(config.train.batch_size)])
        job = SimulationJob("dp" if len(shares) > 1 else "single", shares)
        devices = [f"simgpu:{number}" for number in range(len(shares))]
        with build_simulator(config).prepared(job, devices, StorageLedger()) as (engine, _):
            found.append(description(engine))
    return found


def trained_engine(config: RunConfig, folder: Path) -> dict[str, Any]:
    run = RunFolder.create(path=folder)
    log = EventLog(EventWriter(run.events))
    context = RunContext(run, log, Ranks(), StopSignals(), DeviceMemoryTracker([]))
    trainer = build_trainer(config, context, plan_devices(config), Liveness())
    log.close()
    return description(trainer.engine)


@pytest.mark.slow
def test_planned_engine_equals_the_trained_one(tiny: dict[str, Any], tmp_path: Path) -> None:
    base = {**tiny, "data": {**tiny["data"], "crop_px": [48, 64]}}
    assert train(merged(base, train={"epochs": 1}), tmp_path / "teacher") == 0
    CASES["distillation on two devices"]["distill"]["teacher"] = str(tmp_path / "teacher")
    configs = [merged(base, **sections) for sections in CASES.values()]
    planned = in_own_process(planned_engines, configs)
    trained = [trained_engine(config, tmp_path / f"run-{number}") for number, config in enumerate(configs)]
    for own, wanted, case in zip(planned, trained, CASES, strict=True):
        for part in wanted:
            assert own[part] == wanted[part], f"{case}: {part}"


@pytest.mark.parametrize(("mode", "num_each"), [("single", 2), ("ddp", 2), ("dp", 3)])
def test_blas_workspaces_are_by_thread(mode: Mode, num_each: int) -> None:
    """One for the forward pass and one for autograd; a third in dp, for an evaluation's threads."""
    job, simulator = SimulationJob(mode, (2, 1), blas_mib=0.5), Mock()
    made = Simulator._blas_workspaces(simulator, job, ["meta", "cpu"])
    sizes = Counter((tensor.device.type, tensor.nbytes) for tensor in made)
    assert sizes == {(device, 2**19): num_each for device in ("meta", "cpu")}
    assert Simulator._blas_workspaces(simulator, replace(job, blas_mib=0.0), ["cpu"]) == []
