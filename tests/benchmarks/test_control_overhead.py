"""What watching and steering cost a step: time of each part over the time of a step of the demo's size.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_control_overhead.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segapp.checkpoint.saver import Captured, CheckpointSaver, Position, SaveRules
from segapp.config import LiveSettings
from segapp.memory.counters import HEARTBEAT_S, MEMORY_S, DeviceMemoryTracker, MemorySampler, device_info_of
from segapp.parallel.distributed import Ranks
from segapp.run.events import EventLog, EventWriter, Step
from segapp.run.folder import RunFolder
from segapp.training.batch_split import BatchSplitController
from segapp.training.commands import CommandController, RecomputableBlocks
from segapp.training.context import RunContext
from segapp.training.inbox import Inbox
from segapp.training.progress import TrainingProgress
from segapp.training.reporting import ActivityLog
from segapp.training.signals import StopSignals
from segapp.training.step.network import TrainedNetwork
from segapp.training.trainer import SafePoint
from tests.support.runs import events, merged, train

REPEATS = 400
PHASES = ("forward", "loss", "backward", "step", "data")


def median_us(act: Callable[[], Any]) -> float:
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


@pytest.mark.benchmark
@pytest.mark.timeout(900)
def test_control_overhead(tiny: dict[str, Any], tmp_path: Path) -> None:
    import torch

    config = merged(
        tiny,
        data={"crop_px": [128, 128]},
        model={"name": "lraspp", "encoder": "mobilenet_v3_large"},
        train={"epochs": 4, "batch_size": 2},
    )
    assert train(config, tmp_path / "run") == 0
    step_us = statistics.median(event["step_s"] for event in events(tmp_path / "run", "step")) * 1e6

    folder = RunFolder.create(path=tmp_path / "desk")
    event_log = EventLog(EventWriter(folder.events))
    watch = DeviceMemoryTracker([device_info_of(torch.device("cpu"))])
    inbox = Inbox(folder, event_log)
    context = RunContext(folder, event_log, Ranks(), StopSignals(), watch)
    linear: Any = torch.nn.Linear(1, 1)
    controller = CommandController(
        inbox,
        event_log,
        BatchSplitController(TrainedNetwork(linear, linear, torch.device("cpu")), 2, "single"),
        watch,
        LiveSettings(),
        recompute=RecomputableBlocks(torch.nn.Linear(1, 1)),
    )
    saver = CheckpointSaver(folder.checkpoints, SaveRules(), event_log, Ranks(), lambda: Captured({}, Position(), None))
    activities = ActivityLog(event_log, watch, lambda: 0)
    safe_point = SafePoint(context, controller, saver, TrainingProgress(epochs=9), activities)
    monitor = MemorySampler(event_log.emit, watch)
    parts_us = {
        "a look (no poll due)": median_us(safe_point.check),
        "five marks": median_us(lambda: [watch.mark(phase) for phase in PHASES]),
        "step event": median_us(lambda: event_log.emit(Step(epoch=1, step=1, loss=0.5, lr=0.1, split=[2, 3, 3]))),
        "poll of the inbox, 4 a second": median_us(lambda: controller.inbox.take(is_due=True)) * 4 * step_us / 1e6,
        "memory event, every 2 s": median_us(monitor.sample) * step_us / 1e6 / MEMORY_S,
        "heartbeat, every 5 s": median_us(monitor.beat) * step_us / 1e6 / HEARTBEAT_S,
    }
    print(f"\nmedian step {step_us / 1000:.1f} ms; share of it, and microseconds a step:")
    for name, cost_us in parts_us.items():
        print(f"  {name:<32} {100 * cost_us / step_us:7.4f} %  {cost_us:8.2f}")
    print(f"  {'together':<32} {100 * sum(parts_us.values()) / step_us:7.4f} %")
    assert step_us > 0
