"""Ranks on GPUs: steps against one device, stops, out-of-memory errors and lost ranks.

Two ranks have a GPU each where there are two, and exchange through NCCL; on one GPU they share it and exchange through
gloo. `SEGAPP_GPU_TESTS_ON=cpu` tries the bodies on logical devices.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import ROOT

for _needed in ("pydantic", "albumentations", "cv2", "torchvision", "segmentation_models_pytorch"):
    pytest.importorskip(_needed, reason=f"a whole training needs {_needed}, which is not installed")

IS_GPU = os.environ.get("SEGAPP_GPU_TESTS_ON", "cuda:0").startswith("cuda")
NUM_GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(IS_GPU and NUM_GPUS == 0, reason="needs a CUDA device and sees none"),
    pytest.mark.timeout(240 if IS_GPU else 800),
]

two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices and sees {NUM_GPUS}")
on_a_gpu_only = pytest.mark.skipif(not IS_GPU, reason="is about NCCL")

TWO: list[str | int] = ["cpu", "cpu"] if not IS_GPU else [0, 1 if NUM_GPUS > 1 else 0]
REL = 1e-3 if IS_GPU else 1e-5
"""Relative tolerance of losses: TF32 and another order of sums on a card."""


@on_a_gpu_only
@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=two_gpus), pytest.param(min(8, max(3, NUM_GPUS)))])
def test_steps_of_ranks_equal_one_device_in_float64(tmp_path: Path, num_ranks: int) -> None:
    if num_ranks > NUM_GPUS:
        pytest.skip(f"needs {num_ranks} CUDA devices and sees {NUM_GPUS}")
    path = tmp_path / "figures.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.rank_steps", str(path), str(num_ranks), "cuda"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=200)
    for title, errors in json.loads(path.read_text())["errors"].items():
        assert max(errors) <= 1e-8, f"{title}: {errors}"


@on_a_gpu_only
def test_training_of_one_nccl_rank_equals_one_device(tiny: dict[str, Any], tmp_path: Path) -> None:
    from segapp.config import dump_config
    from tests.support.live_runs import small
    from tests.support.rank_runs import ranks_of
    from tests.support.runs import losses, segapp, train

    (tmp_path / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 3, [0])))
    done = segapp("train", "--plain", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    parallel = {"mode": "single", "devices": [0]}
    assert train(small(tiny, 3, parallel=parallel, train={"batch_size": 5}), tmp_path / "alone") == 0
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-3)


@two_gpus
def test_auto_starts_a_rank_for_each_gpu(tiny: dict[str, Any], tmp_path: Path) -> None:
    from segapp.config import dump_config
    from tests.support.rank_runs import ranks_of
    from tests.support.runs import events, segapp

    (tmp_path / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 2, TWO, mode="auto")))
    done = segapp("train", "--plain", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    start = events(tmp_path / "run", "run_start")[0]
    assert (start["mode"], start["split"]) == ("ddp", [2, 3])
    assert "one process for each GPU" in start["mode_reason"]


def test_split_of_ranks_is_changed_by_command_on_gpus(tiny: dict[str, Any], tmp_path: Path) -> None:
    from tests.support.rank_runs import check_split_change

    check_split_change(tiny, tmp_path, TWO, rel=REL)


def test_ranks_without_sync_bn_train_on_gpus(tiny: dict[str, Any], tmp_path: Path) -> None:
    from segapp.config import dump_config
    from tests.support.rank_runs import ranks_of
    from tests.support.runs import losses, segapp

    (tmp_path / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 2, TWO, sync_bn=False, shares=[2, 3])))
    done = segapp("train", "--plain", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(losses(tmp_path / "run")) == 4


def test_signal_stops_ranks_which_save(tiny: dict[str, Any], tmp_path: Path) -> None:
    from segapp.config import dump_config
    from tests.support.live_runs import background, seen, wait_for
    from tests.support.rank_runs import ranks_of

    (tmp_path / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 3000, TWO)))
    run = tmp_path / "run"
    with background(tmp_path / "ddp.yaml", cwd=tmp_path) as process:
        wait_for(lambda: len(seen(run, "step")) > 2, process=process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
    last = seen(run, "step")[-1]["step"]
    assert torch.load(run / "checkpoints" / "last.pt", weights_only=True)["position"]["step"] == last


def test_ranks_start_again_after_out_of_memory(tiny: dict[str, Any], tmp_path: Path) -> None:
    from tests.support.rank_runs import check_restart_after_out_of_memory

    check_restart_after_out_of_memory(tiny, tmp_path, TWO)


def test_killed_rank_ends_all_within_seconds(tiny: dict[str, Any], tmp_path: Path) -> None:
    from segapp.config import dump_config
    from tests.support.live_runs import background, seen
    from tests.support.rank_runs import ranks_of

    (tmp_path / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 3000, TWO)))
    kill = {"SEGAPP_FAILPOINTS": "train.backward.rank1=4:kill"}
    with background(tmp_path / "ddp.yaml", cwd=tmp_path, **kill) as process:
        assert process.wait(200) in (8, 137)
        assert time.time() - seen(tmp_path / "run", "step")[-1]["t"] < 30


def test_run_of_two_ranks_resumes_with_three_and_one(tiny: dict[str, Any], tmp_path: Path) -> None:
    from tests.support.rank_runs import check_other_numbers_of_ranks

    check_other_numbers_of_ranks(tiny, tmp_path, 0 if IS_GPU else "cpu", rel=REL)
