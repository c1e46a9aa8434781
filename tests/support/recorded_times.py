"""Records what real trainings tell the estimate of their remaining time: `python -m tests.support.recorded_times`.

Each file in `tests/training/telemetry/recorded_times` is one training of drawn images on this machine: its schedule,
what was observed at every `step` event, and when it ended. `test_remaining_time.py` replays them. Each step, and each
batch of an evaluation, waits for a fixed time too, as for a device: the speed of a shared processor cannot be
foreseen.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np

from segapp.failpoints import arm
from segapp.run.commands import parse_command, send_command
from segapp.run.events import RunEnd
from segapp.run.events import writer as event_log
from segapp.training.telemetry.clock import Clock
from segapp.training.telemetry.remaining_time import Observed, RemainingTime
from tests.support.live_runs import seen, wait_for
from tests.support.runs import draw_scene, merged, train

FOLDER = Path(__file__).parent.parent / "train/telemetry/recorded_times"

WAITS = "train.step=sleep:0.4;eval.batch=sleep:0.3"

SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"train": {"epochs": 6}},
    "rare_evaluations": {"train": {"epochs": 6}, "eval": {"every_epochs": 2}, "checkpoint": {"every_epochs": 3}},
    "short_last_interval": {"train": {"epochs": 6, "batch_size": 5}, "log": {"every_steps": 9}},
    "many_saves": {"train": {"epochs": 5}, "checkpoint": {"every_steps": 4}},
    "steps": {"train": {"epochs": 1, "steps": 75}, "eval": {"every_steps": 20}},
    "workers": {"train": {"epochs": 6, "batch_size": 2, "accumulate": 2}, "data": {"workers": 2}},
    "pause": {"train": {"epochs": 6}},
    "gpu0_bsz": {"train": {"epochs": 6}, "parallel": {"mode": "dp", "devices": ["cpu", "cpu", "cpu"]}},
}


def draw_data(root: Path, num_train: int = 56, num_val: int = 24) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    for split, count in (("train", num_train), ("val", num_val)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True)
        for i in range(count):
            image, mask = draw_scene(rng, 96, 128)
            cv2.imwrite(str(root / "images" / split / f"{i:02}.png"), image)
            cv2.imwrite(str(root / "masks" / split / f"{i:02}.png"), mask)
    return {
        "name": "tiny",
        "data": {
            "format": "folder",
            "root": str(root),
            "classes": ["a", "b", "c"],
            "crop_px": [96, 128],
            "workers": 0,
        },
        "model": {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
        "optim": {"name": "sgd", "lr": 0.001},
        "train": {"batch_size": 4, "ema": None},
        "eval": {"batch_size": 4},
        "log": {"tensorboard": False, "every_steps": 5},
    }


def commands_of(shape: str, folder: Path) -> None:
    """Send the commands of a shape while it trains."""
    if shape == "gpu0_bsz":
        wait_for(lambda: len(seen(folder, "epoch_start")) == 4)
        send_command(folder, parse_command("set gpu0_bsz=0"))
    if shape == "pause":
        for epoch in (3, 4):
            wait_for(lambda epoch=epoch: len(seen(folder, "epoch_start")) == epoch)
            send_command(folder, parse_command("pause"))
            time.sleep(4)
            send_command(folder, parse_command("resume"))


def record(shape: str, folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """Train once; return the schedule, a row for each `step` event, and the end."""
    rows: list[list[Any]] = []
    found: dict[str, Any] = {}
    observe, etas, emit = RemainingTime.observe, RemainingTime.etas_s, event_log.EventLog.emit
    paused = Clock.spent

    class Heard:
        clock: Clock

    of = Observed.of

    def noted(clock: Clock) -> Observed:
        Heard.clock = clock
        return of(clock)

    def observed(self: RemainingTime, observed: Observed, way: Any = None) -> None:
        found["schedule"] = asdict(self._timetable)
        rows.append([time.perf_counter(), paused(Heard.clock, "paused").seconds, repr(way), observed])
        observe(self, observed, way)

    def estimated(self: RemainingTime, place: Any) -> Any:
        rows[-1].append(place)
        return etas(self, place)

    def emitted(self: Any, event: Any) -> None:
        if isinstance(event, RunEnd):
            found["end"] = [time.perf_counter(), paused(Heard.clock, "paused").seconds]
        emit(self, event)

    threading.Thread(target=commands_of, args=(shape, folder), daemon=True).start()
    with (
        mock.patch.object(Observed, "of", noted),
        mock.patch.object(RemainingTime, "observe", observed),
        mock.patch.object(RemainingTime, "etas_s", estimated),
        mock.patch.object(event_log.EventLog, "emit", emitted),
    ):
        assert train(merged(config, **SHAPES[shape]), folder) == 0
    began = rows[0][0]
    found["end"][0] -= began
    return {**found, "rows": [[row[0] - began, *row[1:]] for row in rows]}


def main(shapes: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    arm(WAITS)
    with tempfile.TemporaryDirectory() as temporary:
        config = draw_data(Path(temporary) / "data")
        for shape in shapes or SHAPES:
            found = record(shape, Path(temporary) / shape, config)
            rows = json.dumps(json.loads(json.dumps(found), parse_float=lambda text: round(float(text), 4)))
            (FOLDER / f"{shape}.json").write_text(rows.replace("], [[", "],\n [[") + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
