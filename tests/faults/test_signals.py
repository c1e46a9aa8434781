"""Signals, at any time, from anybody; and terminals that go away."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable

import pytest

from segapp.commands.runs import print_requeue_code
from tests.support.fault_runs import EACH_SAVE, FaultRun, Invariants, case, some

NewRun = Callable[..., FaultRun]


def long_run(new_run: NewRun, **sections: object) -> FaultRun:
    return new_run(**{"train": {"epochs": 30}, "data": {"workers": 2}, "checkpoint": {"every_steps": None}, **sections})


def slowest_step_s(run: FaultRun) -> float:
    times = [event["t"] for event in run.events("step")]
    return max(later - earlier for earlier, later in itertools.pairwise(times))


@case("F30", how="SIGTERM, SIGINT in the middle of an epoch", passes="exit 75 within a step, a save and 5 s; resumable")
@case("F31", how="SIGINT to the whole group, workers too", passes="the same, at most 3 lines on stderr, no traceback")
@pytest.mark.faults
@pytest.mark.parametrize(("number", "to_group"), [(signal.SIGTERM, False), (signal.SIGINT, True)])
def test_signal_in_an_epoch_saves_and_exits_75(
    new_run: NewRun, invariants: Invariants, number: signal.Signals, to_group: bool
) -> None:
    run = long_run(new_run)
    program = run.start(failpoints="train.step=sleep:0.05")
    run.wait_for_step(7, program)
    program.send(number, to_group=to_group)
    sent_s = time.monotonic()
    done = run.ended(program, 30)
    ended_s = time.monotonic()
    assert done.returncode == 75
    assert ended_s - sent_s < 0.05 + slowest_step_s(run) + run.events("checkpoint")[-1]["save_s"] + 5
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.strip()]) <= 3
    end = run.events("run_end")[-1]
    assert (end["status"], end["stopped_by"]) == ("stopped", "signal")
    assert print_requeue_code(str(run.folder), 75) == 75
    assert run.committed()[0]["step"] == run.events("step")[-1]["step"]
    invariants.check(run, resume=False)


@case("F30", how="SIGUSR1, SIGHUP in the middle of an epoch", passes="SIGUSR1: a checkpoint; SIGHUP: none; goes on")
@pytest.mark.faults
def test_sigusr1_and_sighup_do_not_stop_the_training(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(checkpoint={"every_steps": None, "every_epochs": None})
    program = run.start(failpoints="train.step=sleep:0.2")
    run.wait_for_step(2, program)
    program.send(signal.SIGHUP)
    run.wait_for_step(4, program)
    assert run.events("checkpoint") == []
    program.send(signal.SIGUSR1)
    [event] = run.wait_for(lambda: run.events("checkpoint"), program)
    assert 4 <= event["step"] < 15, "not the one at the end"
    assert run.ended(program).returncode == 0
    assert [event["step"] for event in run.events("step")] == list(range(1, 16))
    invariants.assert_clean_processes(run)


@case(
    "F32",
    how="SIGTERM while the program starts, and before the first step",
    passes="75 or 143, nothing that blocks a restart",
)
@pytest.mark.parametrize("delay_s", some([0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.8], 0.05))
def test_sigterm_at_startup_allows_a_restart(new_run: NewRun, invariants: Invariants, delay_s: float) -> None:
    run = new_run()
    program = run.start()
    time.sleep(delay_s)
    program.send(signal.SIGTERM)
    done = run.ended(program, 30)
    assert done.returncode in (75, 143, -signal.SIGTERM), done.stderr
    assert "Traceback" not in done.stderr
    invariants.check(run)


@pytest.mark.sampled(2)
@case("F33", how="SIGTERM in an evaluation, and in a save", passes="exit 75, exact")
@case("R09", how="SIGTERM and SIGKILL in an evaluation of averaged weights", passes="exact")
@pytest.mark.faults
@pytest.mark.parametrize("failpoints", ["eval.batch=6:term", "ckpt.before_fsync=3:term", "eval.batch=6:kill"])
def test_signal_in_evaluation_or_save_resumes_exactly(new_run: NewRun, invariants: Invariants, failpoints: str) -> None:
    run = new_run()
    done = run.train(failpoints=f"{failpoints};{EACH_SAVE}")
    assert done.returncode == (-signal.SIGKILL if "kill" in failpoints else 75), done.stderr
    invariants.check(run)


@case("R12", how="SIGKILL in a run's first evaluation", passes="the steps before are saved; exact")
@pytest.mark.faults
def test_kill_in_the_first_evaluation_costs_no_step(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(checkpoint={"every_epochs": 3}, eval={"every_epochs": 2})
    done = run.train(failpoints="eval.batch=1:kill")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert run.events("val") == []
    assert run.events("checkpoint")[-1]["step"] == run.events("step")[-1]["step"] > 1
    invariants.check(run)


@case(
    "F35", how="SIGINT twice in a slow save, and three times", passes="2: saved, 75; 3: 130 at once, the old one intact"
)
@pytest.mark.faults_long
@pytest.mark.parametrize("times", [2, 3])
def test_third_interrupt_in_a_slow_save_exits_130(new_run: NewRun, invariants: Invariants, times: int) -> None:
    run = new_run(checkpoint={"every_steps": 3})
    program = run.start(failpoints=f"ckpt.before_fsync=3:sleep:3;train.step=sleep:0.1;{EACH_SAVE}")
    run.wait_for_step(6, program)
    for _ in range(times):
        program.send(signal.SIGINT)
        time.sleep(0.3)
    done = run.ended(program, 30)
    assert done.returncode == (75 if times == 2 else 130), done.stderr
    invariants.check(run)


@case("F25", how="SIGKILL to the whole group", passes="nothing lost, exact")
@pytest.mark.faults
def test_sigkill_of_the_group_loses_nothing(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(data={"workers": 2})
    program = run.start(failpoints="train.step=sleep:0.05")
    run.wait_for_step(6, program)
    program.send(signal.SIGKILL, to_group=True)
    run.ended(program)
    invariants.check(run)


@case(
    "F21",
    how="a second trainer on the run; the first killed; a lock file of a foreign process",
    passes="exit 9; starts at once",
)
@pytest.mark.faults
def test_second_trainer_on_a_run_exits_9(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run()
    program = run.start(failpoints="train.step=sleep:0.3")
    run.wait_for_step(2, program)
    invariants.assert_clear(run.train(), 9, f"process {program.pid} on ")
    program.send(signal.SIGKILL)
    run.ended(program)
    lock = run.folder / "lock"
    lock.write_text(lock.read_text().replace(str(program.pid), "1"))  # an id that another process has by now
    invariants.check(run)
