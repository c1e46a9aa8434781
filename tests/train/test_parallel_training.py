"""Trainings over several devices and ranks take the course of one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import differing, events, merged, segapp, train

from segapp.config import RunConfig, dump_config
from segapp.errors import ConfigError
from segapp.precision import Precision
from segapp.run.folder import RunFolder
from segapp.train.plan import Plan
from segapp.train.session import run_session


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
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-6)
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


def test_in_float64_every_split_takes_the_course_of_one_device(
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


def test_ddp_with_two_processes_equals_one_device_and_its_checkpoint_goes_on_alone(
    single: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    tiny, reference = single
    config = ten_steps(tiny, mode="ddp", devices=["cpu", "cpu"])
    (tmp_path / "ddp.yaml").write_text(dump_config(config))
    result = segapp("train", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    run = tmp_path / "run"
    assert_same_course(run, reference)
    assert [e["num_images"] for e in events(run, "val")] == [4, 4, 4]
    assert [e["seq"] for e in events(run)] == list(range(1, len(events(run)) + 1))
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    assert not [key for key in state["model"] if key.startswith("module.")]
    longer = merged(tiny, **{**ten_steps(tiny, mode="single").model_dump(mode="json"), "schedule": {}})
    longer = longer.model_copy(update={"train": longer.train.model_copy(update={"epochs": 6})})
    assert run_session(Plan(longer, RunFolder(run))) == 0
    assert len(losses(run)) == 12


def test_model_parallel_equals_one_device(single: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    tiny, reference = single
    assert train(ten_steps(tiny, mode="model", devices=["cpu", "cpu"]), tmp_path / "run") == 0
    assert_same_course(tmp_path / "run", reference)
    stages = {"encoder": "cpu", "decoder": "cpu"}
    assert train(ten_steps(tiny, mode="model", devices=["cpu", "cpu"], stages=stages), tmp_path / "named") == 0
    assert losses(tmp_path / "named") == losses(tmp_path / "run")


def test_dp_resumes_bitwise_with_dropout_on_logical_devices(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = merged(
        tiny, train={"epochs": 2, "batch_size": 4}, parallel={"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 1}
    )
    assert train(config, tmp_path / "whole") == 0
    assert (
        train(config.model_copy(update={"train": config.train.model_copy(update={"epochs": 1})}), tmp_path / "b") == 0
    )
    constant = {"schedule": {"name": "constant"}}
    config = merged(config.model_dump(mode="json"), **constant)
    first = config.model_copy(update={"train": config.train.model_copy(update={"epochs": 1})})
    assert train(config, tmp_path / "whole2") == 0
    assert train(first, tmp_path / "parts") == 0
    assert run_session(Plan(config, RunFolder(tmp_path / "parts"))) == 0
    a = torch.load(tmp_path / "whole2" / "checkpoints" / "last.pt", weights_only=True)
    b = torch.load(tmp_path / "parts" / "checkpoints" / "last.pt", weights_only=True)
    assert [path for path in differing(a, b) if not path.startswith("/best")] == []


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 1, "sync_bn": False}, "sync_bn"),
        ({"mode": "model"}, "two devices"),
        ({"mode": "model", "devices": ["cpu", "cpu"], "stages": {"bakbone": "cpu"}}, "backbone"),
        ({"devices": ["cpu", "cuda:9"]}, "cuda:9"),
        ({"devices": ["cpu", "tpu"]}, "tpu"),
        ({"mode": "dp", "devices": ["cpu"], "gpu0_bsz": 0}, "gpu0_bsz"),
    ],
)
def test_an_impossible_wish_is_refused(
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
