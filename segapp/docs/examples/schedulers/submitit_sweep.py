"""A sweep as a SLURM array: `python submitit_sweep.py --config demo.yaml optim.lr=0.005,0.014 seed=0..4`.

If there is no SLURM, submitit trains the runs on this machine, all at the same time. `uv sync --extra submitit`.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys

import submitit


class TrainOne:
    """Train a run of the sweep in a separate process; after a time limit or a preemption, SLURM starts it again."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.pid: int | None = None

    def __call__(self, index: int, folder: str) -> int:
        """Return the exit code of `segapp status --requeue-code`, which is also 0 if a person stopped the run."""
        process = subprocess.Popen(["segapp", "sweep", *self.words, "--only", str(index)])
        self.pid = process.pid
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # process.wait() holds a lock, which `checkpoint` needs
        code = str(process.wait() % 256)
        return subprocess.run(["segapp", "status", folder, "--requeue-code", code]).returncode

    def checkpoint(self, index: int, folder: str) -> submitit.helpers.DelayedSubmission:
        """Let the run save, and return the job that continues it; submitit calls this at its signal."""
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            if self.pid is not None:
                os.kill(self.pid, signal.SIGTERM)
                os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        return submitit.helpers.DelayedSubmission(TrainOne(self.words), index, folder)

    __submitit_checkpoint__ = checkpoint  # its name in later versions


def main(words: list[str]) -> int:
    """Train all runs of the sweep, list them, and return 1 if a run has failed."""
    listed = subprocess.run(["segapp", "sweep", *words, "--dry-run", "--json"], check=True, stdout=subprocess.PIPE)
    found = json.loads(listed.stdout)
    executor = submitit.AutoExecutor(folder="logs/%j")
    executor.update_parameters(timeout_min=240, gpus_per_node=1, cpus_per_task=8)
    executor.update_parameters(slurm_array_parallelism=4, slurm_signal_delay_s=180)
    runs = found["runs"]
    jobs = executor.map_array(TrainOne(words), [run["index"] for run in runs], [run["folder"] for run in runs])
    codes = [job.result() for job in jobs]
    subprocess.run(["segapp", "ls", found["name"]], check=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
