"""Machines of a job that are lost, cut off or killed: the others go on, or end with the code of the run.

The machines are Linux namespaces (`tests.support.machines`) with one rank each, in float64. The course of a run is
compared with that of one process that nothing disturbs. At the end: random faults of machines, planned from a seed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import secrets
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

MINUTES = float(os.environ.get("SEGAPP_FAULT_MINUTES", "60"))
ONE_SEED = os.environ.get("SEGAPP_FAULT_SEED")
TOLERANCE = 1e-9
NewJob = Callable[..., "Job"]

pytestmark = pytest.mark.timeout(600)


@dataclass
class Job:
    """A run that several machines train, one rank each.

    Args:
        run: its folder and config.
        machines: which may train it.
        nnodes: how many take part, `2` or `1:4`.
        peer_s: seconds of silence after which a machine is lost.
        step_s: seconds that a step takes longer.
        agents: the newest of each machine, by its number.
        ended_s: when an agent was seen to have ended, by the clock of this process.
    """

    run: FaultRun
    machines: Machines
    nnodes: str
    peer_s: float
    step_s: float
    agents: dict[int, Process] = field(default_factory=dict)
    ended_s: dict[int, float] = field(default_factory=dict)

    def start(self, *numbers: int) -> None:
        """Start the agent of some machines, of all without numbers."""
        options = ["--nnodes", self.nnodes, "--nproc-per-node", "1", "--rdzv-endpoint", f"{NETWORK}.1:29500"]
        words = [*options, "--rdzv-conf=last_call_timeout=5", "--", "train", "--plain", "--config", "config.yaml"]
        env = {TAG: self.run.tag, "PYTHONPATH": str(ROOT), "SEGAPP_TRUST_PARTS": "1"}
        env["SEGAPP_PEER_TIMEOUT_S"] = str(self.peer_s)
        if self.step_s:
            env["SEGAPP_FAILPOINTS"] = f"train.step=sleep:{self.step_s}"
        for number in numbers or range(1, len(self.machines) + 1):
            self.ended_s.pop(number, None)
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

    def wait_for(self, what: Callable[[], Any], timeout_s: float = 120) -> None:
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
        jobs.append(Job(run, machines, nnodes, peer_s, step_s=0.1))
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


def test_difference_of_courses_is_the_largest_and_relative() -> None:
    one = ((1, 1, 2.0, 0.1, 4.0), (1, 1, 3.0, 0.5, (0.25, None)))
    other = ((1, 1, 2.0, 0.1, 4.0), (1, 1, 3.0, 0.5, (0.26, None)))
    assert difference(one, one) == 0.0
    assert difference(other, one) == pytest.approx(0.04)
    assert difference(one, one[:1]) == float("inf")


# --- random faults ----------------------------------------------------------------------------------------------------

KINDS = ("rank", "agent", "power", "cut")
PEER_S = 8.0
RECOVERY_S = 240.0
"""A job must make a new step within so many seconds after a fault, and all machines train together in twice as many."""
STEP_S = 0.25
ENDS = {0, 8, 75, 137, -signal.SIGKILL}
"""Exit codes of an agent: of the run, or -9 of itself."""


@dataclass(frozen=True)
class Fault:
    """One fault of a job.

    - rank: SIGKILL to the rank of a machine; the ranks start again;
    - agent: SIGKILL to `segapp launch` of a machine, which is started again later; the job ends, or the others go on;
    - power: a machine loses its power, boots later and starts again; the others go on, but end if they have lost
      machine 1, which has the store of the rendezvous;
    - cut: a machine loses its network for a while, longer or shorter than the watch waits.

    Args:
        kind: of `KINDS`.
        machine: its number.
        after_steps: steps that the job makes before, since it has recovered from the fault before; None: it has not.
        delay_s: seconds to wait then.
        lasts_s: until cable or power are back, or the killed agent is started.
    """

    kind: str
    machine: int
    after_steps: int | None
    delay_s: float
    lasts_s: float


def plan_job(seed: int) -> tuple[int, dict[str, Any], tuple[Fault, ...]]:
    """Return the job of a seed: how many machines, the sections of the config, and the faults in turn."""
    rng = random.Random(seed)
    num_machines = rng.choices([2, 3, 4], [5, 3, 2])[0]
    faults = tuple(_plan_fault(rng, num_machines, is_first=index == 0) for index in range(rng.randint(4, 7)))
    num_steps = 20 + sum(60 + (fault.after_steps or 0) + int(fault.delay_s / STEP_S) for fault in faults)
    sections: dict[str, Any] = {
        "data": {"crop_px": rng.choice([[32, 32], [48, 32]])},
        "train": {
            "steps": num_steps,
            "batch_size": rng.choice([4, 5, 7]),
            "accumulate": rng.choice([1, 1, 2]),
            "ema": rng.choice([None, 0.9]),
        },
        "checkpoint": {"every_steps": rng.choice([1, 2, 3, 5]), "keep": rng.choice([1, 2])},
    }
    return num_machines, sections, faults


def _plan_fault(rng: random.Random, num_machines: int, *, is_first: bool) -> Fault:
    kind = rng.choice(KINDS)
    is_recovered = is_first or rng.random() < 0.75
    return Fault(
        kind,
        rng.randint(1, num_machines),
        rng.randint(0, 9) if is_recovered else None,
        rng.uniform(0, 0.3) if is_recovered else rng.uniform(0, 12),
        rng.uniform(0.5, 2.5 * PEER_S) if kind == "cut" else rng.uniform(0.5, PEER_S),
    )


class Campaign:
    """Carries a job out; a scheduler is played: an agent that has ended before the run is started again."""

    def __init__(self, job: Job) -> None:
        self.job, self.strikes = job, list[tuple[Fault, float]]()
        self._struck_t = self._recovered_t = 0.0
        self._acknowledged: dict[float, int] = {}
        self._due: list[tuple[float, Fault]] = []
        self._absent: set[int] = set()
        self._excused: set[int] = set()
        """Machines whose newest agent was killed."""
        self._is_finished = self._is_stopping = False
        self._step, self._num_ranks, self._looked_s = 0, 0, 0.0
        self._progress_s = self._together_s = time.monotonic()

    def carry_out(self, faults: Sequence[Fault]) -> None:
        """Let the faults happen and the run come to its end, and check what must hold after each."""
        self.job.start()
        self._wait(lambda: self._step > 0)
        for fault in faults:
            if fault.after_steps is not None:
                self._wait(self._is_recovered)
                step = self._step + fault.after_steps
                self._wait(lambda step=step: self._step >= step or self._is_finished)
            until_s = time.monotonic() + fault.delay_s
            self._wait(lambda until_s=until_s: time.monotonic() >= until_s)
            if not self._is_finished and fault.machine not in self._absent:
                self._strike(fault)
        self._wait(self._is_recovered)
        self._finish_fast()
        self._wait(lambda: self._is_finished and len(self.job.ended_s) == len(self.job.agents))
        codes = {number: agent.returncode for number, agent in self.job.agents.items()}
        assert all(codes[number] == 0 for number in codes.keys() - self._excused), f"I4: the agents ended with {codes}"

    def _finish_fast(self) -> None:
        """Stop the job, which must end with 75 on every machine, and train the rest without waiting."""
        while not self._is_finished and self.job.run.command("ctl", "run", "stop").returncode != 0:
            self._wait(lambda step=self._step: self._step > step or self._is_finished)  # a round has just ended
        self._is_stopping = True
        self._wait(lambda: len(self.job.ended_s) == len(self.job.agents) or self._is_finished)
        if not self._is_finished:
            codes = {agent.returncode for agent in self.job.agents.values()}
            assert codes == {75}, f"I4: stopped by a command, the agents ended with {codes}"
        self._is_stopping, self.job.step_s, self._progress_s = False, 0.0, time.monotonic()

    def _strike(self, fault: Fault) -> None:
        machine, agent = self.job.machines[fault.machine], self.job.agents[fault.machine]
        if fault.kind == "rank":
            self._wait(lambda: machine.ranks() or self._is_finished)
        ranks = machine.ranks()
        if self._is_finished or agent.returncode is not None:
            return
        print(f"at step {self._step}: {fault}", flush=True)
        self.strikes.append((fault, time.monotonic()))
        self._struck_t, self._progress_s = time.time(), time.monotonic()
        if fault.kind == "rank":
            with contextlib.suppress(ProcessLookupError):
                os.kill(min(ranks.values()), signal.SIGKILL)
            return
        self._absent.add(fault.machine)
        self._excused.add(fault.machine)
        self._due.append((time.monotonic() + fault.lasts_s, fault))
        act = {"agent": lambda: agent.send(signal.SIGKILL), "power": machine.power_cut, "cut": machine.cut}
        act[fault.kind]()

    def _wait(self, what: Callable[[], Any]) -> None:
        """Wait until `what()` is true, and look after what goes on meanwhile."""
        while not what():
            now_s = time.monotonic()
            for item in [item for item in self._due if item[0] <= now_s]:
                self._due.remove(item)
                machine = self.job.machines[item[1].machine]
                {"agent": lambda: None, "power": machine.boot, "cut": machine.heal}[item[1].kind]()
                self._absent.discard(item[1].machine)
            self._note_ends(now_s)
            if now_s - self._looked_s > 0.3:
                self._looked_s = now_s
                self._read_events()
                self._num_ranks = sum(len(machine.ranks()) for machine in self.job.machines if machine.is_up)
                self._restart(now_s)
                if self._is_recovered() or self._is_stopping:
                    self._together_s = now_s
            assert now_s - self._together_s < 2 * RECOVERY_S, "I6: the machines do not train together"
            assert now_s - self._progress_s < RECOVERY_S, f"I6: no new step, at step {self._step}"
            time.sleep(0.05)

    def _note_ends(self, now_s: float) -> None:
        for number, agent in self.job.agents.items():
            if (code := agent.returncode) is None or number in self.job.ended_s:
                continue
            self.job.ended_s[number] = now_s
            assert code in ENDS, f"I4: machine {number} ended with {code}"
            recent = {fault.kind for fault, at_s in self.strikes if now_s - at_s < 60}
            recent |= set() if self._is_recovered() else {self.strikes[-1][0].kind}
            assert code != 75 or recent != {"rank"} or self._is_stopping, "I4: 75, and nobody asked it to stop"
            if code == 0:
                self._is_finished, self._progress_s = True, now_s

    def _restart(self, now_s: float) -> None:
        """Start the agents that have ended; after the end of the run, end those that have come too late."""
        if self._is_finished:
            for machine in self.job.machines:
                agent = self.job.agents[machine.number]
                if now_s - self._progress_s > 60 and machine.is_up and agent.returncode is None and not machine.ranks():
                    self._excused.add(machine.number)
                    agent.send(signal.SIGKILL)
        elif not self._is_stopping:
            for number, ended_s in list(self.job.ended_s.items()):
                if number not in self._absent and now_s - ended_s > 1.0:
                    self.job.start(number)
                    self._excused.discard(number)

    def _read_events(self) -> None:
        start_t = 0.0
        for event in self.job.run.events():
            if event["type"] == "checkpoint":
                self._acknowledged[event["t"]] = event["step"]
            elif event["type"] == "step" and event["step"] > self._step:
                self._step, self._progress_s = event["step"], time.monotonic()
                if event["t"] > self._struck_t + (0 if start_t > self._struck_t else 5):
                    self._recovered_t = event["t"]
            elif event["type"] == "run_start":
                start_t, resumed = event["t"], event.get("resumed_from_step") or 0
                promised = max((step for t, step in self._acknowledged.items() if t < start_t), default=0)
                assert resumed >= promised, f"I2: resumed from step {resumed}, although {promised} was acknowledged"

    def _is_recovered(self) -> bool:
        """True if every machine is back and has made a step with the others."""
        is_complete = not self._absent and self._num_ranks == len(self.job.machines)
        return self._is_finished or (is_complete and self._recovered_t >= self._struck_t)


def carry_out(seed: int, root: Path, work: Path) -> int:
    """Carry the job of a seed out, compare it with the undisturbed run, and return its faults."""
    num_machines, sections, faults = plan_job(seed)
    print(f"SEGAPP_FAULT_SEED={seed}: {num_machines} machines, {sections}", flush=True)
    run = FaultRun(work / "work", tiny_config(root, **sections_of(sections)))
    with Machines(num_machines, work / "machines") as machines:
        job = Job(run, machines, f"1:{num_machines}", PEER_S, STEP_S)
        campaign = Campaign(job)
        try:
            campaign.carry_out(faults)
        except BaseException as error:
            error.add_note(f"repeat it with SEGAPP_FAULT_SEED={seed}\n{job.text()}")
            raise
        finally:
            job.kill_all()
    Invariants.assert_clean_processes(run, within_s=15)
    Invariants.assert_nothing_lost(run)
    assert [event["seq"] for event in run.events()] == list(range(1, len(run.events()) + 1))
    # A round that ends before its first step has an end alone.
    rounds = [e["type"] for e in run.events() if e["type"] == "run_start" or (e["type"] == "run_end" and e.get("step"))]
    assert ("run_end", "run_end") not in itertools.pairwise(rounds)
    assert difference_from_one_process(run) < TOLERANCE, f"I3: seed {seed}"
    return len(campaign.strikes)


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
    end_s, seeds, num_faults = time.monotonic() + 60 * MINUTES, list[int](), 0
    while not seeds or (ONE_SEED is None and time.monotonic() < end_s):
        seeds.append(secrets.randbits(20) if ONE_SEED is None else int(ONE_SEED))
        num_faults += carry_out(seeds[-1], tiny_root, tmp_path / f"seed-{seeds[-1]}")
    record_property("figure", f"{len(seeds)} jobs, {num_faults} faults")
