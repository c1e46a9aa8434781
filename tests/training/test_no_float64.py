"""Trainings on a device without float64 follow those on the CPU: steps, evaluations, checkpoints, and a resumed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT
from tests.support.runs import events, final_state, merged, train

WEIGHTS = [1.0, 0.5, 2.0]
TWICE = {"train": {"epochs": 2, "batch_size": 3, "accumulate": 2}}
CASES: dict[str, dict[str, Any]] = {
    "ce": {"loss": {"name": "ce"}, **TWICE},
    "weights": {"loss": {"name": "ce", "class_weights": WEIGHTS, "label_smoothing": 0.1}, **TWICE},
    "terms": {"loss": {"name": "ce", "plus": [{"name": name} for name in ("dice", "focal", "lovasz")]}},
    "ohem": {"loss": {"name": "ohem", "class_weights": WEIGHTS}},
    "bce": {"loss": {"name": "bce"}},
}


def course(folder: Path) -> list[float]:
    """Return the losses of all steps and evaluations, and the last mIoU."""
    return [e["loss"] for kind in ("step", "val") for e in events(folder, kind)] + [events(folder, "val")[-1]["miou"]]


@pytest.mark.slow
def test_training_without_float64_follows_the_cpu(base: dict[str, Any], tmp_path: Path) -> None:
    """A tensor of float64 on the device would have raised."""
    wide = {
        name: merged({**base, "train": {"epochs": 1, "batch_size": 5, "precision": "fp32"}}, **each)
        for name, each in CASES.items()
    }
    once = merged(wide["ce"].model_dump(mode="json"), train={"epochs": 1})
    listed = [
        {
            "config": merged(each.model_dump(mode="json"), parallel={"devices": ["narrowgpu"]}).model_dump(mode="json"),
            "folder": str(tmp_path / name),
        }
        for name, each in [*wide.items(), ("resumed", once), ("resumed", wide["ce"])]
    ]
    (tmp_path / "cases.json").write_text(json.dumps(listed))
    command = [sys.executable, "-m", "tests.support.gpu.no_float64", str(tmp_path / "cases.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    for name, each in wide.items():
        narrow, folder = tmp_path / name, tmp_path / f"{name} on the CPU"
        assert train(each, folder) == 0
        assert [device["device"] for device in events(narrow, "run_start")[0]["devices"]] == ["narrowgpu:0"]
        assert course(narrow) == pytest.approx(course(folder), rel=1e-6), name
        for key, value in final_state(folder)["model"].items():
            torch.testing.assert_close(final_state(narrow)["model"][key], value, rtol=1e-4, atol=1e-6, msg=name)
    assert course(tmp_path / "resumed") == course(tmp_path / "ce"), "bit for bit"
