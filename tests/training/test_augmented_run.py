"""Trainings with `data.augment`, `data.cutmix` and `data.sampling` resume bitwise."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import RunConfig, load_config
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training import signals
from tests.support.runs import differing, events, merged, train


def config(tiny_root: Path, augment: Any) -> RunConfig:
    return merged(
        {
            "name": "tiny",
            "data": {
                "format": "folder",
                "root": str(tiny_root),
                "classes": ["ground", "box", "disc"],
                "crop_px": [32, 32],
                "augment": augment,
                "cutmix": 0.6,
                "classmix": 0.4,
                "sampling": "foreground",
            },
            "model": {"name": "fcn", "encoder": "mobilenet_v3_small", "aux": False},
            "train": {"epochs": 1, "batch_size": 2},
            "checkpoint": {"every_steps": 1},
            "log": {"every_steps": 1, "tensorboard": False},
        }
    )


def stop_at(monkeypatch: pytest.MonkeyPatch, visit: int) -> None:
    """Send this process SIGTERM at the n-th look at the stop flag."""
    looks = iter(range(1, 10_000))

    def is_set(self: signals.StopSignals) -> bool:
        if next(looks) == visit:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.count > 0

    monkeypatch.setattr(signals.StopSignals, "is_set", property(is_set))


@pytest.mark.slow
def test_run_with_mixed_samples_resumes_bitwise(
    tiny_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = config(tiny_root, ["ScaledCrop", "D4", {"OneOf": ["Blur", "GaussNoise"]}])
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(merged(given.model_dump(mode="json"), data={"workers": 0}), whole) == 0
    with monkeypatch.context() as patch:
        stop_at(patch, 5)
        assert train(merged(given.model_dump(mode="json"), data={"workers": 2}), parts) == 75
    assert 0 < len(events(parts, "step")) < 5  # in the middle of the first epoch
    again = load_config(parts / "config.yaml", ["data.workers=1"])
    assert run_session(TrainRequest(again, RunFolder(parts))) == 0
    states = [torch.load(each / "checkpoints" / "last.pt", weights_only=True) for each in (whole, parts)]
    assert all(path.startswith("/checkpoint/config") or path.endswith("/workers") for path in differing(*states))
    assert [e["loss"] for e in events(parts, "step")] == [e["loss"] for e in events(whole, "step")]
