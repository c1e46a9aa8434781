"""Kernel launches of a whole step, with a stored upper limit for each mode; see `tests.support.gpu.launches`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segapp.assembly.pairs import build_scheme
from segapp.config import validate_config
from segapp.planning.trial import blank_batch, build_trial_engine
from segapp.training.step.assembler import StepLayout
from tests.support.gpu.launches import LaunchCounter


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("train", "most"),
    [({}, 296), ({"accumulate": 2}, 652), ({"precision": "amp-bf16"}, 361), ({"precision": "fp16"}, 320)],
    ids=["fp32", "accumulate", "amp-bf16", "fp16"],
)
def test_launches_of_a_single_step(train: dict[str, Any], most: int) -> None:
    """Of the second one."""
    data = {"format": "folder", "root": "nowhere", "classes": list("abcde"), "crop_px": [64, 64]}
    model = {"library": "smp", "name": "DeepLabV3Plus", "encoder": "tu-test_resnet"}
    train = {"batch_size": 2, "ema": 0.9, **train}
    config = validate_config({"name": "r", "data": data, "model": model, "train": train})
    engine = build_trial_engine(config, StepLayout("single", (torch.device("cpu"),)))
    engine.network.module.train()
    batches = [blank_batch(build_scheme(config.data), 2, (64, 64))] * config.train.accumulate
    engine.step(batches)
    with LaunchCounter() as counter:
        engine.step(batches)
    assert counter.total <= most, counter.by_operator.most_common()
