"""Processor time of a step with masks of samples over that with torch's dropout, and its launches on CUDA, counted.

pytest tests/benchmarks/test_dropout_cost.py -m benchmark -n 0 -s
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch

from segapp.assembly.pairs import build_scheme
from segapp.config import validate_config
from segapp.planning.trial import blank_batch, build_trial_engine
from segapp.training.step.assembler import StepLayout
from tests.support.gpu.launches import LaunchCounter

pytestmark = pytest.mark.benchmark

NETWORKS: dict[str, dict[str, Any]] = {
    "DeepLabV3 MobileNetV3, dropout of values": {"library": "torchvision", "name": "deeplabv3_mobilenet_v3_large"},
    "Segformer MiT-B0, drop path": {"library": "smp", "name": "Segformer", "encoder": "mit_b0"},
    "Unet EfficientNet-B0, drop connect": {"library": "smp", "name": "Unet", "encoder": "efficientnet-b0"},
    "Unet ResNet-18, none": {"library": "smp", "name": "Unet", "encoder": "resnet18"},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_time_of_a_step(name: str) -> None:
    data = {"format": "folder", "root": "nowhere", "classes": [f"c{i}" for i in range(19)], "crop_px": [256, 256]}
    model = {"weights": None, "weights_backbone": None, **NETWORKS[name]}
    config = validate_config({"name": "r", "data": data, "model": model, "train": {"batch_size": 4, "ema": None}})
    engine = build_trial_engine(config, StepLayout("single", (torch.device("cpu"),)))
    engine.network.module.train()
    batches = [blank_batch(build_scheme(config.data), 4, (256, 256))]
    masks, seconds, launches = engine.masks, {True: [], False: []}, {}  # type: ignore[var-annotated]
    for number in range(16):
        is_masked = number % 2 == 0
        engine.masks = masks if is_masked else None
        if number < 2:
            with LaunchCounter() as counter:
                engine.step(batches)
            launches[is_masked] = counter.total
            continue
        began = time.process_time()
        engine.step(batches)
        seconds[is_masked].append(time.process_time() - began)
    ours, theirs = (statistics.median(seconds[each]) for each in (True, False))
    print(f"{name}: {1000 * ours:.0f} / {1000 * theirs:.0f} ms = {ours / theirs:.3f}, launches {launches}", flush=True)
