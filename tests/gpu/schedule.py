"""What a session on one card runs: the rows in order of worth, each with its limit and with what it needs.

What could show a wrong result comes first, then what could end a training, then the figures. A row is either a call of
pytest or a function that returns cases (`tests.gpu.cases`).
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Finds = Literal["wrong results", "failures", "figures"]

ORDER: tuple[Finds, ...] = ("wrong results", "failures", "figures")

MINUTES = 45.0
"""Length of a session."""

START_MINUTES = 1.0
"""What the starts of all processes may take beside their limits."""

DRY_LIMIT_S = 900.0
"""Limit of a row without a card; two cores of a busy machine are slower than any limit of a session."""


@dataclass(frozen=True)
class ScheduledRow:
    """A row.

    Attributes:
        name: of its files.
        title: its heading in the report.
        finds: what it can show.
        minutes: its limit.
        tests: arguments of pytest; without them `cases` are measured.
        workers: processes of pytest.
        cases: MODULE:FUNCTION, which takes a device and returns cases.
        dry_tests: further arguments of pytest without a card.
        needs: names of `NEEDS`; a row whose needs are not met is skipped.
        has_dry_form: False for a row that has nothing to try without a card.
    """

    name: str
    title: str
    finds: Finds
    minutes: float
    tests: tuple[str, ...] = ()
    workers: int = 0
    cases: str = ""
    dry_tests: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    has_dry_form: bool = True

    def command(self, device: str, results: Path) -> list[str]:
        """Return the command of the row, which adds its results to a file."""
        if self.cases:
            return [sys.executable, "-m", "tests.gpu.cases", self.cases, "--device", device, "--results", str(results)]
        is_dry = device == "cpu"
        # pytest-benchmark, where it is installed, refuses parameters with the name of its fixture.
        plugins = ["-p", "no:cacheprovider", "-p", "no:benchmark"]
        pytest = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", *plugins]
        # worksteal: loadfile, the default of the project, would leave a file to one worker.
        spread = ["-n", str(min(2, self.workers) if is_dry else self.workers), "--dist", "worksteal"]
        chosen = ["-m", "gpu or slow" if is_dry else "gpu", "-p", "tests.gpu.each_test", "--maxfail", "30"]
        xml = ["--junitxml", str(results.with_suffix(".xml"))]
        return [*pytest, *spread, *chosen, *xml, *self.tests, *(self.dry_tests if is_dry else ())]


ROWS = (
    ScheduledRow(
        "losses",
        "Losses against float64, kernels of Triton",
        "wrong results",
        3,
        tests=("tests/gpu/test_losses_gpu.py",),
        workers=8,
    ),
    ScheduledRow(
        "steps",
        "Whole steps: none waits for the device, every mode lowers the loss, graphs repeat steps",
        "wrong results",
        1,
        tests=("tests/gpu/test_steps_gpu.py",),
        workers=4,
    ),
    ScheduledRow(
        "trainings",
        "Replicas against one device, trainings, resume, out of memory",
        "wrong results",
        4,
        tests=("tests/gpu/test_parallel_gpu.py", "tests/gpu/test_training_gpu.py"),
        workers=4,
        dry_tests=("tests/parallel/test_replica_checks.py",),
    ),
    ScheduledRow(
        "rank-steps",
        "Steps of 2 to 4 ranks on one card through gloo, against one device in float64",
        "wrong results",
        3,
        cases="tests.gpu.rank_figures:gloo_cases",
    ),
    ScheduledRow(
        "rank-runs",
        "Trainings of ranks: killed rank, out of memory, signals, changed splits, another number of ranks",
        "wrong results",
        3,
        tests=("tests/gpu/test_ddp_gpu.py",),
        workers=3,
    ),
    ScheduledRow(
        "sanitizer",
        "compute-sanitizer on the kernels of the loss: memcheck, racecheck, initcheck",
        "wrong results",
        5,
        cases="tests.gpu.sanitized:sanitizer_cases",
        needs=("compute-sanitizer",),
    ),
    ScheduledRow(
        "whole-runs",
        "The demo, train.compile, a machine without nvidia-smi",
        "failures",
        2,
        tests=("tests/gpu/test_runs_gpu.py",),
        workers=3,
    ),
    ScheduledRow(
        "rank-steps-nccl",
        "Steps of 2 ranks on one card through NCCL",
        "failures",
        1,
        cases="tests.gpu.rank_figures:nccl_cases",
        needs=("NCCL",),
        has_dry_form=False,
    ),
    ScheduledRow(
        "training",
        "Training step: one device, dp in threads, a rank of ddp; a small network with and without a graph",
        "figures",
        4,
        cases="tests.gpu.figures_training:training_cases",
    ),
    ScheduledRow(
        "profile",
        "Ten profiled steps: launches, idle time, longest gap",
        "figures",
        4,
        cases="tests.gpu.figures_profile:profile_cases",
    ),
    ScheduledRow(
        "plan",
        "Planned against measured peaks of twelve networks",
        "figures",
        7,
        cases="tests.gpu.figures_plan:plan_cases",
    ),
    ScheduledRow(
        "loss",
        "Loss against interpolate + cross_entropy, torch.compile and Liger",
        "figures",
        3,
        cases="tests.gpu.figures_loss:loss_cases",
    ),
    ScheduledRow(
        "head",
        "Head of 1x1 and loss against F.linear_cross_entropy",
        "figures",
        1,
        cases="tests.gpu.figures_loss:head_cases",
    ),
    ScheduledRow("loader", "Loader against device", "figures", 2, cases="tests.gpu.figures_loader:loader_cases"),
    ScheduledRow("evaluation", "Evaluation", "figures", 1, cases="tests.gpu.figures_training:evaluation_cases"),
)


def missing(row: ScheduledRow, device: str) -> str | None:
    """Return why a row cannot run on a device of this machine; None if it can."""
    if device == "cpu":
        return None if row.has_dry_form else "it has nothing to try without a card"
    return next((reason for need in row.needs if (reason := NEEDS[need]()) is not None), None)


def sanitizer_program() -> Path | None:
    """Return the program compute-sanitizer of the wheel nvidia-cuda-sanitizer-api; None if it is not installed."""
    try:
        files = importlib.metadata.files("nvidia-cuda-sanitizer-api") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(file.locate())) for file in files if file.name == "compute-sanitizer"), None)


def _no_sanitizer() -> str | None:
    return None if sanitizer_program() else "the wheel nvidia-cuda-sanitizer-api is not installed"


def _no_nccl() -> str | None:
    import torch.distributed as dist

    return None if dist.is_nccl_available() else "this torch has no NCCL"


NEEDS: dict[str, Callable[[], str | None]] = {"compute-sanitizer": _no_sanitizer, "NCCL": _no_nccl}
"""Why a need is not met; None if it is."""
