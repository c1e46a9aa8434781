"""What a session on one card runs: the rows in order, each with its limit and with what it needs.

A rented card has few minutes. Everything that could show a wrong result comes first, side by side, because it needs no
quiet. Then come the figures that need the card alone, one after the other. A row is either a call of pytest or a
function that returns cases (`tests.gpu.cases`).
"""

from __future__ import annotations

import importlib.metadata
import itertools
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Part = Literal["alone", "side by side"]

MINUTES = 9.0
"""Length of a session."""

START_MINUTES = 0.5
"""What the starts of all processes may take beside their limits."""

DRY_LIMIT_S = 1500.0
"""Limit of a row without a card; two cores of a busy machine are slower than any limit of a session."""


@dataclass(frozen=True)
class ScheduledRow:
    """A row.

    Attributes:
        name: of its files.
        title: its heading in the report.
        part: of the session.
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
    part: Part
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
        return [*pytest, *spread, *chosen, *self.tests, *(self.dry_tests if is_dry else ())]


ROWS = (
    # The figures that need a quiet card are in the order in which they are wanted. The first case of a process with a
    # network takes 45 to 60 s, as Triton compiles the kernels of the loss and cuDNN times its algorithms. Later cases
    # take 5 to 30 s.
    ScheduledRow(
        "ranks",
        "Steps of 2 to 4 ranks on one card through gloo, against one device in float64",
        "side by side",
        3,
        cases="tests.gpu.rank_figures:gloo_cases",
    ),
    ScheduledRow(
        "ranks-nccl",
        "Steps of 2 ranks on one card through NCCL",
        "side by side",
        3,
        cases="tests.gpu.rank_figures:nccl_cases",
        needs=("NCCL",),
        has_dry_form=False,
    ),
    ScheduledRow(
        "tests",
        "Losses against float64, steps, replicas, trainings, ranks, whole runs",
        "side by side",
        3,
        tests=("tests/gpu",),
        workers=10,
        dry_tests=("tests/parallel/test_replica_checks.py",),
    ),
    ScheduledRow(
        "plan",
        "Planned against measured peaks of twelve networks",
        "side by side",
        3,
        cases="tests.gpu.figures_plan:plan_cases",
    ),
    ScheduledRow(
        "sanitizer",
        "compute-sanitizer on the kernels of the loss: memcheck, racecheck, initcheck",
        "side by side",
        3,
        cases="tests.gpu.sanitized:sanitizer_cases",
        needs=("compute-sanitizer",),
    ),
    ScheduledRow(
        "small-network",
        "LR-ASPP, 4 images: a plain loop, eager, torch.compile with and without reduce-overhead",
        "alone",
        1.25,
        cases="tests.gpu.figures_training:small_cases",
    ),
    ScheduledRow(
        "camvid",
        "DeepLabV3-R50 on CamVid, 4 data workers",
        "alone",
        1.5,
        cases="tests.gpu.figures_runs:camvid_cases",
        needs=("CamVid",),
    ),
    ScheduledRow(
        "step",
        "Training step against a plain loop of PyTorch",
        "alone",
        1,
        cases="tests.gpu.figures_training:step_cases",
    ),
    ScheduledRow(
        "init",
        "The config that segapp init writes for CamVid, for a minute",
        "alone",
        1.25,
        cases="tests.gpu.figures_runs:init_cases",
        needs=("CamVid",),
    ),
    ScheduledRow(
        "loss",
        "Loss against interpolate + cross_entropy, torch.compile and Liger",
        "alone",
        0.5,
        cases="tests.gpu.figures_loss:loss_cases",
    ),
)


def groups(rows: Sequence[ScheduledRow]) -> list[list[ScheduledRow]]:
    """Return the rows in groups: those of a group run side by side, and no two groups at the same time."""
    parts = itertools.groupby(rows, key=lambda row: row.name if row.part == "alone" else row.part)
    return [list(members) for _, members in parts]


def missing(row: ScheduledRow, device: str) -> str | None:
    """Return why a row cannot run on a device of this machine; None if it can."""
    if device == "cpu":
        return None if row.has_dry_form else "it has nothing to try without a card"
    return next((reason for need in row.needs if (reason := NEEDS[need]()) is not None), None)


def sanitizer_program() -> Path | None:
    """Return the program compute-sanitizer: of the wheel nvidia-cuda-sanitizer-api, else of the PATH; None without."""
    try:
        files = importlib.metadata.files("nvidia-cuda-sanitizer-api") or ()
    except importlib.metadata.PackageNotFoundError:
        files = ()
    of_wheel = next((Path(str(file.locate())) for file in files if file.name == "compute-sanitizer"), None)
    on_path = shutil.which("compute-sanitizer")
    return of_wheel or (Path(on_path) if on_path else None)


def _no_sanitizer() -> str | None:
    if sanitizer_program():
        return None
    return "compute-sanitizer is not on the PATH, and the wheel nvidia-cuda-sanitizer-api is not installed"


def _no_nccl() -> str | None:
    import torch.distributed as dist

    return None if dist.is_nccl_available() else "this torch has no NCCL"


def _no_camvid() -> str | None:
    from tests.gpu.figures_runs import CAMVID

    return None if CAMVID.is_dir() else f"there is no folder {CAMVID}: CAMVID names the folder of CamVid"


NEEDS: dict[str, Callable[[], str | None]] = {
    "CamVid": _no_camvid,
    "NCCL": _no_nccl,
    "compute-sanitizer": _no_sanitizer,
}
"""Why a need is not met; None if it is."""
