"""`model.weights` names a run: its best checkpoint, its average, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.assembly.network import build_network
from segapp.config import RunConfig, validate_config
from segapp.errors import CheckpointError, ConfigError
from tests.support.runs import train


@pytest.fixture(scope="module")
def run(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    data = {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0}
    config = validate_config(
        {
            "name": "teacher",
            "data": {**data, "crop_px": [32, 64]},
            "model": {"library": "smp", "name": "FPN", "encoder": "resnet18"},
            "train": {"epochs": 1, "batch_size": 5, "ema": 0.5},
        }
    )
    folder = tmp_path_factory.mktemp("home") / "runs" / "teacher"
    assert train(config, folder) == 0
    return config, folder


@pytest.mark.parametrize("is_name", [True, False])
def test_weights_of_a_run_are_its_average(
    run: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch, is_name: bool
) -> None:
    config, folder = run
    monkeypatch.chdir(folder.parents[1])
    section = config.model.model_copy(update={"weights": "teacher" if is_name else str(folder)})
    model = build_network(section, 3)
    best: dict[str, Any] = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, best["ema"]["module"][name]), name
    (report,) = model.load_reports
    assert report.keys.missing == {}
    fresh = build_network(section, 3, with_weights=False)
    assert not torch.equal(fresh.encoder.conv1.weight, model.encoder.conv1.weight)


def test_other_classes_need_partial_weights(run: tuple[RunConfig, Path]) -> None:
    config, folder = run
    section = config.model.model_copy(update={"weights": str(folder)})
    with pytest.raises(
        CheckpointError, match=r"segmentation_head.0.weight.*it has 3 classes, this config 5: set model"
    ):
        build_network(section, 5)
    model = build_network(section.model_copy(update={"partial_weights": True}), 5)
    best: dict[str, Any] = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
    assert torch.equal(model.decoder.p5.weight, best["ema"]["module"]["decoder.p5.weight"])
    assert set(model.load_reports[0].keys.missing) == {"segmentation_head.0.weight", "segmentation_head.0.bias"}


def test_folder_of_runs_is_not_taken_for_one(run: tuple[RunConfig, Path]) -> None:
    config, folder = run
    with pytest.raises(ConfigError, match=r"model.weights: .*no such run"):
        build_network(config.model.model_copy(update={"weights": str(folder.parent)}), 3)
