"""The workspaces of cuBLAS in a simulation, by mode."""

from __future__ import annotations

import types
from collections import Counter
from dataclasses import replace

import pytest

from segapp.chunks import Mode
from segapp.memory.peaks import SimulationJob
from segapp.planning.simulate import Simulator


@pytest.mark.parametrize(("mode", "num_each"), [("single", 2), ("ddp", 2), ("dp", 3)])
def test_blas_workspaces_are_by_thread(mode: Mode, num_each: int) -> None:
    """One for the forward pass and one for autograd; a third in dp, for an evaluation's threads."""
    simulator = types.SimpleNamespace()
    job = SimulationJob(mode, (2, 1), blas_mib=0.5)
    made = Simulator._blas_workspaces(simulator, job, ["meta", "cpu"])  # type: ignore[arg-type]
    sizes = Counter((tensor.device.type, tensor.nbytes) for tensor in made)
    assert sizes == {(device, 2**19): num_each for device in ("meta", "cpu")}
    assert Simulator._blas_workspaces(simulator, replace(job, blas_mib=0.0), ["cpu"]) == []  # type: ignore[arg-type]
