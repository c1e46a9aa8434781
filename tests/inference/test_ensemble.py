"""Averaged networks: the mean of probability maps by plain torch, tiles, parked weights, and the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from segapp.assembly.paths import split_networks
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import ConfigError
from segapp.inference.predict.predictor import EnsemblePredictor, TrainedPredictor, plan_workspace
from segapp.inference.sliding import Inference
from segapp.inference.workspace import CPU_TILE_PX
from segapp.models import SegmentationModel, build_model

SCHEME = ClassScheme(("ground", "box", "disc"), ((10, 20, 30), (200, 0, 0), (0, 0, 250)))
CPU = torch.device("cpu")
NORMALS = [((0.48, 0.45, 0.4), (0.22, 0.22, 0.22)), ((0.5, 0.5, 0.5), (0.5, 0.4, 0.3))]


@pytest.fixture(scope="module")
def models() -> list[SegmentationModel]:
    """Two architectures of different stride, with BatchNorm statistics that are not those of the start."""
    torch.manual_seed(4)
    built = [
        build_model("torchvision", "lraspp", 3, encoder="mobilenet_v3_small"),
        build_model("smp", "Linknet", 3, encoder="tu-test_resnet", options={"encoder_depth": 3}),
    ]
    for model in built:
        model(torch.randn(4, 3, 64, 64))
    return [model.eval() for model in built]


def predictor(model: SegmentationModel, at: int, **inference: Any) -> TrainedPredictor:
    preprocessing = Preprocessing(PixelFormat(None, "uint8", None, *NORMALS[at]))
    return TrainedPredictor(model, Inference(preprocessing, align_corners=at == 0, **inference), SCHEME, CPU)


def plain_mean(models: list[SegmentationModel], images: np.ndarray) -> Tensor:
    """The mean of the softmax of upsampled logits, in float64 with torch's own operators."""
    maps = []
    for at, model in enumerate(models):
        mean, std = (torch.tensor(values, dtype=torch.float64).view(1, 3, 1, 1) for values in NORMALS[at])
        normal = (torch.from_numpy(images).permute(0, 3, 1, 2).double() / 255 - mean) / std
        with torch.no_grad():
            logits = model.double()(normal)[0]
        model.float()
        maps.append(F.interpolate(logits, images.shape[1:3], mode="bilinear", align_corners=at == 0).softmax(1))
    return torch.stack(maps).mean(0)


def photo(seed: int, height: int = 96, width: int = 128) -> np.ndarray:
    coarse = np.random.default_rng(seed).integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)


def test_ensemble_is_the_mean_of_plain_softmax_maps(models: list[SegmentationModel]) -> None:
    images = np.stack([photo(0), photo(1)])
    expected = plain_mean(models, images)
    ensemble = EnsemblePredictor((f"net{i}", predictor(model, i)) for i, model in enumerate(models))
    found = ensemble.probabilities(images)
    assert found.dtype == np.float32
    assert np.abs(found - expected.numpy()).max() < 1e-5
    assert np.array_equal(ensemble.labels(images), found.argmax(1))
    assert (ensemble.labels(images) == expected.argmax(1).numpy()).mean() > 0.999
    assert not np.allclose(found, predictor(models[0], 0).probabilities(images), atol=1e-3)
    members = [predictor(model, i) for i, model in enumerate(models)]
    assert ensemble.align_corners, "one of them does"
    assert not EnsemblePredictor([("net1", members[1])]).align_corners
    assert plan_workspace(ensemble).max_px <= min(plan_workspace(member).max_px for member in members) * 1.05
    assert {plan_workspace(each).tile_px for each in (ensemble, *members)} == {CPU_TILE_PX}
    assert plan_workspace(members[0], "probabilities").max_px < plan_workspace(members[0]).max_px


def test_networks_of_other_classes_are_refused_by_name(models: list[SegmentationModel]) -> None:
    other = ClassScheme(("ground", "disc", "box"), SCHEME.palette)
    second = predictor(models[1], 1)
    second.scheme = other
    with pytest.raises(ConfigError, match=r"one and two have .* class 1 is 'box' and 'disc', class 2 is 'disc'"):
        EnsemblePredictor([("one", predictor(models[0], 0)), ("two", second)])


def test_words_are_networks_up_to_the_first_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two", "photos", "sweep/lr1"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").write_text("{}")
    (tmp_path / "photos").mkdir()
    (tmp_path / "net.safetensors").write_bytes(b"")
    (tmp_path / "runs" / "one" / "sample.png").write_bytes(b"")
    words = ["one", "runs/two", "sweep/lr1", "net.safetensors", "./photos", "two"]
    assert split_networks(words) == (words[:4], [Path("photos"), Path("two")])
    assert split_networks(["one", "runs/photos", "x.png"])[0] == ["one", "runs/photos"]
    with pytest.raises(ConfigError, match=r"photos is a run and a folder here: name runs/photos or \./photos"):
        split_networks(["one", "photos"])
    assert split_networks(["one", "runs/one/sample.png"]) == (["one"], [Path("runs/one/sample.png")])
    assert split_networks(["one", "*.jpg"]) == (["one"], [Path("*.jpg")])
    with pytest.raises(ConfigError, match="two is a model: name images or folders"):
        split_networks(["one", "two"])
