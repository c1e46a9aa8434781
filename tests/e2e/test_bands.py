"""Four bands of 16 bits from training to export: in one process, each stage compared with the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_scheme
from segapp.commands.evaluate import EvalOptions, evaluate_target
from segapp.commands.export import export_target
from segapp.commands.predict import PredictOptions, predict_target
from segapp.config import RunConfig
from segapp.datasets import cache
from segapp.errors import DataError
from segapp.export.write import open_onnx
from segapp.inference.predict.reading import find_images
from segapp.parallel.distributed import Ranks
from tests.support.band_data import write_band_data
from tests.support.runs import alerts, events, merged, train

pytest.importorskip("rasterio", reason="the extra geo is not installed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return write_band_data(tmp_path_factory.mktemp("bands"))


def config_of(own: dict[str, Any], **sections: Any) -> RunConfig:
    plain = {
        "name": "bands",
        "seed": 3,
        "data": own,
        "model": {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
        "optim": {"name": "adamw", "lr": 0.01},
        "train": {"epochs": 2, "batch_size": 2},
        "eval": {"every_epochs": 2},
        "parallel": {"mode": "single", "devices": ["cpu"]},
        "log": {"every_steps": 1, "tensorboard": False},
    }
    return merged(plain, **sections)


@pytest.fixture(scope="module")
def run(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "run"
    assert train(config_of(data), folder) == 0
    return folder


@pytest.mark.slow
def test_evaluation_prediction_and_export_agree(
    run: Path, data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = torch.load(run / "checkpoints" / "last.pt", weights_only=True)["model"]
    assert next(w for name, w in weights.items() if name.endswith("conv1.0.weight")).shape[1] == 4
    evaluate_target([str(run)], EvalOptions())
    miou = events(run, "val")[-1]["miou"]
    assert f"mIoU {miou:.4f}" in capsys.readouterr().out
    onnx = tmp_path / "bands.onnx"
    export_target(str(run), onnx, format=None, argmax=False)
    assert "same class at 100" in capsys.readouterr().out
    images = Path(data["root"]) / "images" / "val"
    compute = open_onnx(onnx)
    predict_target([str(run)], find_images([images])[0], tmp_path / "run", PredictOptions())
    for path in sorted((tmp_path / "run" / "labels").iterdir()):
        labels = np.array(Image.open(path))
        other = compute(tifffile.imread(images / f"{path.stem}.tif")[None])[0].argmax(0)
        assert (labels == other).mean() > 0.99
    overlay = np.array(Image.open(tmp_path / "run" / "overlay" / "0.png"))
    assert overlay.shape == (*tifffile.imread(images / "0.tif").shape[:2], 3)


def test_pixels_are_compared_with_those_of_the_training(
    run: Path, data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A training refuses a clipped band and names a narrow one; predict has a line for each range of an ensemble."""
    clipped, narrow = [[0, 4000], [0, 4000], [3500, 9000], [0, 4000]], [[0, 9000], [0, 4000], [0, 4000], [0, 900_000]]
    with pytest.raises(
        DataError, match=r"^train: band 3: 100\.0% of the values .* \[3500, 9000\] \(measured: "
    ) as refused:
        train(config_of(data, data={"value_range": clipped}), tmp_path / "refused")
    assert refused.value.exit_code == 3
    assert train(config_of(data, data={"value_range": narrow}, train={"steps": 1}), tmp_path / "other") == 0
    said = [each["message"].partition(" fill")[0] for each in alerts(tmp_path / "other")]
    assert said == ["train: band 4: the values", "val: band 4: the values"]
    for number in range(3):
        image = tifffile.imread(Path(data["root"]) / f"images/val/{number}.tif") + np.array([4001, 0, 0, 0], np.uint16)
        tifffile.imwrite(tmp_path / f"{number}.tif", image, photometric="minisblack", planarconfig="contig")
    targets, options = [str(run), str(tmp_path / "other")], PredictOptions()
    predict_target(targets, find_images([tmp_path / "?.tif"])[0], tmp_path / "out", options)
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: images: ")]
    assert [line[14:39] for line in notes] == ["band 1: 100.0% of the val", "band 4: the values fill u"]
    Image.new("RGB", (40, 40)).save(tmp_path / "rgb.png")
    with pytest.raises(DataError, match="uint8 with 3 bands, but the model was trained on uint16 of 4 bands"):
        predict_target(targets, find_images([tmp_path / "rgb.png"])[0], tmp_path / "out", options)


def test_cached_samples_of_bands_equal_decoded_ones(
    data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "RESERVE_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    section = config_of(data, data={"cache": "disk"}).data
    scheme = build_scheme(section)
    cached = build_dataset(section, scheme, "train", is_training=True, seed=1, ranks=Ranks())
    plain = build_dataset(section, scheme, "train", is_training=True, seed=1)
    for epoch in (0, 1):
        for index in range(len(plain)):
            one, other = cached[(epoch, index)], plain[(epoch, index)]
            assert one.image.dtype == torch.uint16
            assert one.image.shape[0] == 4
            assert torch.equal(one.image, other.image)
            assert torch.equal(one.target, other.target)
    assert cached.cache is not None
    assert cached.cache.state().num_stored == len(plain)
    stored, _ = cached.read(0)
    np.testing.assert_array_equal(stored, tifffile.imread(cached.pairs[0].image))
