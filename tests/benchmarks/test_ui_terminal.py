"""The screen at a pseudo-terminal: imports, first picture, bytes to the terminal, processor time and memory.

Processor time depends on what else the machine does: a loop of known work beside each figure shows how much.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_ui_terminal.py
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from segapp.config import dump_config
from segapp.run.folder import RunFolder
from tests.support.recorded_runs import RecordedRun, live_run
from tests.support.runs import merged
from tests.support.terminals import Terminal, terminal

pytestmark = pytest.mark.benchmark
REPEATS, MEASURED_S = 7, 15.0


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables with which Python keeps compiled modules, as it does where they are not set."""
    cache = tmp_path_factory.mktemp("compiled")
    code = "import segapp.tui.app, segapp.cli, segapp.commands.runs, segapp.commands.spawn, segapp.session.request"
    env = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache)}
    subprocess.run([sys.executable, "-c", code], env={**os.environ, **env}, check=True)
    return env


def known_work_s() -> float:
    """Processor time of a loop that takes about 0.1 s on a quiet core of 2024."""
    began = time.process_time()
    sum(i * i for i in range(2_500_000))
    return time.process_time() - began


def test_time_of_the_imports_of_the_screen(compiled: dict[str, str]) -> None:
    took_s, cpu_s = [], []
    for _ in range(REPEATS):
        code = "import time; import segapp.tui.app; print(time.process_time())"
        done = subprocess.run(
            [sys.executable, "-X", "importtime", "-c", code],
            env={**os.environ, **compiled}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        last = done.stderr.splitlines()[-1]
        took_s.append(int(last.split("|")[1]) / 1e6)
        cpu_s.append(float(done.stdout))
    print(
        f"\nimports of the screen, {REPEATS} times: median {statistics.median(took_s):.2f} s, best {min(took_s):.2f} s "
        f"(aim: <= 0.5 s); processor time with Python's start {statistics.median(cpu_s):.2f} s, best {min(cpu_s):.2f} s"
        f"; known work {known_work_s():.2f} s"
    )


def test_time_until_a_training_shows_its_screen(compiled: dict[str, str], tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "tiny.yaml").write_text(dump_config(merged(tiny)))
    took_s, cpu_s = [], []
    for i in range(REPEATS):
        began, folder = time.monotonic(), RunFolder(tmp_path / f"run-{i}")
        with terminal("train", "--config", "tiny.yaml", "--run", folder.path, cwd=tmp_path, **compiled) as shown:
            shown.wait_for("starting")
            took_s.append(time.monotonic() - began)
            cpu_s.append(shown.cpu_s())
            stop_trainer(folder)
    print(
        f"\nsegapp train until its first picture, {REPEATS} times: median {statistics.median(took_s):.2f} s, best "
        f"{min(took_s):.2f} s (aim: < 1 s); processor time of the screen {statistics.median(cpu_s):.2f} s, best "
        f"{min(cpu_s):.2f} s; known work {known_work_s():.2f} s"
    )


def stop_trainer(folder: RunFolder) -> None:
    """Ends the trainer of a run, also one that has not begun yet."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = file.read_bytes().split(b"\0")
            if b"--plain" in words and str(folder.path).encode() in words:
                os.kill(int(file.parent.name), signal.SIGKILL)


@pytest.fixture
def training(tmp_path: Path) -> Iterator[RecordedRun]:
    run = live_run(tmp_path / "run", epochs=40)
    yield run
    run.folder.release()


@pytest.mark.parametrize("size", [(80, 24), (120, 36), (200, 60)], ids=lambda size: f"{size[0]}x{size[1]}")
def test_cost_of_the_screen_of_ten_events_a_second(
    compiled: dict[str, str], training: RecordedRun, size: tuple[int, int], tmp_path: Path
) -> None:
    env = {**compiled, "COLORTERM": "truecolor", "COLUMNS": str(size[0]), "LINES": str(size[1])}
    with terminal("attach", training.folder.path, cwd=tmp_path, size=size, **env) as shown:
        figures = measure(shown, training)
    print(f"\n{size[0]}x{size[1]} at 10 events/s: {figures} (aims: <= 2 % of a core, <= 16 KiB/s, <= 90 MiB)")


@pytest.mark.parametrize("state", ["paused", "finished"])
def test_cost_of_the_screen_at_rest(
    compiled: dict[str, str], training: RecordedRun, state: str, tmp_path: Path
) -> None:
    if state == "finished":
        training.end()
    with terminal("attach", training.folder.path, cwd=tmp_path, COLORTERM="truecolor", **compiled) as shown:
        figures = measure(shown, training if state == "paused" else None, phase="paused")
    print(f"\n{state}: {figures} (aim: <= 1 KiB/s)")


def measure(shown: Terminal, run: RecordedRun | None, phase: str = "train") -> str:
    """Returns the figures of a screen while a run trains at 10 steps a second, or is paused, or does nothing."""
    began_s = next_s = time.monotonic()
    start: tuple[float, float, int] | None = None
    while start is None or time.monotonic() < start[0] + MEASURED_S:
        shown.read(0.05)
        now_s = time.monotonic()
        if run is not None and now_s >= next_s:
            run.clock.now_s = time.time() - (run.step_s if phase == "train" else 0)
            if phase == "train":
                run.train(1)
            else:
                run.beat(phase, 0.0)
            next_s += 0.1 if phase == "train" else 2.0
        if start is None and now_s > began_s + 6 and re.search(rb"LIVE|PAUSED|FINISHED", shown.output):
            start = now_s, shown.cpu_s(), len(shown.output)
    took_s = time.monotonic() - start[0]
    return (
        f"{100 * (shown.cpu_s() - start[1]) / took_s:.2f} % of a core (known work {known_work_s():.2f} s), "
        f"{(len(shown.output) - start[2]) / 1024 / took_s:.2f} KiB/s, {shown.shared_mib():.0f} MiB"
    )
