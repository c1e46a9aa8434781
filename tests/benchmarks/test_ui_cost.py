"""What the screen computes: a chart of 1e6 steps, and attaching to 1e6 events with keys that act meanwhile."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from textual.app import App, ComposeResult

from segapp.tui.app import MonitorApp, collect_rarely
from segapp.tui.chart import LossChart
from segapp.view.source import LiveSource
from segapp.view.view import View
from tests.support.recorded_runs import RecordedRun

pytestmark = pytest.mark.benchmark


@pytest.fixture(autouse=True)
def _collection_of_a_screen() -> Iterator[None]:
    """Garbage is collected as in the process of a screen."""
    threshold = gc.get_threshold()
    gc.collect()
    collect_rarely()
    yield
    gc.set_threshold(*threshold)
    gc.unfreeze()


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
    alone, with_screen, waits = [], [], []
    for _ in range(5):
        began = time.perf_counter()
        source = LiveSource(run.folder)
        while source.poll():
            pass
        alone.append(time.perf_counter() - began)
        assert source.view.num_events == 1_000_000
        began = time.perf_counter()
        waits += asyncio.run(keys_while_reading(LiveSource(run.folder)))
        with_screen.append(time.perf_counter() - began)
    waits.sort()
    print(f"\nattach to 1e6 events, {size_mib:.0f} MiB: {median_and_range(alone)} (aim: <= 3 s)")
    print(
        f"with the screen: {median_and_range(with_screen)}; {len(waits)} keys meanwhile acted after "
        f"{1000 * waits[len(waits) // 2]:.0f} ms (median), {1000 * waits[-1]:.0f} ms at most"
    )


def median_and_range(times_s: list[float]) -> str:
    return f"{sorted(times_s)[len(times_s) // 2]:.2f} s ({min(times_s):.2f} to {max(times_s):.2f})"


async def keys_while_reading(source: LiveSource) -> list[float]:
    """Shows a run, and presses a key again and again until its events have been read; returns the times to act."""
    app, waits = MonitorApp(source), []
    async with app.run_test(size=(120, 36)):
        while source.status().loaded_frac < 1 or not source.view.num_events:
            began, before = time.perf_counter(), app.is_zoomed
            app.simulate_key("f")
            while app.is_zoomed == before:
                await asyncio.sleep(0.001)
            waits.append(time.perf_counter() - began)
    return waits


def test_time_of_a_chart_of_a_million_steps() -> None:
    class ChartApp(App[None]):
        def compose(self) -> ComposeResult:
            yield LossChart(id="loss")

    async def go() -> tuple[list[float], int]:
        view, num = View(), 1_000_000
        steps = list(range(1, num + 1))
        view.history.extend(steps, [float(s) for s in steps], [2 * math.exp(-s / 9e4) + random.random() for s in steps])
        app, times = ChartApp(), []
        async with app.run_test(size=(111, 23)) as pilot:
            chart = app.query_one(LossChart)
            chart.show(view)
            await pilot.pause()
            for step in range(num + 1, num + 41):
                view.history.extend([step], [float(step)], [random.random()])
                began = time.process_time()
                chart.show(view)
                await pilot.pause()
                times.append(time.process_time() - began)
        return times, view.history.size

    times, num_points = asyncio.run(go())
    times.sort()
    print(
        f"\nchart of 1e6 steps ({num_points} points kept), 100x20 cells: {1000 * times[len(times) // 2]:.1f} ms of CPU "
        f"a refresh, best {1000 * times[0]:.1f} ms (aim: <= 10 ms)"
    )
