"""A config of trainings that are compared with each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def base(tiny_root: Path) -> dict[str, Any]:
    """A config of two epochs of two steps: batches of four of ten images, crops that are not square, no dropout.

    The network is shallow: in a deep one BatchNorm over a few values multiplies the rounding of float32, and
    convolutions in half precision are slow on a CPU.
    """
    data = {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0}
    return {
        "name": "tiny",
        "seed": 3,
        "data": {**data, "crop_px": [40, 56]},
        "model": {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
        "optim": {"name": "sgd", "lr": 0.002},
        "schedule": {"name": "constant"},
        "train": {"epochs": 2, "batch_size": 4},
        "log": {"every_steps": 1, "tensorboard": False},
    }
