"""What the screen costs: a chart of 1e5 points, attaching to 1e6 events, and a live run at a pseudo-terminal."""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
import pty
import random
import select
import struct
import sys
import termios
import time
from pathlib import Path

import pytest
from textual.app import App, ComposeResult

from segapp.run.events import EventReader
from segapp.tui.panes.chart import LossChart
from segapp.tui.state.source import LiveSource
from segapp.tui.state.view import View, fold_events
from tests.support.recorded_runs import RecordedRun, live_run

pytestmark = pytest.mark.benchmark


def many_events(path: Path, num: int) -> None:
    """A long history as the trainer writes it: every twentieth line is a memory sample of four devices."""
    rng = random.Random(0)
    device = {"device": "cuda:0", "used_mib": 14000.5, "total_mib": 22528.0, "utilization": 0.96, "temperature": 71.0,
              "allocated_mib": 9000.1, "reserved_mib": 13000.2, "peak_mib": 15000.3}  # fmt: skip
    with path.open("w") as file:
        for seq in range(1, num + 1):
            frame = {"v": 1, "seq": seq, "t": 1.7e9 + 0.5 * seq}
            if seq % 20 == 0:
                raw = {**frame, "type": "memory", "devices": [device] * 4, "step": seq}
            else:
                raw = {**frame, "type": "step", "epoch": 1 + seq // 1000, "step": seq, "loss": rng.random(),
                       "lr": 0.0099123, "images_per_s": 41.2345, "data_wait_frac": 0.0412345, "grad_norm": 1.8123456,
                       "split": [4, 10, 9, 9], "skipped": 0, "step_s": 0.7771234, "eta_epoch_s": 123.45,
                       "eta_run_s": 26000.1}  # fmt: skip
            file.write(json.dumps(raw, separators=(",", ":")) + "\n")


def test_time_of_attaching_to_a_million_events(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    many_events(run.folder.events, 1_000_000)
    size_mib = run.folder.events.stat().st_size / 2**20
    began, cpu = time.perf_counter(), time.process_time()
    source = LiveSource(run.folder)
    while source.poll():
        pass
    took, used = time.perf_counter() - began, time.process_time() - cpu
    assert source.view.num_events == 1_000_000
    print(f"\nattach to 1e6 events, {size_mib:.0f} MiB: {took:.2f} s, {used:.2f} s of CPU (aim: < 3 s)")
    began = time.perf_counter()
    fold_events(View(), EventReader(run.folder.events).read_raw())
    print(f"without skimming: {time.perf_counter() - began:.2f} s")


def test_time_of_a_chart_of_100000_points() -> None:
    class ChartApp(App[None]):
        def compose(self) -> ComposeResult:
            yield LossChart(id="loss")

    async def go() -> list[float]:
        view = View()
        steps = range(1, 100_001)
        view.history.extend(
            list(steps), [float(s) for s in steps], [2 * math.exp(-s / 9e3) + random.random() for s in steps]
        )
        app, times = ChartApp(), []
        async with app.run_test(size=(111, 23)) as pilot:
            chart = app.query_one(LossChart)
            chart.show(view)
            await pilot.pause()
            for step in range(100_001, 100_041):
                view.history.extend([step], [float(step)], [random.random()])
                began = time.process_time()
                chart.show(view)
                await pilot.pause()
                times.append(time.process_time() - began)
        return times

    times = sorted(asyncio.run(go()))
    print(
        f"\nchart of 1e5 points, 100x20 cells: {1000 * times[len(times) // 2]:.1f} ms of CPU a refresh (aim: < 10 ms)"
    )


def test_cpu_and_memory_of_the_screen_of_a_live_run(tmp_path: Path) -> None:
    run = live_run(tmp_path / "run")
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", COLORTERM="truecolor", XDG_CONFIG_HOME=str(tmp_path))
        os.execv(sys.executable, [sys.executable, "-m", "segapp", "attach", str(run.folder.path)])
    fcntl.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", 36, 120, 0, 0))
    began, first_s, num_bytes, next_s, from_s = time.monotonic(), None, 0, 0.0, None
    seen = b""
    while (now_s := time.monotonic() - began) < 20:
        if select.select([fd], [], [], 0.05)[0]:
            data = os.read(fd, 65536)
            num_bytes += len(data)
            seen = (seen + data)[-200_000:]
            if first_s is None and b"LIVE" in seen:
                first_s = time.monotonic() - began
        if now_s > next_s:  # four steps a second
            run.clock.now_s = time.time() - run.step_s
            run.train(1)
            next_s += 0.25
        if from_s is None and now_s > 5:
            from_s, from_cpu, from_bytes = now_s, cpu_s(pid), num_bytes
    assert first_s is not None
    assert from_s is not None
    share = (cpu_s(pid) - from_cpu) / (now_s - from_s)
    rate = (num_bytes - from_bytes) / 1024 / (now_s - from_s)
    os.write(fd, b"q")
    os.waitpid(pid, 0)
    run.folder.release()
    print(
        f"\n120x36 at 2 Hz: first picture {first_s:.2f} s (aim: < 1), {100 * share:.1f} % of a core (aim: < 5), ",
        end="",
    )
    print(f"{rate:.1f} KiB/s (aim: < 25)")


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
