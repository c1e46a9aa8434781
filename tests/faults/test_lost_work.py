"""The seconds of work that a kill loses, against what the pages promise: kills at the worst moment, in a save."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

import pytest

from segapp.checkpoint.saver import SAVING_SHARE
from tests.support.fault_runs import FaultRun, Invariants, case

RHYTHMS: dict[str, dict[str, Any]] = {
    "short epochs": {"every_epochs": 1},
    "minutes": {"every_minutes": 0.15},
}


def longest_s(steps: dict[int, float], num_steps: int) -> float:
    """The longest time that so many steps in a row took."""
    return max(at_s - steps[step - num_steps] for step, at_s in steps.items() if step > num_steps)


@case(
    "F02",
    how="SIGKILL while the third save is written; writes of 0.2 s, epochs of 0.5 s",
    passes="lost seconds <= interval + 20 saves + the one that was killed, and more than the interval of an epoch",
)
@pytest.mark.faults
@pytest.mark.parametrize("rhythm", RHYTHMS)
def test_kill_loses_at_most_the_promised_seconds(
    new_run: Callable[..., FaultRun],
    invariants: Invariants,
    rhythm: str,
    record_property: Callable[[str, object], None],
) -> None:
    run = new_run(
        train={"epochs": 4000},
        eval={"every_epochs": 4000},
        checkpoint={"every_epochs": None, "every_steps": None, **RHYTHMS[rhythm]},
    )
    program = run.start(failpoints="train.step=sleep:0.1;ckpt.before_fsync=sleep:0.2")
    run.wait_for_act(program, "ckpt.before_fsync", 3)
    program.send(signal.SIGKILL)
    assert run.ended(program).returncode == -signal.SIGKILL

    saves, steps = run.events("checkpoint"), {event["step"]: event["t"] for event in run.events("step")}
    assert len(saves) == 2, "the third save was under way"
    assert run.committed()[0]["step"] == saves[-1]["step"]
    lost_s = max(steps.values()) - steps[saves[-1]["step"]]
    save_s = max(save["save_s"] + save["copy_s"] for save in saves)
    slack_s = 2 * longest_s(steps, 1)  # a save begins at a boundary of steps, and the kill came in one
    interval_s = {"short epochs": longest_s(steps, 5), "minutes": 60 * 0.15}[rhythm]
    assert lost_s <= interval_s + save_s / SAVING_SHARE + save_s + slack_s
    if rhythm == "short epochs":
        assert lost_s > 3 * interval_s, "saves of a twentieth of the time"
        assert saves[-1]["t"] - saves[0]["t"] >= (saves[0]["save_s"] + saves[0]["copy_s"]) / SAVING_SHARE - slack_s
    else:
        assert lost_s >= interval_s - slack_s
    record_property("figure", f"{rhythm}: lost {lost_s:.1f} s; interval {interval_s:.1f} s, a save {save_s:.2f} s")
    invariants.check(run, resume=False)
