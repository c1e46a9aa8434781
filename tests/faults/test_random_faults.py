"""Kills at random moments, and rounds of random faults on random configs: nothing promised is lost (F02, R02).

`SEGAPP_KILLS` says how many kills a variant gets (default 36: over 200 in all); `SEGAPP_FAULT_MINUTES` for how long the
rounds go on (default 60); `SEGAPP_FAULT_SEED` repeats one round: its config, its faults and their moments, which are
visits to failpoints, not seconds. What a fault does to a start of a round:

| kind | what | ends |
|---|---|---|
| kill | SIGKILL at a failpoint | -9 |
| full disk | a file system with so many KiB left; where no mount is allowed, ENOSPC in saves and events | 0, 10 |
| slow disk | every write and fsync takes longer | -9, 75 |
| stop | SIGSTOP at a step, a save or an evaluation, SIGCONT after a while | -9, 75 |
| clock | the time of day jumps at a step | -9, 75 |
| removed data | an image or all of them removed at a step, later put back | 0, 3 |
| corrupted data | an image or a mask replaced by noise at a step, later put back | 0, 3 |
| removed file | before the start: alias, object, lock, log, inbox | -9, 75 |
| corrupted file | before the start: newest checkpoint, manifest, lock, tail of the events | -9, 75; 4 |

A start may also come to its end before the fault is due: exit code 0.
"""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from segapp.errors import CommandError
from segapp.run.commands import parse_command, send_command
from tests.support.fault_runs import EACH_SAVE, FaultRun, Invariants, case, is_stopped, lacks, small_disk

NUM_KILLS = int(os.environ.get("SEGAPP_KILLS", "36"))
MINUTES = float(os.environ.get("SEGAPP_FAULT_MINUTES", "60"))
ONE_SEED = os.environ.get("SEGAPP_FAULT_SEED")

PLACES = (
    "train.step",
    "train.device",
    "eval.batch",
    "events.before_write",
    "events.rewind.before_rename",
    "command.answered",
    "ckpt.opened",
    "ckpt.write",
    "ckpt.before_fsync",
    "ckpt.after_fsync",
    "ckpt.before_rename",
    "ckpt.after_rename",
    "ckpt.manifest.before_rename",
    "ckpt.committed",
    "ckpt.before_link",
    "ckpt.before_retire",
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
        run.ended(program, 180)
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
    run = new_run(train={"epochs": 2}, data={"workers": 2})
    root = run.copy_data()
    for kind in ("images", "masks"):
        for number in range(10, 14):  # epochs of 7 steps: five stops are five places
            shutil.copy(root / kind / "train" / f"{number - 10:02}.png", root / kind / "train" / f"{number}.png")
    for number in range(1, 6):
        done = run.train(failpoints="train.step=2:term")
        assert done.returncode == 75, done.stderr
        newest = run.committed()[0]
        assert (newest["epoch"], newest["step"]) == (1, number)
    invariants.check(run)


# --- rounds on random configs -----------------------------------------------------------------------------------------

SIZE_KIB = 64 * 1024

AT_REST = ("removed file", "corrupted file")
KINDS = ("kill", "full disk", "slow disk", "stop", "clock", "removed data", "corrupted data", *AT_REST)


@dataclass(frozen=True)
class Fault:
    """A fault of one start.

    Args:
        kind: of `KINDS`.
        failpoints: armed in the program.
        codes: exit codes with which it may end, beside 0.
        share: in [0, 1): chooses a file, a size.
        seconds: of a SIGSTOP.
    """

    kind: str
    failpoints: str
    codes: tuple[int, ...]
    share: float
    seconds: float


@dataclass(frozen=True)
class Round:
    """The sections of the config of a run, and the faults of its starts in turn, planned from a seed."""

    seed: int
    sections: dict[str, Any]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        words = [f"{fault.kind} [{fault.failpoints}] {fault.share:.3f}" for fault in self.faults]
        return f"SEGAPP_FAULT_SEED={self.seed}: {self.sections}; " + "; ".join(words)


def plan_round(seed: int) -> Round:
    """Returns the round of a seed."""
    rng = random.Random(seed)
    sections = _plan_sections(rng)
    return Round(seed, sections, tuple(_plan_fault(rng) for _ in range(rng.randint(2, 6))))


def _plan_sections(rng: random.Random) -> dict[str, Any]:
    sections: dict[str, Any] = {
        "seed": rng.randrange(1000),
        "data": {"workers": rng.choice([0, 0, 1, 2]), "crop_px": rng.choice([[32, 32], [48, 32]])},
        "train": {
            "epochs": rng.choice([3, 4, 6]),
            "batch_size": rng.choice([2, 2, 3]),
            "precision": rng.choice(["fp32", "fp32", "amp-bf16", "fp16"]),
            "ema": rng.choice([None, 0.9]),
            "accumulate": rng.choice([1, 1, 2]),
        },
        "checkpoint": {"every_steps": rng.choice([1, 2, 3, None]), "keep": rng.choice([1, 2, 3])},
        "schedule": {"warmup_steps": rng.choice([0, 3])},
    }
    if rng.random() < 0.3:
        sections["optim"] = {"name": "sgd", "lr": 0.01}
    if rng.random() < 0.25:
        num_devices = rng.choice([2, 3])
        sections["parallel"] = {"mode": "dp", "devices": ["cpu"] * num_devices}
        sections["train"]["batch_size"] = 4
    return sections


def _plan_fault(rng: random.Random) -> Fault:
    kind = rng.choice(KINDS)
    step, share, seconds = rng.randint(1, 3), rng.random(), rng.uniform(0.2, 1.5)
    is_killed = rng.random() < 0.5
    end = f"train.device={step + rng.randint(1, 2)}:{'kill' if is_killed else 'term'}"
    ends = (-signal.SIGKILL,) if is_killed else (75,)
    place, offset = rng.choice(PLACES), rng.choice([-1, 1]) * 10 ** rng.uniform(0, 8.5)
    stop_at = rng.choice(["train.step", "ckpt.before_fsync", "ckpt.before_rename", "eval.batch"])
    failpoints = {
        "kill": f"{place}={rng.randint(1, 4)}:kill",
        "full disk": "" if lacks("mount") is None else f"ckpt.write={10 * step}:raise:ENOSPC*1000000",
        "slow disk": f"ckpt.write=sleep:0.002;ckpt.before_fsync=sleep:{share:.2f};events.before_write=sleep:0.01;{end}",
        "stop": f"{stop_at}={step}:stop;{end}",
        "clock": f"train.step={step}:clock:{offset:.0f};{end}",
        "removed data": f"train.step={step}:stop",
        "corrupted data": f"train.step={step}:stop",
    }.get(kind, end)
    codes = {
        "kill": (-signal.SIGKILL,),
        "full disk": (10,),
        "removed data": (3,),
        "corrupted data": (3,),
    }.get(kind, ends)
    return Fault(kind, failpoints, codes, share, seconds)


class Campaign:
    """Carries rounds out, and counts what took place."""

    def __init__(self, invariants: Invariants) -> None:
        self._invariants = invariants
        self.num_rounds = 0
        self.num_faults, self.num_ends = Counter[str](), Counter[int]()

    def carry_out(self, each: Round, run: FaultRun) -> None:
        """Starts a run once for each fault, then to its end, and compares it with the uninterrupted run."""
        run.copy_data()
        with small_disk(run.folder, SIZE_KIB) if lacks("mount") is None else contextlib.nullcontext():
            for fault in each.faults:
                self._suffer(run, fault)
            self._invariants.check(run, timeout_s=300)
            run.kill_all()
        self.num_rounds += 1

    def _suffer(self, run: FaultRun, fault: Fault) -> None:
        codes, failpoints, num_alerts = fault.codes, fault.failpoints, len(run.events("alert"))
        with contextlib.ExitStack() as undone:
            has_acted = False
            if fault.kind in AT_REST:
                change = undone.enter_context(_changed_at_rest(run, fault))
                has_acted, codes = change != "", (4,) if change == "manifest" else codes
                failpoints = "" if change == "manifest" else failpoints
            elif fault.kind == "full disk" and not failpoints:
                usage = shutil.disk_usage(run.folder)
                _resize(run.folder, usage.used // 1024 + 150 + int(2500 * fault.share))
                undone.callback(_resize, run.folder, SIZE_KIB)
            program = run.start(failpoints=f"{failpoints};{EACH_SAVE}")
            if ":stop" in failpoints:
                run.wait_for(lambda: is_stopped(program) or program.returncode is not None, timeout_s=300)
            if ":stop" in failpoints and program.returncode is None:
                has_acted = True
                undone.enter_context(_changed_data(run, fault))
                if fault.kind == "stop":
                    time.sleep(fault.seconds)
                program.send(signal.SIGCONT)
            done = run.ended(program, 300, must_act=False)
        assert done.returncode in (0, *codes), f"{fault}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        if done.returncode in (3, 4, 10):
            self._invariants.assert_clear(done, done.returncode)
        assert "Traceback" not in done.stdout + done.stderr, done.stderr
        self._invariants.assert_clean_processes(run, within_s=15)
        self._invariants.assert_nothing_lost(run)
        if fault.kind == "clock":
            status = run.command("status", "run", timeout_s=120)
            assert status.returncode == 0, status.stderr
        if fault.kind == "full disk":
            has_acted = done.returncode == 10 or len(run.events("alert")) > num_alerts
        elif fault.kind in ("kill", "slow disk", "clock"):
            has_acted = run.num_acts(program, failpoints.partition("=")[0]) > 0
        self.num_faults[fault.kind] += has_acted
        self.num_ends[done.returncode] += 1

    def figure(self) -> str:
        """Returns what took place."""
        faults = ", ".join(f"{kind} {self.num_faults[kind]}" for kind in KINDS)
        ends = ", ".join(f"{code}: {number}" for code, number in sorted(self.num_ends.items()))
        return f"{self.num_rounds} rounds; faults: {faults}; exit codes: {ends}"


def _resize(folder: Path, size_kib: int) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size_kib}k", str(folder)], check=True)


@contextlib.contextmanager
def _changed_data(run: FaultRun, fault: Fault) -> Iterator[None]:
    """The images, one of them, or a mask are gone or noise, until the end."""
    if not fault.kind.endswith("data"):
        yield
        return
    root, elsewhere = Path(run.config.data.root), run.work / "elsewhere"
    files = sorted(root.rglob("train/*.png"))
    chosen = root / "images" / "train" if fault.share < 0.2 else files[int(fault.share * len(files))]
    if fault.kind == "removed data":
        chosen.rename(elsewhere)
        yield
        elsewhere.rename(chosen)
        return
    chosen = files[0] if chosen.is_dir() else chosen
    whole = chosen.read_bytes()
    chosen.write_bytes(random.Random(fault.share).randbytes(len(whole)))
    yield
    chosen.write_bytes(whole)


@contextlib.contextmanager
def _changed_at_rest(run: FaultRun, fault: Fault) -> Iterator[str]:
    """A file of the run is removed or changed before the start; yields which, "" where there is none."""
    folder, manifest = run.folder, run.folder / "checkpoints" / "manifest.json"
    whole = manifest.read_bytes() if manifest.exists() else b""
    changes: dict[str, dict[str, Callable[[], object]]] = {
        "removed file": {
            "best.pt": (folder / "checkpoints" / "best.pt").unlink,
            "inbox": lambda: shutil.rmtree(folder / "commands"),
            "last.pt": (folder / "checkpoints" / "last.pt").unlink,
            "lock": (folder / "lock").unlink,
            "log": (folder / "trainer.log").unlink,
            "object": lambda: run.newest().unlink(),
        },
        "corrupted file": {
            "checkpoint": lambda: _flip_newest(run, fault.share),
            "events": lambda: _append(folder / "events.jsonl", b'{"v":1,"seq":9,"t":1.5,"type":"ste'),
            "lock": lambda: (folder / "lock").write_bytes(b"\0{" * 100),
            "manifest": lambda: manifest.write_bytes(whole[: int(0.9 * fault.share * len(whole))]),
        },
    }
    names = list(changes[fault.kind])
    name = names[int(fault.share * 1000) % len(names)]
    if len(run.committed()) < 2 or (name in ("last.pt", "best.pt") and not (manifest.parent / name).exists()):
        yield ""  # nothing is there that could be lost and made good
        return
    changes[fault.kind][name]()
    yield name
    if name == "manifest":
        manifest.write_bytes(whole)


def _flip_newest(run: FaultRun, share: float) -> None:
    with open(run.newest(), "r+b") as file:
        file.seek(int(share * os.fstat(file.fileno()).st_size))
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _append(path: Path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)


def test_seed_determines_config_faults_and_moments() -> None:
    random.seed(1)
    first = [plan_round(seed) for seed in range(200)]
    random.seed(2)
    assert first == [plan_round(seed) for seed in range(200)]
    assert len({str(each.sections) for each in first}) > 150
    assert {fault.kind for each in first for fault in each.faults} == set(KINDS)


@pytest.mark.faults_long
@pytest.mark.timeout(2 * 3600)
@case(
    "F02",
    how="random kills, full and slow disks, SIGSTOPs, clock jumps, removed and corrupted files on random configs",
    passes="nothing promised lost, every end has its exit code, exact at the end",
)
def test_random_faults_lose_nothing_that_was_promised(
    new_run: Callable[..., FaultRun], invariants: Invariants, record_property: Callable[[str, object], None]
) -> None:
    campaign, end_s = Campaign(invariants), time.monotonic() + 60 * MINUTES
    while campaign.num_rounds == 0 or (ONE_SEED is None and time.monotonic() < end_s):
        each = plan_round(secrets.randbits(32) if ONE_SEED is None else int(ONE_SEED))
        print(each, flush=True)
        run = new_run(f"round-{each.seed}", **each.sections)
        try:
            campaign.carry_out(each, run)
        except BaseException as error:
            error.add_note(f"repeat it with {each}")
            raise
        shutil.rmtree(run.work)
    record_property("figure", f"{MINUTES:g} min: {campaign.figure()}" if ONE_SEED is None else campaign.figure())
