"""Signs of life of a training: heartbeats, and the alert of a blocked writer, on a clock that the test moves."""

from __future__ import annotations

import contextlib
import os
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from segapp.memory import counters
from segapp.memory.counters import DeviceInfo, DeviceMemoryTracker, MemorySampler
from segapp.run.events import EventLog, EventWriter, Step
from segapp.run.folder import RunFolder
from segapp.training import pulse
from segapp.training.pulse import Liveness
from tests.support.runs import events


class Listener:
    def __init__(self) -> None:
        self.events: list[Any] = []

    def handle(self, event: Any) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass


def alive(log: EventLog, step: Callable[[], int | None], saving_s: Callable[[], float | None]) -> Liveness:
    """Return the signs of life of a training whose progress and writer are those of the test."""
    liveness = Liveness(blocked_s=30.0)
    liveness.event_log, liveness.device_memory = log, DeviceMemoryTracker([DeviceInfo("cpu", pid=os.getpid())])

    class Progress:
        @property
        def position(self) -> Any:
            return types.SimpleNamespace(step=step())

    liveness.training = Progress(), types.SimpleNamespace(written_for_s=saving_s)  # type: ignore[assignment]
    return liveness


def test_blocked_write_is_told_again_after_each_further_time() -> None:
    now_s: list[float | None] = [None]
    listener = Listener()
    liveness = alive(EventLog(None, [listener]), lambda: 4, lambda: now_s[0])
    for now_s[0] in (10.0, 30.0, 40.0, 61.0, 90.0, 95.0, 120.0, None, 29.0, 35.0):
        liveness.beat()
    found = [event for event in listener.events if event.type == "alert"]
    assert [event.message.partition("after ")[2].split(" s;")[0] for event in found] == ["30", "61", "95", "35"]
    assert {(event.kind, event.step) for event in found} == {("storage", 4)}
    beats = [event for event in listener.events if event.type == "heartbeat"]
    assert [event.saving_s for event in beats[6:9]] == [120.0, None, 29.0]


def test_heartbeats_are_as_frequent_as_the_grace_requires(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, listener = 100.0, Listener()
    monkeypatch.setattr(pulse, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    liveness = Liveness(blocked_s=2.0)
    liveness.event_log = EventLog(None, [listener])
    for _ in range(12):
        assert liveness.poll() == 0.5
        now_s += 0.5
    assert [event.type for event in listener.events] == ["heartbeat"] * 3


def test_heartbeat_names_the_activity_of_the_training_thread() -> None:
    """Phases of a step, and the wait for a batch, are all `train`; a failed activity is not followed by another one."""
    listener, liveness = Listener(), Liveness()
    liveness.event_log, liveness.device_memory = EventLog(None, [listener]), DeviceMemoryTracker([DeviceInfo("cpu")])
    liveness.beat()
    assert (liveness.step(), liveness.saving_s(), liveness.has_stepped) == (None, None, False)
    liveness.mark("data")
    liveness.report_progress(activity="read")
    liveness.beat()
    with liveness.during("eval"), liveness.during("paused"):
        liveness.beat()
        assert (liveness.activity, liveness.device_memory.phase) == ("paused", "paused")
    assert (liveness.activity, liveness.device_memory.phase) == ("data", "data")
    liveness.mark("forward")
    liveness.beat()
    with pytest.raises(ZeroDivisionError), liveness.during("save"):
        _ = 1 / 0
    assert liveness.activity == "forward"
    found = [(event.phase, event.pid is not None) for event in listener.events]
    told = [("eval", False), ("paused", False), ("paused", True), ("eval", False), ("train", False)]
    assert found == [("start", True), ("train", True), *told, ("train", True), ("save", False)]


def test_each_second_counts_for_one_activity(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(pulse, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    liveness = alive(EventLog(None), lambda: 7, lambda: None)
    now_s += 50.0  # the model is built
    liveness.mark("data")
    with liveness.during("eval"):
        now_s += 7.0
        liveness.report_progress()
        now_s += 0.5
        assert liveness.spent_s("eval") == 7.5
        with liveness.during("paused"):
            now_s += 500.0
            assert (liveness.spent_s("eval"), liveness.spent_s("paused")) == (7.5, 500.0)
        now_s += 0.25
    now_s += 20.0
    with contextlib.suppress(ZeroDivisionError), liveness.during("eval"):
        now_s += 2.0
        _ = 1 / 0
    now_s += 3.0
    found = [liveness.spent_s(activity) for activity in ("start", "data", "eval", "paused", "save")]
    assert found == [50.0, 23.0, 9.75, 500.0, 0.0]


def test_progress_of_an_evaluation_is_told_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(pulse, "time", types.SimpleNamespace(monotonic=lambda: now_s))
    listener = Listener()
    liveness = alive(EventLog(None, [listener]), lambda: 7, lambda: None)
    with liveness.during("eval"):
        for number in range(1, 8):
            now_s += 0.4
            liveness.report_evaluated(number * 10, 33)
    found = [(event.step, event.num_evaluated, event.num_images) for event in listener.events]
    assert found == [(7, None, None), (7, 30, 33), (7, 33, 33), (7, None, None)]


@pytest.mark.parametrize(
    ("step_s", "log_every", "num_beats"),
    [(1e9, 1, 5), (0.03, 10, 5), (0.3, 100, 21), (7.0, 100, 6)],  # no step; fast steps in the log; few steps in it
)
def test_intervals_are_those_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step_s: float, log_every: int, num_beats: int
) -> None:
    """ "A `memory` event is written every 2 s and a `heartbeat` every 5 s": on a clock that the waits move.

    More heartbeats are only for steps that the last second of the log does not name.
    """
    run = RunFolder.create(path=tmp_path / "run")
    log, now_s, ages = EventLog(EventWriter(run.events)), 1000.0, list[float]()

    def step() -> int:
        return int((now_s - 1000.0) / step_s)

    clock = types.SimpleNamespace(monotonic=lambda: now_s)
    monkeypatch.setattr(pulse, "time", clock)
    monkeypatch.setattr("segapp.run.events.writer.time", types.SimpleNamespace(monotonic=lambda: now_s, time=time.time))
    liveness = alive(log, step, lambda: None)
    sampler = MemorySampler(log.emit, liveness.device_memory, step)
    assert sampler.poll() < counters.MEMORY_S  # the first sample comes soon after `run_start`
    liveness.mark("data")
    due_s = {liveness.poll: now_s, sampler.poll: now_s}
    while min(due_s.values()) <= 1020.5:
        poll = min(due_s, key=lambda each: due_s[each])
        while now_s < due_s[poll] - 1e-9:
            before, now_s = step(), min(due_s[poll], now_s + 0.03)
            if step() // log_every > before // log_every:
                log.emit(Step(epoch=1, step=step(), loss=1.0, lr=0.1))
            ages.append(now_s - 1000.0 - ((log.told[0] or 0) + 1) * step_s)  # since the first step not named
        due_s[poll] = now_s + poll()
    assert len(events(run.path, "memory")) == 11  # at 0, 2, ..., 20 s
    assert len(events(run.path, "heartbeat")) == num_beats  # at least at 0, 5, ..., 20 s
    assert max(ages) < 1.5  # the screen looks every half second
