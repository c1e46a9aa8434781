"""Images/s of the trainer over a hand-written PyTorch loop: same model, batches, loader and loss, interleaved.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_step_overhead.py
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.assembly.devices import DevicePlan
from segapp.assembly.network import build_network
from segapp.checkpoint.saver import Position
from segapp.losses import CriterionCE
from segapp.memory.counters import DeviceMemoryTracker
from segapp.parallel.distributed import Ranks
from segapp.run.events import EventLog, EventWriter
from segapp.run.folder import RunFolder
from segapp.session.trainer import build_trainer, seed_everything
from segapp.training.context import RunContext
from segapp.training.progress import Best
from segapp.training.signals import StopSignals
from segapp.training.trainer import Trainer
from tests.support.runs import merged

ROUNDS = 12


def plain_loop(trainer: Trainer, model: torch.nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
    """What a person writes by hand: no checks, no events, no averages."""
    criterion = CriterionCE()
    mean = torch.tensor(trainer.facts.config["data"]["mean"]).view(1, 3, 1, 1) * 255
    std = torch.tensor(trainer.facts.config["data"]["std"]).view(1, 3, 1, 1) * 255
    model.train()
    for batch in trainer.train_loader.epoch(epoch):
        images = (batch.images.float() - mean) / std
        loss = criterion(model(images), batch.target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("workers", [0, 1])
def test_time_of_a_step_against_a_plain_loop(tiny: dict[str, Any], tmp_path: Path, workers: int) -> None:
    torch.set_num_threads(2)
    config = merged(
        tiny,
        data={"crop_px": [128, 128], "workers": workers},
        model={"name": "deeplabv3", "encoder": "mobilenet_v3_large"},
        optim={"name": "sgd", "lr": 0.01},
        train={"epochs": 1000, "batch_size": 2, "ema": None},
        log={"every_steps": 1},
    )
    folder = RunFolder.create("bench", path=tmp_path / "run")
    event_log = EventLog(EventWriter(folder.events))
    ranks, memory = Ranks(), DeviceMemoryTracker()
    context = RunContext(folder, event_log, ranks, StopSignals(), memory)
    trainer = build_trainer(config, context, DevicePlan("single", (torch.device("cpu"),), ""))
    seed_everything(config.seed)
    model = build_network(config.model, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=0.0005)

    def ours(epoch: int) -> None:
        trainer.progress.restore(Position(epoch, 0, trainer.position.step), Best())
        trainer.train_epoch()

    times: dict[str, list[float]] = {"segapp": [], "plain": []}
    for round_number in range(ROUNDS + 2):
        runs = [("segapp", ours), ("plain", lambda epoch: plain_loop(trainer, model, optimizer, epoch))]
        for name, run in runs if round_number % 2 else reversed(runs):
            began = time.perf_counter()
            run(round_number + 1)
            if round_number >= 2:
                times[name].append(time.perf_counter() - began)
    event_log.close()
    trainer.train_loader.close()
    ratios = sorted(p / s for s, p in zip(times["segapp"], times["plain"], strict=True))
    images = len(trainer.train_loader) * config.train.batch_size
    print(
        f"\nworkers {workers}: segapp {images / statistics.median(times['segapp']):.2f} images/s, "
        f"plain {images / statistics.median(times['plain']):.2f} images/s, "
        f"ratio of medians {statistics.median(times['plain']) / statistics.median(times['segapp']):.3f}, "
        f"pairwise median {statistics.median(ratios):.3f} (quartiles {ratios[len(ratios) // 4]:.3f} "
        f"to {ratios[-len(ratios) // 4]:.3f})"
    )
    assert len(times["segapp"]) == len(times["plain"]) == ROUNDS
