"""Trainings over several devices and ranks take the course of one device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from segapp.assembly.pairs import build_scheme
from segapp.config import RunConfig, dump_config
from segapp.errors import ConfigError
from segapp.parallel.distributed import Ranks
from segapp.parallel.model_parallel import balance_stages
from segapp.session.build import _build_datasets
from tests.support.fault_table import case
from tests.support.golden_runs import float64
from tests.support.rank_runs import trained_by_ranks
from tests.support.runs import events, final_state, losses, merged, segapp, train

CPUS = ["cpu"] * 3


def three_epochs(base: dict[str, Any], epochs: int = 3, **parallel: Any) -> RunConfig:
    """Two steps an epoch of five images each; evaluations after the second epoch and the last."""
    sections = {"train": {"epochs": epochs, "batch_size": 5, "ema": 0.9}, "eval": {"every_epochs": 2}}
    return merged(base, **sections, optim={"head_lr_factor": 3}, parallel=parallel)


def course(folder: Path) -> list[float]:
    """All losses, of steps and of evaluations."""
    return losses(folder) + [event["loss"] for event in events(folder, "val")]


@pytest.fixture(scope="module")
def single(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "run"
    assert train(three_epochs(base, mode="single"), folder) == 0
    assert len(course(folder)) == 6 + 2
    return folder


def test_dp_on_three_devices_equals_one_device(base: dict[str, Any], tmp_path: Path) -> None:
    """In float64, where what differs is the order of the sums."""
    splits = {(0, 3, 2): {"gpu0_bsz": 0}, (2, 0, 3): {"shares": [2, 0, 3]}}
    with float64():
        assert train(three_epochs(base, 2, mode="single"), tmp_path / "single") == 0
        for split, parallel in splits.items():
            folder = tmp_path / f"{split}"
            assert train(three_epochs(base, 2, mode="dp", devices=CPUS, **parallel), folder) == 0
            assert {tuple(event["split"]) for event in events(folder, "step")} == {split}
            assert losses(folder) == pytest.approx(losses(tmp_path / "single"), rel=1e-11), split
            assert course(folder) == pytest.approx(course(tmp_path / "single"), rel=1e-5), "averages are float32"


def test_model_parallel_equals_one_device(base: dict[str, Any], single: Path, tmp_path: Path) -> None:
    assert train(three_epochs(base, mode="model", devices=CPUS[:2]), tmp_path / "run") == 0
    assert course(tmp_path / "run") == pytest.approx(course(single), rel=1e-5)


def test_stages_suit_the_parameters_that_will_be_trained(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stages stay where they are when a freeze ends."""
    trained: list[int] = []

    def balanced(module: nn.Module, *args: Any) -> Any:
        trained.append(sum(p.requires_grad for p in module.parameters()))
        return balance_stages(module, *args)

    monkeypatch.setattr("segapp.training.step.assembler.balance_stages", balanced)
    frozen = {"freeze": ["backbone"]}
    plain = three_epochs(base, mode="model", devices=CPUS[:2]).model_dump(mode="json")
    for name, model in (("none", {}), ("all", frozen), ("one", {**frozen, "freeze_epochs": 1})):
        config = merged(plain, model=model, train={"steps": 1})
        assert train(config, tmp_path / name) == 0
    whole, without_backbone, later = trained
    assert 0 < without_backbone < whole == later
    counts = {name: events(tmp_path / name, "run_start")[0]["num_trainable"] for name in ("none", "all", "one")}
    assert 0 < counts["one"] == counts["all"] < counts["none"]


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 1, "sync_bn": False}, "sync_bn"),
        ({"mode": "model"}, "two devices"),
        ({"devices": ["cpu", "cuda:9"]}, "cuda:9"),
        ({"mode": "dp", "devices": ["cpu"], "gpu0_bsz": 0}, "gpu0_bsz"),
    ],
)
def test_impossible_parallel_config_is_refused(
    tiny: dict[str, Any], tmp_path: Path, parallel: dict[str, Any], message: str
) -> None:
    model = {"library": "smp", "name": "DeepLabV3Plus", "encoder": "tu-test_resnet"}  # BatchNorm after global pooling
    with pytest.raises(ConfigError, match=message):
        train(
            merged({**tiny, "model": model}, data={"crop_px": [32, 48]}, train={"batch_size": 3}, parallel=parallel),
            tmp_path / "run",
        )


def test_every_rank_needs_a_training_image(tiny: dict[str, Any]) -> None:
    """As the trainer's parts are built: a launcher would be needed to come here."""
    config, ranks = merged(tiny, data={"cache": "none"}), Ranks()
    ranks.world_size = 10
    _build_datasets(config, build_scheme(config.data), ranks, None)
    ranks.world_size = 11
    with pytest.raises(ConfigError, match="11 ranks cannot share 10 training images"):
        _build_datasets(config, build_scheme(config.data), ranks, None)


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK, MASTER_ADDR, MASTER_PORT not set in the environment"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "RANK=2"),
    ],
)
def test_wrong_torchrun_environment_is_one_error(
    base: dict[str, Any], tmp_path: Path, environment: dict[str, str], message: str
) -> None:
    (tmp_path / "ddp.yaml").write_text(dump_config(three_epochs(base, mode="ddp", devices=CPUS[:2])))
    result = segapp("train", "--config", "ddp.yaml", cwd=tmp_path, **environment)
    assert result.returncode == 8
    assert result.stderr.startswith("error: ")
    assert result.stderr.splitlines()[1:] == ["more: segapp docs ranks"]
    assert message in result.stderr


@case("X02", how="a batch of 1 for two ranks", passes="exit 2, told once")
def test_error_of_all_ranks_is_printed_once(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ddp.yaml").write_text(dump_config(three_epochs(base, mode="ddp", devices=CPUS[:2])))
    words = ("train", "--config", "ddp.yaml", "--run", "run", "train.batch_size=1")
    result = segapp(*words, cwd=tmp_path, SEGAPP_TEST_FORK="1")
    assert result.returncode == 2
    busy = ("still starting", "SIGTERM: stopping")  # on a busy machine the launcher ends the slower rank
    said = [line for line in result.stderr.splitlines() if line and not line.startswith(busy)]
    assert said == ["error: parallel: 2 ranks cannot share train.batch_size = 1: use 2 or more"]


@pytest.mark.slow
def test_ranks_of_torchrun_equal_one_device(base: dict[str, Any], single: Path, tmp_path: Path) -> None:
    (tmp_path / "ddp.yaml").write_text(dump_config(three_epochs(base, mode="auto", devices="auto")))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    words = [*torchrun, "segapp", "train", "--config", "ddp.yaml", "--run", "run"]
    subprocess.run(words, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, timeout=240)
    assert course(tmp_path / "run") == pytest.approx(course(single), rel=1e-5)


@case("R08", how="three logical devices, then two ranks, then one device", passes="the course of one device")
@pytest.mark.slow
def test_checkpoint_moves_from_dp_to_ddp_to_one_device(base: dict[str, Any], single: Path, tmp_path: Path) -> None:
    """Stopped within an epoch each time."""
    stages: list[tuple[dict[str, Any], dict[str, str]]] = [
        ({"mode": "dp", "devices": CPUS, "shares": [3, 0, 2]}, {"SEGAPP_FAILPOINTS": "train.step=2:term"}),
        ({"mode": "ddp", "devices": CPUS[:2]}, {"SEGAPP_FAILPOINTS": "train.step=3:term"}),
        ({"mode": "single"}, {}),
    ]
    for parallel, failpoint in stages:
        (tmp_path / "now.yaml").write_text(dump_config(three_epochs(base, **parallel)))
        where = ["--resume", "run"] if (tmp_path / "run").exists() else ["--run", "run"]
        result = segapp("train", "--config", "now.yaml", *where, cwd=tmp_path, **failpoint)
        assert result.returncode == (75 if failpoint else 0), result.stderr
    assert course(tmp_path / "run") == pytest.approx(course(single), rel=1e-5)


@pytest.mark.slow
def test_oom_of_a_rank_in_an_evaluation_is_handled_by_all(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ddp.yaml").write_text(dump_config(three_epochs(base, 2, mode="ddp", devices=CPUS[:2])))
    armed = {"SEGAPP_FAILPOINTS": "eval.forward.rank1=1:oom"}
    trained_by_ranks("--plain", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path, **armed)
    (oom,) = events(tmp_path / "run", "oom")
    assert "sliding windows" in oom["action"]
    assert oom["index"] == 1
    assert final_state(tmp_path / "run")["live"]["settings"]["window_px"] == (40, 56)
