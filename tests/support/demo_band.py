"""The demo recipe over ten seeds, and the bands stored for its mIoU and its loss in tests/e2e/demo_band.json.

python -m tests.support.demo_band --write   trains ten times and stores the bands

It has 15 epochs in place of 45: ten runs then take less than six minutes of one core.
"""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from segapp.config import RunConfig, load_config
from tests.support import ROOT
from tests.support.runs import events, train

STORED = ROOT / "tests" / "e2e" / "demo_band.json"
SEEDS = range(10)
OVERRIDES = ("train.epochs=15", "log.every_steps=1", "log.tensorboard=false")
NUM_STDS = 4
"""Standard deviations from the mean to each end of a band."""


def demo(seed: int, *more: str) -> RunConfig:
    """Return demo.yaml with this seed, shortened."""
    root = f"data.root={ROOT / 'data' / 'demo'}"
    return load_config(ROOT / "configs" / "demo.yaml", [f"seed={seed}", root, *OVERRIDES, *more])


def train_seeds(folder: Path) -> list[Path]:
    """Train the demo with every seed on one device and return the run folders."""
    runs = [folder / f"seed_{seed}" for seed in SEEDS]
    for seed, run in zip(SEEDS, runs, strict=True):
        assert train(demo(seed, "parallel.mode=single"), run) == 0
    return runs


def miou_of(run: Path) -> float:
    """Return the mIoU of a run's last evaluation."""
    return float(events(run, "val")[-1]["miou"])


def epoch_losses(run: Path) -> list[float]:
    """Return the mean loss of the steps of each epoch."""
    losses: dict[int, list[float]] = {}
    for step in events(run, "step"):
        losses.setdefault(step["epoch"], []).append(step["loss"])
    return [statistics.mean(each) for each in losses.values()]


def band(values: Sequence[float]) -> dict[str, float]:
    """Return mean, standard deviation (n - 1), and the ends of the band: four of them from the mean."""
    mean, std = statistics.mean(values), statistics.stdev(values)
    numbers = {"min": min(values), "max": max(values), "mean": mean, "std": std}
    numbers |= {"low": mean - NUM_STDS * std, "high": mean + NUM_STDS * std}
    return {name: round(value, 5) for name, value in numbers.items()}


def stored_bands() -> dict[str, Any]:
    """Return what `store_bands` wrote."""
    stored: dict[str, Any] = json.loads(STORED.read_text())
    return stored


def store_bands(runs: Sequence[Path]) -> None:
    """Write the bands of these runs, with the commit and the versions they were made with."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    miou = [miou_of(run) for run in runs]
    losses = [epoch_losses(run) for run in runs]
    stored = {
        "command": "python -m tests.support.demo_band --write",
        "commit": commit.stdout.strip(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "overrides": OVERRIDES,
        "miou_of_seeds": [round(value, 5) for value in miou],
        "miou": band(miou),
        "loss_of_epochs": [band(values) for values in zip(*losses, strict=True)],
    }
    lines = ",\n".join(f"  {json.dumps(key)}: {_json(value)}" for key, value in stored.items())
    STORED.write_text(f"{{\n{lines}\n}}\n")


def _json(value: Any) -> str:
    if isinstance(value, list) and isinstance(value[0], dict):
        return "[\n    " + ",\n    ".join(map(json.dumps, value)) + "\n  ]"
    return json.dumps(value)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store_bands(train_seeds(Path(folder)))
