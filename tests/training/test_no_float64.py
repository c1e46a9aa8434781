"""Trainings on a device without float64 follow those on the CPU: steps, evaluations, checkpoints, and a resumed run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import RunConfig
from tests.support import ROOT
from tests.support.runs import events, merged, train

WEIGHTS = [1.0, 0.5, 2.0]
ACCUMULATED = {"train": {"epochs": 2, "batch_size": 3, "accumulate": 2}}
CASES: dict[str, dict[str, Any]] = {
    "ce": {"loss": {"name": "ce"}, **ACCUMULATED},
    "weights": {"loss": {"name": "ce", "class_weights": WEIGHTS, "label_smoothing": 0.1}, **ACCUMULATED},
    "terms": {"loss": {"name": "ce", "plus": [{"name": name} for name in ("dice", "focal", "lovasz")]}},
    "ohem": {"loss": {"name": "ohem", "class_weights": WEIGHTS}},
    "bce": {"loss": {"name": "bce"}},
}


def config(tiny: dict[str, Any], **sections: Any) -> RunConfig:
    model = {"library": "smp", "name": "FPN", "encoder": "tu-test_resnet", "options": {"decoder_dropout": 0.0}}
    return merged(
        tiny,
        model=model,
        optim={"name": "sgd", "lr": 0.001},
        schedule={"name": "constant", "warmup_steps": 0},
        train={"epochs": 1, "batch_size": 5, **sections.pop("train", {})},
        **sections,
    )


def course(folder: Path) -> list[float]:
    """Return the losses of all steps and evaluations."""
    return [event["loss"] for kind in ("step", "val") for event in events(folder, kind)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", [("ce",), pytest.param(("ce", "terms", "weights", "ohem", "bce"), marks=pytest.mark.slow)]
)
def test_training_without_float64_follows_the_cpu(tiny: dict[str, Any], tmp_path: Path, names: tuple[str, ...]) -> None:
    """A tensor of float64 on the device would have raised."""
    configs = {name: config(tiny, **CASES[name]) for name in names}
    once = config(tiny, loss={"name": "ce"}, train={**ACCUMULATED["train"], "epochs": 1})
    cases = [*configs.items(), ("resumed", once), ("resumed", configs["ce"])]
    listed = []
    for name, each in cases:
        dumped = each.model_dump(mode="json")
        dumped["parallel"]["devices"] = ["narrowgpu"]
        listed.append({"config": dumped, "folder": str(tmp_path / name)})
    (tmp_path / "cases.json").write_text(json.dumps(listed))
    command = [sys.executable, "-m", "tests.support.gpu.no_float64", str(tmp_path / "cases.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-2000:]
    for name, each in configs.items():
        narrow, wide = tmp_path / name, tmp_path / f"{name} on the CPU"
        assert train(each, wide) == 0
        assert [device["device"] for device in events(narrow, "run_start")[0]["devices"]] == ["narrowgpu:0"]
        assert course(narrow) == pytest.approx(course(wide), rel=1e-6), name
        assert events(narrow, "val")[-1]["miou"] == pytest.approx(events(wide, "val")[-1]["miou"], rel=1e-6)
        states = [torch.load(folder / "checkpoints" / "last.pt", weights_only=True) for folder in (narrow, wide)]
        for key, value in states[1]["model"].items():
            torch.testing.assert_close(states[0]["model"][key], value, rtol=1e-4, atol=1e-6, msg=f"{name} {key}")
    assert course(tmp_path / "resumed") == course(tmp_path / "ce"), "bit for bit"
