"""Stand-ins for schedulers: SLURM's sbatch, srun and scontrol, and a `segapp` whose trainings end as a test says.

The stand-in of `segapp` carries every command out with the real program, except for the two that train.
They write the events of a training into the real run folder, wait for SIGTERM if they are to be stopped, and exit. What
is left out of SLURM: queues, clusters, cgroups, and that it kills the batch script after `scontrol requeue`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from tests.support import ROOT

SBATCH_OPTIONS = frozenset(
    ["--array", "--cpus-per-task", "--gpus", "--gpus-per-node", "--nodes", "--ntasks-per-node", "--open-mode",
     "--requeue", "--signal", "--time"]
)  # fmt: skip
"""Options of sbatch, as in its manual, that the examples use."""

_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
pids=()
for ((rank = 0; rank < SLURM_NNODES; rank++)); do
    SLURM_STEP_ID=0 SLURM_PROCID=$rank SLURM_STEP_NUM_TASKS=$SLURM_NNODES SLURM_LOCALID=0 "$@" & pids+=($!)
done
echo "${pids[@]}" > "$FAKE/step"
worst=0
for pid in "${pids[@]}"; do wait "$pid"; code=$?; if ((code > worst)); then worst=$code; fi; done
rm -f "$FAKE/step"
exit $worst
"""

_SCONTROL = """#!/bin/bash
case $1 in
    show) for ((node = 1; node <= SLURM_NNODES; node++)); do echo "node$node"; done ;;
    requeue) echo "$2" >> "$FAKE/requeue" ;;
    *) exit 1 ;;
esac
"""

_SEGAPP = """#!{python}
import sys
sys.path.insert(0, {root!r})
from tests.support.schedulers import act
act(sys.argv[1:])
"""


_REAL_SEGAPP = """#!/bin/sh
exec {python} -m segapp "$@"
"""


class Round(NamedTuple):
    """One start of a job."""

    exit_code: int
    is_requeued: bool


class Scheduler:
    """A folder with stand-ins in `bin`, and the scenario of the trainings that they start.

    Args:
        folder: for the stand-ins and their notes.
        cwd: working directory of the jobs.
        rounds: how the trainings end, one after another: `signal` (waits for SIGTERM, has saved), `command` (a person
            stopped it), `finish`, `killed` (SIGKILL), `lost` (exit code 8), `config` (exit code 2, before the folder).
        is_real: trainings are those of the real program.
    """

    def __init__(self, folder: Path, cwd: Path, rounds: list[str], *, is_real: bool = False) -> None:
        self.folder, self.cwd = folder, cwd
        bin_ = folder / "bin"
        bin_.mkdir(parents=True)
        program = _REAL_SEGAPP if is_real else _SEGAPP
        texts = {
            "srun": _SRUN,
            "scontrol": _SCONTROL,
            "getent": "#!/bin/sh\necho 10.0.0.7\n",
            "segapp": program.format(python=sys.executable, root=str(ROOT)),
        }
        for name, text in texts.items():
            (bin_ / name).write_text(text)
            (bin_ / name).chmod(stat.S_IRWXU)
        (folder / "rounds.json").write_text(json.dumps(rounds))
        self.environ = {**os.environ, "FAKE": str(folder), "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}"}

    def calls(self) -> list[dict[str, Any]]:
        """Return the words of each training that was started, with its rank."""
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def start(self, command: list[str], **env: str) -> subprocess.Popen[bytes]:
        """Start a command with the stand-ins first on its PATH."""
        return subprocess.Popen(command, cwd=self.cwd, env={**self.environ, **env}, stderr=subprocess.DEVNULL)

    def wait_until_training(self, num: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until this many trainings in all have started and can be stopped."""
        self._wait(lambda: self.num_stoppable() >= num, process, 60)

    def num_stoppable(self) -> int:
        """Return the number of trainings so far that wait for SIGTERM, or have."""
        return sum(call["how"] == "signal" for call in self.calls())

    @staticmethod
    def _wait(condition: Callable[[], bool], process: subprocess.Popen[bytes], wait_s: float) -> None:
        deadline_s = time.monotonic() + wait_s
        while not condition():
            assert process.poll() is None, f"the job has ended with {process.returncode}"
            assert time.monotonic() < deadline_s, "the training does not start"
            time.sleep(0.05)

    def submit(
        self,
        script: Path,
        *,
        job: int = 7,
        task: int | None = None,
        most: int = 6,
        wait_s: float = 60,
        can_be_stopped: Callable[[], bool] | None = None,
    ) -> list[Round]:
        """Run a batch script until it is not requeued, and return its rounds; SIGTERM reaches the tasks of its step.

        A training of the real program gets SIGTERM when `can_be_stopped` returns True.
        """
        options = sbatch_options(script)
        assert set(options) <= SBATCH_OPTIONS, options
        assert options["--signal"].startswith("TERM@")
        nodes, done = int(options.get("--nodes", "1")), list[Round]()
        name, env = str(job), {"SLURM_NNODES": str(nodes), "SLURM_JOB_ID": str(job), "SLURM_JOB_NODELIST": "node[1-2]"}
        if task is not None:
            name = f"{job}_{task}"
            env |= {"SLURM_JOB_ID": str(job + task), "SLURM_ARRAY_JOB_ID": str(job), "SLURM_ARRAY_TASK_ID": str(task)}
        rounds = json.loads((self.folder / "rounds.json").read_text())
        while len(done) < most:
            if done:
                env["SLURM_RESTART_COUNT"] = str(len(done))
            process = self.start(["bash", str(script)], **env)
            if rounds[len(done)] == "signal":
                num = nodes * sum(how == "signal" for how in rounds[: len(done) + 1])
                self._wait(can_be_stopped or (lambda num=num: self.num_stoppable() >= num), process, wait_s)
                for pid in (self.folder / "step").read_text().split():  # every process of the step, as slurmstepd does
                    for each in (psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)):
                        with contextlib.suppress(psutil.NoSuchProcess):
                            each.terminate()
            code = process.wait(wait_s)
            asked = self.folder / "requeue"
            is_requeued = asked.exists()
            if is_requeued:
                assert asked.read_text() == f"{name}\n"
                asked.unlink()
            done.append(Round(code, is_requeued))
            if not is_requeued:
                break
        return done


def sbatch_options(script: Path) -> dict[str, str]:
    """Return the options in the #SBATCH lines of a script."""
    lines = [line.removeprefix("#SBATCH") for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    found = [re.fullmatch(r"(--[a-z-]+)(?:=(\S+))?", word) for line in lines for word in shlex.split(line)]
    assert all(found), "options are written as --name or --name=value"
    return {each[1]: each[2] or "" for each in found if each}


def act(words: list[str]) -> None:
    """Be `segapp` with these words: see the module."""
    is_task = words[0] == "sweep" and "--only" in words and "--dry-run" not in words
    fake, rank = Path(os.environ["FAKE"]), int(os.environ.get("SLURM_PROCID", "0"))
    if words[0] != "launch" and not is_task:
        os.execv(sys.executable, [sys.executable, "-m", "segapp", *words])
    run = _made_sweep_run(words) if is_task else Path(words[words.index("--run") + 1])
    starts = fake / f"starts-{run.name}-{rank}"
    with open(starts, "a") as file:
        file.write("x")
    num = len(starts.read_text())
    how = json.loads((fake / "rounds.json").read_text())[num - 1]
    is_stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: is_stopped.append(number))
    with open(fake / "calls.jsonl", "a") as file:
        file.write(json.dumps({"words": words, "rank": rank, "how": how}) + "\n")
    deadline_s = time.monotonic() + 60
    while how == "signal" and not is_stopped and time.monotonic() < deadline_s:
        time.sleep(0.02)
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0 and how in _ENDS:
        _write_training(run, num, _ENDS[how])
    sys.exit(_ENDS[how]["exit_code"] if how in _ENDS else 2)


_ENDS: dict[str, dict[str, Any]] = {
    "signal": {"status": "stopped", "exit_code": 75, "stopped_by": "signal", "reason": "SIGTERM: saved"},
    "command": {"status": "stopped", "exit_code": 75, "stopped_by": "command", "reason": "asked to stop"},
    "finish": {"status": "finished", "exit_code": 0},
    "lost": {"status": "failed", "exit_code": 8, "reason": "another rank is gone"},
}


def _made_sweep_run(words: list[str]) -> Path:
    """Make the sweep with all of its runs, as `segapp sweep --only` does, and return the folder of the run."""
    from segapp.commands.sweep import plan_sweep, save_sweep

    at = words.index("--only")
    configs = [value for name, value in itertools.pairwise(words) if name == "--config"]
    path, runs = plan_sweep([word for word in words[1:at] if word not in ("--config", *configs)], configs)
    save_sweep(path, runs)
    return runs[int(words[at + 1])].folder.path


def _write_training(run: Path, num: int, end: dict[str, Any]) -> None:
    """Write the events of the start with this number, which makes five steps."""
    from segapp.run.events import EventWriter, RunEnd, RunStart, Step
    from segapp.run.folder import RunFolder

    if not (run / "run.json").exists():
        RunFolder.create(path=run).write_info()
    with EventWriter(run / "events.jsonl") as events:
        events.write(RunStart(classes=["a"], num_params=7, batch_size=2, epochs=9, steps_per_epoch=5, devices=["cpu"]))
        events.write(Step(epoch=num, step=5 * num, loss=1.0, lr=0.1))
        events.write(RunEnd(step=5 * num, **end))
