"""What the tests share: a tiny drawn data set, a tiny config, and where the real images lie if they are here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch

from tests.support import ROOT, fault_table

# A busy machine is slow; that is no failure of a property.
hypothesis.settings.register_profile("segapp", deadline=None)
hypothesis.settings.load_profile("segapp")
os.environ.setdefault("OMP_NUM_THREADS", "1")
torch.set_num_threads(1)

CAMVID = ROOT.parent / "shared" / "camvid"

_outcomes: list[fault_table.Outcome] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    fault_table.note_cases(items)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _outcomes.extend(fault_table.outcomes_of(report))


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_controller = not hasattr(session.config, "workerinput")
    if is_controller and fault_table.is_asked_for() and _outcomes:
        fault_table.write_table(_outcomes)


@pytest.fixture(scope="session")
def camvid() -> Path:
    """The real CamVid images; users do not have them."""
    if not CAMVID.is_dir():
        pytest.skip("the CamVid images are not on this machine")
    return CAMVID


@pytest.fixture(scope="session")
def tiny_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `folder` data set of 10 training and 4 validation images, 48 x 64 px, 3 classes."""
    # Here, not above: the tests of segapp.parallel and segapp.losses run where there is nothing but torch.
    import cv2
    import numpy as np

    from tests.support.runs import draw_scene

    root = tmp_path_factory.mktemp("tiny-data")
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 4)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            image, mask = draw_scene(rng, 48, 64)
            cv2.imwrite(str(root / "images" / split / f"{i:02}.png"), image)
            cv2.imwrite(str(root / "masks" / split / f"{i:02}.png"), mask)
    return root


@pytest.fixture
def tiny(tiny_root: Path) -> dict[str, Any]:
    """A config as nested plain values: 3 epochs of 5 steps in well under a second a step."""
    return {
        "name": "tiny",
        "seed": 3,
        "data": {
            "format": "folder",
            "root": str(tiny_root),
            "classes": ["ground", "box", "disc"],
            "crop_px": [32, 32],
            "workers": 0,
        },
        "model": {"library": "torchvision", "name": "fcn", "encoder": "mobilenet_v3_small", "aux": False},
        "optim": {"name": "adamw", "lr": 0.001},
        "schedule": {"warmup_steps": 3},
        "train": {"epochs": 3, "batch_size": 2, "ema": 0.9},
        "log": {"every_steps": 1, "tensorboard": False},
    }
