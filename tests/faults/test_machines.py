"""Machines of a job that are lost, cut off or killed: the others go on, or end with the code of the run.

The machines are Linux namespaces (`tests.support.machines`) with one rank each, in float64. The course of a run is
compared with that of one process that nothing disturbs.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.fault_runs import TAG, FaultRun, Invariants, case, course, sections_of, tiny_config
from tests.support.machines import NETWORK, Machines, Process, needs_machines

TOLERANCE = 1e-9
NewJob = Callable[..., "Job"]

pytestmark = pytest.mark.timeout(600)


@dataclass
class Job:
    """A run that `nnodes` of the machines train, one rank each; one is lost after `peer_s` seconds of silence.

    Args:
        agents: the newest of each machine, by its number.
    """

    run: FaultRun
    machines: Machines
    nnodes: str
    peer_s: float
    agents: dict[int, Process] = field(default_factory=dict)

    def start(self, *numbers: int) -> None:
        """Start the agent of some machines, of all without numbers."""
        options = ["--nnodes", self.nnodes, "--nproc-per-node", "1", "--rdzv-endpoint", f"{NETWORK}.1:29500"]
        words = [*options, "--rdzv-conf=last_call_timeout=5", "--", "train", "--plain", "--config", "config.yaml"]
        env = {TAG: self.run.tag, "PYTHONPATH": str(ROOT), "SEGAPP_TRUST_PARTS": "1"}
        env["SEGAPP_PEER_TIMEOUT_S"] = str(self.peer_s)
        env["SEGAPP_FAILPOINTS"] = "train.step=sleep:0.1"
        for number in numbers or range(1, len(self.machines) + 1):
            command = [sys.executable, "-m", "segapp", "launch", *words, "--run", "run"]
            self.agents[number] = self.machines[number].start(
                *command, log=self.log(number), cwd=self.run.work, env=env
            )

    def log(self, number: int) -> Path:
        """Return the file with the output of a machine's agent and ranks."""
        return self.run.work / f"machine{number}.txt"

    def text(self) -> str:
        """Return the output of all machines, for a failed test."""
        return "\n".join(f"--- machine {n}\n{self.log(n).read_text(errors='replace')[-3000:]}" for n in self.agents)

    def step(self) -> int:
        """Return the newest step in the events."""
        path = self.run.folder / "events.jsonl"
        found = re.findall(rb'"type":"step".*?"step":(\d+)', path.read_bytes()[-20000:]) if path.exists() else []
        return int(found[-1]) if found else 0

    def wait_for(self, what: Callable[[], Any], timeout_s: float = 200) -> None:
        """Wait until `what()` is true."""
        deadline_s = time.monotonic() + timeout_s
        while not what():
            assert time.monotonic() < deadline_s, f"the condition did not hold in {timeout_s:g} s\n{self.text()}"
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """Wait until the event of a step is written, or a later one."""
        self.wait_for(lambda: self.step() >= step)

    def codes(self, *numbers: int) -> dict[int, int | None]:
        """Wait until the agents of some machines, or of all, have ended, and return their exit codes."""
        chosen = numbers or tuple(self.agents)
        self.wait_for(lambda: all(self.agents[number].returncode is not None for number in chosen))
        return {number: self.agents[number].returncode for number in chosen}

    def kill_all(self) -> None:
        """End what is left: the machines are about to go."""
        for machine in self.machines:
            for pid in machine.pids() if machine.is_up else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def new_job(tiny_root: Path, tmp_path: Path) -> Iterator[NewJob]:
    """Starts a job on two machines: `new_job("1:2", steps=30)`; its machines end with the test."""
    needs_machines()
    jobs: list[Job] = []

    def make(nnodes: str, *, same_name: bool = False, peer_s: float = 6.0, steps: int = 30, **sections: object) -> Job:
        train = {"steps": steps, **dict(sections.pop("train", {}))}  # type: ignore[call-overload]
        run = FaultRun(tmp_path / "work", tiny_config(tiny_root, **sections_of({**sections, "train": train})))
        machines = Machines(2, tmp_path / "machines", same_name=same_name).__enter__()
        jobs.append(Job(run, machines, nnodes, peer_s))
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


def difference(found: tuple[tuple[Any, ...], ...], expected: tuple[tuple[Any, ...], ...]) -> float:
    """Return the largest relative difference of two courses, infinite if they have other steps or evaluations."""
    if [row[:2] for row in found] != [row[:2] for row in expected]:
        return float("inf")
    pairs = zip(numbers_of(found), numbers_of(expected), strict=True)
    return max(abs(a - b) / max(1e-6, abs(b)) for a, b in pairs)


def numbers_of(rows: Sequence[Any]) -> list[float]:
    """Return the numbers of nested tuples, those that are None as 0."""
    return [x for row in rows for x in (numbers_of(row) if isinstance(row, tuple | list) else [float(row or 0.0)])]


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
@case("M03", how="the machine of rank 0 and of the store cannot be reached", passes="the other ends with 8")
@case("M02", how="the cable of a machine is pulled", passes="its rank ends with 8, the cause is named")
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
@case(
    "M02",
    how="a rank is killed; a machine loses its power, boots, and joins again",
    passes="the others go on meanwhile; the course holds",
)
@case(
    "M05",
    how="SIGKILL to a rank and to an agent, a power cut, a cut cable, one after the other",
    passes="nothing acknowledged is lost, the course is that of the undisturbed run",
)
def test_killed_ranks_and_lost_machines_come_back(new_job: NewJob) -> None:
    job = new_job("1:2", steps=2000)
    machine = job.machines[2]
    for fault in ("rank", "power", "agent", "cable"):
        step = job.step() + 5
        job.wait_for(lambda step=step: all(each.ranks() for each in job.machines) and job.step() > step)
        promised, num_rounds = job.run.acknowledged_step(), len(job.run.events("run_start"))
        match fault:
            case "rank":
                os.kill(machine.ranks().popitem()[1], signal.SIGKILL)
            case "power":
                machine.power_cut()
            case "agent":
                job.agents[2].send(signal.SIGKILL)
            case "cable":
                machine.cut()
        job.wait_for(lambda num_rounds=num_rounds: len(job.run.events("run_start")) > num_rounds)
        assert job.run.events("run_start")[num_rounds]["resumed_from_step"] >= promised
        if fault == "rank":
            continue
        if fault == "cable":  # its agent waits for the endpoint, and joins again by itself
            job.wait_for(lambda: "lost: " in job.log(2).read_text())
            machine.heal()
            continue
        assert job.codes(2)[2] in (8, 75, -signal.SIGKILL)
        if fault == "power":
            machine.boot()
        job.start(2)
    job.wait_for(lambda: all(machine.ranks() for machine in job.machines))
    assert job.run.command("ctl", "run", "stop", "--wait").returncode == 0
    assert job.codes() == {1: 75, 2: 75}, job.text()
    assert job.run.train("parallel.mode=single", timeout_s=240, SEGAPP_TRUST_PARTS="1").returncode == 0
    Invariants.assert_nothing_lost(job.run)
    assert difference_from_one_process(job.run) < TOLERANCE


@pytest.mark.faults_long
@case(
    "M06",
    how="the cable of one of two machines is cut for longer than its ranks live, and healed",
    passes="the machine comes back by itself, both end with 0, the course holds; SIGTERM ends its wait at once",
)
@pytest.mark.parametrize("is_healed", [True, False], ids=["healed", "SIGTERM"])
def test_machine_that_was_cut_off_comes_back_by_itself(new_job: NewJob, is_healed: bool) -> None:
    job = new_job("2", steps=40)
    job.wait_for_step(8)
    job.machines[2].cut()
    job.wait_for(lambda: "lost: 10.77.0.1:29500 " in job.log(2).read_text())
    if is_healed:
        job.machines[2].heal()
        assert job.codes() == {1: 0, 2: 0}, job.text()
        assert rounds(job)[-1] == ("finished", 0)
        assert difference_from_one_process(job.run) < TOLERANCE
    else:
        sent_s = time.monotonic()
        job.agents[2].send(signal.SIGTERM)
        assert job.codes(2)[2] in (75, 143)
        assert time.monotonic() - sent_s < 5
    Invariants.assert_nothing_lost(job.run)


@pytest.mark.faults_long
@case(
    "M04", how="two machines of one host name, data.cache ram", passes="no false alarm; no machine is taken for another"
)
def test_machines_of_one_host_name_train_to_the_end(new_job: NewJob) -> None:
    """The run is watched and stopped from the machine that does not have rank 0, and resumed."""
    job = new_job("2", same_name=True, data={"cache": "ram"})
    job.wait_for_step(4)
    segapp = ("env", "-C", job.run.work, sys.executable, "-m", "segapp")
    job.wait_for(lambda: job.run.events("memory"))
    status = json.loads(job.machines[2].run(*segapp, "status", "run", "--json"))
    assert status["state"] in ("live", "busy")
    assert [device["machine"] for device in status["devices"]] == ["node", "node (2)"]
    assert job.machines[2].run(*segapp, "ctl", "run", "stop", "--wait").splitlines()[-1].startswith("applied")
    assert job.codes() == {1: 75, 2: 75}, job.text()
    status = json.loads(job.machines[2].run(*segapp, "status", "run", "--json"))
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    job.start()
    assert job.codes() == {1: 0, 2: 0}, job.text()
    assert rounds(job) == [("stopped", 75), ("finished", 0)]
    assert difference_from_one_process(job.run) < TOLERANCE
