"""Trainings over several devices and ranks take the course of one device."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import RunConfig, dump_config
from segapp.errors import ConfigError
from segapp.precision import Precision
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from tests.support.fault_table import case
from tests.support.runs import differing, events, merged, segapp, train


def ten_steps(tiny: dict[str, Any], **parallel: Any) -> RunConfig:
    return merged(
        tiny,
        # Shallow, and with maps of 6 x 8 values: a deep network's BatchNorm over a few values multiplies the rounding
        # of float32 beyond the tolerance, on one device as well.
        model={"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
        optim={"name": "sgd", "lr": 0.001},
        train={"epochs": 5, "batch_size": 4, "ema": 0.9},
        data={"crop_px": [48, 64]},
        parallel=parallel,
        eval={"every_epochs": 2},
    )


def assert_same_course(ours: Path, theirs: Path) -> None:
    """All ten losses and all evaluations, in float32."""
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)  # of float32
    assert val_losses(ours) == pytest.approx(val_losses(theirs), rel=1e-5)


def val_losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "val")]


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "step")]


@pytest.fixture(scope="module")
def single(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    tiny: dict[str, Any] = {
        "name": "tiny",
        "seed": 3,
        "data": {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    folder = tmp_path_factory.mktemp("single") / "run"
    assert train(ten_steps(tiny, mode="single"), folder) == 0
    assert len(losses(folder)) == 10
    return tiny, folder


@pytest.mark.sampled(2)
@pytest.mark.parametrize("gpu0_bsz", [0, 1, 3, None])
def test_dp_on_three_logical_devices_equals_one_device(
    single: tuple[dict[str, Any], Path], tmp_path: Path, gpu0_bsz: int | None
) -> None:
    tiny, reference = single
    config = ten_steps(tiny, mode="dp", devices=["cpu", "cpu", "cpu"], gpu0_bsz=gpu0_bsz)
    assert train(config, tmp_path / "run") == 0
    assert_same_course(tmp_path / "run", reference)
    split = events(tmp_path / "run", "step")[0]["split"]
    expected = {0: [0, 2, 2], 1: [1, 2, 1], 3: [3, 1, 0], None: [1, 2, 1]}[gpu0_bsz]
    assert split == expected


@pytest.mark.slow
def test_every_split_in_float64_equals_one_device(
    single: tuple[dict[str, Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny, _ = single
    set_up = Precision.__init__

    def double(self: Precision, name: str, device: torch.device) -> None:
        set_up(self, name, device)
        self.input_dtype = torch.float64

    monkeypatch.setattr(Precision, "__init__", double)
    monkeypatch.setattr(Precision, "prepare", lambda _self, model: model.double())
    found = []
    for gpu0_bsz in (-1, 0, 1, 3):
        parallel = {"mode": "dp", "devices": ["cpu"] * 3, "gpu0_bsz": gpu0_bsz} if gpu0_bsz >= 0 else {"mode": "single"}
        values = ten_steps(tiny, **parallel).model_dump(mode="json")
        config = merged(values, optim={"lr": 0.02, "head_lr_factor": 10}, train={"ema": None})
        assert train(config, tmp_path / str(gpu0_bsz)) == 0
        found.append(losses(tmp_path / str(gpu0_bsz)))
    assert min(found[0]) < 0.8 * found[0][0]
    for each in found[1:]:
        assert each == pytest.approx(found[0], rel=1e-10)


@case("R08", how="saved by two ranks, resumed by one process", passes="bare names; the course of one device")
def test_ddp_of_two_ranks_equals_and_resumes_on_one_device(single: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    tiny, reference = single
    config = ten_steps(tiny, mode="ddp", devices=["cpu", "cpu"])
    (tmp_path / "ddp.yaml").write_text(dump_config(config))
    result = segapp("train", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "Warning" not in result.stderr
    run = tmp_path / "run"
    assert_same_course(run, reference)
    for rank, log in enumerate([run / "trainer.log", run / "logs" / "rank-0001.log"]):
        assert f" rank {rank}, round 0, process " in log.read_text().splitlines()[0]
    assert [e["num_images"] for e in events(run, "val")] == [4, 4, 4]
    assert [e["seq"] for e in events(run)] == list(range(1, len(events(run)) + 1))
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    assert not [key for key in state["model"] if key.startswith("module.")]
    longer = merged(tiny, **{**ten_steps(tiny, mode="single").model_dump(mode="json"), "schedule": {}})
    longer = longer.model_copy(update={"train": longer.train.model_copy(update={"epochs": 6})})
    assert run_session(TrainRequest(longer, RunFolder(run))) == 0
    assert len(losses(run)) == 12


def test_model_parallel_equals_one_device(single: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    tiny, reference = single
    assert train(ten_steps(tiny, mode="model", devices=["cpu", "cpu"]), tmp_path / "run") == 0
    assert_same_course(tmp_path / "run", reference)


def test_dp_resumes_bitwise_with_dropout_on_logical_devices(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = merged(
        tiny,
        train={"epochs": 2, "batch_size": 4},
        parallel={"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 1},
        schedule={"name": "constant"},
    )
    first = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 1})})
    assert train(config, tmp_path / "whole") == 0
    assert train(first, tmp_path / "parts") == 0
    assert run_session(TrainRequest(config, RunFolder(tmp_path / "parts"))) == 0
    a = torch.load(tmp_path / "whole" / "checkpoints" / "last.pt", weights_only=True)
    b = torch.load(tmp_path / "parts" / "checkpoints" / "last.pt", weights_only=True)
    assert [path for path in differing(a, b) if not path.startswith("/best")] == []


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 1, "sync_bn": False}, "sync_bn"),
        ({"mode": "model"}, "two devices"),
        ({"devices": ["cpu", "cuda:9"]}, "cuda:9"),
        ({"devices": ["cpu", "tpu"]}, "tpu"),
        ({"mode": "dp", "devices": ["cpu"], "gpu0_bsz": 0}, "gpu0_bsz"),
    ],
)
def test_impossible_parallel_config_is_refused(
    tiny: dict[str, Any], tmp_path: Path, parallel: dict[str, Any], message: str
) -> None:
    config = merged(
        tiny,
        model={"name": "deeplabv3", "encoder": "mobilenet_v3_large"},
        train={"epochs": 1, "batch_size": 3},
        parallel=parallel,
    )
    with pytest.raises(ConfigError, match=message):
        train(config, tmp_path / "run")


def ddp_file(tiny: dict[str, Any], tmp_path: Path, **train: Any) -> None:
    config = ten_steps(tiny, mode="ddp", devices=["cpu", "cpu"])
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    (tmp_path / "ddp.yaml").write_text(dump_config(config))


@pytest.mark.slow
@case("X03", how="SIGTERM or SIGINT to the launcher", passes="saved, 75")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_stopped_ranks_save_and_launcher_exits_75(tiny: dict[str, Any], tmp_path: Path, number: signal.Signals) -> None:
    ddp_file(tiny, tmp_path, epochs=3000)
    process = subprocess.Popen(
        [sys.executable, "-m", "segapp", "train", "--config", "ddp.yaml", "--run", "run"],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a shell's background job would ignore SIGINT
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler) and None,
    )
    deadline = time.monotonic() + 120
    while not (tmp_path / "run" / "events.jsonl").exists() or not losses(tmp_path / "run"):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.2)
    process.send_signal(number)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 75, stderr
    assert b"Traceback" not in stderr
    end = events(tmp_path / "run", "run_end")[-1]
    assert (end["status"], end["exit_code"], end["stopped_by"]) == ("stopped", 75, "signal")
    state = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)
    assert state["position"]["step"] >= 1
    assert len(state["rng"]) == 2


@pytest.mark.slow
@case("X02", how="a batch of 1 for two ranks", passes="exit 2, told once")
def test_error_of_all_ranks_is_printed_once(tiny: dict[str, Any], tmp_path: Path) -> None:
    ddp_file(tiny, tmp_path, batch_size=1)
    result = segapp("train", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.splitlines() == ["error: parallel: 2 ranks cannot share train.batch_size = 1: use 2 or more"]


@pytest.mark.slow
@case("X01", how="SIGKILL in both ranks at a step", passes="137, the rank is named")
def test_killed_rank_ends_the_others_and_is_named(tiny: dict[str, Any], tmp_path: Path) -> None:
    ddp_file(tiny, tmp_path, epochs=3000)
    result = segapp(
        "train", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path, SEGAPP_FAILPOINTS="train.step=5:kill"
    )
    assert result.returncode == 128 + signal.SIGKILL
    assert re.search(r"^error: rank [01] was ended by SIGKILL; the others were stopped$", result.stderr, re.MULTILINE)


def two_agents(tmp_path: Path, port: int) -> list[subprocess.Popen[str]]:
    """Two torchrun agents, as on two machines, with a rank each."""
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
    ]
    words = [f"--rdzv-endpoint=127.0.0.1:{port}", "--local-addr=127.0.0.1", "-m", "--", "segapp", "train"]
    return [
        subprocess.Popen(
            [*torchrun, *words, "--config", "ddp.yaml", "--run", "run"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]


@pytest.mark.slow
def test_two_torchrun_agents_equal_one_device(single: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    tiny, reference = single
    (tmp_path / "ddp.yaml").write_text(dump_config(ten_steps(tiny, mode="auto", devices="auto")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for agent in two_agents(tmp_path, port):
        output, _ = agent.communicate(timeout=240)
        assert agent.returncode == 0, output
    assert_same_course(tmp_path / "run", reference)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK=2"),
    ],
)
def test_wrong_torchrun_environment_is_one_error(
    tiny: dict[str, Any], tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    ddp_file(tiny, tmp_path)
    result = segapp("train", "--config", "ddp.yaml", cwd=tmp_path, **environment)
    assert result.returncode == 8
    assert result.stderr.startswith("error: ")
    assert result.stderr.splitlines()[1:] == ["more: segapp docs ranks"]
    assert message in result.stderr


@case("R08", how="three logical devices, then two ranks, then one device", passes="the course of one device")
@pytest.mark.slow
def test_checkpoint_moves_from_dp_to_ddp_to_one_device(single: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    """Stopped within an epoch each time, three logical devices, two ranks, then one: the course of one device."""
    tiny, reference = single
    run = tmp_path / "run"
    stages: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"mode": "dp", "devices": ["cpu", "cpu", "cpu"], "gpu0_bsz": 1}, {"SEGAPP_FAILPOINTS": "train.step=4:term"}),
        ({"mode": "ddp", "devices": ["cpu", "cpu"]}, {"SEGAPP_FAILPOINTS": "train.step=4:term"}),
        ({"mode": "single"}, {}),
    ]
    for parallel, failpoint in stages:
        (tmp_path / "now.yaml").write_text(dump_config(ten_steps(tiny, **parallel)))
        where = ["--resume", "run"] if run.exists() else ["--run", "run"]
        result = segapp("train", "--config", "now.yaml", *where, cwd=tmp_path, **failpoint)
        assert result.returncode == (75 if failpoint else 0), result.stderr
    assert_same_course(run, reference)


@case("N03", how="out of memory on rank 1", passes="all ranks end, a resume recomputes all blocks")
@pytest.mark.slow
def test_oom_of_a_rank_ends_all_and_a_resume_recomputes(tiny: dict[str, Any], tmp_path: Path) -> None:
    ddp_file(tiny, tmp_path, batch_size=6, epochs=3)  # 10 images: one step an epoch
    # Two passes check the network before the first step; the second start has fewer than five.
    armed = {"SEGAPP_FAILPOINTS": "train.forward.rank1=5:oom"}
    done = segapp("train", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path, timeout_s=200, **armed)
    assert done.returncode == 0, done.stderr
    assert "out of memory on cpu in forward" in done.stderr
    assert "the ranks start again" in done.stdout
    folder = tmp_path / "run"
    assert [event["step"] for event in events(folder, "step")] == [1, 2, 3]
    assert (folder / "reports" / "rank_1_step_2.json").exists()
    fallbacks = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)["fallbacks"]
    assert fallbacks == {"is_recomputed": True}
    (change,) = events(folder, "recompute")
    assert (change["reason"], [len(names) for names in change["blocks"]]) == (
        "out of memory",
        [change["num_blocks"]] * 2,
    )


@pytest.mark.slow
def test_oom_of_a_rank_in_an_evaluation_is_handled_by_all(tiny: dict[str, Any], tmp_path: Path) -> None:
    ddp_file(tiny, tmp_path, batch_size=6, epochs=2)
    armed = {"SEGAPP_FAILPOINTS": "eval.forward.rank1=1:oom"}
    done = segapp("train", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path, timeout_s=200, **armed)
    assert done.returncode == 0, done.stderr
    (oom,) = events(tmp_path / "run", "oom")
    assert "sliding windows" in oom["action"]
    assert oom["index"] == 1
    fallbacks = torch.load(tmp_path / "run" / "checkpoints" / "last.pt", weights_only=True)["fallbacks"]
    assert fallbacks["window_px"] == (48, 64)
