"""Figures of whole trainings, on one card; with a few steps of small images on a CPU."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import segapp
from segapp.onboarding.init import InitRequest, propose_config
from tests.gpu.cases import Case
from tests.support.runs import draw_tiny_data

CAMVID = Path(os.environ.get("CAMVID", "data/camvid"))
"""Folder of CamVid, with the parts train, trainannot, val and valannot."""

CAMVID_KEYS = {
    "model.name": "deeplabv3_resnet50",
    "data.crop_px": [352, 480],
    "data.workers": 4,
    "optim.lr": 6e-4,
    "train.batch_size": 16,
    "train.precision": "amp-bf16",
    "schedule.warmup_steps": 100,
    "loss.class_weights": None,
    "eval.every_epochs": 50,
}
"""The command of the page `speed`, with four data workers."""

RUN_S = 60.0
"""Length of a run with the config that `segapp init` writes."""


def camvid_cases(device: str) -> list[Case]:
    """Return a case: DeepLabV3-R50 on CamVid."""
    return [Case("CamVid", partial(_camvid_row, torch.device(device)))]


def _camvid_row(place: torch.device) -> dict[str, Any]:
    is_gpu = place.type == "cuda"
    keys = {**CAMVID_KEYS, "data.root": str(CAMVID), "train.epochs": 12} if is_gpu else {"train.steps": 5}
    return _trained("camvid.yaml" if is_gpu else "demo.yaml", keys)


def init_cases(device: str) -> list[Case]:
    """Return a case: the config that `segapp init` writes for CamVid and this card, for a minute."""
    place = torch.device(device)
    return [Case("config of init", partial(_init_row, place))]


def _init_row(place: torch.device) -> dict[str, Any]:
    is_gpu = place.type == "cuda"
    with tempfile.TemporaryDirectory() as folder:
        data = CAMVID if is_gpu else draw_tiny_data(Path(folder) / "data")
        out = Path(folder) / "own.yaml"
        propose_config(InitRequest(data, out, is_tried=is_gpu))
        row = _trained(str(out), {} if is_gpu else {"train.steps": 5}, stop_s=RUN_S)
    return {"config": "of init", **row}


def _trained(config: str, keys: Mapping[str, Any], stop_s: float = float("inf")) -> dict[str, Any]:
    """Return the speed and the share of waiting of a training's later half, and its last mIoU."""
    began, steps = time.monotonic(), list[Any]()

    def watch(event: Any) -> None:
        if event.type == "step":
            steps.append(event)
            if time.monotonic() - began > stop_s:
                raise segapp.StopTraining("its time is over")

    with tempfile.TemporaryDirectory() as folder:
        more = {"log.every_steps": 5, "log.tensorboard": False}
        result = segapp.train(config, {**more, **keys}, run=Path(folder) / "run", on_event=watch, progress=False)
    late = steps[len(steps) // 2 :]
    median: Callable[[str], float] = lambda name: statistics.median(getattr(each, name) or 0.0 for each in late)  # noqa: E731
    return {
        "steps": result.step,
        "images/s": median("images_per_s"),
        "waiting for data": median("data_wait_frac"),
        "mIoU": None if result.val is None else result.val.miou,
        "s": time.monotonic() - began,
    }
