"""Steps of several ranks that share one card, against the same steps on one device in float64."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from tests.gpu.cases import Case
from tests.support import ROOT

LIMIT = 1e-8
"""Largest difference of losses, gradient norms and state; sums of a card have another order."""


def gloo_cases(device: str) -> list[Case]:
    """Return a case for 2, 3 and 4 ranks, which exchange through gloo."""
    kind = "cpu" if device == "cpu" else "cuda"
    return [Case(f"{ranks} ranks, gloo", partial(rank_row, ranks, kind, "gloo")) for ranks in (3, 2, 4)]


def nccl_cases(device: str) -> list[Case]:
    """Return a case for 2 ranks, which exchange through NCCL: see `tests.support.rank_steps.let_ranks_share_a_gpu`."""
    return [Case("2 ranks, nccl", partial(rank_row, 2, "cuda", "nccl"))]


def rank_row(num_ranks: int, kind: str, backend: str) -> dict[str, Any]:
    """Return the largest differences between the steps of ranks and those of one device.

    Raises:
        AssertionError: a difference is above the limit, or a rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-W", "ignore", "-m", "tests.support.rank_steps", str(path), str(num_ranks), kind]
        start = time.monotonic()
        done = subprocess.run([*command, backend], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"exit {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}"
        found = json.loads(path.read_text())
    errors = found["errors"]
    worst = max(errors, key=lambda title: max(errors[title]))
    assert max(errors[worst]) <= LIMIT, f"{worst}: {errors[worst]}"
    return {
        "ranks": num_ranks,
        "through": backend,
        "steps compared": len(errors),
        "largest difference": max(errors[worst]),
        "of": worst,
        "seconds": time.monotonic() - start,
    }
