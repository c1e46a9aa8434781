"""Whole trainings on CUDA's code paths: Triton's interpreter runs the loss, definitions replace the BatchNorm kernels.

Both refuse a batch without images, as CUDA does. Every process counts what it computed with them, in a file of its own.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from segapp.losses.fused import kernels
from tests.support import ROOT
from tests.support.gpu.as_on_cuda import call_functions_directly, leave_overflow_checks_out, take_cuda_road
from tests.support.gpu.batchnorm_kernels import kernels_on_the_cpu

FACTS_VARIABLE = "SEGAPP_TEST_CUDA_ROAD"

_patches = contextlib.ExitStack()
"""They last as long as the process."""


def environment(folder: Path) -> dict[str, str]:
    """Return the variables that put a training, and the ranks it starts, on the road; `folder` gets their counts."""
    path = [str(Path(__file__).parent / "hook"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "TRITON_INTERPRET": "1",
        "PYTHONWARNINGS": "ignore",
        FACTS_VARIABLE: str(folder),
    }


def facts(folder: Path) -> list[dict[str, Any]]:
    """Return the counts of the processes: losses and BatchNorm layers computed by kernels, and the kernels' state."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def take_the_road() -> None:
    """Take the road in this process, until it ends."""
    from segapp.losses.fused import triton_cross_entropy
    from segapp.parallel import sync_batchnorm

    call_functions_directly()
    leave_overflow_checks_out()
    take_cuda_road(pytest.MonkeyPatch())
    _patches.enter_context(kernels_on_the_cpu())
    path = Path(os.environ[FACTS_VARIABLE]) / f"{os.getpid()}.json"
    counts: collections.Counter[str] = collections.Counter()
    launch, normalize, warn = triton_cross_entropy._launch, sync_batchnorm._normalized, kernels._warn

    def note(what: str) -> None:
        counts[what] += 1
        state = {str(device): reason for device, reason in kernels._results.items()}
        path.write_text(json.dumps({"rank": os.environ.get("RANK"), **counts, "kernels": state}))

    def noted_launch(logits: Any, target: Any, *rest: Any) -> None:
        if not logits.numel():
            raise RuntimeError("Triton Error [CUDA]: invalid argument")  # of a launch without programs
        note("losses")
        launch(logits, target, *rest)

    def noted_normalize(*arguments: Any) -> Any:
        note("layers")
        return normalize(*arguments)

    def noted_warning(error: Any) -> None:
        note("warnings")
        warn(error)

    triton_cross_entropy._launch = noted_launch
    sync_batchnorm._normalized = noted_normalize
    kernels._warn = noted_warning


def train_cases(path: Path) -> None:
    """Make the trainings that a file lists, one after the other, in this process: config, folder, failpoints."""
    from segapp.config import validate_config
    from segapp.failpoints import arm
    from segapp.run.folder import RunFolder
    from segapp.session.request import TrainRequest
    from segapp.session.session import run_session

    take_the_road()
    for case in json.loads(path.read_text()):
        arm(case["failpoints"])
        config, folder = validate_config(case["config"]), Path(case["folder"])
        request = TrainRequest(config, RunFolder(folder)) if folder.exists() else TrainRequest(config, run=folder)
        run_session(request)


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train_cases(Path(sys.argv[1]))
