"""Helpers of the fault cases: a small run, the uninterrupted run it is compared with, and the invariants.

`tests/faults/README.md` says how a case is written. The invariants, after any fault:

- I1 old or new: what can be resumed is verified, and is the newest acknowledged checkpoint or a newer one;
- I2 nothing acknowledged is lost: a `checkpoint` event is a promise;
- I3 exact: resumed to the end, every step, every evaluation, the checkpoint of every epoch's end and the last one
  have the bits of the reference;
- I4 clear: the expected exit code, one `error:` line, no traceback;
- I5 clean: no process, no temporary file, no lock, no shared memory is left;
- I6 bounded: nothing takes longer than its limit;
- I7 inert: no control byte of the data reaches the terminal (the cases with hostile names add their canaries).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from segapp import failpoints as points
from segapp.config import RunConfig, dump_config
from segapp.run.checkpoints import CheckpointFolder
from tests.support.fault_table import case as case  # imported with the rest by the cases
from tests.support.programs import Program, segapp, start
from tests.support.runs import MODEL, merged

TAG = "SEGAPP_FAULT_TAG"
"""A variable in the environment of every process of a case, by which processes left behind are found."""

SYNCHRONOUS = "ckpt.background=sync"
"""The failpoint that makes training wait for every save, and makes each due save, so that none is skipped."""

EACH_SAVE = "ckpt.background=each"
"""The failpoint that makes each due save in the background; training waits only for the one before."""


LEAN: dict[str, Any] = {"train": {"ema": None}, "optim": {"name": "sgd", "lr": 0.01, "momentum": 0.0}}
"""Few tensors, so few system calls a save: about nine for each."""

SHORT: dict[str, Any] = {**LEAN, "train": {"epochs": 2, "ema": None}, "checkpoint": {"every_steps": 4}}
"""Ten steps, and saves at steps 4, 5, 8 and 10."""

RANKS: dict[str, Any] = {
    "model": {"library": "python", "name": "tests.support.double_net:DoubleNet", "encoder": None, "options": {}},
    "train": {"precision": "fp32", "batch_size": 4, "epochs": 40},
    "optim": {"name": "sgd", "lr": 0.05},  # AdamW amplifies the rounding of gradients that are 0
    "parallel": {"mode": "ddp", "devices": ["cpu"]},
}
"""A tiny network in float64 on a rank of each machine."""


def sections_of(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of `RANKS` with some keys replaced."""
    return {name: {**RANKS.get(name, {}), **dict(sections.get(name, {}))} for name in {**RANKS, **sections}}


def some(values: Sequence[Any], *short: Any) -> list[Any]:
    """Returns the parameters of a test: those in `short` are marked faults, the others faults_long."""
    marks = {True: pytest.mark.faults, False: pytest.mark.faults_long}
    return [
        pytest.param(*(each if isinstance(each, tuple) else (each,)), marks=marks[each in short]) for each in values
    ]


def tiny_config(root: Path, **sections: Any) -> RunConfig:
    """Returns a config of 15 steps with BatchNorm, dropout, AdamW, warm-up and averaged weights, keys replaced."""
    base = {
        "name": "tiny",
        "seed": 3,
        "data": {
            "format": "folder",
            "root": str(root),
            "classes": ["ground", "box", "disc"],
            "crop_px": [32, 32],
            "workers": 0,
        },
        "model": MODEL,
        "optim": {"name": "adamw", "lr": 0.001},
        "schedule": {"warmup_steps": 3},
        "train": {"epochs": 3, "batch_size": 2, "ema": 0.9},
        "checkpoint": {"every_steps": 1, "keep": 2},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    return merged(base, **sections)


def state_of(folder: Path) -> list[tuple[Path, int, int, int, bytes]]:
    """Returns everything about a folder that a program could change."""
    facts = [(path, path.lstat()) for path in (folder, *sorted(folder.rglob("*")))]
    return [
        (path, seen.st_mode, seen.st_nlink, seen.st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path, seen in facts
    ]


def finished_run(folder: Path, root: Path) -> Path:
    """Train one epoch as the program does, and return the run; its config lies next to it."""
    (folder / "config.yaml").write_text(dump_config(tiny_config(root, train={"epochs": 1})))
    done = segapp("train", "--plain", "--config", "config.yaml", "--run", "run", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder / "run"


@dataclass
class FaultRun:
    """A run to inject faults into: `work` is an empty folder, the run is in `work / "run"`."""

    work: Path
    config: RunConfig
    programs: list[Program] = field(default_factory=list)
    marks: dict[int, Path] = field(default_factory=dict)
    tag: str = field(default_factory=lambda: secrets.token_hex(8))

    def __post_init__(self) -> None:
        self.work.mkdir(parents=True, exist_ok=True)
        (self.work / "config.yaml").write_text(dump_config(self.config))

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.work / "run"

    def start(self, *overrides: str, **options: Any) -> Program:
        """Starts (or resumes) the training; `options` are those of `program`."""
        return self.program(
            "train", "--plain", "--config", "config.yaml", "--run", "run", "--resume", *overrides, **options
        )

    def train(self, *overrides: str, failpoints: str = "", timeout_s: float = 60, **env: str) -> Any:
        """Trains (or resumes) to the end; fails the test if that takes too long."""
        return self.ended(self.start(*overrides, failpoints=failpoints, **env), timeout_s)

    def program(
        self, *arguments: str, failpoints: str = "", is_stopped: bool = False, machine: int | None = None, **env: str
    ) -> Program:
        """Starts any command of segapp in the work folder."""
        marks = self.work / f"marks-{len(self.programs)}"
        marks.mkdir()
        env = {**env, points.VARIABLE: failpoints, points.MARKS_VARIABLE: str(marks), TAG: self.tag}
        program = start(*arguments, cwd=self.work, logs=self.work, is_stopped=is_stopped, machine=machine, **env)
        self.programs.append(program)
        self.marks[program.pid] = marks
        return program

    def ended(
        self, program: Program, timeout_s: float = 60, *, must_act: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Waits for the end of a program, which must come in time (I6); with `must_act` after its faults took place."""
        if program.wait(timeout_s) is None:
            program.send(signal.SIGABRT)  # prints its stacks
            program.wait(5)
            self.kill_all()
            pytest.fail(f"{' '.join(program.words[:1])} still ran after {timeout_s:g} s\n{program.stderr}")
        if program.is_sigkilled:
            assert program.returncode == -signal.SIGKILL, f"it ended with {program.returncode} before the SIGKILL"
        if must_act:
            assert_acted(self.marks[program.pid])
        return program.finish(1)

    def num_acts(self, program: Program, point: str) -> int:
        """Returns how often an armed failpoint has acted so far, in a program and its children."""
        path = self.marks[program.pid] / point
        return path.read_text().count("\n") if path.exists() else 0

    def wait_for_act(self, program: Program, point: str, times: int = 1) -> None:
        """Waits until an armed failpoint has acted so often."""
        self.wait_for(lambda: self.num_acts(program, point) >= times, program)

    def command(self, *arguments: str, timeout_s: float = 60, **env: str) -> subprocess.CompletedProcess[str]:
        """Runs another command of segapp to its end."""
        return self.ended(self.program(*arguments, **env), timeout_s)

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Returns the events so far, whole lines only."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return []
        whole = path.read_bytes().rpartition(b"\n")[0]
        found = [json.loads(line) for line in whole.splitlines()]
        return [event for event in found if kind in (None, event["type"])]

    def wait_for(self, what: Callable[[], Any], program: Program | None = None, timeout_s: float = 60) -> Any:
        """Waits until `what()` is true and returns it; the test fails if the program ends first."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := what()):
            assert time.monotonic() < deadline_s, "the condition did not hold in time"
            assert program is None or program.returncode is None, f"the program ended:\n{program.stderr}"
            time.sleep(0.01)
        return found

    def wait_for_step(self, step: int, program: Program, timeout_s: float = 60) -> None:
        """Waits until the event of a step is written."""
        self.wait_for(lambda: any(e["step"] >= step for e in self.events("step")), program, timeout_s)

    def acknowledged_step(self) -> int:
        """Returns the step of the last acknowledged checkpoint; 0 if there is none."""
        return max((event["step"] for event in self.events("checkpoint")), default=0)

    def committed(self) -> list[dict[str, Any]]:
        """Returns the committed checkpoints, newest first; each must be intact, as `segapp ckpt verify` says it."""
        if not (self.folder / "run.json").exists():
            return []
        rows = CheckpointFolder(self.folder / "checkpoints").verify()
        assert [row.problem for row in rows] == [None] * len(rows)
        return [row.entry.model_dump() for row in rows]

    def copy_data(self) -> Path:
        """Gives the run a data set of its own, a copy, and returns its root; before the first start."""
        root = self.work / "data"
        shutil.copytree(self.config.data.root, root)
        self.config = self.config.model_copy(update={"data": self.config.data.model_copy(update={"root": str(root)})})
        (self.work / "config.yaml").write_text(dump_config(self.config))
        return root

    def newest(self) -> Path:
        """Returns the file of the newest checkpoint."""
        return next((self.folder / "checkpoints" / "objects").glob(f"*{self.committed()[0]['sha256'][:16]}.pt"))

    def left_behind(self) -> list[int]:
        """Returns the processes of this run that still live."""
        return living_processes({program.pid for program in self.programs}, self.tag)

    def kill_all(self) -> None:
        """Kills what is left, by process id."""
        for pid in self.left_behind():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def assert_acted(marks: Path) -> None:
    """Fails where an armed failpoint has left no mark in the folder that SEGAPP_FAILPOINT_MARKS named."""
    idle = sorted(path.name for path in marks.iterdir() if path.stat().st_size == 0)
    assert not idle, f"armed, but never visited when it was due: {', '.join(idle)}"


def living_processes(sessions: set[int], tag: str) -> list[int]:
    """Returns the living processes of some sessions, and those with a tag in their environment.

    A process that was forked, not executed, shows its parent's environment: it is found by its session.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        with contextlib.suppress(OSError, IndexError):
            state, *numbers = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            is_ours = int(numbers[2]) in sessions or f"{TAG}={tag}".encode() in (entry / "environ").read_bytes()
            if is_ours and state != "Z":
                found.append(int(entry.name))
    return found


# --- the reference ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reference:
    """The uninterrupted run of a config: its course, the sha256 of each (path, step, epoch) and of the last one."""

    course: tuple[tuple[Any, ...], ...]
    sha256: Mapping[tuple[str, int, int], str]
    final: str


class References:
    """Uninterrupted runs on the data set `root`, each made once, in the folder `work`."""

    def __init__(self, root: Path, work: Path) -> None:
        self._root, self._work = root, work
        self._made: dict[str, Reference] = {}
        self._left: dict[str, Path] = {}

    def config(self, **sections: Any) -> RunConfig:
        """Returns the small config with keys replaced; images are read in each epoch, so that their faults are met."""
        return tiny_config(self._root, **{**sections, "data": {"cache": "none", **sections.get("data", {})}})

    def of(self, config: RunConfig) -> Reference:
        """Returns the reference of a config."""
        key = dump_config(config)
        if key not in self._made:
            run = FaultRun(self._work / f"reference-{len(self._made)}", config)
            done = run.train(failpoints=SYNCHRONOUS, timeout_s=240)
            assert done.returncode == 0, done.stderr
            found = {_place(event): event["sha256"] for event in run.events("checkpoint")}
            self._made[key] = Reference(course(run), found, run.committed()[0]["sha256"])
        return self._made[key]

    def left_by(self, failpoints: str, run: FaultRun) -> FaultRun:
        """Makes a run what a start with these failpoints leaves; the first such start is copied for the others."""
        key = f"{failpoints}\n{dump_config(run.config)}"
        if key not in self._left:
            made = FaultRun(self._work / f"left-{len(self._left)}", run.config)
            made.train(failpoints=failpoints)
            self._left[key] = made.folder
        subprocess.run(["cp", "-a", self._left[key], run.folder], check=True)
        return run


def _is_saved_for_an_end(later: list[dict[str, Any]]) -> bool:
    """Whether a checkpoint was written because its process ended: no step and no evaluation came between."""
    following = (event for event in later if event["type"] in ("step", "val", "run_start", "run_end"))
    end = next(following, None)
    return end is not None and end["type"] == "run_end" and end["status"] != "finished"


def _place(event: dict[str, Any]) -> tuple[str, int, int]:
    return event["path"], event["step"], event["epoch"]


def course(run: FaultRun) -> tuple[tuple[Any, ...], ...]:
    """Returns the values of all step and evaluation events, without times."""
    steps = [(e["step"], e["epoch"], e["loss"], e["lr"], e["grad_norm"]) for e in run.events("step")]
    found = [(e["step"], e["epoch"], e["loss"], e["miou"], tuple(e["iou"])) for e in run.events("val")]
    return (*steps, *found)


# --- the invariants ---------------------------------------------------------------------------------------------------


class Invariants:
    """Checks of what must hold after any fault, against uninterrupted runs."""

    def __init__(self, references: References) -> None:
        self.references = references

    def check(self, run: FaultRun, *, resume: bool = True, timeout_s: float = 60, **env: str) -> None:
        """Checks all invariants; the programs of `run` have ended or were killed.

        Without `resume` it is not trained to its end (I3), where the fault rules that out.
        """
        self.assert_clean_processes(run)
        self.assert_nothing_lost(run)
        if resume:
            self.assert_exact(run, timeout_s=timeout_s, **env)
            self.assert_clean_folder(run)

    @staticmethod
    def assert_clean_processes(run: FaultRun, within_s: float = 5.0) -> None:
        """I5: no process is left."""
        deadline_s = time.monotonic() + within_s
        while left := run.left_behind():
            if time.monotonic() > deadline_s:
                words = [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[-80:] for pid in left]
                run.kill_all()
                pytest.fail(f"still alive {within_s:g} s later: {left} {words}")
            time.sleep(0.05)

    @staticmethod
    def assert_nothing_lost(run: FaultRun) -> None:
        """I1 and I2: what is committed is intact, and the newest is not older than the last one acknowledged."""
        acknowledged, committed = run.acknowledged_step(), run.committed()
        newest = committed[0]["step"] if committed else 0
        assert newest >= acknowledged, (
            f"step {acknowledged} was acknowledged, the newest checkpoint is of step {newest}"
        )

    def assert_exact(self, run: FaultRun, timeout_s: float = 60, **env: str) -> None:
        """I3: resumed to its end, the run equals the reference bit for bit, its events too."""
        done = run.train(timeout_s=timeout_s, **env)
        assert done.returncode == 0, done.stderr
        self.assert_same(run)

    def assert_same(self, run: FaultRun) -> None:
        """A finished run equals the reference of its config."""
        reference = self.references.of(run.config)
        assert course(run) == reference.course
        loaded, found = None, run.events()
        for index, event in enumerate(found):
            loaded = event.get("resumed_from_step") if event["type"] == "run_start" else loaded
            # A state saved as it was loaded, or for the end of a process, is equal (R04), but its bytes need not be:
            # pickle tells equal objects apart.
            if event["type"] != "checkpoint" or event["step"] == loaded or _is_saved_for_an_end(found[index + 1 :]):
                continue
            # One saved for a stop or a command has no counterpart in the reference.
            expected = reference.sha256.get(_place(event), event["sha256"])
            assert event["sha256"] == expected, f"{event['path']} of step {event['step']} differs"
        assert run.committed()[0]["sha256"] == reference.final
        assert [event["seq"] for event in run.events()] == list(range(1, len(run.events()) + 1))

    @staticmethod
    def assert_clean_folder(run: FaultRun) -> None:
        """I5: no temporary file and no lock is left."""
        assert [path.name for path in run.folder.rglob(".tmp-*")] == []
        assert [path.name for path in (run.folder / "commands").iterdir()] == []

    @staticmethod
    def assert_clear(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
        """I4: the exit code, and one error line that holds the words; no traceback."""
        assert done.returncode == code, f"exit code {done.returncode} instead of {code}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stdout + done.stderr
        lines = done.stderr.replace("\0", "").splitlines()  # torch's own line about a crashed worker ends with a NUL
        errors = [line for line in lines if line.startswith("error:")]
        assert len(errors) == 1, done.stderr
        for word in words:
            assert word in done.stderr, f"{word!r} is not in {done.stderr!r}"


# --- tools ------------------------------------------------------------------------------------------------------------


@functools.cache
def lacks(tool: str) -> str | None:
    """Returns why a tool (`strace`, `mount`, `unshare`, `root`) cannot be used here; None if it can."""
    probes = {
        "strace": ["strace", "-qq", "-o", "/dev/null", "true"],
        "mount": ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"],
        "unshare": ["unshare", "-m", "true"],
        "root": ["test", "0", "=", str(os.geteuid())],
    }
    try:
        done = subprocess.run(probes[tool], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{tool}: {error}"
    return None if done.returncode == 0 else f"{tool} is not allowed here: {done.stderr.strip()[:80]}"


def needs(*tools: str) -> None:
    """Skips the case, by name, where a tool is missing."""
    for tool in tools:
        if (why := lacks(tool)) is not None:
            pytest.skip(why)


@contextlib.contextmanager
def small_disk(where: Path, size_kib: int) -> Iterator[Path]:
    """A file system of its own, of so many KiB."""
    needs("root", "mount")
    where.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_kib}k", "tmpfs", str(where)], check=True)
    try:
        yield where
    finally:
        subprocess.run(["umount", "-l", str(where)], check=False)


@contextlib.contextmanager
def traced(run: FaultRun, program: Program, *options: str) -> Iterator[Path]:
    """strace on a program that waits for SIGCONT, and all it forks; it goes on once strace holds it."""
    needs("strace")
    run.wait_for(lambda: is_stopped(program), program)
    trace = run.work / f"trace-{program.pid}"
    command = ["strace", "-f", "-qq", "-y", "-o", str(trace), *options, "-p", str(program.pid)]
    tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        run.wait_for(lambda: _tracers_of(program.pid) == {tracer.pid} or tracer.poll() is not None)
        if tracer.poll() is not None:
            assert tracer.stderr is not None
            pytest.skip(f"strace cannot attach: {tracer.stderr.read().strip()[:120]}")
        program.send(signal.SIGCONT)
        yield trace
        if any("error=" in option for option in options):
            assert "(INJECTED)" in trace.read_text(errors="replace"), "strace has injected no error"
    finally:
        program.wait(60)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tracer.wait(10)
        if tracer.poll() is None:
            tracer.kill()
            tracer.wait()


def is_stopped(program: Program) -> bool:
    """Whether a program waits for SIGCONT."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{program.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    return False


def _tracers_of(pid: int) -> set[int]:
    """Returns the tracers of the threads of a process; strace attaches to one after the other."""
    found = set()
    for path in Path(f"/proc/{pid}/task").glob("*/status"):
        lines = path.read_text().splitlines()
        found |= {int(line.split()[1]) for line in lines if line.startswith("TracerPid:")}
    return found
