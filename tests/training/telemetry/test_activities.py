"""What a training tells of evaluations, saves and pauses, and the times it counts for them."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from segapp.training import reporting as activities
from segapp.training.reporting import Clock, DataWatch
from tests.support.runs import alerts, events, merged, train


class Time:
    """A clock that the test moves."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_by(self, seconds: float) -> None:
        self.now_s += seconds


def test_clock_counts_each_second_for_one_activity() -> None:
    time = Time()
    clock = Clock(time)
    time.pass_by(50.0)  # the model is built
    with clock.during("load"):
        time.pass_by(3.0)
        clock.restart()
        time.pass_by(1.0)
    time.pass_by(20.0)
    clock.num_steps, clock.num_images = clock.num_steps + 1, clock.num_images + 8  # the first step compiles kernels
    for _ in range(4):
        time.pass_by(0.5)
        clock.num_steps, clock.num_images = clock.num_steps + 1, clock.num_images + 8
    with clock.during("paused"):
        time.pass_by(1000.0)
        with clock.during("save"):
            time.pass_by(2.0)
    time.pass_by(0.25)  # the device finishes the steps
    assert (clock.num_steps, clock.num_images) == (5, 40)
    assert clock.elapsed_s() == 1 + 20 + 2 + 2 + 0.25
    with clock.during("eval"):
        time.pass_by(7.0)
        with clock.during("paused"):
            time.pass_by(500.0)
        assert (clock.num_evaluations, clock.spent_s("eval")) == (0, 7.0)
    found = [clock.spent_s(activity) for activity in ("load", "eval", "save", "paused")]
    assert found == [4.0, 7.0, 2.0, 1500.0]
    assert clock.num_evaluations == 1


def test_failed_activity_is_not_counted() -> None:
    clock = Clock(Time())
    with pytest.raises(ZeroDivisionError), clock.during("eval"):
        _ = 1 / 0
    assert clock.num_evaluations == 0


def test_evaluations_and_saves_are_told_at_their_begin_and_end(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(activities, "PROGRESS_S", 0.0)
    monkeypatch.setattr(DataWatch, "after_interval", lambda *_: ["it waits"])
    config = merged(tiny, train={"epochs": 2, "batch_size": 5, "ema": None}, eval={"batch_size": 1})
    assert train(config, tmp_path / "run") == 0
    told = [event for event in events(tmp_path / "run", "heartbeat") if event.get("pid") is None]
    phases = [event["phase"] for event in told]
    assert [b for a, b in pairwise(["train", *phases]) if a != b] == ["eval", "train", "save", "train"] * 2
    done = [event["num_evaluated"] for event in told if event.get("num_evaluated") is not None]
    assert done == [1, 2, 3, 4] * 2
    assert {event["num_images"] for event in told if "num_evaluated" in event} <= {4, None}
    kinds = [(e["type"], e.get("phase")) for e in events(tmp_path / "run") if e["type"] in ("heartbeat", "val")]
    assert kinds.index(("heartbeat", "eval")) < kinds.index(("val", None))
    told_alerts = [(event["kind"], event["message"], event["step"]) for event in alerts(tmp_path / "run")]
    assert told_alerts == [("data", "it waits", event["step"]) for event in events(tmp_path / "run", "step")]
    last = events(tmp_path / "run", "step")[-1]
    assert 0 < last["eta_epoch_s"] == last["eta_run_s"] < 60  # the evaluation and the save of the end
