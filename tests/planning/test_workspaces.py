"""The workspaces of cuBLAS in a simulation, by mode."""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import replace

import pytest

from segapp.chunks import Mode
from segapp.config import validate_config
from segapp.memory.peaks import SimulationJob
from segapp.planning.simulate import Simulator


@pytest.mark.parametrize(
    ("mode", "cuda_graph", "num_each"), [("single", False, 2), ("ddp", False, 2), ("dp", False, 3), ("single", True, 3)]
)
def test_blas_workspaces_are_by_thread_and_stream(mode: Mode, cuda_graph: bool, num_each: int) -> None:
    """One for the forward pass and one for autograd; a third in dp, for an evaluation's threads, or for a graph."""
    config = validate_config(
        {"name": "w", "data": {"format": "camvid", "root": "."}, "train": {"cuda_graph": cuda_graph}}
    )
    simulator = types.SimpleNamespace(assembler=types.SimpleNamespace(config=config))
    job = SimulationJob(mode, (2, 1), blas_mib=0.5)
    made = Simulator._blas_workspaces(simulator, job, ["meta", "cpu"])  # type: ignore[arg-type]
    sizes = Counter((tensor.device.type, tensor.nbytes) for tensor in made)
    assert sizes == {(device, 2**19): num_each for device in ("meta", "cpu")}
    assert Simulator._blas_workspaces(simulator, replace(job, blas_mib=0.0), ["cpu"]) == []  # type: ignore[arg-type]
