"""Ten profiled steps of each mode: launches, the share of time in which the device idles, and its longest gap."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.gpu.cases import Case
from tests.gpu.figures_training import LAYOUTS, Mode, batch_of, engine_of, figures_config, mode_of

NUM_STEPS = 10

DEVICE_KINDS = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
"""Categories of a Chrome trace for what runs on a card."""

HOST_KINDS = frozenset({"cpu_op", "cuda_runtime", "cuda_driver", "user_annotation"})
"""Categories for what the host does."""

Event = Mapping[str, Any]


def profile_cases(device: str) -> list[Case]:
    """Return a case for each mode; the Chrome traces are kept in `traces/` of the session."""
    place = torch.device(device)
    return [Case(f"{wanted}, 10 steps", partial(_row, place, wanted)) for wanted in LAYOUTS]


def _row(place: torch.device, wanted: Mode) -> dict[str, Any]:
    is_gpu = place.type == "cuda"
    config = figures_config(is_gpu, precision="amp-bf16" if is_gpu else "fp32")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    num_steps = NUM_STEPS if is_gpu else 2
    with engine_of(config, place, wanted) as engine:
        batch, mode = batch_of(config, engine, place), mode_of(engine)
        for _ in range(3 if is_gpu else 1):
            engine.step([batch])
        with profile(activities=activities) as found:
            for _ in range(num_steps):
                engine.step([batch])
            if is_gpu:
                torch.cuda.synchronize(place)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(os.environ.get("SEGAPP_GPU_OUT", scratch)) / "traces"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{wanted}.json"
        found.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    kinds = DEVICE_KINDS if is_gpu else frozenset({"cpu_op"})
    busy = busy_time(events, kinds)
    return {
        "mode": mode,
        "launches a step": busy.num_launches / num_steps,
        "ms per step": busy.total_us / 1e3 / num_steps,
        "idle %": 100 * busy.idle_share,
        "longest gap ms": busy.longest_gap_us / 1e3,
        "in it, the host": busy.cause,
    }


@dataclass(frozen=True)
class BusyTime:
    """Use of a device between its first and its last operation.

    Attributes:
        num_launches: operations.
        total_us: from the begin of the first to the end of the last.
        idle_share: share of that time in which none ran, 0 to 1.
        longest_gap_us: between two operations.
        cause: what the host spent most of the longest gap in.
    """

    num_launches: int
    total_us: float
    idle_share: float
    longest_gap_us: float
    cause: str


def busy_time(events: Sequence[Event], kinds: frozenset[str] = DEVICE_KINDS) -> BusyTime:
    """Return the use of the device in a Chrome trace.

    Args:
        events: `traceEvents`; times are in microseconds.
        kinds: categories of the device's operations.

    Raises:
        ValueError: there is no such operation.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    spans = sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in complete if e.get("cat") in kinds)
    if not spans:
        raise ValueError("the trace has no operation of the device: the profiler recorded the host alone")
    begin, reached = spans[0]
    idle_us, longest = 0.0, (0.0, begin, begin)
    for start, end in spans[1:]:
        if start > reached:
            idle_us += start - reached
            longest = max(longest, (start - reached, reached, start))
        reached = max(reached, end)
    total_us = reached - begin
    host = [event for event in complete if event.get("cat") in HOST_KINDS]
    return BusyTime(len(spans), total_us, idle_us / total_us, longest[0], _cause(host, longest[1], longest[2]))


def _cause(host: Sequence[Event], start: float, end: float) -> str:
    """Return the innermost operation of the host that covers half of a gap, else the one that covers most of it."""
    inside = [(_overlap(event, start, end), event) for event in host]
    inside = [(covered, event) for covered, event in inside if covered > 0]
    half = [event for covered, event in inside if covered >= (end - start) / 2]
    if half:
        return str(min(half, key=lambda event: float(event["dur"]))["name"])
    return str(max(inside, key=lambda each: each[0])[1]["name"]) if inside else ""


def _overlap(event: Event, start: float, end: float) -> float:
    return max(0.0, min(end, float(event["ts"]) + float(event["dur"])) - max(start, float(event["ts"])))
