"""The examples for schedulers, with stand-ins for these: what they start, what starts again, and what does not."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonschema
import psutil
import pytest
import typer.main
import yaml

from segapp.cli import app
from segapp.config import dump_config
from segapp.docs.pages import FOLDER
from segapp.view.runs import run_state
from tests.support.live_runs import seen, small
from tests.support.schedulers import Round, Scheduler, sbatch_options

EXAMPLES = FOLDER / "examples" / "schedulers"
PAGES = {"job.slurm": "slurm", "sweep.slurm": "slurm", "pytorchjob.yaml": "kubernetes",
         "skypilot.yaml": "skypilot"}  # fmt: skip
GRID = ["--config", "tiny.yaml", "seed=0,1", "train.epochs=1"]


@pytest.mark.parametrize("name", sorted(PAGES))
def test_pages_show_the_examples_as_they_are(name: str) -> None:
    assert {path.name for path in EXAMPLES.iterdir() if path.is_file()} == set(PAGES)
    text = (EXAMPLES / name).read_text()
    assert f"segapp/docs/examples/schedulers/{name}" in (FOLDER / "tasks" / f"{PAGES[name]}.md").read_text()
    assert f"\n{text}```" in (FOLDER / "tasks" / f"{PAGES[name]}.md").read_text()
    assert len(text.splitlines()) <= 60


def check_launch(words: list[str]) -> None:
    """Check that the real program takes the words of `segapp launch`, and what it trains."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    launch = commands["launch"].make_context("launch", words[1:]).params
    inner = launch["words"]
    assert inner[0] == "train", f"options that are not segapp's: {inner}"
    train = commands["train"].make_context("train", inner[1:]).params
    assert (train["config"], train["run"].name) == ("cityscapes.yaml", "cityscapes")


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        (["signal", "finish"], [Round(75, True), Round(0, False)]),
        (["signal", "command"], [Round(75, True), Round(0, False)]),  # segapp ctl stop
        (["killed"], [Round(137, False)]),
        (["config"], [Round(2, False)]),
    ],
)
def test_slurm_job_is_requeued_after_signals_alone(tmp_path: Path, rounds: list[str], expected: list[Round]) -> None:
    slurm = Scheduler(tmp_path / "fake", tmp_path, rounds)
    assert slurm.submit(EXAMPLES / "job.slurm") == expected
    calls = [call["words"] for call in slurm.calls() if call["rank"] == 0]
    assert len(slurm.calls()) == 2 * len(rounds), "one launcher on each of two machines"
    for number, words in enumerate(calls):
        check_launch(words)
        assert " ".join(words) == (
            f"launch --nnodes 2 --nproc-per-node 4 --rdzv-id 7.{number} --rdzv-endpoint node1:29500 "
            "-- train --config cityscapes.yaml --run runs/cityscapes"
        )


@pytest.mark.slow
def test_slurm_job_of_real_trainings_has_the_undisturbed_course(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two launchers of one rank each, on one machine; the second half of the epochs is made after a requeue."""
    config = small(tiny, epochs=4, parallel={"mode": "ddp"})
    (tmp_path / "cityscapes.yaml").write_text(dump_config(config))
    monkeypatch.setenv("SEGAPP_FAILPOINTS", "train.step=sleep:0.3")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    text = (EXAMPLES / "job.slurm").read_text().replace("per-node 4 ", "per-node 1 ")
    job = tmp_path / "job.slurm"
    job.write_text(text.replace("$head:29500", f"127.0.0.1:{port}"))
    run = tmp_path / "runs" / "cityscapes"
    slurm = Scheduler(tmp_path / "fake", tmp_path, ["signal", "finish"], is_real=True)
    done = slurm.submit(job, wait_s=300, can_be_stopped=lambda: len(seen(run, "step")) >= 4)
    assert done == [Round(75, True), Round(0, False)]
    ends = [(end["exit_code"], end.get("stopped_by")) for end in seen(run, "run_end")]
    assert ends == [(75, "signal"), (0, None)]
    monkeypatch.setenv("SEGAPP_FAILPOINTS", "")
    words = ["launch", "--nproc-per-node", "2", "--", "train", "--config", "cityscapes.yaml", "--run", "whole"]
    subprocess.run([sys.executable, "-m", "segapp", *words], check=True, cwd=tmp_path)
    resumed, whole = ([step["loss"] for step in seen(each, "step")] for each in (run, tmp_path / "whole"))
    assert len(whole) == 20
    assert resumed == whole


@pytest.fixture
def place(tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with tiny.yaml, as the current one."""
    (tmp_path / "tiny.yaml").write_text(dump_config(small(tiny)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_slurm_array_requeues_each_task_alone(place: Path) -> None:
    text = (EXAMPLES / "sweep.slurm").read_text()
    assert sbatch_options(EXAMPLES / "sweep.slurm")["--array"] == "0-9%4"
    script = place / "sweep.slurm"
    script.write_text(re.sub(r"--config .* seed=\S+", " ".join(GRID), text))
    slurm = Scheduler(place / "fake", place, ["signal", "finish"])
    assert slurm.submit(script, task=1) == [Round(75, True), Round(0, False)]
    assert [call["words"][-2:] for call in slurm.calls()] == [["--only", "1"]] * 2
    runs = {run.name: run_state(run) for run in (place / "runs" / "tiny-sweep").glob("seed*")}
    assert runs == {"seed1": "finished"}


JOB_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "kubeflow.org/v1"},
        "kind": {"const": "PyTorchJob"},
        "metadata": {"type": "object", "required": ["name"]},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["pytorchReplicaSpecs"],
            "properties": {
                "elasticPolicy": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "rdzvBackend": {"enum": ["c10d", "etcd", "etcd-v2"]},
                        "minReplicas": {"type": "integer"},
                        "maxReplicas": {"type": "integer"},
                        "maxRestarts": {"type": "integer"},
                    },
                },
                "pytorchReplicaSpecs": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["Worker"],
                    "properties": {
                        "Worker": {
                            "type": "object",
                            "additionalProperties": False,
                            "required": ["template"],
                            "properties": {
                                "replicas": {"type": "integer"},
                                "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
                                "template": {"type": "object", "required": ["spec"]},
                            },
                        }
                    },
                },
            },
        },
    },
}
"""The part of the PyTorchJob of Kubeflow's training operator that the example uses."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("how", "code"), [("signal", 143), ("command", 0), ("finish", 0), ("lost", 143), ("config", 2)]
)
def test_pod_starts_again_by_its_exit_code(tmp_path: Path, how: str, code: int) -> None:
    job = yaml.safe_load((EXAMPLES / "pytorchjob.yaml").read_text())
    jsonschema.validate(job, JOB_SCHEMA)
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    elastic, spec = job["spec"]["elasticPolicy"], worker["template"]["spec"]
    assert elastic["minReplicas"] <= worker["replicas"] <= elastic["maxReplicas"]
    (container,) = spec["containers"]
    assert [mount["name"] for mount in container["volumeMounts"]] == [each["name"] for each in spec["volumes"]]
    (script,) = container["args"]
    cluster = Scheduler(tmp_path / "fake", tmp_path, [how])
    # The names that the operator gives to a pod for its elasticPolicy.
    names = {"PET_NNODES": f"{elastic['minReplicas']}:{elastic['maxReplicas']}",
             "PET_RDZV_ENDPOINT": "cityscapes-worker-0:23456"}  # fmt: skip
    command = [*container["command"], script.replace("/runs", str(tmp_path))]
    pod = cluster.start(command, **names)
    if how == "signal":
        cluster.wait_until_training(1, pod)
        pod.send_signal(signal.SIGTERM)  # the kubelet signals the first process of the container alone
    assert pod.wait(60) == code
    check_launch(cluster.calls()[0]["words"])
    assert " ".join(cluster.calls()[0]["words"][:9]) == (
        "launch --nnodes 1:4 --nproc-per-node 4 --rdzv-id cityscapes --rdzv-endpoint cityscapes-worker-0:23456"
    )


TASK_SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "name": {"type": "string"},
        "num_nodes": {"type": "integer"},
        "workdir": {"type": "string"},
        "volumes": {"type": "object", "additionalProperties": {"type": "string"}},
        "setup": {"type": "string"},
        "run": {"type": "string"},
        "resources": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                "accelerators": {"type": "string"},
                "use_spot": {"type": "boolean"},
                "job_recovery": {
                    "type": "object",
                    "additionalProperties": False,
                    "properties": {
                        "recover_on_exit_codes": {
                            "type": "array",
                            "items": {"type": "integer", "minimum": 0, "maximum": 255},
                        },
                    },
                },
            },
        },
    },
}
"""The part of a SkyPilot task that the example uses."""


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("how", "is_recovered"), [("signal", True), ("command", False), ("lost", True)])
def test_skypilot_recovers_by_exit_code(tmp_path: Path, how: str, is_recovered: bool) -> None:
    task = yaml.safe_load((EXAMPLES / "skypilot.yaml").read_text())
    jsonschema.validate(task, TASK_SCHEMA)
    cloud = Scheduler(tmp_path / "fake", tmp_path, [how])
    names = {"SKYPILOT_NODE_IPS": "10.0.0.5\n10.0.0.6", "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
             "SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "sky-1", "HOME": str(tmp_path)}  # fmt: skip
    node = cloud.start(["bash", "-c", task["run"].replace("/runs", str(tmp_path))], **names)
    if how == "signal":
        cloud.wait_until_training(1, node)
        for child in psutil.Process(node.pid).children():
            child.terminate()
    code = node.wait(60)
    assert (code in task["resources"]["job_recovery"]["recover_on_exit_codes"]) == is_recovered
    assert is_recovered or code == 0
    check_launch(cloud.calls()[0]["words"])
    assert " ".join(cloud.calls()[0]["words"][:9]) == (
        "launch --nnodes 2 --nproc-per-node 8 --rdzv-id sky-1 --rdzv-endpoint 10.0.0.5:29500"
    )
