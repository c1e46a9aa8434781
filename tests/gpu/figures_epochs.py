"""Figures of whole trainings: what an epoch takes beside its steps, and what a change of the batch split takes."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from segapp.config import RunConfig, dump_config, validate_config
from segapp.run.commands import parse_command, send_command
from tests.gpu.cases import Case
from tests.gpu.figures_training import LARGE, TINY
from tests.support.live_runs import background, seen, wait_for
from tests.support.runs import draw_scene, events

WARM_EPOCHS = 2
"""Epochs that are not counted: workers start, libraries choose algorithms."""


def epoch_cases(device: str) -> list[Case]:
    """Return a case for one device, and one for a live change of the split of three replicas; tiny ones on a CPU."""
    is_gpu = device != "cpu"
    return [
        Case("whole epochs over within epochs", partial(_epochs_row, is_gpu)),
        Case("live change of the split", partial(_split_row, is_gpu)),
    ]


def _config(root: Path, is_gpu: bool, epochs: int, **parallel: Any) -> RunConfig:
    """Return the config of a training on drawn images: 180 of CamVid's size on a GPU, of which an epoch is 0.55 s."""
    size, num_images = ((360, 480), 180) if is_gpu else ((64, 96), 12)
    rng = np.random.default_rng(0)
    for split, count in (("train", num_images), ("val", 4)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            for kind, pixels in zip(("images", "masks"), draw_scene(rng, *size), strict=True):
                cv2.imwrite(str(root / kind / split / f"{i:03}.png"), pixels)
    crop_px = [352, 480] if is_gpu else [32, 32]
    data = {"format": "folder", "root": str(root), "classes": ["ground", "box", "disc"], "crop_px": crop_px}
    return validate_config(
        {
            "name": "epochs",
            "data": data,
            "model": LARGE if is_gpu else TINY,
            "optim": {"name": "adamw", "lr": 0.0001},
            "train": {"epochs": epochs, "batch_size": 15 if is_gpu else 6, "precision": "auto", "ema": 0.99},
            "log": {"every_steps": 1, "tensorboard": False},
            "parallel": parallel,
        }
    )


def _epochs_row(is_gpu: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = _config(folder / "data", is_gpu, 24 if is_gpu else 5, devices=[0] if is_gpu else "cpu")
        (folder / "run.yaml").write_text(dump_config(config))
        with background(folder / "run.yaml", cwd=folder) as process:
            assert process.wait() == 0, (folder / "lines.log").read_text()[-1000:]
        return {"device": "one", **epoch_figures(events(folder / "run"), config.train.batch_size)}


def epoch_figures(found: list[dict[str, Any]], batch_size: int) -> dict[str, Any]:
    """Return images per second over whole epochs and within epochs, from the events of a training.

    Args:
        found: the events, with a `step` for each update.
        batch_size: images of an update.
    """
    steps: dict[int, list[float]] = defaultdict(list)
    for event in found:
        if event["type"] == "step" and event["epoch"] > WARM_EPOCHS:
            steps[event["epoch"]].append(event["t"])
    # From the last step of an epoch to the last one of the next: a whole epoch with what lies between the two.
    ends = [times[-1] for _, times in sorted(steps.items())]
    num_images = batch_size * statistics.mean(len(times) for times in steps.values())
    within_s = sum(times[-1] - times[0] for times in steps.values())
    within = batch_size * sum(len(times) - 1 for times in steps.values()) / within_s
    whole = num_images * (len(ends) - 1) / (ends[-1] - ends[0])
    saves = [event["save_s"] for event in found if event["type"] == "checkpoint" and event.get("save_s") is not None]
    return {
        "images/s, whole epochs": whole,
        "images/s, within epochs": within,
        "whole over within": whole / within,
        "s a save": statistics.median(saves) if saves else None,
    }


def _split_row(is_gpu: bool) -> dict[str, Any]:
    devices = [0, 0, 0] if is_gpu else ["cpu"] * 3
    with tempfile.TemporaryDirectory() as name:
        folder, run = Path(name), Path(name) / "run"
        config = _config(folder / "data", is_gpu, 10 if is_gpu else 6, mode="dp", devices=devices)
        (folder / "run.yaml").write_text(dump_config(config))
        # Tiny epochs would be over before the command is read.
        slow = {} if is_gpu else {"SEGAPP_FAILPOINTS": "train.step=sleep:0.2"}
        with background(folder / "run.yaml", cwd=folder, **slow) as process:
            wait_for(lambda: [step for step in seen(run, "step") if step["epoch"] > WARM_EPOCHS], process=process)
            sent = time.time()
            send_command(run, parse_command("set gpu0_bsz=1"))
            assert process.wait() == 0, (folder / "lines.log").read_text()[-1000:]
        found = events(run)
    changes = [event for event in found if event["type"] == "gpu0_bsz"]
    applied = next((event for event in changes if event["status"] == "applied"), None)
    assert applied is not None, f"the split was not changed: {changes}"
    return {
        "device": "three times",
        "split": f"{applied['old']} to {applied['split']}",
        "applied after s": applied["t"] - sent,
        **border_figures(found, applied["epoch"]),
    }


def border_figures(found: list[dict[str, Any]], epoch: int) -> dict[str, Any]:
    """Return the seconds between the last step of an epoch and the first of the next: at a change, and elsewhere."""
    times: dict[int, list[float]] = defaultdict(list)
    for event in found:
        if event["type"] == "step":
            times[event["epoch"]].append(event["t"])
    borders = {each: times[each][0] - times[each - 1][-1] for each in times if each > WARM_EPOCHS}
    change_s = borders.pop(epoch)
    return {"border with the change, s": change_s, "other borders, s": statistics.median(borders.values())}
