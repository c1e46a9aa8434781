"""The engine that the memory planner simulates is the one that trains."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from segapp.assembly.devices import plan_devices
from segapp.memory.counters import DeviceMemoryTracker
from segapp.parallel.distributed import Ranks
from segapp.run.events import EventLog, EventWriter
from segapp.run.folder import RunFolder
from segapp.session.trainer import build_trainer
from segapp.training.context import RunContext
from segapp.training.inbox import Inbox
from segapp.training.signals import StopSignals
from tests.support import ROOT
from tests.support.engine_description import description
from tests.support.runs import merged, train

CASES: dict[str, dict[str, Any]] = {
    "one device": {"train": {"batch_size": 6, "ema": None}},
    "three devices, half weights, average": {
        "parallel": {"mode": "dp", "devices": ["cpu"] * 3, "shares": [1, 2, 3]},
        "train": {"batch_size": 6, "precision": "fp16", "ema": 0.9},
        "optim": {"name": "sgd", "lr": 0.01, "clip_grad_norm": 1.0},
    },
    "distillation on two devices": {
        "parallel": {"mode": "dp", "devices": ["cpu"] * 2, "shares": [2, 4]},
        "train": {"batch_size": 6, "ema": None},
        "distill": {"critic_width": 8},
    },
}


def trained_engine(config: Any, folder: Path) -> dict[str, Any]:
    run = RunFolder.create(path=folder)
    log = EventLog(EventWriter(run.events))
    context = RunContext(run, log, Ranks(), StopSignals(), DeviceMemoryTracker())
    trainer = build_trainer(config, context, plan_devices(config.parallel))
    context = RunContext(run, log, Ranks(), StopSignals(), DeviceMemoryTracker(), Inbox(run, log))
    trainer = build_trainer(config, context, plan_devices(config))
    log.close()
    found: dict[str, Any] = json.loads(json.dumps(description(trainer.engine)))
    return found


@pytest.mark.slow
def test_planned_engine_equals_the_trained_one(tiny: dict[str, Any], tmp_path: Path) -> None:
    base = {**tiny, "data": {**tiny["data"], "crop_px": [48, 64]}}
    assert train(merged(base, train={"epochs": 1}), tmp_path / "teacher") == 0
    words, configs = [], []
    for number, sections in enumerate(CASES.values()):
        if "distill" in sections:
            sections = {**sections, "distill": {**sections["distill"], "teacher": str(tmp_path / "teacher")}}
        config = merged(base, **sections)
        path = tmp_path / f"{number}.json"
        path.write_text(json.dumps(config.model_dump(mode="json")))
        words += [str(path), "+".join(map(str, config.parallel.shares or [config.train.batch_size]))]
        configs.append(config)
    command = [sys.executable, "-m", "tests.support.engine_description", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    for number, (case, config, line) in enumerate(zip(CASES, configs, done.stdout.splitlines(), strict=True)):
        planned, trained = json.loads(line), trained_engine(config, tmp_path / f"run-{number}")
        assert planned.keys() == trained.keys()
        for part in trained:
            assert planned[part] == trained[part], f"{case}: {part}"
