"""Images/s of a training while a screen shows it, over the same training alone, in short turns of the same run.

The screen stays open: in the turns without it, its process is stopped. Turns in which the machine does other work than
the training, the screen and this benchmark are not counted.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_ui_attached.py
"""

from __future__ import annotations

import os
import pty
import shutil
import signal
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from segapp.config import dump_config
from segapp.run.folder import RunFolder
from tests.support.runs import events, merged, segapp

PAIRS, TURN_S, SETTLE_S = 20, 5.0, 1.0
MOST_FOREIGN = 0.05
"""Of the machine's processors, in one turn."""


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
        self.pid = self._process.pid
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        try:
            while data := os.read(self._ours, 65536):
                self.num_bytes += len(data)
        except OSError:
            return

    def show(self, is_shown: bool) -> None:
        self._process.send_signal(signal.SIGCONT if is_shown else signal.SIGSTOP)

    def close(self) -> None:
        self.show(True)
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)
        os.close(self._ours)


def busy_s() -> float:
    """Processor time that the machine has worked."""
    user, nice, system, _, _, irq, soft = (int(word) for word in Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def used_s(pid: int) -> float:
    """Processor time that a process has used."""
    words = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.benchmark
@pytest.mark.timeout(1200)
def test_training_speed_with_screen_attached(tiny: dict[str, Any], tmp_path: Path) -> None:
    # An epoch of 500 steps: what an epoch's end costs is no part of the question.
    root = tmp_path / "data"
    shutil.copytree(tiny["data"]["root"], root)
    for file in [*root.glob("*/train/*")]:
        for k in range(199):
            file.with_stem(f"{file.stem}_{k}").hardlink_to(file)
    config = merged(
        tiny,
        data={"root": str(root), "crop_px": [96, 128]},
        model={"name": "lraspp", "encoder": "mobilenet_v3_large"},
        train={"epochs": 100_000, "batch_size": 4, "ema": None},
        eval={"every_epochs": 100_000},
        log={"every_steps": 10},
        checkpoint={"every_epochs": None, "every_minutes": 1000.0},
    )
    (tmp_path / "tiny.yaml").write_text(dump_config(config))
    started = segapp("train", "--config", "tiny.yaml", "--run", "run", "--detach", cwd=tmp_path, OMP_NUM_THREADS="2")
    assert started.returncode == 0, started.stderr
    holder = RunFolder(tmp_path / "run").read_holder()
    assert holder is not None
    viewer = Viewer(tmp_path)
    turns: list[tuple[bool, float, float, float]] = []
    screen_s = num_bytes = 0.0
    try:
        time.sleep(10)  # a screen that opens imports a lot
        for turn in range(2 * PAIRS):
            is_shown = turn % 2 == 1
            viewer.show(is_shown)
            time.sleep(SETTLE_S)
            began, busy, known = time.time(), busy_s(), sum(map(used_s, (holder.pid, viewer.pid, os.getpid())))
            screen, shown = used_s(viewer.pid), viewer.num_bytes
            time.sleep(TURN_S)
            known = sum(map(used_s, (holder.pid, viewer.pid, os.getpid()))) - known
            foreign = (busy_s() - busy - known) / (TURN_S * (os.cpu_count() or 1))
            turns.append((is_shown, began, time.time(), foreign))
            screen_s += used_s(viewer.pid) - screen
            num_bytes += viewer.num_bytes - shown
    finally:
        viewer.close()
        segapp("ctl", "run", "stop", "--wait", cwd=tmp_path)
    steps = [(event["t"], event["step"]) for event in events(tmp_path / "run", "step")]

    def rate(began: float, ended: float) -> float:
        inside = [(t, step) for t, step in steps if began <= t <= ended]
        return 4 * (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    pairs = [
        (rate(*alone[1:3]), rate(*shown[1:3]))
        for alone, shown in zip(turns[::2], turns[1::2], strict=True)
        if max(alone[3], shown[3]) <= MOST_FOREIGN
    ]
    assert pairs, "the machine was never quiet"
    ratios = sorted(shown / alone for alone, shown in pairs)
    print(
        f"\n{len(pairs)} quiet pairs of {PAIRS}: images/s alone {statistics.median(a for a, _ in pairs):.1f}, with a "
        f"screen {statistics.median(b for _, b in pairs):.1f}, ratio {statistics.median(ratios):.3f} (quartiles "
        f"{ratios[len(ratios) // 4]:.3f} and {ratios[3 * len(ratios) // 4]:.3f}); the screen takes "
        f"{100 * screen_s / (PAIRS * TURN_S):.1f} % of a core and {num_bytes / 1024 / TURN_S / PAIRS:.1f} KiB/s"
    )
