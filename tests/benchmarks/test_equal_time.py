"""mIoU on CamVid at equal time: segapp's shipped config against SMP's example with Lightning, and against a plain loop.

Two trainings run at the same time, each with one thread on one core, for 12 minutes; in the second repetition they
change their cores and have another seed. All begin with random weights. The test needs the CamVid images, two cores
and, for two of the peers, lightning:

uv run --with lightning pytest -m benchmark -n 0 -s tests/benchmarks/test_equal_time.py
"""

from __future__ import annotations

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
from importlib.util import find_spec
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from segapp.metrics import ConfusionMatrix
from tests.support import ROOT

SECONDS = 60 * float(os.environ.get("SEGAPP_BENCHMARK_MINUTES", "12"))
STOP_S = 5
"""A training of segapp that is stopped writes a checkpoint first."""
BATCH = 4
NUM_CLASSES = 11
TRAINING_IMAGES = 367
VALIDATION_IMAGES = 101
PEERS = {
    "smp-example": ("smp", "--encoder", "resnext50_32x4d", "--batch", "32"),
    "smp-mobile": ("smp", "--encoder", "tu-mobilenetv3_large_100", "--batch", "4"),
    "plain": ("plain",),
}


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
            f"{self.wall_s:.0f} s, {self.cpu_s:.0f} s of CPU time"
        )


def on_core(core: int, arguments: Sequence[str], log: Path, seconds: float = 7200.0) -> tuple[float, float]:
    """Run a module with one thread on one core; return its wall and CPU seconds. After `seconds` it gets SIGTERM."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = ["taskset", "-c", str(core), sys.executable, "-W", "ignore", "-m", *arguments]
    began, deadline_s = time.monotonic(), time.monotonic() + seconds
    with log.open("wb") as output, log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=errors)
    ended = 0
    while not ended:
        time.sleep(0.2)
        ended, status, usage = os.wait4(process.pid, os.WNOHANG)
        if not ended and time.monotonic() > deadline_s:
            process.send_signal(signal.SIGTERM)
            deadline_s += 300
    process.returncode = os.waitstatus_to_exitcode(status)
    was_stopped = time.monotonic() - began >= seconds
    assert process.returncode == 0 or was_stopped, (command, log.with_suffix(".err").read_text()[-2000:])
    return time.monotonic() - began, usage.ru_utime + usage.ru_stime


def epochs_that_fit(step_s: float, validation_every: int, px_ratio: float) -> int:
    """Return the epochs of 92 steps that fit, less a tenth of the time for the start and the unforeseen.

    An image of the validation takes a third of an image of the training, times the ratio of their pixels.
    """
    validation_s = VALIDATION_IMAGES * step_s / BATCH * px_ratio / 3
    return max(1, int(0.9 * SECONDS / (TRAINING_IMAGES / BATCH * step_s + validation_s / validation_every)))


class PeerSide:
    """A training without segapp (`tests/support/camvid_peers.py`)."""

    def __init__(self, name: str, camvid: Path, out: Path, seed: int, core: int) -> None:
        self.name, self.camvid, self.out, self.seed, self.core = name, camvid, out, seed, core
        program, *options = PEERS[name]
        self._start = ["tests.support.camvid_peers", program, str(camvid)]
        self._options = [*options, "--seed", str(seed)]
        self.epochs = 50  # as the example is published
        out.mkdir(parents=True)

    def plan(self) -> None:
        """Choose the epochs from the time of some steps."""
        if self.name == "smp-example":
            return
        tried = self.out / "tried"
        on_core(self.core, [*self._start, str(tried), *self._options, "--steps", "14"], self.out / "tried.log")
        step_s = json.loads((tried / "training.json").read_text())["step_s"]
        validation = (4, 2.25) if self.name == "plain" else (1, 1.8)
        self.epochs = epochs_that_fit(step_s, *validation)

    def train(self) -> None:
        """Train; the process predicts the validation images afterwards, which does not count."""
        options = [*self._options, "--epochs", str(self.epochs), "--seconds", str(SECONDS)]
        on_core(self.core, [*self._start, str(self.out), *options], self.out / "train.log")

    def result(self) -> Trained:
        """Return the numbers of the training and its mIoU."""
        numbers = json.loads((self.out / "training.json").read_text())
        images, wall_s, cpu_s = (numbers[key] for key in ("images", "wall_s", "cpu_s"))
        miou = miou_of(self.camvid, self.out / "labels")
        return Trained(self.name, self.seed, self.core, self.epochs, images, wall_s, cpu_s, miou)


class SegappSide:
    """`segapp train --config camvid.yaml` with other epochs."""

    def __init__(self, camvid: Path, out: Path, seed: int, core: int) -> None:
        self.camvid, self.out, self.seed, self.core = camvid, out, seed, core
        self._config = ["--config", str(ROOT / "configs/camvid.yaml"), f"data.root={camvid}", f"seed={seed}"]
        self.run = out / "run"
        self.epochs = 0
        out.mkdir(parents=True)

    def plan(self) -> None:
        """Choose the epochs from the time of some steps."""
        profile = self.out / "profile.json"
        on_core(self.core, ["segapp", "profile", "--json", "--steps", "12", *self._config], profile)
        self.epochs = epochs_that_fit(sum(json.loads(profile.read_text())["phase_s"].values()), 4, 2.25)

    def train(self) -> None:
        """Train, and stop as a scheduler would if the time is over."""
        training = ["segapp", "train", "--plain", "--run", str(self.run), *self._config, f"train.epochs={self.epochs}"]
        self.times = on_core(self.core, training, self.out / "train.log", SECONDS - STOP_S)

    def result(self) -> Trained:
        """Return the numbers of the training, and the mIoU of its last weights, which `segapp eval` confirms."""
        last, scores = self.run / "checkpoints/last.pt", self.out / "eval.json"
        predict = ["segapp", "predict", str(last), str(self.camvid / "val"), "--out", str(self.out), "--save", "labels"]
        on_core(self.core, predict, self.out / "predict.log")
        on_core(self.core, ["segapp", "eval", str(last), "--json", str(scores)], self.out / "eval.log")
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
@pytest.mark.parametrize("peer", PEERS)
def test_miou_at_equal_time(peer: str, camvid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if PEERS[peer][0] == "smp" and not find_spec("lightning"):
        pytest.skip("needs lightning: uv run --with lightning pytest ...")
    results: list[list[Trained]] = []
    cores = sorted(os.sched_getaffinity(0))[:2]
    for seed in (0, 1):
        first, second = cores if seed == 0 else reversed(cores)
        sides = [
            SegappSide(camvid, tmp_path / f"segapp-{seed}", seed, first),
            PeerSide(peer, camvid, tmp_path / f"{peer}-{seed}", seed, second),
        ]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda side: side.plan(), sides))
            list(pool.map(lambda side: side.train(), sides))
            results.append(list(pool.map(lambda side: side.result(), sides)))
        with capsys.disabled():
            print("", *results[-1], sep="\n")
    ours, theirs = zip(*results, strict=True)
    with capsys.disabled():
        gain = statistics.mean(our.miou - their.miou for our, their in results)
        speed = statistics.mean((our.images / our.wall_s) / (their.images / their.wall_s) for our, their in results)
        print(
            f"{peer}: mIoU {statistics.mean(each.miou for each in ours):.4f} of segapp, "
            f"{statistics.mean(each.miou for each in theirs):.4f} of the peer ({gain:+.4f}); "
            f"images/s, segapp : peer = {speed:.3f}"
        )
    assert all(each.wall_s <= SECONDS + 60 for each in (*ours, *theirs))
