"""mIoU on CamVid at equal CPU time: segapp's config against the same training in a plain PyTorch loop.

Two trainings run at the same time, each with one thread on one core, for 12 minutes of CPU time; in the second
repetition they change their cores and have another seed. CPU time is the same as wall time on an idle machine, and
hardly changes with the load. Both begin with random weights. The test needs the CamVid images and two cores:

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_equal_time.py

SEGAPP_BENCHMARK_MINUTES=6 and SEGAPP_BENCHMARK_SEEDS=1 shorten it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
import torch

from segapp.metrics import ConfusionMatrix
from tests.support import ROOT
from tests.support.plain_camvid import cpu_s_of

SECONDS = 60 * float(os.environ.get("SEGAPP_BENCHMARK_MINUTES", "12"))
SEEDS = int(os.environ.get("SEGAPP_BENCHMARK_SEEDS", "2"))
STOP_S = 5
"""A training of segapp that is stopped writes a checkpoint first."""
BATCH = 4
NUM_CLASSES = 11
TRAINING_IMAGES = 367
VALIDATION_IMAGES = 101
VALIDATION_EVERY, VALIDATION_PX_RATIO = 4, 2.25
"""Validation comes every 4 epochs, on images with 2.25 times the pixels of a crop."""


@dataclass(frozen=True)
class Trained:
    """A training of one seed, and its mIoU; `epochs` is the planned length of its schedule."""

    name: str
    seed: int
    core: int
    epochs: int
    images: int
    wall_s: float
    cpu_s: float
    miou: float

    def __str__(self) -> str:
        return (
            f"{self.name:12} seed {self.seed} core {self.core}: mIoU {self.miou:.4f}, {self.images} images "
            f"({self.images / TRAINING_IMAGES:.1f} of {self.epochs} epochs), {self.images / self.wall_s:.2f} images/s, "
            f"{self.images / self.cpu_s:.2f} images per CPU second, {self.wall_s:.0f} s, {self.cpu_s:.0f} s of CPU time"
        )


def on_core(core: int, arguments: Sequence[str], log: Path, limit_cpu_s: float = 7200.0) -> tuple[float, float]:
    """Run a module with one thread on one core; return its wall and CPU seconds. At the limit it gets SIGTERM."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ["taskset", "-c", str(core), sys.executable, "-W", "ignore", "-m", *arguments]
    began, is_stopped = time.monotonic(), False
    with log.open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
    watched, cpu_s = psutil.Process(process.pid), 0.0
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_s = max(cpu_s, cpu_s_of(watched))
        time.sleep(0.5)
        if cpu_s > limit_cpu_s and not is_stopped:
            process.send_signal(signal.SIGTERM)
            is_stopped = True
    assert process.returncode == 0 or is_stopped, (command, log.with_suffix(".err").read_text()[-2000:])
    return time.monotonic() - began, cpu_s


def epochs_that_fit(camvid: Path, out: Path, core: int) -> int:
    """Return the epochs that fit, by the time of 14 steps, less a tenth of the time for the start and the unforeseen.

    A validation image takes a third of an image of the training times the ratio of their pixels.
    """
    tried = ["tests.support.plain_camvid", str(camvid), str(out / "tried"), "--steps", "14"]
    on_core(core, tried, out / "tried.log")
    step_s = json.loads((out / "tried/training.json").read_text())["step_s"]
    validation_s = VALIDATION_IMAGES * step_s / BATCH * VALIDATION_PX_RATIO / 3
    return max(1, int(0.9 * SECONDS / (TRAINING_IMAGES / BATCH * step_s + validation_s / VALIDATION_EVERY)))


class PlainSide:
    """The training without segapp (`tests/support/plain_camvid.py`)."""

    def __init__(self, camvid: Path, out: Path, seed: int, core: int) -> None:
        self.camvid, self.out, self.seed, self.core, self.epochs = camvid, out, seed, core, 0
        out.mkdir(parents=True)

    def train(self) -> None:
        """Train; the process predicts the validation images afterwards, which does not count."""
        options = ["--seed", str(self.seed), "--epochs", str(self.epochs), "--seconds", str(SECONDS)]
        training = ["tests.support.plain_camvid", str(self.camvid), str(self.out), *options]
        on_core(self.core, training, self.out / "train.log")

    def result(self) -> Trained:
        """Return the numbers of the training and its mIoU."""
        numbers = json.loads((self.out / "training.json").read_text())
        images, wall_s, cpu_s = (numbers[key] for key in ("images", "wall_s", "cpu_s"))
        miou = miou_of(self.camvid, self.out / "labels")
        return Trained("plain", self.seed, self.core, self.epochs, images, wall_s, cpu_s, miou)


class SegappSide:
    """`segapp train --config camvid.yaml` with other epochs."""

    def __init__(self, camvid: Path, out: Path, seed: int, core: int) -> None:
        self.camvid, self.out, self.seed, self.core = camvid, out, seed, core
        self._config = ["--config", str(ROOT / "configs/camvid.yaml"), f"data.root={camvid}", f"seed={seed}"]
        self.run = out / "run"
        self.epochs = 0
        out.mkdir(parents=True)

    def train(self) -> None:
        """Train, and stop as a scheduler would when the time is over."""
        training = ["segapp", "train", "--plain", "--run", str(self.run), *self._config, f"train.epochs={self.epochs}"]
        self.times = on_core(self.core, training, self.out / "train.log", SECONDS - STOP_S)

    def result(self) -> Trained:
        """Return the numbers of the training, and the mIoU of its last weights, which `segapp eval` confirms."""
        last, scores = self.run / "checkpoints/last.pt", self.out / "eval.log"
        predict = ["segapp", "predict", str(last), str(self.camvid / "val"), "--out", str(self.out), "--save", "labels"]
        on_core(self.core, predict, self.out / "predict.log")
        on_core(self.core, ["segapp", "eval", str(last), "--json"], scores)
        miou = miou_of(self.camvid, self.out / "labels")
        assert json.loads(scores.read_text())["miou"] == pytest.approx(miou, abs=1e-6)
        steps = json.loads((self.run / "events.jsonl").read_text().splitlines()[-1])["step"]
        return Trained("segapp", self.seed, self.core, self.epochs, steps * BATCH, *self.times, miou)


def miou_of(camvid: Path, labels: Path) -> float:
    """Return the mIoU of label images over the 11 classes, from counts by numpy; segapp's matrix has to agree."""
    counts = np.zeros((12, 12), np.int64)  # rows: targets; 11 is unlabelled
    matrix = ConfusionMatrix(NUM_CLASSES, ignore_index=NUM_CLASSES)
    paths = sorted((camvid / "valannot").iterdir())
    assert len(paths) == VALIDATION_IMAGES
    for path in paths:
        target = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
        predicted = cv2.imread(str(labels / f"{path.stem}.png"), cv2.IMREAD_GRAYSCALE)
        assert target is not None
        assert predicted is not None
        assert predicted.shape == target.shape
        np.add.at(counts, (target.ravel(), predicted.ravel()), 1)
        matrix.update(torch.from_numpy(predicted[None]).long(), torch.from_numpy(target[None]).long())
    valid = counts[:NUM_CLASSES, :NUM_CLASSES]
    hits = valid.diagonal()
    iou = hits / (valid.sum(0) + valid.sum(1) - hits)
    assert matrix.scores().miou == pytest.approx(iou.mean(), abs=1e-12)
    return float(iou.mean())


@pytest.mark.benchmark
@pytest.mark.timeout(4 * 3600)
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_miou_at_equal_time(camvid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results: list[tuple[Trained, Trained]] = []
    cores = sorted(os.sched_getaffinity(0))[:2]
    for seed in range(SEEDS):
        first, second = cores if seed == 0 else reversed(cores)
        ours = SegappSide(camvid, tmp_path / f"segapp-{seed}", seed, first)
        theirs = PlainSide(camvid, tmp_path / f"plain-{seed}", seed, second)
        ours.epochs = theirs.epochs = epochs_that_fit(camvid, theirs.out, second)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda side: side.train(), (ours, theirs)))
        results.append((ours.result(), theirs.result()))
        with capsys.disabled():
            print("", *results[-1], sep="\n")
    of_segapp, of_plain = zip(*results, strict=True)
    with capsys.disabled():
        speed = statistics.mean((our.images / our.wall_s) / (plain.images / plain.wall_s) for our, plain in results)
        per_cpu_s = statistics.mean((our.images / our.cpu_s) / (plain.images / plain.cpu_s) for our, plain in results)
        print(
            f"mIoU {statistics.mean(each.miou for each in of_segapp):.4f} of segapp, "
            f"{statistics.mean(each.miou for each in of_plain):.4f} of the plain loop; "
            f"images/s, segapp : plain = {speed:.3f}; images per CPU second, segapp : plain = {per_cpu_s:.3f}"
        )
    assert all(each.cpu_s <= SECONDS + 60 for each in (*of_segapp, *of_plain))
