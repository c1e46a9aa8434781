"""Trainings on one card: demo, fp16, exact resume, the plan against the allocator, little memory, out-of-memory.

The bodies that say something on the CPU run there too, with -m slow.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.assembly.devices import numerics
from segapp.assembly.pairs import build_scheme
from segapp.config import dump_config
from segapp.memory.oom import is_out_of_memory
from segapp.planning.trial import blank_batch, build_trial_engine
from segapp.training.step.assembler import StepLayout
from tests.gpu.figures_plan import Plans, plan_row
from tests.gpu.figures_training import figures_config
from tests.support import ROOT
from tests.support.runs import differing, events, merged, segapp, train

gpu = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
on_gpu = pytest.param("cuda:0", marks=gpu)
on_cpu = pytest.param("cpu", marks=pytest.mark.slow)
everywhere = pytest.mark.parametrize("device", [on_cpu, on_gpu])
SEGFORMER = {"library": "smp", "name": "Segformer", "encoder": "mit_b0"}


@pytest.fixture
def plain(tiny_root: Path) -> dict[str, Any]:
    return {
        "name": "tiny",
        "seed": 3,
        "data": {
            "format": "folder",
            "root": str(tiny_root),
            "classes": ["ground", "box", "disc"],
            "crop_px": [32, 32],
            "workers": 0,
        },
        "model": {"library": "smp", "name": "DeepLabV3Plus", "encoder": "tu-test_resnet"},
        "train": {"epochs": 2, "batch_size": 2, "precision": "fp32"},
        "checkpoint": {"every_steps": 1},
        "log": {"every_steps": 1, "tensorboard": False},
    }


def on(plain: dict[str, Any], device: str, **sections: Any) -> Any:
    return merged(plain, parallel={"devices": device}, **sections)


@everywhere
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"train": {"precision": "fp16"}},
        {"train": {"precision": "auto", "ema": 0.9}},
        {"train": {"tf32": False}},
        {"model": SEGFORMER, "train": {"precision": "fp16"}},
    ],
    ids=["default", "fp16", "auto", "full-float32", "segformer-fp16"],
)
def test_two_epochs_end_with_finite_losses(
    device: str, sections: dict[str, Any], plain: dict[str, Any], tmp_path: Path
) -> None:
    assert train(on(plain, device, **sections), tmp_path / "run") == 0
    steps = events(tmp_path / "run", "step")
    assert steps
    assert all(step["loss"] is not None for step in steps)
    assert len(events(tmp_path / "run", "val")) == 2


@everywhere
def test_killed_run_resumes_bit_for_bit(device: str, plain: dict[str, Any], tmp_path: Path) -> None:
    config = on(plain, device, train={"deterministic": True, "precision": "fp32"})
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, "-m", "segapp", "train", "--plain", "--run"]
    whole, killed = [*command, str(tmp_path / "whole")], [*command, str(tmp_path / "killed")]
    assert subprocess.run([*whole, "--config", str(path)], cwd=ROOT).returncode == 0
    process = subprocess.Popen([*killed, "--config", str(path)], cwd=ROOT)
    _wait_for_checkpoint(tmp_path / "killed", process)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert subprocess.run([*killed, "--resume"], cwd=ROOT).returncode == 0
    states = [
        torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True) for name in ("whole", "killed")
    ]
    for part in ("model", "optimizer"):
        assert differing(states[0][part], states[1][part]) == []


def _wait_for_checkpoint(run: Path, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s and process.poll() is None:
        if (run / "events.jsonl").exists() and events(run, "checkpoint"):
            return
        time.sleep(0.02)


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.parametrize("precision", ["fp32", "amp-bf16", "fp16"])
def test_plan_is_within_a_tenth_of_the_allocators_peak(device: str, precision: str) -> None:
    key = ("cityscapes", precision, 2)
    row = plan_row(Plans([key], 1, is_small=False), torch.device(device), key)
    assert abs(row["error %"]) < 10, row


@pytest.fixture
def _little_memory() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    torch.cuda.empty_cache()


@pytest.mark.parametrize("device", [on_gpu])
@pytest.mark.usefixtures("_little_memory")
def test_out_of_memory_leaves_the_step_without_trace(device: str) -> None:
    config = figures_config(True, batch_size=32, ema=None)
    with numerics(deterministic=False, tf32=True):
        engine = build_trial_engine(config, StepLayout("single", (torch.device(device),)))
        engine.network.module.train()
        batch = blank_batch(build_scheme(config.data), 32, config.data.crop_px)
        before = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        total = torch.cuda.get_device_properties(0).total_memory
        allowed = torch.cuda.memory_reserved(0) + (1 << 30)
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), 0)
        with pytest.raises(RuntimeError) as raised:  # the allocator's own, or cuDNN's, which does not speak of memory
            engine.step([batch])
        assert is_out_of_memory(raised.value)
        del raised
        for name, tensor in engine.model.state_dict().items():
            assert torch.equal(tensor, before[name]), name
        torch.cuda.set_per_process_memory_fraction(1.0, 0)
        torch.cuda.empty_cache()
        assert float(engine.step([blank_batch(build_scheme(config.data), 2, config.data.crop_px)]).is_bad) == 0.0


@pytest.mark.parametrize("device", [on_gpu])
def test_run_with_a_small_budget_ends_in_pieces(device: str, plain: dict[str, Any], tmp_path: Path) -> None:
    """In a process of its own: the workspaces and caches that other tests leave would count towards the budget.

    The tensors of a step of 8 images need 388 MiB, those of a piece of 2 need 103 MiB; cuBLAS takes 64 MiB besides.
    """
    small = merged(
        plain,
        data={"crop_px": [256, 256], "scale": [0.5, 4]},
        train={"batch_size": 8, "epochs": 1, "precision": "fp32"},
        parallel={"devices": [0], "memory_budget_mib": [300]},
    )
    (tmp_path / "small.yaml").write_text(dump_config(small))
    done = segapp("train", "--plain", "--config", "small.yaml", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = events(tmp_path / "run", "oom")
    assert found, "the budget was never reached"
    assert {event["device"] for event in found} == {"cuda:0"}
