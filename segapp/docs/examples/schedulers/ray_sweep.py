"""A sweep over the machines of a Ray cluster: `python ray_sweep.py --config demo.yaml optim.lr=0.005,0.014 seed=0..4`.

Each run is a Ray task with one GPU, which starts segapp as a process. Ray restarts the tasks of a lost machine, and
this script restarts runs that were stopped after a save. The run folders are on a disk that all machines see.
"""

import json
import signal
import subprocess
import sys

import ray

REQUEUE = 75
"""Exit code of a run that a signal has stopped and that should be started again."""


@ray.remote(num_gpus=1, max_retries=3, retry_exceptions=[InterruptedError])
def train(words: list[str], index: int, folder: str) -> int:
    """Train a run of the sweep, and return the exit code; if it is started again, it continues from its checkpoint."""
    process = subprocess.Popen(["segapp", "sweep", *words, "--only", str(index)])
    try:
        code = process.wait()
    except BaseException:  # ray.cancel
        process.send_signal(signal.SIGTERM)
        process.wait()
        raise
    code = subprocess.run(["segapp", "status", folder, "--requeue-code", str(code % 256)]).returncode
    if code == REQUEUE:
        raise InterruptedError(f"{folder} was stopped and has saved")
    return code


def main(words: list[str]) -> int:
    """Train all runs of the sweep, list them, and return 1 if a run has failed."""
    listed = subprocess.run(["segapp", "sweep", *words, "--dry-run", "--json"], check=True, stdout=subprocess.PIPE)
    found = json.loads(listed.stdout)
    ray.init()
    codes = ray.get([train.remote(words, run["index"], run["folder"]) for run in found["runs"]])
    subprocess.run(["segapp", "ls", found["name"]], check=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
