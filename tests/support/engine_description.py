"""A step engine as plain values: what it is made of, without devices and numbers.

    python -m tests.support.engine_description CONFIG.json SPLIT [CONFIG.json SPLIT]...

prints the descriptions of the engines that the memory planner simulates, one a line. The simulated backend is
registered for a whole process, so they have one of their own.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

from torch import nn

from segapp.config import validate_config
from segapp.memory.ledger import StorageLedger
from segapp.memory.peaks import SimulationJob
from segapp.planning.simulate import build_simulator
from segapp.training.step.engine import StepEngine


def description(engine: StepEngine) -> dict[str, Any]:
    """Return types, shapes, precisions and settings of everything that a step consists of."""
    groups = engine.update.optimizer.param_groups
    return {
        "model": {name: type(module).__name__ for name, module in engine.model.named_modules()},
        "parameters": _tensors(engine.model.named_parameters()),
        "buffers": _tensors(engine.model.named_buffers()),
        "network": _wrappers(engine.network.module),
        "split": engine.network.split_of(6),
        "criterion": [type(part).__name__ for part in engine.criterion.modules()],
        "optimizer": type(engine.update.optimizer).__name__,
        "groups": [
            {
                **{key: value for key, value in group.items() if isinstance(value, (int, float, bool, tuple))},
                "params": [[list(p.shape), str(p.dtype)] for p in group["params"]],
            }
            for group in groups
        ],
        "precision": [engine.precision.name, str(engine.precision.input_dtype), engine.precision.scaler is not None],
        "average": None if engine.update.average is None else type(engine.update.average.module).__name__,
        "participants": [type(participant).__name__ for participant in engine.participants],
        "clip": engine.update.clip_grad_norm,
    }


def _tensors(named: Any) -> dict[str, list[Any]]:
    return {name: [list(tensor.shape), str(tensor.dtype)] for name, tensor in named}


def _wrappers(network: nn.Module) -> list[str]:
    """Return the types from the outermost wrapper to the model."""
    names = [type(network).__name__]
    inner = getattr(network, "module", None) or getattr(network, "model", None)
    return names + (_wrappers(inner) if isinstance(inner, nn.Module) else [])


def simulated(config: str, split: str) -> dict[str, Any]:
    """Return the description of the simulated engine of a config."""
    parts = tuple(map(int, split.split("+")))
    simulator = build_simulator(validate_config(json.loads(Path(config).read_text())))
    job = SimulationJob("dp" if len(parts) > 1 else "single", parts)
    devices = [f"simgpu:{number}" for number in range(len(parts))]
    with simulator.prepared(job, devices, StorageLedger()) as (engine, _):
        return description(engine)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for path, shares in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        print(json.dumps(simulated(path, shares)))
