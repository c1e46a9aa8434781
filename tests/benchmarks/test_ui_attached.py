"""Images/s of a training while a screen shows it, over the same training alone, in turns of the same run.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_ui_attached.py
"""

from __future__ import annotations

import os
import pty
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_runs import events, merged, segapp

from segapp.config import dump_config

TURNS, TURN_S, SETTLE_S = 6, 12.0, 4.0


class Viewer:
    """`segapp attach` in a terminal of its own, whose output is read and thrown away."""

    def __init__(self, folder: Path) -> None:
        self._ours, theirs = pty.openpty()
        self.num_bytes = 0
        env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "36"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "segapp", "attach", "run"],
            cwd=folder, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        try:
            while data := os.read(self._ours, 65536):
                self.num_bytes += len(data)
        except OSError:
            return

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        os.close(self._ours)


@pytest.mark.benchmark
@pytest.mark.timeout(1200)
def test_images_per_second_with_a_screen_attached(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = merged(
        tiny,
        data={"crop_px": [96, 128]},
        model={"name": "lraspp", "encoder": "mobilenet_v3_large"},
        train={"epochs": 100_000, "batch_size": 4, "ema": None},
        eval={"every_epochs": 100_000},
        log={"every_steps": 10},
        checkpoint={"every_epochs": None, "every_minutes": 1000.0},
    )
    (tmp_path / "tiny.yaml").write_text(dump_config(config))
    started = segapp("train", "--config", "tiny.yaml", "--run", "run", "--detach", cwd=tmp_path, OMP_NUM_THREADS="2")
    assert started.returncode == 0, started.stderr
    windows: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    num_bytes = 0
    try:
        for turn in range(TURNS):
            is_attached = turn % 2 == 1
            viewer = Viewer(tmp_path) if is_attached else None
            time.sleep(SETTLE_S)  # a screen that opens imports a lot
            began, before = time.time(), 0 if viewer is None else viewer.num_bytes
            time.sleep(TURN_S)
            windows[is_attached].append((began, time.time()))
            if viewer is not None:
                num_bytes += viewer.num_bytes - before
                viewer.close()
    finally:
        segapp("ctl", "run", "stop", "--wait", cwd=tmp_path)
    steps = [(event["t"], event["step"]) for event in events(tmp_path / "run", "step")]

    def rate(began: float, ended: float) -> float:
        inside = [(t, step) for t, step in steps if began <= t <= ended]
        return 4 * (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    alone, attached = ([rate(*window) for window in windows[key]] for key in (False, True))
    pairs = [a / b for a, b in zip(attached, alone, strict=True)]
    print(
        f"\nimages/s alone {statistics.median(alone):.1f}, with a screen {statistics.median(attached):.1f}, ratio "
        f"{statistics.median(pairs):.3f} ({min(pairs):.3f} to {max(pairs):.3f}); "
        f"{num_bytes / 1024 / TURN_S / (TURNS // 2):.1f} KiB/s to the terminal"
    )
