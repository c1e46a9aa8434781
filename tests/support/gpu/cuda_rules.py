"""Training steps and evaluations on simulated devices under rules of CUDA that the CPU does not have.

Fake tensors refuse operators on several devices. `CudaRules` also refuses the mixed dtypes that CUDA's kernels refuse
and the CPU's accept. The simulated backend cannot be unregistered, so this runs in a process of its own:

    python -m tests.support.gpu.cuda_rules CASES.json

reads a list of cases and prints, for each, its error or null. Cases with "fault" come last: they run with two defects.
"""

from __future__ import annotations

import functools
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from segapp.config import validate_config
from segapp.memory.peaks import SimulationJob
from segapp.memory.simulated_devices import simulated_ledger
from segapp.planning.simulate import Simulator, build_simulator, run_step
from segapp.planning.trial import evaluate_blank
from segapp.precision import Precision
from segapp.training.step import assembler

SAME_DTYPE = {"native_layer_norm", "native_group_norm", "native_layer_norm_backward", "native_group_norm_backward"}
"""Operators whose CUDA kernels refuse a weight of another dtype than the input (pytorch/pytorch#135969)."""

FLOAT_WEIGHT_ONLY = {"native_batch_norm", "_native_batch_norm_legit", "batch_norm_gather_stats_with_counts"}
"""Operators that take a float32 weight with a half input, and no other mixture."""


class CudaRules(TorchDispatchMode):
    """Raises what CUDA raises for dtypes that only the CPU's kernels mix."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        dtypes = [a.dtype for a in args if isinstance(a, Tensor) and a.is_floating_point()]
        if name in SAME_DTYPE and len(set(dtypes_of_values(name, args, dtypes))) > 1:
            raise RuntimeError(f"{name}: expected scalar type Half but found Float: {dtypes}")
        if name in FLOAT_WEIGHT_ONLY and len(set(dtypes[1:])) > 1:
            raise RuntimeError(f"{name}: weight and statistics of several dtypes: {dtypes}")
        if name in FLOAT_WEIGHT_ONLY and dtypes[0] == torch.float32 and set(dtypes) != {torch.float32}:
            raise RuntimeError(f"{name}: expected scalar type Float but found Half: {dtypes}")
        return func(*args, **(kwargs or {}))


def dtypes_of_values(name: str, args: tuple[Any, ...], dtypes: list[torch.dtype]) -> list[torch.dtype]:
    """Return the dtypes that must be equal; a backward also gets statistics, always in float32."""
    if not name.endswith("backward"):
        return dtypes
    statistics = (3, 4) if name == "native_layer_norm_backward" else (2, 3)
    return [a.dtype for i, a in enumerate(args) if isinstance(a, Tensor) and i not in statistics]


@functools.cache
def seed_faults() -> None:
    """Put LayerNorm back to float32 in a half model, and leave the outputs of a model on the last stage's device."""
    prepare, place = Precision.prepare, assembler.place_stages

    def prepare_with_float_norms(precision: Precision, model: nn.Module) -> nn.Module:
        prepared = prepare(precision, model)
        for part in prepared.modules():
            if isinstance(part, nn.LayerNorm):
                part.float()
        return prepared

    Precision.prepare = prepare_with_float_norms  # type: ignore[method-assign]
    assembler.place_stages = lambda module, stages, rest, output_device: place(module, stages, rest=rest)  # type: ignore[assignment]


def error_of(simulator: Simulator, case: dict[str, Any]) -> str | None:
    """Return the error of a step and an evaluation of a case; None if both run."""
    split = tuple(case["split"])
    devices = [f"simgpu:{i}" for i in range(len(split))]
    job = SimulationJob(case["mode"], split)
    ledger = simulated_ledger()
    try:
        with simulator.prepared(job, devices, ledger) as (engine, backend), CudaRules():
            run_step(engine, [simulator.batch(sum(split))], ledger)
            backend.end_backward()
            evaluate_blank(engine, simulator.assembler.config, simulator.assembler.scheme, tuple(case["eval_px"]))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return None


def main() -> None:
    warnings.simplefilter("ignore")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        if case.get("fault"):
            seed_faults()
        simulator = build_simulator(validate_config(case["config"]))
        print(json.dumps(error_of(simulator, case)), flush=True)


if __name__ == "__main__":
    main()
