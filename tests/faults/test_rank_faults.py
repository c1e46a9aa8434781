"""Ranks that die, raise, stall or are told to stop: every one ends, with a cause and nothing left (gloo, two ranks)."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable

import psutil
import pytest

from tests.support.fault_runs import FaultRun, Invariants, case
from tests.support.programs import Program

NewRun = Callable[..., FaultRun]

pytestmark = [pytest.mark.faults_long, pytest.mark.timeout(1200)]

DDP = {"parallel": {"mode": "ddp", "devices": ["cpu", "cpu"]}}


def ranks_of(run: FaultRun) -> dict[int, int]:
    """Process ids of the ranks, by rank; their own children are left out."""
    processes = [psutil.Process(pid) for pid in run.left_behind()]
    ranks = {each.pid: int(each.environ()["RANK"]) for each in processes if "RANK" in each.environ()}
    return {rank: pid for pid, rank in ranks.items() if psutil.Process(pid).ppid() not in ranks}


def begun(new_run: NewRun, **sections: object) -> tuple[FaultRun, Program]:
    run = new_run(**{**DDP, "train": {"epochs": 60, "hang_timeout_s": 6.0}, **sections})
    program = run.start(failpoints="train.step=sleep:0.1")
    run.wait_for_step(3, program, 400)  # a launcher and two ranks import the program, also on a busy machine
    return run, program


@case("X01", how="SIGSTOP to rank 1 (it stalls)", passes="stacks, exit 8, no orphans, nothing lost")
def test_stalled_rank_exits_8_with_stacks(new_run: NewRun, invariants: Invariants) -> None:
    run, program = begun(new_run)
    os.kill(ranks_of(run)[1], signal.SIGSTOP)
    done = run.ended(program, 180)
    assert done.returncode == 8, done.stderr
    assert "all stacks are in" in (run.events("run_end")[-1]["reason"] or "")
    assert (run.folder / "stacks.log").stat().st_size > 0
    invariants.assert_clean_processes(run, within_s=10)
    invariants.assert_nothing_lost(run)


@case("X01", how="rank 1 raises in its forward pass", passes="all end, the cause is said, no orphans, nothing lost")
def test_raising_rank_ends_all_and_cause_is_named(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(**DDP)
    done = run.train(failpoints="train.forward.rank1=6:raise:RuntimeError", timeout_s=180)
    assert done.returncode in (1, 8), done.stderr
    assert "failpoint train.forward.rank1" in (run.folder / "logs" / "rank-0001.log").read_text()
    invariants.check(run, timeout_s=180)


@case("X04", how="the port of the rendezvous is in use", passes="exit 8, one line that names it")
def test_rendezvous_port_in_use_exits_8_and_is_named(new_run: NewRun, invariants: Invariants) -> None:
    run = new_run(**DDP)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        ranks = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        invariants.assert_clear(run.train(timeout_s=120, **ranks), 8, port)


@case("X03", how="SIGTERM to one rank only", passes="both ranks stop at the same step, saved, 75")
def test_signal_to_a_rank_stops_all_at_the_same_step(new_run: NewRun, invariants: Invariants) -> None:
    run, program = begun(new_run)
    os.kill(ranks_of(run)[1], signal.SIGTERM)
    done = run.ended(program, 120)
    assert done.returncode == 75, done.stderr
    assert run.committed()[0]["step"] == run.events("step")[-1]["step"]
    invariants.check(run, resume=False)


@case("F37", how="SIGKILL to the launcher", passes="no rank left after 5 s, nothing lost")
@case("F37", how="SIGKILL to the launcher while the ranks start", passes="none of them left")
@pytest.mark.parametrize("delay_s", [0.5, 2.0, 5.0, 30.0])
def test_killed_launcher_leaves_no_rank(new_run: NewRun, invariants: Invariants, delay_s: float) -> None:
    run = new_run(**DDP, train={"epochs": 1000})
    program = run.start()
    run.wait_for(lambda: len(run.left_behind()) > 1, program, 120)
    time.sleep(delay_s)
    program.send(signal.SIGKILL)
    run.ended(program)
    invariants.assert_clean_processes(run, within_s=30)
    invariants.assert_nothing_lost(run)
