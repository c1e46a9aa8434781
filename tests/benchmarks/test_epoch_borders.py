"""Images per second over whole epochs and within epochs, for data of CamVid's size and a step of 50 ms.

A stand-in for the step sleeps, as a host does that waits for its device. Everything else is real: workers read and
augment the images, the loop handles commands and writes events, the run is evaluated. The time of the evaluations is
counted separately, with the sample pictures; so is the time of saves, of which few are due.

    pytest tests/benchmarks/test_epoch_borders.py -m benchmark -n 0 -s
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from segapp.config import RunConfig, validate_config
from segapp.datasets.pool import Batch
from segapp.training.step.engine import StepEngine, StepResult
from tests.support.runs import draw_scene, events, train

pytestmark = pytest.mark.benchmark

NUM_IMAGES = {"train": 367, "val": 101}
HEIGHT_PX, WIDTH_PX = 360, 480
STEP_S = 0.05
BATCH = 8
EPOCHS = 6
WORKERS = 2


def sleep_step(engine: StepEngine, batches: Sequence[Batch], *_: object, **__: object) -> StepResult:
    """Stand in for `StepEngine.step`: sleep like a host that waits for its device."""
    time.sleep(STEP_S)
    zero = torch.zeros(())
    return StepResult(zero + 1, zero, zero, [len(batches[0])])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, rng = tmp_path_factory.mktemp("drawn"), np.random.default_rng(0)
    for split, count in NUM_IMAGES.items():
        for kind in ("images", "masks"):
            (folder / kind / split).mkdir(parents=True)
        for number in range(count):
            image, mask = draw_scene(rng, HEIGHT_PX, WIDTH_PX)
            cv2.imwrite(str(folder / "images" / split / f"{number:03}.png"), image)
            cv2.imwrite(str(folder / "masks" / split / f"{number:03}.png"), mask)
    return folder


def config_of(root: Path, eval_every_epochs: int) -> RunConfig:
    return validate_config(
        {
            "name": "borders",
            "data": {
                "format": "folder", "root": str(root), "classes": ["ground", "box", "disc"], "crop_px": [352, 480],
                "workers": WORKERS,
            },
            "model": {"library": "python", "name": "tests.support.own_parts:Net"},
            "optim": {"name": "sgd", "lr": 0.001},
            "train": {"epochs": EPOCHS, "batch_size": BATCH, "ema": None},
            "eval": {"every_epochs": eval_every_epochs, "batch_size": 4},
            "checkpoint": {"every_epochs": EPOCHS},
            "log": {"every_steps": 1, "tensorboard": False},
        }
    )  # fmt: skip


def busy_s(run: Path) -> dict[int, float]:
    """Return the seconds of evaluations and saves after each step, from the heartbeats at their begin and end."""
    beats = [beat for beat in events(run, "heartbeat") if beat["phase"] != "paused"]
    found: dict[int, float] = defaultdict(float)
    for beat, following in itertools.pairwise(beats):
        if beat["phase"] in ("eval", "save"):
            found[beat["step"]] += following["t"] - beat["t"]
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize("eval_every_epochs", [EPOCHS, 1])
def test_images_per_s_over_whole_epochs(
    root: Path, tmp_path: Path, eval_every_epochs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the end of the first epoch, in which the workers start, to the end of the last."""
    torch.set_num_threads(1)
    monkeypatch.setattr(StepEngine, "step", sleep_step)
    assert train(config_of(root, eval_every_epochs), tmp_path / "run") == 0
    others_s = busy_s(tmp_path / "run")
    within_s, firsts_s = [], []
    for before, step in itertools.pairwise(events(tmp_path / "run", "step")):
        taken_s = step["t"] - before["t"] - others_s[before["step"]]
        if before["epoch"] > 1 or step["epoch"] > 1:
            (within_s if step["epoch"] == before["epoch"] else firsts_s).append(taken_s)
    within, first = statistics.fmean(within_s), statistics.fmean(firsts_s)
    whole = (sum(within_s) + sum(firsts_s)) / (len(within_s) + len(firsts_s))
    print(
        f"\nevaluation every {eval_every_epochs} epochs: a step takes {1e3 * within:.1f} ms within an epoch, the first "
        f"of an epoch {1e3 * first:.0f} ms, evaluation and saves {sum(others_s.values()) / EPOCHS:.2f} s per epoch\n"
        f"images/s over whole epochs {BATCH / whole:.1f} / within epochs {BATCH / within:.1f} = {within / whole:.3f}"
    )
