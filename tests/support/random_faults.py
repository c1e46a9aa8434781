"""Rounds of random faults: a seed says config, faults and moments; moments are visits to failpoints, not seconds.

`plan_round` is pure; `Round.carry_out` starts the run, injects one fault into each start, and checks after each what
must hold. What a fault does to a start:

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
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.fault_runs import EACH_SAVE, FaultRun, Invariants, is_stopped, lacks
from tests.support.programs import Program

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

SIZE_KIB = 64 * 1024

KINDS = (
    "kill",
    "full disk",
    "slow disk",
    "stop",
    "clock",
    "removed data",
    "corrupted data",
    "removed file",
    "corrupted file",
)

AT_REST = ("removed file", "corrupted file")


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
    """A run and the faults of its starts.

    Args:
        seed: from which it was planned.
        sections: of the config.
        faults: in turn.
    """

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
    """Carries rounds out, and counts what took place.

    Args:
        invariants: what must hold.
    """

    def __init__(self, invariants: Invariants) -> None:
        self._invariants = invariants
        self.num_rounds = 0
        self.num_faults = dict.fromkeys(KINDS, 0)
        self.num_ends: dict[int, int] = {}

    def carry_out(self, each: Round, run: FaultRun) -> None:
        """Starts a run once for each fault, then to its end, and compares it with the uninterrupted run."""
        run.copy_data()
        with _small_disk(run):
            for fault in each.faults:
                self._suffer(run, fault)
            self._invariants.check(run, timeout_s=300)
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
                undone.enter_context(_full_disk(run, 150 + int(2500 * fault.share)))
            program = run.start(failpoints=f"{failpoints};{EACH_SAVE}")
            if ":stop" in failpoints and _wait_for_stop(run, program):
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
        points = [entry.partition("=")[0] for entry in failpoints.split(";") if "=" in entry]
        if fault.kind == "full disk":
            has_acted = done.returncode == 10 or len(run.events("alert")) > num_alerts
        elif fault.kind in ("kill", "slow disk", "clock"):
            has_acted = run.num_acts(program, points[0]) > 0
        self.num_faults[fault.kind] += has_acted
        self.num_ends[done.returncode] = self.num_ends.get(done.returncode, 0) + 1

    def figure(self) -> str:
        """Returns what took place."""
        faults = ", ".join(f"{kind} {number}" for kind, number in self.num_faults.items())
        ends = ", ".join(f"{code}: {number}" for code, number in sorted(self.num_ends.items()))
        return f"{self.num_rounds} rounds; faults: {faults}; exit codes: {ends}"


def _wait_for_stop(run: FaultRun, program: Program) -> bool:
    run.wait_for(lambda: is_stopped(program) or program.returncode is not None, timeout_s=300)
    return program.returncode is None


@contextlib.contextmanager
def _small_disk(run: FaultRun) -> Iterator[None]:
    """The run folder is a file system of its own, where that is allowed."""
    if lacks("mount") is not None:
        yield
        return
    run.folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={SIZE_KIB}k", "tmpfs", str(run.folder)], check=True)
    try:
        yield
    finally:
        run.kill_all()
        subprocess.run(["umount", "-l", str(run.folder)], check=True)


@contextlib.contextmanager
def _full_disk(run: FaultRun, left_kib: int) -> Iterator[None]:
    """The file system of the run has only so much left."""
    usage = shutil.disk_usage(run.folder)
    _resize(run.folder, usage.used // 1024 + left_kib)
    yield
    _resize(run.folder, SIZE_KIB)


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
    changes: dict[str, dict[str, Callable[[FaultRun], object]]] = {
        "removed file": {
            "last.pt": lambda run: (run.folder / "checkpoints" / "last.pt").unlink(),
            "best.pt": lambda run: (run.folder / "checkpoints" / "best.pt").unlink(),
            "object": lambda run: run.newest().unlink(),
            "lock": lambda run: (run.folder / "lock").unlink(),
            "log": lambda run: (run.folder / "trainer.log").unlink(),
            "inbox": lambda run: shutil.rmtree(run.folder / "commands"),
        },
        "corrupted file": {
            "checkpoint": lambda run: _flip_newest(run, fault.share),
            "manifest": lambda run: _cut(run.folder / "checkpoints" / "manifest.json", fault.share),
            "lock": lambda run: (run.folder / "lock").write_bytes(b"\0{" * 100),
            "events": lambda run: _append(run.folder / "events.jsonl", b'{"v":1,"seq":9,"t":1.5,"type":"ste'),
        },
    }
    names = sorted(changes[fault.kind])
    name = names[int(fault.share * 1000) % len(names)]
    manifest = run.folder / "checkpoints" / "manifest.json"
    if len(run.committed()) < 2 or (name in ("last.pt", "best.pt") and not (manifest.parent / name).exists()):
        yield ""  # nothing is there that could be lost and made good
        return
    whole = manifest.read_bytes()
    changes[fault.kind][name](run)
    yield name
    if name == "manifest":
        manifest.write_bytes(whole)


def _flip_newest(run: FaultRun, share: float) -> None:
    with open(run.newest(), "r+b") as file:
        file.seek(int(share * os.fstat(file.fileno()).st_size))
        [byte] = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def _cut(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(0.9 * share * len(content))])


def _append(path: Path, content: bytes) -> None:
    with open(path, "ab") as file:
        file.write(content)
