"""Whole runs of the program on a card: the demo, `train.compile`, and a machine without nvidia-smi.

`SEGAPP_GPU_TESTS_ON=cpu` tries them without a card.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support import ROOT

for _needed in ("pydantic", "albumentations", "cv2", "torchvision", "segmentation_models_pytorch"):
    pytest.importorskip(_needed, reason=f"a whole training needs {_needed}, which is not installed")

DEVICE = os.environ.get("SEGAPP_GPU_TESTS_ON", "cuda:0")
IS_GPU = DEVICE.startswith("cuda")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240 if IS_GPU else 800),  # to compile takes a CPU minutes
    pytest.mark.skipif(IS_GPU and not torch.cuda.is_available(), reason="needs a CUDA device and sees none"),
]


def train_demo(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "segapp", "train", "--plain", "--config", str(ROOT / "configs" / "demo.yaml")]
    command += ["--run", str(folder / "run"), f"parallel.devices={DEVICE if not IS_GPU else '[0]'}", *words]
    variables = {**os.environ, **environment}
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)


def test_demo_learns(tmp_path: Path) -> None:
    from tests.support.runs import events

    done = train_demo(tmp_path, "log.every_steps=1", *([] if IS_GPU else ["train.epochs=1"]))
    assert done.returncode == 0, done.stderr
    losses = [event["loss"] for event in events(tmp_path / "run", "step")]
    assert statistics.mean(losses[-5:]) < 0.9 * statistics.mean(losses[:5])


def test_config_of_init_trains_here(tmp_path: Path) -> None:
    """It is for the device of the machine and names it first."""
    from segapp.onboarding.init import InitRequest, propose_config
    from tests.benchmarks.drawn_sets import draw_set
    from tests.support.runs import events

    draw_set("lines", tmp_path / "lines", 20)
    config = tmp_path / "lines.yaml"
    found = propose_config(InitRequest(tmp_path / "lines", config, is_tried=True)).facts
    assert ("GPU" in found.machine.device.partition(",")[0]) == IS_GPU
    command = [
        sys.executable,
        "-m",
        "segapp",
        "train",
        "--plain",
        "--config",
        str(config),
        "--run",
        str(tmp_path / "run"),
    ]
    command += ["train.steps=60" if IS_GPU else "train.steps=6", "log.every_steps=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = [event["loss"] for event in events(tmp_path / "run", "step")]
    assert statistics.mean(losses[-3:]) < 0.95 * statistics.mean(losses[:3])


def test_compiled_training_has_the_losses_of_the_plain_one(tmp_path: Path) -> None:
    from tests.support.runs import events

    courses = []
    for name, is_compiled in (("plain", "false"), ("compiled", "true")):
        words = ["train.epochs=1", "log.every_steps=1", "train.precision=fp32", f"train.compile={is_compiled}"]
        done = train_demo(tmp_path / name, *words)
        assert done.returncode == 0, done.stderr
        courses.append([event["loss"] for event in events(tmp_path / name / "run", "step")])
    assert courses[1] == pytest.approx(courses[0], rel=0.02)


def test_training_without_nvidia_smi_finishes(tmp_path: Path) -> None:
    from tests.support.runs import events

    programs = tmp_path / "bin"  # what a PATH has, without the driver's program
    programs.mkdir()
    for name in ("git", "gcc", "cc", "c++", "g++", "ld", "as"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    done = train_demo(tmp_path, "train.epochs=1", PATH=str(programs))
    assert done.returncode == 0, done.stderr
    assert events(tmp_path / "run", "run_end")[-1]["status"] == "finished"


SHOWN = """
import torch
from segapp.accelerator import CUDA
from segapp.memory.gpus import visible_gpus
seen = visible_gpus()
print(sorted(gpu.uuid for gpu in seen.gpus), sorted(CUDA.facts(device).uuid for device in CUDA.devices()), sep="|")
"""


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs nvidia-smi, which is not on PATH")
@pytest.mark.parametrize(
    "visible", [None, "0", " 0", "+0", "0x", "0,99", "99", "", "-1", "NoDevFiles", "0,0", "uuid", "part"]
)
def test_visible_gpus_are_those_of_torch(visible: str | None) -> None:
    """On a real driver, in a process of its own for each value of CUDA_VISIBLE_DEVICES."""
    from segapp.memory.gpus import visible_gpus

    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        listed = visible_gpus(environment).listed
        names = {"uuid": listed[0].full_uuid, "part": listed[0].full_uuid[:14]} if listed else {}
        environment["CUDA_VISIBLE_DEVICES"] = names.get(visible, visible)
    done = subprocess.run([sys.executable, "-c", SHOWN], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    by_function, by_torch = done.stdout.strip().split("|")
    assert by_function == by_torch
