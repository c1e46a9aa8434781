"""Helpers of the tests of whole runs: drawn scenes, configs, training in this process, events, states."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch

from segapp import failpoints
from segapp.config import RunConfig, validate_config
from segapp.config.trust import named_code
from segapp.custom.trust import accept_code
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from tests.support.programs import segapp as segapp  # the program beside `train`

MODEL: dict[str, Any] = {
    "library": "smp",
    "name": "PSPNet",
    "encoder": "tu-test_resnet",
    "options": {"encoder_depth": 3, "psp_out_channels": 32, "psp_dropout": 0.2},
}
"""A model with BatchNorm and dropout that is trained in milliseconds; the fork server has measured it for 3 classes."""

UNET: dict[str, Any] = {
    "library": "smp",
    "name": "Unet",
    "encoder": "tu-test_resnet",
    "options": {"encoder_depth": 3, "decoder_channels": [16, 8, 8]},
}
"""A model with five blocks that can be computed again."""

FCN = {"library": "torchvision", "name": "fcn", "encoder": "mobilenet_v3_small", "aux": False}
"""The section `model` of a network with dropout, whose BatchNorms have a momentum of their own."""


def draw_scene(rng: np.random.Generator, height: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns an image (H, W, 3) of a ground, a box and a disc, and its class ids (H, W), 255 at the left border."""
    mask = np.zeros((height, width), np.uint8)
    cv2.rectangle(mask, (int(rng.integers(4, width // 2)), 0), (width, int(rng.integers(8, height))), 1, -1)
    cv2.circle(mask, (int(rng.integers(0, width)), int(rng.integers(0, height))), int(rng.integers(4, 14)), 2, -1)
    colors = np.array([[70, 110, 60], [150, 90, 80], [60, 80, 190]], np.float32)
    image = colors[mask] + rng.normal(0, 12, (height, width, 3))
    mask[:, :2] = 255
    return image.clip(0, 255).astype(np.uint8), mask


TINY_SIZES_PX = ((48, 64), (45, 61), (48, 53))
"""Height and width of the first, second, third, fourth ... image of a split; no two have the same shape of a crop."""


def draw_tiny_data(root: Path) -> Path:
    """Draws a `folder` data set of 10 training and 4 validation images of 3 sizes and 3 classes; returns its root."""
    rng = np.random.default_rng(0)
    for split, count in (("train", 10), ("val", 4)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            image, mask = draw_scene(rng, *TINY_SIZES_PX[i % len(TINY_SIZES_PX)])
            cv2.imwrite(str(root / "images" / split / f"{i:02}.png"), image)
            cv2.imwrite(str(root / "masks" / split / f"{i:02}.png"), mask)
    return root


def merged(config: dict[str, Any], **sections: Any) -> RunConfig:
    """Returns a config with some keys of some sections replaced."""
    values = {
        key: {**config.get(key, {}), **value} if isinstance(value, dict) else value for key, value in sections.items()
    }
    return validate_config({**config, **values})


def train(config: RunConfig, folder: Path, **plan: Any) -> int:
    """Trains in this process, into `folder`, and returns the exit code; the config's code is the caller's own."""
    accept_code(named_code(config).values())
    return run_session(TrainRequest(config, run=folder, **plan))


def resume(config: RunConfig, folder: Path, **plan: Any) -> int:
    """Continues a run in this process, and returns the exit code."""
    return run_session(TrainRequest(config, RunFolder(folder), **plan))


@contextlib.contextmanager
def each_save() -> Iterator[None]:
    """Let trainings in this process make each due save, whatever the last one cost."""
    failpoints.arm("ckpt.background=each")
    try:
        yield
    finally:
        failpoints.arm("")


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Returns the events of a run, of one type or all."""
    found = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [event for event in found if kind in (None, event["type"])]


def losses(folder: Path) -> list[float]:
    """Returns the losses of all steps."""
    return [event["loss"] for event in events(folder, "step")]


def final_state(folder: Path) -> dict[str, Any]:
    """Returns the state in the last checkpoint of a run."""
    state: dict[str, Any] = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return state


def alerts(folder: Path) -> list[dict[str, Any]]:
    """Returns the alerts of a run but those about config, data and learning, which short runs deserve."""
    usual = ("classes", "learning", "precision", "schedule")
    return [alert for alert in events(folder, "alert") if alert["kind"] not in usual]


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every tensor and plain value of a nested state with its path."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from leaves(item, f"{path}/{index}")
    else:
        yield path, value


def differing(a: Any, b: Any) -> list[str]:
    """Returns the paths at which two states are not bitwise equal."""
    left, right = dict(leaves(a)), dict(leaves(b))
    names = [path for path in {*left, *right} if path not in left or path not in right]
    for path in {*left} & {*right}:
        x, y = left[path], right[path]
        is_equal = torch.equal(x, y) if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor) else x == y
        if not is_equal:
            names.append(path)
    return sorted(names)
