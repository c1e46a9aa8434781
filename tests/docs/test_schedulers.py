"""The files for schedulers, with stand-ins for these and for segapp: what they start, and what starts again.

`segapp status --requeue-code` decides (tests/commands/test_requeue_code.py). Left out of SLURM are queues, clusters,
cgroups, and that it kills the batch script after `scontrol requeue`.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer.main
import yaml

from segapp.cli import app
from tests.support.page_blocks import blocks

EXAMPLES = {
    block.reason: block.text for block in blocks() if block.page.name == "schedulers.md" and block.mark == "not output"
}
"""Name of a file -> its text on the page."""
SBATCH_OPTIONS = {"--array", "--cpus-per-task", "--gpus", "--gpus-per-node", "--nodes", "--ntasks-per-node",
                  "--open-mode", "--requeue", "--signal", "--time"}  # fmt: skip
"""Options of sbatch, as in its manual, that the examples use."""
PYTORCH_JOB = {"apiVersion", "kind", "metadata", "name", "spec", "elasticPolicy", "rdzvBackend", "minReplicas",
               "maxReplicas", "pytorchReplicaSpecs", "Worker", "replicas", "restartPolicy", "template"}  # fmt: skip
"""Names in the PyTorchJob of Kubeflow's training operator, above those of a pod."""
SKY_TASK = {"name", "num_nodes", "workdir", "volumes", "/runs", "setup", "run", "resources", "accelerators", "use_spot",
            "job_recovery", "recover_on_exit_codes"}  # fmt: skip
"""Names in a task of SkyPilot."""

PROGRAMS = {
    "srun": """
while [[ $1 == --* ]]; do shift; done
pids=()
for ((rank = 0; rank < ${SLURM_NNODES:-1}; rank++)); do SLURM_PROCID=$rank "$@" & pids+=($!); done
echo "${pids[@]}" > "$FAKE/step"
worst=0
for pid in "${pids[@]}"; do wait "$pid"; code=$?; if ((code > worst)); then worst=$code; fi; done
exit $worst
""",
    "scontrol": """
case $1 in
    show) for ((node = 1; node <= SLURM_NNODES; node++)); do echo "node$node"; done ;;
    *) echo "$*" >> "$FAKE/requeued" ;;
esac
""",
    "getent": "echo 10.0.0.7",
    "segapp": """
echo "$*" >> "$FAKE/calls"
case "$*" in status*) exit "$STATUS" ;; *--dry-run) echo "runs/demo-sweep/third"; exit ;; esac
if [ "$TRAINING" != SIGTERM ]; then exit "$TRAINING"; fi
trap 'exit 75' TERM
echo >> "$FAKE/started"
for ((i = 0; i < 1500; i++)); do sleep 0.02; done
""",
}
"""Stand-ins. A training ends with the code `TRAINING`, or with 75 on SIGTERM; `segapp status` with `STATUS`."""


def carry_out(
    folder: Path,
    command: list[str],
    training: str | int,
    status: int,
    signaled: Callable[[int], Iterable[int]],
    num_trainings: int = 1,
    **env: str,
) -> int:
    """Return the exit code of a job; processes `signaled(pid)` get SIGTERM when all trainings wait for it."""
    for name, text in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}")
        (folder / name).chmod(0o700)
    environ = {**os.environ, "FAKE": str(folder), "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    environ |= {"TRAINING": str(training), "STATUS": str(status), **env}
    with subprocess.Popen(command, cwd=folder, env=environ, stderr=subprocess.DEVNULL) as process:
        deadline_s = time.monotonic() + 20
        while training == "SIGTERM" and len(lines(folder / "started")) < num_trainings:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        for pid in signaled(process.pid) if training == "SIGTERM" else ():
            psutil.Process(pid).terminate()
        return process.wait(20)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def check_words(line: str) -> None:
    """Check that the real program takes the words of a training, those behind `--` too."""
    words = line.split()
    params = typer.main.get_command(app).commands[words[0]].make_context(words[0], words[1:]).params  # type: ignore[attr-defined]
    if words[0] == "launch":
        assert params["words"][0] == "train", f"options that are not segapp's: {params['words']}"
        check_words(" ".join(params["words"]))
    else:
        assert params["config"], params


def names_in(node: Any) -> set[str]:
    """Return the names of a document, down to the template of a pod."""
    if isinstance(node, dict):
        return set(node).union(*(names_in(value) for name, value in node.items() if name != "template"))
    return set()


@pytest.mark.parametrize(
    ("training", "status", "requeued"), [("SIGTERM", 75, ["requeue 7"]), (75, 0, []), (137, 137, []), (0, 0, [])]
)
def test_slurm_job_is_requeued_if_its_status_says_so(
    tmp_path: Path, training: str | int, status: int, requeued: list[str]
) -> None:
    script = saved("job.slurm", tmp_path)
    env = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_RESTART_COUNT": "3"}
    code = carry_out(tmp_path, ["bash", str(script)], training, status, step_of(tmp_path), 2, **env)
    assert (code, lines(tmp_path / "requeued")) == (status, requeued)
    *launches, asked = lines(tmp_path / "calls")
    assert launches == 2 * [
        "launch --nnodes 2 --nproc-per-node 4 --rdzv-id 7.3 --rdzv-endpoint node1:29500 "
        "-- train --config cityscapes.yaml --run runs/cityscapes"
    ]
    assert asked == f"status runs/cityscapes --requeue-code {75 if training == 'SIGTERM' else training}"
    check_words(launches[0])
    assert {"--signal": "TERM@180", "--nodes": "2"}.items() <= sbatch_options(script).items()


def saved(name: str, folder: Path) -> Path:
    path = folder / name
    path.write_text(EXAMPLES[name])
    return path


def step_of(folder: Path) -> Callable[[int], Iterable[int]]:
    """Return the function for the processes of a step, which slurmstepd signals."""

    def pids(_: int) -> Iterable[int]:
        while not lines(folder / "step"):  # srun notes them after their start
            time.sleep(0.01)
        return map(int, lines(folder / "step")[0].split())

    return pids


def sbatch_options(script: Path) -> dict[str, str]:
    """Return the options in the #SBATCH lines of a script."""
    words = [word for line in lines(script) if line.startswith("#SBATCH") for word in shlex.split(line)[1:]]
    found = dict(re.fullmatch(r"(--[a-z-]+)(?:=(\S+))?", word).groups("") for word in words)  # type: ignore[union-attr]
    assert set(found) <= SBATCH_OPTIONS
    return found


@pytest.mark.parametrize(("training", "status"), [("SIGTERM", 75), (0, 0)])
def test_slurm_array_requeues_its_own_task(tmp_path: Path, training: str | int, status: int) -> None:
    script = saved("sweep.slurm", tmp_path)
    env = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert carry_out(tmp_path, ["bash", str(script)], training, status, step_of(tmp_path), **env) == status
    assert lines(tmp_path / "requeued") == ["requeue 7_2"] * (training == "SIGTERM")
    planned, trained, asked = lines(tmp_path / "calls")
    assert (planned, asked.split()[:2]) == (f"{trained} --dry-run", ["status", "runs/demo-sweep/third"])
    assert trained.endswith("--only 2")
    check_words(planned)
    assert sbatch_options(script)["--array"] == "0-9%4", "two learning rates with five seeds"


@pytest.mark.parametrize(("training", "status", "code"), [("SIGTERM", 75, 143), (75, 0, 0), (8, 8, 143), (2, 2, 2)])
def test_pod_starts_again_by_its_exit_code(tmp_path: Path, training: str | int, status: int, code: int) -> None:
    job = yaml.safe_load(EXAMPLES["pytorchjob.yaml"])
    assert names_in(job) == PYTORCH_JOB
    worker, elastic = job["spec"]["pytorchReplicaSpecs"]["Worker"], job["spec"]["elasticPolicy"]
    assert (job["apiVersion"], job["kind"], worker["restartPolicy"]) == ("kubeflow.org/v1", "PyTorchJob", "ExitCode")
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    spec = worker["template"]["spec"]
    (container,) = spec["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [each["name"] for each in spec["volumes"]]
    # The operator gives these names to a pod; the kubelet signals the first process of a container and no other.
    env = {"PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}", "PET_RDZV_ENDPOINT": "worker-0:23456"}
    command = [*container["command"], *container["args"]]
    assert carry_out(tmp_path, command, training, status, lambda pid: [pid], **env) == code
    launched, asked = lines(tmp_path / "calls")
    assert launched.startswith(
        "launch --nnodes 1:4 --nproc-per-node 4 --rdzv-id cityscapes --rdzv-endpoint worker-0:23456 -- train "
    )
    assert asked == f"status /runs/cityscapes --requeue-code {75 if training == 'SIGTERM' else training}"
    check_words(launched)


@pytest.mark.parametrize(("training", "status", "is_recovered"), [("SIGTERM", 75, True), (75, 0, False), (8, 8, True)])
def test_skypilot_recovers_by_exit_code(tmp_path: Path, training: str | int, status: int, is_recovered: bool) -> None:
    task = yaml.safe_load(EXAMPLES["skypilot.yaml"])
    assert names_in(task) == SKY_TASK
    env = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
           "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-1", "HOME": str(tmp_path)}  # fmt: skip

    def children(pid: int) -> list[int]:
        return [child.pid for child in psutil.Process(pid).children()]

    code = carry_out(tmp_path, ["bash", "-c", task["run"]], training, status, children, **env)
    assert code == status
    assert (code in task["resources"]["job_recovery"]["recover_on_exit_codes"]) == is_recovered
    launched, asked = lines(tmp_path / "calls")
    assert launched.startswith("launch --nnodes 2 --nproc-per-node 8 --rdzv-id sky-1 --rdzv-endpoint 10.0.0.5:29500 ")
    assert asked == f"status /runs/cityscapes --requeue-code {75 if training == 'SIGTERM' else training}"
    check_words(launched)
