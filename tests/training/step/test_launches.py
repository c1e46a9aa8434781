"""Kernel launches of a whole step, with a stored upper limit for each mode; see `tests.support.gpu.launches`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segapp.assembly.pairs import build_scheme
from segapp.config import RunConfig, validate_config
from segapp.planning.trial import blank_batch, build_trial_engine
from segapp.training.step.assembler import StepLayout
from tests.support.gpu.launches import LaunchCounter

CPU = torch.device("cpu")
DEMO = {"library": "smp", "name": "DeepLabV3Plus", "encoder": "tu-test_resnet"}
R50 = {"library": "torchvision", "name": "deeplabv3_resnet50"}


def config_of(model: dict[str, Any], **train: Any) -> RunConfig:
    data = {"format": "folder", "root": "nowhere", "classes": [f"c{i}" for i in range(5)], "crop_px": [64, 64]}
    return validate_config({"name": "r", "data": data, "model": model, "train": {"batch_size": 2, "ema": 0.9, **train}})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("train", "most"),
    [({}, 291), ({"accumulate": 2}, 646), ({"precision": "amp-bf16"}, 356), ({"precision": "fp16"}, 320)],
    ids=["fp32", "accumulate", "amp-bf16", "fp16"],
)
def test_launches_of_a_single_step(train: dict[str, Any], most: int) -> None:
    """Of the second one."""
    config = config_of(DEMO, **train)
    engine = build_trial_engine(config, StepLayout("single", (CPU,)))
    engine.network.module.train()
    batches = [blank_batch(build_scheme(config.data), 2, (64, 64))] * config.train.accumulate
    engine.step(batches)
    with LaunchCounter() as counter:
        engine.step(batches)
    assert counter.total <= most, counter.by_operator.most_common()


def test_undo_and_average_take_at_most_20_launches() -> None:
    engine = build_trial_engine(config_of(R50), StepLayout("single", (CPU,)))
    assert engine.update.average is not None
    is_bad = torch.zeros(())
    with LaunchCounter() as counter:
        engine.guard.remember()
        engine.guard.restore_where(is_bad)
        engine.update.average.update(is_bad)
    assert counter.total <= 11, counter.by_operator  # 183 buffers, 187 parameters
