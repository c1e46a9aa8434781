"""Kills at random moments, resumed each time, at the end compared with the uninterrupted run bit for bit (F02, R02).

`SEGAPP_KILLS` says how many kills a variant gets (default 36: over 200 in all).
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from segapp.errors import CommandError
from segapp.run.commands import parse_command, send_command
from tests.support.fault_runs import EACH_SAVE, FaultRun, Invariants, case

NUM_KILLS = int(os.environ.get("SEGAPP_KILLS", "36"))

PLACES = (
    *("train.step", "train.device", "eval.batch", "events.before_write", "events.rewind.before_rename"),
    *("command.answered", "ckpt.opened", "ckpt.write", "ckpt.before_fsync", "ckpt.after_fsync", "ckpt.before_rename"),
    *("ckpt.after_rename", "ckpt.manifest.before_rename", "ckpt.committed", "ckpt.before_link", "ckpt.before_retire"),
    "ckpt.end",
)
"""Failpoints of a training at which a process may be killed."""

VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "workers": {"data": {"workers": 2}},
    "amp-bf16": {"train": {"precision": "amp-bf16"}},
    "fp16": {"train": {"precision": "fp16"}},
    "three-devices": {
        "parallel": {"mode": "dp", "devices": ["cpu", "cpu", "cpu"], "gpu0_bsz": 1},
        "train": {"batch_size": 5},
    },
    "accumulate": {"train": {"accumulate": 2}, "data": {"workers": 1}},
    "ddp": {"parallel": {"mode": "ddp", "devices": ["cpu", "cpu"]}},
}

SLOW_TO_START = {"ddp"}
"""They get a third of the kills: each rank is a process that imports the program anew."""

KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL, 8)
"""How a program ends that was killed, or that lost a rank to it."""


def kill_somewhere(run: FaultRun, rng: random.Random) -> bool:
    """One start and one kill: at a named place on a random visit, or after a random time; False if it came too late."""
    if rng.random() < 0.5:
        program = run.start(failpoints=f"{rng.choice(PLACES)}={rng.randint(1, 8)}:kill;{EACH_SAVE}")
        ask_for_something(run, rng)
        run.ended(program, 180, must_act=False)
    else:
        program = run.start(failpoints=EACH_SAVE)
        run.wait_for(lambda: run.events("run_start") or program.returncode is not None, timeout_s=180)
        ask_for_something(run, rng)
        time.sleep(rng.uniform(0, 1.2))
        to_group = rng.random() < 0.5
        if program.returncode is None:
            program.send(signal.SIGKILL, to_group=to_group)
        program.wait(180)
        program.is_sigkilled = program.returncode in KILLED  # else it ended by itself at that moment: no kill
        run.ended(program, 180, must_act=False)  # it may have been killed before its first save was due
    return program.returncode in KILLED


def ask_for_something(run: FaultRun, rng: random.Random) -> None:
    """Sometimes a command that does not change the course is on its way."""
    if rng.random() < 0.3 and (run.folder / "run.json").exists():
        with contextlib.suppress(CommandError):
            send_command(run.folder, parse_command("checkpoint"), "campaign")


@case(
    "F02",
    how="SIGKILL at random moments and places (step, evaluation, save, command), to the process or its group",
    passes="no promised checkpoint lost, every resumed run exact",
)
@pytest.mark.faults_long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("variant", VARIANTS)
def test_run_killed_at_random_moments_resumes_exactly(
    new_run: Callable[..., FaultRun],
    invariants: Invariants,
    variant: str,
    record_property: Callable[[str, object], None],
) -> None:
    rng = random.Random(variant)
    num_kills = num_runs = 0
    num_wanted = NUM_KILLS // 3 if variant in SLOW_TO_START else NUM_KILLS
    while num_kills < num_wanted:
        num_runs += 1
        run = new_run(f"run-{num_runs}", **VARIANTS[variant])
        for _ in range(rng.randint(1, 8)):
            if not kill_somewhere(run, rng):
                break
            num_kills += 1
            invariants.assert_clean_processes(run, within_s=15)
            invariants.assert_nothing_lost(run)
        invariants.check(run, timeout_s=180)
    record_property("figure", f"{variant}: {num_kills} kills in {num_runs} runs, 0 lost, 0 inexact")


@case("R02", how="stopped by SIGTERM five times within one epoch", passes="exit 75 each time, exact at the end")
@pytest.mark.faults_long
def test_run_stopped_five_times_in_an_epoch_resumes_exactly(
    new_run: Callable[..., FaultRun], invariants: Invariants
) -> None:
    run = new_run(train={"epochs": 2, "batch_size": 1}, data={"workers": 2})  # epochs of 10 steps
    for number in range(1, 6):
        done = run.train(failpoints="train.step=2:term")
        assert done.returncode == 75, done.stderr
        newest = run.committed()[0]
        assert (newest["epoch"], newest["step"]) == (1, number)
    invariants.check(run)
