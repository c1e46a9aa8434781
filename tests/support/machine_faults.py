"""Random faults of machines: a seed says how many machines train, and what is killed and cut at which moments.

    python -m tests.support.machine_faults --faults 100 [--seed N] [--out FILE]

carries jobs out, one after the other, until so many faults took place, and writes one line for each fault and one for
each job. Several at a time do not disturb each other. What a fault does:

- rank: SIGKILL to the rank of a machine; the ranks start again;
- agent: SIGKILL to `segapp launch` of a machine, which is started again later; the job ends, or the others go on;
- power: a machine loses its power, boots later and starts again; the others go on, but end if they have lost machine 1,
  which has the store of the rendezvous;
- cut: a machine loses its network for a while, longer or shorter than the watch waits.

A scheduler is played: where an agent has ended and the run is not finished, it is started again. Faults may hit a job
that still recovers from the one before. The undisturbed run of the same config is trained by one process.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.fault_runs import FaultRun, Invariants, course, tiny_config
from tests.support.machine_jobs import Job, sections_of
from tests.support.machines import Machines, why_not
from tests.support.runs import draw_tiny_data

KINDS = ("rank", "agent", "power", "cut")
PEER_S = 8.0
"""Seconds of silence after which a machine is lost in these jobs."""
RECOVERY_S = 240.0
"""A job must make a new step within so many seconds after a fault, on a busy machine."""
CANCEL_S = 60.0
"""Seconds after the end of the run in which the agents of machines without ranks may end by themselves."""
TOGETHER_S = 400.0
"""All machines must train together within so many seconds."""
TOLERANCE = 1e-9
STEP_S = 0.25
"""Seconds that a step takes while faults happen."""
ENDS = {0, 8, 75, 137, -signal.SIGKILL}
"""Exit codes of an agent: of the run, or -9 of itself."""


@dataclass(frozen=True)
class Fault:
    """One fault of a job.

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


@dataclass(frozen=True)
class Plan:
    """A job and its faults.

    Args:
        seed: from which it was planned.
        num_machines: 2 to 4.
        sections: of the config.
        faults: in turn.
    """

    seed: int
    num_machines: int
    sections: dict[str, Any]
    faults: tuple[Fault, ...]


def plan_job(seed: int) -> Plan:
    """Return the job of a seed."""
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
    return Plan(seed, num_machines, sections, faults)


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


@dataclass
class Outcome:
    """What followed a fault.

    Args:
        fault: that took place.
        step: of the run at that moment.
        at_s: when, by the clock of this process.
        t: when, in Unix seconds, as events have it.
        ends: of agents, in turn: machine, exit code, seconds after the fault.
        recovered_s: seconds until the run made a step beyond.
    """

    fault: Fault
    step: int
    at_s: float
    t: float
    ends: list[tuple[int, int, float]] = field(default_factory=list)
    recovered_s: float | None = None


class BrokenError(AssertionError):
    """An invariant does not hold."""


class Campaign:
    """Carries one job out.

    Args:
        plan: of the job.
        job: its run and machines.
        say: takes the lines.
    """

    def __init__(self, plan: Plan, job: Job, say: Callable[[str], None]) -> None:
        self.plan, self.job, self._say = plan, job, say
        self.outcomes: list[Outcome] = []
        self._acknowledged: dict[float, int] = {}
        self._resumes: dict[float, int] = {}
        self._due: list[tuple[float, Fault]] = []
        self._absent: set[int] = set()
        self._struck: set[int] = set()
        self._finished_s: float | None = None
        self._is_stopping = False
        self._looked_s = 0.0
        self._step, self._num_ranks = 0, 0
        self._progress_s = self._together_s = time.monotonic()
        self._num_reported = 0

    def carry_out(self) -> None:
        """Start the job, let the faults happen and the run come to its end, and check what must hold after each.

        Raises:
            BrokenError: it does not.
        """
        self._start_all()
        self._wait(lambda: self._step > 0)
        for fault in self.plan.faults:
            if fault.after_steps is not None:
                self._wait(self._is_recovered)
                self._wait_for_step(self._step + fault.after_steps)
            self._wait_for_time(time.monotonic() + fault.delay_s)
            if self._is_finished():
                break
            self._strike(fault)
        self._wait(self._is_recovered)
        self._finish_fast()
        self._wait(self._is_over)
        self._report()

    def _finish_fast(self) -> None:
        """Stop the job, which must end with 75 on every machine, and train the rest without waiting."""
        if self._is_finished():
            return
        while self.job.run.command("ctl", "run", "stop").returncode != 0:  # a round has just ended
            self._wait_for_step(self._step + 1)
            if self._is_finished():
                return
        self._is_stopping = True
        self._wait(lambda: len(self.job.ended_s) == len(self.job.agents) or self._is_finished())
        if not self._is_finished():
            codes = {number: agent.returncode for number, agent in self.job.agents.items()}
            if set(codes.values()) != {75}:
                raise BrokenError(f"I4: stopped by a command, the agents ended with {codes}")
        self._is_stopping = False
        del self.job.env["SEGAPP_FAILPOINTS"]
        self._progress_s = time.monotonic()

    def _start_all(self) -> None:
        for machine in self.job.machines:
            self._start(machine.number)

    def _start(self, number: int) -> None:
        self.job.start(number)
        self._struck.discard(number)

    def _strike(self, fault: Fault) -> None:
        machine = self.job.machines[fault.machine]
        if fault.machine in self._absent:
            return  # it has no power or no network any more
        agent = self.job.agents[fault.machine]
        if fault.kind == "rank":
            self._wait(lambda: machine.ranks() or self._is_finished())
        ranks = machine.ranks()
        if self._is_finished() or agent.returncode is not None:
            return
        self._report()
        self.outcomes.append(Outcome(fault, self._step, time.monotonic(), time.time()))
        self._progress_s = time.monotonic()
        if fault.kind == "rank":
            with contextlib.suppress(ProcessLookupError):
                os.kill(min(ranks.values()), signal.SIGKILL)
            return
        self._absent.add(fault.machine)
        self._struck.add(fault.machine)
        match fault.kind:
            case "agent":
                agent.send(signal.SIGKILL)
            case "power":
                machine.power_cut()
            case "cut":
                machine.cut()
        self._due.append((time.monotonic() + fault.lasts_s, fault))

    def _undo(self, fault: Fault) -> None:
        machine = self.job.machines[fault.machine]
        if fault.kind == "power":
            machine.boot()
        elif fault.kind == "cut":
            machine.heal()
        self._absent.discard(fault.machine)

    # --- what goes on meanwhile ---

    def _wait(self, what: Callable[[], Any]) -> None:
        while not what():
            self._tick()
            time.sleep(0.05)

    def _wait_for_step(self, step: int) -> None:
        self._wait(lambda: self._step >= step or self._is_finished())

    def _wait_for_time(self, until_s: float) -> None:
        self._wait(lambda: time.monotonic() >= until_s)

    def _tick(self) -> None:
        now_s = time.monotonic()
        for item in [item for item in self._due if item[0] <= now_s]:
            self._due.remove(item)
            self._undo(item[1])
        self._note_ends(now_s)
        if now_s - self._looked_s > 0.3:
            self._looked_s = now_s
            self._read_events()
            self._num_ranks = sum(len(machine.ranks()) for machine in self.job.machines if machine.is_up)
            self._restart(now_s)
            if self._is_recovered() or self._is_stopping:
                self._together_s = now_s
                self._report()
        if now_s - self._together_s > TOGETHER_S:
            raise BrokenError(f"I6: not all machines trained together within {TOGETHER_S:g} s")
        if now_s - self._progress_s > RECOVERY_S:
            raise BrokenError(f"I6: no new step within {RECOVERY_S:g} s, at step {self._step}")

    def _note_ends(self, now_s: float) -> None:
        before = set(self.job.ended_s)
        self.job.note_ends()
        for number in self.job.ended_s.keys() - before:
            code = self.job.agents[number].returncode
            if self.outcomes:
                self.outcomes[-1].ends.append((number, code or 0, now_s - self.outcomes[-1].at_s))
            if code not in ENDS:
                raise BrokenError(f"I4: machine {number} ended with {code}")
            recent = {each.fault.kind for each in self.outcomes if each.recovered_s is None or now_s - each.at_s < 60}
            if code == 75 and recent == {"rank"} and not self._is_stopping:
                raise BrokenError(f"I4: nobody asked machine {number} to stop, and it ended with 75")
            if code == 0 and self._finished_s is None:
                self._finished_s = self._progress_s = now_s

    def _restart(self, now_s: float) -> None:
        """Start the agents that have ended, as a scheduler does."""
        if self._finished_s is not None:
            if now_s - self._finished_s > CANCEL_S:  # a scheduler ends what has come too late
                for machine in self.job.machines:
                    agent = self.job.agents[machine.number]
                    if machine.is_up and agent.returncode is None and not machine.ranks():
                        self._struck.add(machine.number)
                        agent.send(signal.SIGKILL)
            return
        if self._is_stopping:
            return
        for number, ended_s in list(self.job.ended_s.items()):
            if number not in self._absent and now_s - ended_s > 1.0:
                self._start(number)

    def _read_events(self) -> None:
        start_t = 0.0
        for event in self.job.run.events():
            if event["type"] == "checkpoint":
                self._acknowledged[event["t"]] = event["step"]
            elif event["type"] == "step" and event["step"] > self._step:
                self._step, self._progress_s = event["step"], time.monotonic()
                for outcome in self.outcomes:
                    if outcome.recovered_s is None and event["t"] > outcome.t + (0 if start_t > outcome.t else 5):
                        outcome.recovered_s = time.monotonic() - outcome.at_s
            elif event["type"] == "run_start":
                start_t = event["t"]
                if start_t in self._resumes:
                    continue
                self._resumes[event["t"]] = resumed = event.get("resumed_from_step") or 0
                promised = max((step for t, step in self._acknowledged.items() if t < event["t"]), default=0)
                if resumed < promised:
                    raise BrokenError(f"I2: resumed from step {resumed}, although step {promised} was acknowledged")

    def _is_recovered(self) -> bool:
        """True if every machine is back and has made a step with the others."""
        return self._is_finished() or (
            not self._absent
            and all(outcome.recovered_s is not None for outcome in self.outcomes)
            and self._num_ranks == len(self.job.machines)
        )

    def _is_finished(self) -> bool:
        """True once an agent has ended with 0."""
        return self._finished_s is not None

    def _is_over(self) -> bool:
        return self._is_finished() and len(self.job.ended_s) == len(self.job.agents)

    def _report(self) -> None:
        """Write the lines of the faults that are over, or that the next one follows."""
        for outcome in self.outcomes[self._num_reported :]:
            self._say(self._line(outcome))
        self._num_reported = len(self.outcomes)

    def _line(self, outcome: Outcome) -> str:
        fault = outcome.fault
        ends = ", ".join(f"machine {number}: {code} after {s:.1f} s" for number, code, s in outcome.ends)
        own = {code for number, code, _ in outcome.ends if code != -signal.SIGKILL}
        when = "while it recovered" if fault.after_steps is None else f"at step {outcome.step}"
        back = "" if fault.kind == "rank" else f" for {fault.lasts_s:.1f} s"
        recovered = "no new step" if outcome.recovered_s is None else f"a new step after {outcome.recovered_s:.1f} s"
        together = (
            f"all together after {time.monotonic() - outcome.at_s:.1f} s" if self._is_recovered() else "not together"
        )
        verdict = "I2 ok, I4 ok, I6 ok" if len(own) < 2 else f"I2 ok, I4 codes {sorted(own)}, I6 ok"
        name = f"seed {self.plan.seed} fault {self.outcomes.index(outcome) + 1}"
        who = f"{fault.kind} of machine {fault.machine} of {self.plan.num_machines}"
        return f"{name}: {who}{back}, {when}: {ends or 'no agent ended'}; {recovered}; {together}; {verdict}"

    # --- at the end ---

    def check(self, reference: FaultRun) -> None:
        """Check the finished run.

        Raises:
            BrokenError: it is not what the undisturbed run is, or something is left.
        """
        run = self.job.run
        codes = {number: agent.returncode for number, agent in self.job.agents.items()}
        if any(codes[number] != 0 for number in codes.keys() - self._struck):
            raise BrokenError(f"I4: the run is finished, and the agents ended with {codes}")
        Invariants.assert_clean_processes(run, within_s=15)
        Invariants.assert_nothing_lost(run)
        numbers = [event["seq"] for event in run.events()]
        if numbers != list(range(1, len(numbers) + 1)):
            raise BrokenError("I3: the numbers of the events have gaps")
        # A round that ends before its first step has an end alone.
        kinds = [event["type"] for event in run.events() if event["type"] == "run_start" or _is_end_of_training(event)]
        if ("run_end", "run_end") in itertools.pairwise(kinds):
            raise BrokenError("I3: a round has two ends")
        largest = difference(course(run), course(reference))
        if largest > TOLERANCE:
            raise BrokenError(f"I3: the course differs from the undisturbed run by {largest:.1e}")
        self._say(
            f"seed {self.plan.seed} job: {self.plan.num_machines} machines, {len(self.outcomes)} faults, "
            f"{self._step} steps, {len(self._resumes)} rounds; "
            f"course differs by {largest:.1e}; I1 ok, I2 ok, I3 ok, I4 ok, I5 ok"
        )


def _is_end_of_training(event: dict[str, Any]) -> bool:
    return event["type"] == "run_end" and event.get("step") is not None


def difference(found: tuple[tuple[Any, ...], ...], expected: tuple[tuple[Any, ...], ...]) -> float:
    """Return the largest relative difference of two courses, infinite if they have other steps or evaluations."""
    if [row[:2] for row in found] != [row[:2] for row in expected]:
        return float("inf")
    pairs = zip(_numbers(found), _numbers(expected), strict=True)
    return max(abs(a - b) / max(1e-6, abs(b)) for a, b in pairs)


def _numbers(rows: Sequence[Any]) -> list[float]:
    """Return the numbers of nested tuples, those that are None as 0."""
    flat: list[float] = []
    for row in rows:
        flat += _numbers(row) if isinstance(row, tuple | list) else [float(row or 0.0)]
    return flat


def carry_out(seed: int, root: Path, work: Path, say: Callable[[str], None]) -> int:
    """Carry the job of a seed out in a new folder, compare it with the undisturbed run, and return its faults.

    Raises:
        BrokenError: an invariant does not hold; the folder is left.
    """
    plan = plan_job(seed)
    sections = sections_of(plan.sections)
    run = FaultRun(work / "job", tiny_config(root, **sections))
    alone = FaultRun(work / "alone", tiny_config(root, **{**sections, "parallel": {"mode": "single"}}))
    done = alone.train(timeout_s=240, SEGAPP_TRUST_PARTS="1")
    assert done.returncode == 0, done.stderr
    env = {"SEGAPP_PEER_TIMEOUT_S": str(PEER_S), "SEGAPP_FAILPOINTS": f"train.step=sleep:{STEP_S}"}
    with Machines(plan.num_machines, work / "machines") as machines:
        job = Job(run, machines, f"1:{plan.num_machines}", env=env, options=("--rdzv-conf=last_call_timeout=5",))
        campaign = Campaign(plan, job, say)
        try:
            campaign.carry_out()
            campaign.check(alone)
        except BaseException as error:
            (work / "outcome.txt").write_text(f"{plan}\n{error!r}\n{job.text()}\n")
            raise
        finally:
            job.kill_all()
    return len(campaign.outcomes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="end after the job in which so many took place")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after that")
    parser.add_argument("--seed", type=int, help="of the first job; the next has the next number")
    parser.add_argument("--out", type=Path, help="a file for the lines, appended")
    parser.add_argument("--work", type=Path, help="a folder for the jobs; what fails is left there")
    options = parser.parse_args()
    if reason := why_not():
        print(f"no machines in namespaces here: {reason}", file=sys.stderr)
        return 1
    began_s, num_faults, num_broken = time.monotonic(), 0, 0
    seed = secrets.randbits(20) if options.seed is None else options.seed
    work = options.work or Path(tempfile.mkdtemp(prefix="machine-faults-"))
    root = draw_tiny_data(work / f"data-{seed}")

    def say(line: str) -> None:
        text = f"{(time.monotonic() - began_s):6.0f} s  {line}"
        print(text, flush=True)
        if options.out is not None:
            with options.out.open("a") as file:
                file.write(f"{text}\n")

    while num_faults < options.faults and time.monotonic() - began_s < 60 * options.minutes:
        folder = work / f"seed-{seed}"
        try:
            num_faults += carry_out(seed, root, folder, say)
            shutil.rmtree(folder)
        except (AssertionError, pytest.fail.Exception) as error:
            num_broken += 1
            say(f"seed {seed} BROKEN: {str(error).splitlines()[0] if str(error) else error!r} (see {folder})")
        seed += 1
    say(json.dumps({"faults": num_faults, "broken jobs": num_broken}))
    return num_broken


if __name__ == "__main__":
    sys.exit(main())
