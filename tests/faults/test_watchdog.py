"""What hangs or dies is noticed in time, says where it was, and leaves a checkpoint and nothing else."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from segapp.view.runs import run_state
from tests.support.fault_runs import FaultRun, Invariants, case, some

NewRun = Callable[..., FaultRun]

HANG = {"hang_timeout_s": 2.0}


def workers_of(run: FaultRun, pid: int) -> list[int]:
    """The data workers of a trainer: its children."""
    return [child for child in run.left_behind() if child != pid]


@case("W01", how="a device call that never returns (failpoint)", passes="stacks, event, exit 8, exact")
@pytest.mark.faults
def test_hanging_device_call_exits_8_with_stacks(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(train=HANG, data={"workers": 2}, checkpoint={"every_steps": 3})
    done = run.train(failpoints="train.device=8:hang", timeout_s=40)
    invariants.assert_clear(done, 8, "no progress for 2 s in loss after step 7", "stacks.log")
    stacks = (run.folder / "stacks.log").read_text()
    assert "in _backward" in stacks
    assert stacks.count("most recent call first") >= 3, "the workers' stacks are there too"
    assert run.events("run_end")[-1]["exit_code"] == 8
    assert any(alert["kind"] == "hang" for alert in run.events("alert"))
    assert 0 < run.committed()[0]["step"] < 7, "the last checkpoint stays"
    invariants.check(run)


@case(
    "F38",
    how="SIGSTOP for 7 s to a trainer in a step, and one that waits for data, of 9 s, at limits of 5 s; SIGCONT",
    passes="goes on, no false alarm, exact",
)
@pytest.mark.faults_long
@pytest.mark.parametrize(("point", "visit"), [("train.step", 7), ("data.item", 13)])  # evaluations read 12 items
def test_continued_trainer_raises_no_false_alarm(
    new_run: NewRun, invariants: Invariants, point: str, visit: int
) -> None:
    run = new_run(train={"hang_timeout_s": 5.0 if point == "train.step" else 25.0}, data={"workers": 1})
    program = run.start(failpoints=f"{point}={visit}:sleep:9")
    run.wait_for_act(program, point)
    time.sleep(0.5)  # a worker reads ahead: by now the trainer waits for it
    program.send(signal.SIGSTOP)
    time.sleep(7)
    program.send(signal.SIGCONT)  # what it waits for takes 1.5 s more: counted from its begin, that is past the limit
    assert run.ended(program).returncode == 0, program.stderr
    assert [alert for alert in run.events("alert") if alert["kind"] != "learning"] == []
    assert not (run.folder / "stacks.log").exists()
    invariants.check(run)


@case("F34", how="SIGSTOP to every data worker", passes="train.hang_timeout_s, exit 7, nothing left")
@case("F41", how="an item that hangs in a worker", passes="exit 7 within a fifth of the timeout + 5 s, the file named")
@pytest.mark.faults_long
@pytest.mark.parametrize("how", ["stopped", "hangs"])
def test_unresponsive_data_worker_exits_7(new_run: NewRun, invariants: Invariants, how: str) -> None:
    run = new_run(data={"workers": 2}, train={"hang_timeout_s": 10.0})
    program = run.start(failpoints="data.item=4:hang" if how == "hangs" else "train.step=sleep:0.2")
    if how == "stopped":
        run.wait_for_step(2, program)
        workers = workers_of(run, program.pid)
        assert len(workers) >= 2, "those of the evaluation may have started, too"
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
    done = run.ended(program, 60)
    # A stopped worker may hold the trainer in the middle of a hand-over, where only the watchdog sees it.
    said = ("data worker",) if how == "stopped" else ("no batch arrived",)
    invariants.assert_clear(done, 7, *said, "train.hang_timeout_s")
    invariants.check(run)


ITEMS: list[Any] = [
    ("data.item=5:segv", 1, 7, "SIGSEGV"),
    ("data.item=4:raise:SystemExit", 2, 3, "SystemExit"),
    ("data.item=4:raise:KeyboardInterrupt", 2, 3, "KeyboardInterrupt"),
    ("data.item=4:raise:MemoryError", 2, 3, "MemoryError"),
    ("data.item=4:raise:RuntimeError", 2, 3, "RuntimeError"),
    ("data.item=9:hang", 0, 7, "in read"),
]


@case("F44", how="SIGSEGV in a worker at one file", passes="exit 7, the file named, saved")
@case(
    "F40",
    how="an item raises SystemExit, KeyboardInterrupt, MemoryError, RuntimeError",
    passes="exit 3, the file named",
)
@case("W01", how="a reading without workers that never returns (failpoint)", passes="stacks, event, exit 7, exact")
@pytest.mark.parametrize(("failpoint", "workers", "code", "says"), some(ITEMS, *ITEMS[:2]))
def test_item_that_ends_its_worker_is_named(
    new_run: NewRun, invariants: Invariants, failpoint: str, workers: int, code: int, says: str
) -> None:
    run = new_run(
        data={"workers": workers}, checkpoint={"every_steps": None}, train=HANG if "hang" in failpoint else {}
    )
    done = run.train(failpoints=failpoint, timeout_s=40)
    invariants.assert_clear(done, code, says, "stacks.log" if "hang" in failpoint else ".png")
    invariants.check(run)


@case("F34", how="SIGKILL to data workers twice in an epoch", passes="named with its file, exit 7, saved, exact")
@case("F45", how="SIGKILL to data workers twice in an epoch", passes="named with its file, exit 7, saved, exact")
@pytest.mark.faults
def test_second_killed_worker_in_an_epoch_exits_7(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(data={"workers": 2}, checkpoint={"every_steps": None})
    program = run.start(failpoints="data.item=sleep:0.3")
    run.wait_for_step(1, program)
    workers = workers_of(run, program.pid)
    for pid in workers:
        os.kill(pid, signal.SIGKILL)
    run.wait_for(lambda: set(workers_of(run, program.pid)) - set(workers), program)
    for pid in workers_of(run, program.pid):
        os.kill(pid, signal.SIGKILL)
    invariants.assert_clear(run.ended(program), 7, "data worker", "ended by SIGKILL")
    (said,) = (alert["message"] for alert in run.events("alert") if alert["kind"] == "data")
    assert said.endswith("the workers start again with the same samples")
    assert run.committed()[0]["step"] >= 1, "the last good step was saved"
    invariants.check(run)


@case("F37", how="SIGKILL to the trainer alone, its workers in an item of 600 s", passes="workers gone in 5 s, exact")
@pytest.mark.faults
def test_killed_trainer_leaves_no_workers(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(data={"workers": 2})
    program = run.start(failpoints="data.item=3:sleep:600")
    run.wait_for_act(program, "data.item", times=2)  # a worker between two items sees that its pipe is closed
    assert len(workers_of(run, program.pid)) >= 2, "those of the evaluation may have started, too"
    program.send(signal.SIGKILL)
    run.ended(program)
    invariants.check(run)


@case("W02", how="SIGUSR2 to a running trainer", passes="stacks of trainer and workers in stacks.log, training goes on")
@pytest.mark.faults
def test_sigusr2_writes_stacks_and_training_continues(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(data={"workers": 1}, train={"epochs": 2})
    program = run.start(failpoints="train.step=sleep:0.1")
    run.wait_for_step(2, program)
    for pid in run.left_behind():
        os.kill(pid, signal.SIGUSR2)
    assert run.ended(program).returncode == 0
    assert (run.folder / "stacks.log").read_text().count("most recent call first") >= 3
    assert run_state(run.folder) == "finished"
    invariants.check(run)
