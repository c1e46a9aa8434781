"""Machines of a job that are lost, cut off or killed: the others go on, or end with the code of the run.

The machines are Linux namespaces (`tests.support.machines`) with one rank each, in float64. The course of a run is
compared with that of one process that nothing disturbs.
"""

from __future__ import annotations

import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.fault_runs import FaultRun, Invariants, case, course, tiny_config
from tests.support.machine_faults import KINDS, TOLERANCE, BrokenError, carry_out, difference, plan_job
from tests.support.machine_jobs import Job, sections_of
from tests.support.machines import Machines, needs_machines

MINUTES = float(os.environ.get("SEGAPP_FAULT_MINUTES", "60"))
ONE_SEED = os.environ.get("SEGAPP_FAULT_SEED")
NewJob = Callable[..., Job]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def new_job(tiny_root: Path, tmp_path: Path) -> Iterator[NewJob]:
    """Starts a job on two machines: `new_job("1:2", steps=30)`; its machines end with the test."""
    needs_machines()
    jobs: list[Job] = []

    def make(nnodes: str, *, same_name: bool = False, peer_s: float = 6.0, steps: int = 30, **sections: object) -> Job:
        train = {"steps": steps, **dict(sections.pop("train", {}))}  # type: ignore[call-overload]
        run = FaultRun(tmp_path / "work", tiny_config(tiny_root, **sections_of({**sections, "train": train})))
        machines = Machines(2, tmp_path / "machines", same_name=same_name).__enter__()
        env = {"SEGAPP_PEER_TIMEOUT_S": str(peer_s), "SEGAPP_FAILPOINTS": "train.step=sleep:0.1"}
        jobs.append(Job(run, machines, nnodes, env=env, options=("--rdzv-conf=last_call_timeout=5",)))
        jobs[0].start()
        return jobs[0]

    yield make
    for job in jobs:
        job.kill_all()
        job.machines.__exit__()


def difference_from_one_process(run: FaultRun) -> float:
    """Returns by how much the course of a run differs from that of one process."""
    config = run.config.model_copy(update={"parallel": tiny_config(Path("data")).parallel})
    alone = FaultRun(run.work.parent / "alone", config)
    done = alone.train(timeout_s=240, SEGAPP_TRUST_PARTS="1")
    assert done.returncode == 0, done.stderr
    return difference(course(run), course(alone))


def rounds(job: Job) -> list[tuple[str, int | None]]:
    """Returns (status, exit code) of each round, None where a round has no end."""
    return [(event["status"], event["exit_code"]) for event in job.run.events("run_end")]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    needs_machines()
    with Machines(2, tmp_path / "machines") as made:
        yield made


@pytest.mark.sampled(2)
@pytest.mark.faults
@case(
    "M01", how="one of two machines loses its network, or its power", passes="the ranks end with 8, exact when resumed"
)
@pytest.mark.parametrize("is_cut", [True, False], ids=["network", "power"])
def test_ranks_end_when_the_other_machine_is_lost(
    machines: Machines, new_run: Callable[..., FaultRun], is_cut: bool
) -> None:
    run = new_run(**sections_of({"train": {"steps": 24}}))
    meeting = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": machines[1].address, "MASTER_PORT": "29500"}
    ranks = [
        run.start(
            failpoints="train.step=sleep:0.1",
            machine=machine.first_pid,
            RANK=str(machine.number - 1),
            SEGAPP_PEER_TIMEOUT_S="5",
            SEGAPP_TRUST_PARTS="1",
            **meeting,
        )
        for machine in machines
    ]
    run.wait_for_step(4, ranks[0])
    machines[2].cut() if is_cut else machines[2].power_cut()
    silence = "has not answered for 5 s: its power or network connection failed, or it hangs; --resume continues"
    first, second = (run.ended(rank, 60, must_act=False) for rank in ranks)
    assert first.returncode == 8, first.stderr
    assert f"error: machine node2 (rank 1) {silence}" in first.stderr
    [end] = run.events("run_end")
    assert (end["status"], end["exit_code"]) == ("failed", 8)
    if is_cut:
        assert second.returncode == 8, second.stderr
        assert f"error: the machine of rank 0, whose store all ranks use, {silence}" in second.stderr
    else:
        assert second.returncode == -signal.SIGKILL
    Invariants.assert_clean_processes(run)
    Invariants.assert_nothing_lost(run)
    done = run.train("parallel.mode=single", SEGAPP_TRUST_PARTS="1")
    assert done.returncode == 0, done.stderr
    assert difference_from_one_process(run) < TOLERANCE


@pytest.mark.faults_long
@case("M02", how="the cable of a machine is pulled", passes="its rank ends; the others go on alone; the course holds")
def test_machine_without_network_is_left_behind(new_job: NewJob) -> None:
    job = new_job("1:2", steps=20)
    job.wait_for_step(4)
    job.machines[2].cut()
    assert job.codes(1) == {1: 0}, job.text()
    assert job.machines[2].ranks() == {}, "the rank that was cut off ends as well"
    assert rounds(job) == [("failed", 8), ("finished", 0)]
    assert "machine node2 (rank 1) has not answered for 6 s" in job.run.events("run_end")[0]["reason"]
    assert "the machine of rank 0, whose store all ranks use, has not answered for 6 s" in job.log(2).read_text()
    assert difference_from_one_process(job.run) < TOLERANCE


@pytest.mark.faults_long
@case("M02", how="a machine loses its power while its rank starts", passes="the others do not wait for it for minutes")
def test_machine_lost_while_ranks_start_is_left_behind(new_job: NewJob) -> None:
    job = new_job("1:2", steps=20)
    job.wait_for(lambda: job.machines[2].ranks())
    began_s = time.monotonic()
    job.machines[2].power_cut()
    assert job.codes(1) == {1: 0}, job.text()
    assert time.monotonic() - began_s < 120
    assert "machine 1 has not answered for 16 s: the ranks of this machine end" in job.log(1).read_text()
    assert difference_from_one_process(job.run) < TOLERANCE


@pytest.mark.faults_long
@case(
    "M02",
    how="a rank is killed; a machine loses its power, boots, and joins again",
    passes="rounds of 2, 2, 1 and 2 machines; the course holds",
)
def test_killed_rank_and_lost_machine_come_back(new_job: NewJob) -> None:
    job = new_job("1:2", steps=80)
    job.wait_for_step(4)
    os.kill(job.machines[2].ranks().popitem()[1], signal.SIGKILL)
    job.wait_for(lambda: len(job.run.events("run_start")) == 2)
    job.wait_for_step(job.step() + 5)
    job.machines[2].power_cut()
    job.wait_for(lambda: len(job.run.events("run_start")) == 3)
    job.wait_for_step(job.step() + 5)
    job.machines[2].boot()
    job.start(2)
    assert job.codes() == {1: 0, 2: 0}, job.text()
    assert rounds(job) == [("failed", 8), ("failed", 8), ("stopped", 75), ("finished", 0)]
    assert difference_from_one_process(job.run) < TOLERANCE


@pytest.mark.faults_long
@case("M03", how="the machine of rank 0 and of the store loses its power", passes="the other ends with 8 within 60 s")
@pytest.mark.parametrize("is_cut", [False, True], ids=["power", "cable"])
def test_other_machine_ends_without_that_of_rank_0(
    new_job: NewJob, is_cut: bool, record_property: Callable[[str, object], None]
) -> None:
    job = new_job("2", peer_s=30.0, steps=2000)
    job.wait_for_step(4)
    began_s = time.monotonic()
    job.machines[1].cut() if is_cut else job.machines[1].power_cut()
    assert job.codes(2) == {2: 8}, job.text()
    seconds = time.monotonic() - began_s
    assert seconds < 62
    record_property("figure", f"{'cable' if is_cut else 'power'}: 8 after {seconds:.0f} s")
    assert "the machine of rank 0" in job.log(2).read_text()


@pytest.mark.faults_long
@case(
    "M04", how="two machines of one host name, data.cache ram", passes="no false alarm; no machine is taken for another"
)
def test_machines_of_one_host_name_train_to_the_end(new_job: NewJob) -> None:
    job = new_job("2", same_name=True, data={"cache": "ram"})
    assert job.codes() == {1: 0, 2: 0}, job.text()
    assert rounds(job) == [("finished", 0)]
    assert difference_from_one_process(job.run) < TOLERANCE


def test_seed_determines_machines_and_faults() -> None:
    plans = [plan_job(seed) for seed in range(200)]
    assert plans == [plan_job(seed) for seed in range(200)]
    assert {plan.num_machines for plan in plans} == {2, 3, 4}
    faults = [fault for plan in plans for fault in plan.faults]
    assert {fault.kind for fault in faults} == set(KINDS)
    assert any(fault.after_steps is None for fault in faults), "one in four hits a job that recovers"


def test_difference_of_courses_is_the_largest_and_relative() -> None:
    one = ((1, 1, 2.0, 0.1, 4.0), (1, 1, 3.0, 0.5, (0.25, None)))
    other = ((1, 1, 2.0, 0.1, 4.0), (1, 1, 3.0, 0.5, (0.26, None)))
    assert difference(one, one) == 0.0
    assert difference(other, one) == pytest.approx(0.04)
    assert difference(one, one[:1]) == float("inf")


@pytest.mark.faults_long
@pytest.mark.timeout(3 * 3600)
@case(
    "M05",
    how="SIGKILL to ranks, agents and machines, cut cables, on 2 to 4 machines, at random moments",
    passes="nothing acknowledged is lost, each end has its code, the course is that of the undisturbed run",
)
def test_random_faults_of_machines_lose_nothing(
    tiny_root: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    needs_machines()
    end_s, num_faults, num_jobs = time.monotonic() + 60 * MINUTES, 0, 0
    while num_jobs == 0 or (ONE_SEED is None and time.monotonic() < end_s):
        seed = secrets.randbits(20) if ONE_SEED is None else int(ONE_SEED)
        try:
            num_faults += carry_out(seed, tiny_root, tmp_path / f"seed-{seed}", print)
        except BrokenError as error:
            error.add_note(f"repeat it with SEGAPP_FAULT_SEED={seed}")
            raise
        num_jobs += 1
    record_property("figure", f"{num_jobs} jobs, {num_faults} faults")
