"""Weights out and in again: the library's own network takes them, and segapp predicts with them as with the run."""

from __future__ import annotations

import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torchvision.models.segmentation import lraspp_mobilenet_v3_large

from segapp.assembly.trained import load_trained
from segapp.commands.export import export_target
from segapp.config import dump_config
from segapp.errors import CheckpointError, ConfigError
from segapp.models import build_model
from tests.support.runs import MODEL, events, merged, segapp, train

CLASSES = ["ground", "box", "disc"]


@pytest.fixture(scope="module")
def folder(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trained run, and its config beside it."""
    folder = tmp_path_factory.mktemp("weights")
    config = merged(
        {
            "name": "tiny",
            "data": {"format": "folder", "root": str(tiny_root), "classes": CLASSES, "crop_px": [32, 32], "workers": 0},
            "model": {"name": "lraspp_mobilenet_v3_large"},
            "optim": {"name": "adamw", "lr": 0.001},
            "log": {"tensorboard": False},
        },
        train={"epochs": 1, "batch_size": 2, "ema": 0.9},
    )
    assert train(config, folder / "run") == 0
    (folder / "tiny.yaml").write_text(dump_config(config))
    return folder


@pytest.mark.slow
def test_safetensors_of_a_run_load_into_torchvision(folder, tiny_root, tmp_path):
    result = segapp("export", folder / "run", "--out", "net.safetensors", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "tensors of torchvision lraspp_mobilenet_v3_large mobilenet_v3_large, read back" in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]

    with safe_open(tmp_path / "net.safetensors", "pt") as file:
        about = file.metadata()
    assert about["format"] == "pt"
    assert json.loads(about["classes"]) == CLASSES
    assert json.loads(about["mean"]) == [0.485, 0.456, 0.406]
    assert len(json.loads(about["palette"])) == 3
    assert json.loads(about["segapp_version"])
    about_run = json.loads((folder / "run" / "run.json").read_text())
    assert (json.loads(about["run"]), json.loads(about["run_id"])) == ("run", about_run["id"])
    assert json.loads(about["config"])["model"]["name"] == "lraspp_mobilenet_v3_large"
    assert not {"input", "output", "opset"} & about.keys()
    assert json.loads(about["size_multiple"]) == 16  # it accepts any size

    theirs = lraspp_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=3)
    theirs.load_state_dict(load_file(tmp_path / "net.safetensors"))
    ours = load_trained(str(folder / "run")).model
    images = torch.rand(1, 3, 48, 64)
    with torch.no_grad():
        low = torch.nn.functional.interpolate(ours(images)[0], (48, 64), mode="bilinear", align_corners=False)
        torch.testing.assert_close(theirs.eval()(images)["out"], low)

    photo = tiny_root / "images" / "val" / "00.png"
    torch.save({"module." + name: value for name, value in theirs.state_dict().items()}, tmp_path / "bare.pth")
    labels, confusions = [], []
    for words in ([folder / "run"], ["net.safetensors"], ["bare.pth", "--config", folder / "tiny.yaml"]):
        out = tmp_path / f"out{len(labels)}"
        result = segapp("predict", words[0], photo, "--out", out, *words[1:], cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        labels.append(cv2.imread(str(out / "labels" / "00.png"), cv2.IMREAD_UNCHANGED))
        result = segapp("eval", *words, "--json", cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        confusions.append(json.loads(result.stdout)["confusion"])
    assert all(np.array_equal(labels[0], each) for each in labels)
    assert confusions[1:] == confusions[:1] * 2
    words = ("export", "bare.pth", "--config", folder / "tiny.yaml", "--out", "again.safetensors")
    assert segapp(*words, cwd=tmp_path).returncode == 0
    again = load_file(tmp_path / "again.safetensors")
    assert all(again[name].equal(value) for name, value in theirs.state_dict().items())


@pytest.mark.parametrize(
    ("target", "config", "message"),
    [
        ("bare.safetensors", None, "holds no config: name the config"),
        ("bare.pth", None, "name the config of its model with --config"),
        ("head.pth", "tiny.yaml", "lacks 40 of the 64 tensors of this model, such as encoder"),
        ("gone.safetensors", None, "no file gone.safetensors"),
    ],
)
def test_unusable_weights_are_one_clear_error(tiny, target, config, message):
    Path("tiny.yaml").write_text(dump_config(merged({**tiny, "model": MODEL})))
    own = build_model("smp", "PSPNet", 3, encoder="tu-test_resnet", options=MODEL["options"]).state_dict()
    save_file(own, "bare.safetensors")
    torch.save(own, "bare.pth")
    torch.save({n: v for n, v in own.items() if not n.startswith("encoder.")}, "head.pth")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_trained(target, config)
    assert caught.value.exit_code == 4


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("a.safetensors", {"argmax": True}, "--argmax: a safetensors file holds weights only: leave it out"),
        ("a.safetensors", {"size": "64x96"}, "--size: a safetensors file holds weights only: leave it out"),
        ("a.safetensors", {"opset": 20}, "--opset 20: only ONNX files have one: leave it out"),
        ("a.pt2", {"opset": 18}, "--opset 18: only ONNX files have one: leave it out"),
        ("a.onnx", {"opset": 17}, "--opset 17: use 18 to 23"),
        ("a.onnx", {"opset": 24}, "--opset 24: use 18 to 23"),
        ("a.onnx", {"size": "64,96"}, "--size 64,96: write HEIGHTxWIDTH in pixels, e.g. 512x512"),
        ("a.zip", {}, "another suffix than the formats: use one of .onnx, .pt2"),
    ],
)
def test_unknown_form_of_a_file_is_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        export_target("run", Path(name), format=None, **{"argmax": False, **options})


@pytest.mark.slow
def test_training_reports_loaded_weights_in_log_and_event(tiny, folder, tmp_path, capsys):
    save_file(load_trained(str(folder / "run")).model.state_dict(), tmp_path / "three.safetensors")
    model = {"name": "lraspp_mobilenet_v3_large", "weights": str(tmp_path / "three.safetensors")}
    config = merged({**tiny, "model": model}, data={"classes": [*CLASSES, "none"]}, train={"epochs": 1})
    assert train(config, tmp_path / "run") == 0
    (event,) = events(tmp_path / "run", "weights")
    assert event["num_taken"] == event["num_tensors"] - 4
    assert event["missing"]["classifier.low_classifier.bias"] == "for 3 classes there, 4 here"
    shown = [line for line in capsys.readouterr().out.splitlines() if line.startswith("weights ")]
    assert shown == event["message"].splitlines()
