"""Initial weights from runs and files: a run's best checkpoint, its average, what is refused, and mean and std."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import segmentation_models_pytorch as smp
import timm
import torch

import segapp
from segapp.assembly.data import build_dataset
from segapp.assembly.network import build_network, with_weights_defaults
from segapp.assembly.pairs import build_pixels, build_scheme
from segapp.assembly.trained import load_trained
from segapp.commands.export import export_target
from segapp.config import RunConfig, dump_config, load_config
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import CheckpointError, ConfigError
from segapp.inference.predict.predictor import EnsemblePredictor, TrainedPredictor
from segapp.models.weights import weights_path
from segapp.training.step.assembler import StepAssembler
from tests.support.runs import events, merged, resume, train

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
NARROW = {"decoder_pyramid_channels": 16, "decoder_segmentation_channels": 32}


@pytest.fixture(scope="module")
def run(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    data = {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0}
    config = merged(
        {"name": "teacher", "model": {"library": "smp", "name": "FPN", "encoder": "tu-test_resnet", "options": NARROW}},
        data={**data, "crop_px": [32, 64], "mean": MEAN, "std": STD},
        train={"epochs": 1, "batch_size": 5, "ema": 0.5},
        loss={"align_corners": True},
    )
    folder = tmp_path_factory.mktemp("home") / "runs" / "teacher"
    assert train(config, folder) == 0
    return config, folder


@pytest.fixture(scope="module")
def half(run: tuple[RunConfig, Path]) -> tuple[RunConfig, Path]:
    """A run whose backbone comes from a file for a timm model, which expects 0.5 and not ImageNet's numbers."""
    folder = run[1].with_name("half")
    state = {
        name: value for name, value in timm.create_model("test_resnet").state_dict().items() if "layer4" not in name
    }
    torch.save(state, folder.with_name("backbone.pt"))
    model = {"weights_backbone": str(folder.with_name("backbone.pt"))}
    model |= {"partial_weights": True}
    loss = {"align_corners": "auto"}
    config = merged(run[0].model_dump(mode="json"), data={"mean": None, "std": None}, model=model, loss=loss)
    assert train(config, folder) == 0
    return config, folder


def by_hand(target: Path, image: np.ndarray, mean: tuple[float, ...], std: tuple[float, ...]) -> torch.Tensor:
    """The class probabilities of a run for an image that is normalized here."""
    normal = (torch.from_numpy(image / 255) - torch.tensor(mean)) / torch.tensor(std)
    model, is_aligned = load_trained(str(target)).model, target.name == "teacher"
    with torch.no_grad():
        logits = model(normal.permute(2, 0, 1)[None].float())[0]
    logits = torch.nn.functional.interpolate(logits, image.shape[:2], mode="bilinear", align_corners=is_aligned)
    return logits.softmax(1)[0]


def test_values_of_the_weights_stay_with_the_run(
    run: tuple[RunConfig, Path], half: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, folder = half
    monkeypatch.setattr("segapp.assembly.network.expected_statistics", lambda *_: pytest.fail("resolved again"))
    assert resume(merged(config.model_dump(mode="json"), train={"epochs": 2}), folder) == 0
    own = load_config(folder / "config.yaml")
    assert (own.data.mean, own.data.std, own.loss.align_corners) == ((0.5,) * 3, (0.5,) * 3, False)
    image = np.random.default_rng(1).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    expected = [by_hand(folder, image, (0.5,) * 3, (0.5,) * 3), by_hand(run[1], image, MEAN, STD)]
    export_target(str(folder), tmp_path / "net.safetensors", format=None, argmax=False)
    for target in (folder, tmp_path / "net.safetensors"):
        found = segapp.load(target).probabilities(image)
        np.testing.assert_allclose(found, expected[0], atol=1e-5)
    members = [load_trained(str(each)) for each in (folder, run[1])]
    ensemble = EnsemblePredictor(
        (str(i), TrainedPredictor(each.model, each.inference, each.scheme, each.device))
        for i, each in enumerate(members)
    )
    np.testing.assert_allclose(ensemble.probabilities(image[None])[0], sum(expected) / 2, atol=1e-5)


@pytest.mark.parametrize(
    ("key", "weights", "expected"),
    [
        ("weights", "teacher", (MEAN, STD)),
        ("weights", "runs/half", ((0.5,) * 3, (0.5,) * 3)),
        ("weights", "runs/teacher/checkpoints/last.pt", (MEAN, STD)),
        ("weights", "runs/smp.pt", ((0.5,) * 3, (0.5,) * 3)),
        ("weights", "runs/classifier.pt", ((0.5,) * 3, (0.5,) * 3)),
        ("weights_backbone", "runs/teacher/checkpoints/best.pt", (MEAN, STD)),
        ("weights_backbone", "teacher", ((0.5,) * 3, (0.5,) * 3)),  # which names no run there
        ("weights_backbone", None, ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))),
    ],
)
def test_values_of_the_config_come_from_the_loaded_weights(
    half: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch, key: str, weights: str | None, expected: Any
) -> None:
    """The corners are aligned as a run did; other whole weights of smp aligned them, and backbones have no logits."""
    monkeypatch.chdir(half[1].parents[1])
    torch.save({"encoder.fc.weight": torch.ones(1), "segmentation_head.0.bias": torch.ones(1)}, "runs/smp.pt")
    torch.save({"encoder.fc.weight": torch.ones(1)}, "runs/classifier.pt")
    plain = half[0].model_dump(mode="json")
    model = {"weights_backbone": None, key: weights}
    is_aligned = key == "weights" and weights not in ("runs/half", "runs/classifier.pt")
    for named in ({}, {"std": (0.7, 0.8, 0.9)}):
        config, notes = with_weights_defaults(merged(plain, model=model, data={"mean": None, "std": None, **named}))
        assert (config.data.mean, config.data.std) == (expected[0], named.get("std", expected[1]))
        assert config.loss.align_corners is is_aligned
        taken = f"data.mean = {[*expected[0]]}" + ("" if named else f", data.std = {[*expected[1]]}")
        said = [taken] * (weights is not None) + ["loss.align_corners = true"] * is_aligned
        assert [note.partition(":")[0] for note in notes] == said
    named = merged(plain, model=model, loss={"align_corners": not is_aligned})
    assert with_weights_defaults(named)[0].loss.align_corners is not is_aligned


def test_padding_of_a_crop_is_near_zero_for_the_network(run: tuple[RunConfig, Path]) -> None:
    data = run[0].data.model_copy(update={"crop_px": (90, 90), "scale": (1.0, 1.0), "photometric": False})
    sample = build_dataset(data, build_scheme(data), "train", is_training=True, seed=0)[0, 0]
    is_padding = (sample.target == 255).all(1)
    assert 20 < is_padding.sum() < 90
    normal = Preprocessing(build_pixels(data), torch.float32)(sample.image[None])[0, :, is_padding]
    assert normal.abs().max() < 1 / 255 / min(STD)


@pytest.mark.parametrize("form", ["name", "folder", "file"])
def test_weights_of_a_run_are_its_average(
    run: tuple[RunConfig, Path], monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    config, folder = run
    monkeypatch.chdir(folder.parents[1])
    file = folder / "checkpoints" / "best.pt"
    weights = {"name": "teacher", "folder": str(folder), "file": str(file)}[form]
    section = config.model.model_copy(update={"weights": weights})
    model = build_network(section, 3)
    best: dict[str, Any] = torch.load(file, weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, best["ema"]["module"][name]), name
    (report,) = model.load_reports
    assert report.keys.missing == {}
    evaluated = [load_trained(str(file), given).model.state_dict().values() for given in (None, config)]
    assert all(map(torch.equal, *evaluated)), "with and without --config"
    fresh = build_network(section, 3, with_weights=False)
    assert not torch.equal(fresh.encoder.model.conv1[0].weight, model.encoder.model.conv1[0].weight)


def test_classifier_of_other_classes_is_left_out(run: tuple[RunConfig, Path]) -> None:
    config, folder = run
    section = config.model.model_copy(update={"weights": str(folder)})
    model = build_network(section, 5)
    best: dict[str, Any] = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
    ends = ("segmentation_head.0.weight", "segmentation_head.0.bias")
    assert all(
        torch.equal(value, best["ema"]["module"][name])
        for name, value in model.state_dict().items()
        if name not in ends
    )
    (report,) = model.load_reports
    assert report.keys.missing == dict.fromkeys(ends, "for 3 classes there, 5 here")
    assert (report.random, report.notes) == ((), ())
    file = folder.with_name("five.yaml")
    file.write_text(dump_config(merged(config.model_dump(mode="json"), data={"classes": [*"abcde"]})))
    with pytest.raises(
        CheckpointError, match=r"weights: .*best\.pt lacks 2 of the .*; train with it as model\.weights$"
    ):
        load_trained(str(folder / "checkpoints" / "best.pt"), str(file))


def test_classes_of_other_names_get_a_line(run: tuple[RunConfig, Path], tmp_path: Path) -> None:
    raw = run[0].model_dump(mode="json")
    export_target(str(run[1]), tmp_path / "net.safetensors", format=None, argmax=False)
    for names, said in (
        (["ground", "box", "disc"], ()),
        (["ground", "disc", "tree"], ("its classes have other names: box -> disc, disc -> tree",)),
        (["ground", "disc", "box", "tree"], ()),
    ):
        for weights in (run[1], run[1] / "checkpoints/last.pt", tmp_path / "net.safetensors"):
            config = merged(raw, data={"classes": names}, model={"weights": str(weights)})
            (report,) = StepAssembler(config, build_scheme(config.data)).build_model(with_weights=True).load_reports
            assert report.notes == said
            assert report.as_event().message.splitlines()[2:] == [f"weights {weights}: {line}" for line in said]


def test_alert_names_the_modules_that_stay_random(half: tuple[RunConfig, Path]) -> None:
    said = [event["message"] for event in events(half[1], "alert") if event["kind"] == "weights"]
    assert said == ["model.partial_weights: no weights file gives encoder.model.layer4, which stay random"]


@pytest.mark.parametrize("key", ["weights", "weights_backbone"])
def test_folder_of_save_pretrained_gives_its_tensors(
    run: tuple[RunConfig, Path], tmp_path: Path, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = smp.FPN("tu-test_resnet", encoder_weights=None, classes=3, **NARROW)
    theirs.save_pretrained(tmp_path / "net")
    (tmp_path / "net" / "config.json").write_text('{"_model_class": "Unet", "encoder_name": "none"}')
    shutil.copytree(run[1], tmp_path / "runs" / "net")  # a run of the same name, which is not the folder
    monkeypatch.chdir(tmp_path)
    model = build_network(run[0].model.model_copy(update={key: "net"}), 3)
    config = merged(run[0].model_dump(mode="json"), model={key: "net"}, loss={"align_corners": "auto"})
    assert with_weights_defaults(config)[0].loss.align_corners == (key == "weights")
    fcn = {"library": "torchvision", "name": "fcn", "encoder": "resnet18", "options": {}}  # which has no head of smp
    assert not with_weights_defaults(merged(config.model_dump(mode="json"), model=fcn))[0].loss.align_corners
    state = theirs.state_dict()
    given = [n for n in state if key == "weights" or n.startswith("encoder.")]
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in given)
    (tmp_path / "fpn.yaml").write_text(dump_config(run[0]))
    loaded = load_trained(str(tmp_path / "net"), str(tmp_path / "fpn.yaml"))
    assert all(torch.equal(loaded.model.state_dict()[name], value) for name, value in state.items())
    assert loaded.path == tmp_path / "net" / "model.safetensors"
    (tmp_path / "net" / "run.json").write_text("{}")  # a run, whose own checkpoints count
    assert weights_path(tmp_path / "net") == tmp_path / "net"


def test_folder_of_runs_is_not_taken_for_one(run: tuple[RunConfig, Path]) -> None:
    config, folder = run
    with pytest.raises(ConfigError, match=r"model.weights: .*no such run"):
        build_network(config.model.model_copy(update={"weights": str(folder.parent)}), 3)
