"""Export: a file computes what segapp predicts, at odd sizes, in two formats."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from timm.layers import create_conv2d
from torch import nn

from segapp.api import load
from segapp.datasets.preprocessing import Preprocessing
from segapp.errors import ConfigError, RunError, StorageError
from segapp.export import write
from segapp.export.write import ExportInfo, ExportNetwork, check_export, open_onnx, write_export, write_weights
from segapp.models import SegmentationModel, build_model
from tests.support.disk import BLOCK_BYTES, disk_of
from tests.support.runs import merged, train
from tests.training.test_modern_networks import DPT, EOMT, NETWORKS

CLASSES = ("ground", "box", "disc")


def info_of(model: SegmentationModel, **fields: Any) -> ExportInfo:
    values: dict[str, Any] = {
        "segapp_version": "0",
        "run": "tiny",
        "checkpoint": "best.pt",
        "epoch": 1,
        "step": 2,
        "network": model.name,
        "classes": CLASSES,
        "palette": ((1, 2, 3), (4, 5, 6), (7, 8, 9)),
        "file_ids": (0, 1, 2),
        "ignore_index": 255,
        "mean": (0.4, 0.5, 0.6),
        "std": (0.2, 0.3, 0.25),
        "align_corners": True,
        "output": "logits",
        "fixed_size_px": model.fixed_size_px,
    }
    return ExportInfo.model_validate(values | fields)


def network(library: str, name: str, encoder: str, *, aux: bool = False, **options: Any) -> SegmentationModel:
    torch.manual_seed(0)
    model = build_model(library, name, len(CLASSES), encoder=encoder, aux=aux, options=options).eval()
    for module in model.modules():  # fresh statistics (0 and 1) would hide a wrong normalisation
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 1.5)
    return model


class SmallNet(SegmentationModel):
    """A network that is traced in a second; it accepts multiples of 4 and pools adaptively."""

    def __init__(self, seed: int = 0) -> None:
        about = {"library": "test", "name": "small", "encoder_name": "none"}
        super().__init__(**about, num_classes=len(CLASSES), in_channels=3, size_divisor=4)
        torch.manual_seed(seed)
        self.stem = nn.Conv2d(3, 8, 5, stride=4, padding=2)
        self.pool = nn.AdaptiveAvgPool2d((2, 3))
        self.head = nn.Conv2d(16, len(CLASSES), 1)

    def compute_logits(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.stem(images_NCHW).relu()
        pooled = F.interpolate(self.pool(features), features.shape[-2:], mode="bilinear", align_corners=False)
        logits = self.head(torch.cat([features, pooled], 1))
        return logits, -logits


class DividedNet(SegmentationModel):
    """A network that computes with sizes: "same" padding, which takes ceilings, and quotients of negative numbers.

    Tracing takes three times as long if a second convolution has such a padding.
    """

    def __init__(self) -> None:
        about = {"library": "test", "name": "divided", "encoder_name": "none"}
        super().__init__(**about, num_classes=len(CLASSES), in_channels=3)
        torch.manual_seed(0)
        self.first, self.second = create_conv2d(3, 8, 3, stride=2, padding="same"), nn.Conv2d(8, 8, 1)
        self.head = nn.Conv2d(8, len(CLASSES), 1)

    def compute_logits(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.second(self.first(images_NCHW).relu())
        height, width = features.shape[-2:]
        return (self.head(F.pad(features, (0, -width % 3, (8 - height) // 3, 0))),)


def test_sizes_within_a_network_are_divided_exactly(tmp_path):
    model = DividedNet().eval()
    info = info_of(model)
    write_export(model, info, tmp_path / "x.onnx", "onnx")
    compute = open_onnx(tmp_path / "x.onnx")
    for size in [(1, 128, 160), (1, 61, 75), (3, 37, 54), (2, 131, 165), (1, 239, 191)]:
        images = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        expected = ExportNetwork(model, Preprocessing(info.pixels))(torch.from_numpy(images)).numpy()
        np.testing.assert_allclose(compute(images), expected, rtol=0, atol=1e-5)


class FaultyInOpenCV(SegmentationModel):
    """A network of what OpenCV computes otherwise: maps of one column and of one value enlarged, and a gate first."""

    def __init__(self) -> None:
        about = {"library": "test", "name": "gates", "encoder_name": "none"}
        super().__init__(**about, num_classes=len(CLASSES), in_channels=3, size_divisor=4)
        torch.manual_seed(0)
        self.stem, self.head = nn.Conv2d(3, 8, 5, stride=4, padding=2), nn.Conv2d(24, len(CLASSES), 1)
        self.offsets = nn.Parameter(torch.randn(1, 8, 40, 50))

    def compute_logits(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.stem(images_NCHW).relu()
        size = features.shape[-2:]
        for side in (2, 3):
            features = F.hardsigmoid(features.mean(side, keepdim=True)) * features
        features = features + F.interpolate(self.offsets, size, mode="bicubic", antialias=True)
        maps = [features, features.mean(3, keepdim=True)[:, :, ::3], features.mean((2, 3), keepdim=True)]
        return (self.head(torch.cat([F.interpolate(each, size, mode="bilinear") for each in maps], 1)),)


def run_opencv(path: Path, images: np.ndarray, engine: int) -> np.ndarray:
    network = cv2.dnn.readNetFromONNX(str(path), engine=engine)
    network.setInput(images)
    return network.forward()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "opset"), [((44, 68), 18), ((61, 75), 20), ((61, 75), 23)])
def test_file_of_one_size_agrees_in_onnxruntime_and_opencv(size, opset, tmp_path):
    model, path = FaultyInOpenCV().eval(), tmp_path / "x.onnx"
    info = info_of(model, fixed_size_px=size, batch_size=1, opset=opset)
    assert write_export(model, info, path, "onnx").sizes == ((1, *size), (1, *size))
    graph = onnx.load(path)
    assert [entry.version for entry in graph.opset_import if not entry.domain] == [opset]
    assert [entry.dim_value for entry in graph.graph.input[0].type.tensor_type.shape.dim] == [1, *size, 3]
    # Left are the two enlargements of maps to the size of the features, and that of the logits.
    changes = [node.op_type for node in graph.graph.node if node.op_type in ("Pad", "Resize", "Gather", "Shape")]
    assert changes == ["Resize"] * 2 + ["Gather"] * (2 if size[0] % 4 else 0)  # padding is part of a convolution
    images = np.random.default_rng(0).integers(0, 256, (1, *size, 3), dtype=np.uint8)
    with torch.no_grad():
        expected = ExportNetwork(model, Preprocessing(info.pixels))(torch.from_numpy(images)).numpy()
    np.testing.assert_allclose(open_onnx(path)(images), expected, atol=1e-5)
    for engine in (cv2.dnn.ENGINE_CLASSIC, cv2.dnn.ENGINE_NEW):
        np.testing.assert_allclose(run_opencv(path, images, engine), expected, atol=1e-4)


class SameSize(FaultyInOpenCV):
    """The same network with logits of the size of the image, so that nothing is left of the last enlargement."""

    def compute_logits(self, images_NCHW: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (logits,) = super().compute_logits(images_NCHW)
        return (F.interpolate(logits, images_NCHW.shape[-2:], mode="nearest"),)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("network_class", "format"), [(FaultyInOpenCV, "pt2"), (SameSize, "pt2"), (SameSize, "onnx")])
def test_last_enlargement_of_one_size_is_the_output(network_class, format, tmp_path):
    model, path = network_class().eval(), tmp_path / f"x.{format}"
    info = info_of(model, fixed_size_px=(44, 68), batch_size=1)
    write_export(model, info, path, format)
    images = np.random.default_rng(0).integers(0, 256, (1, 44, 68, 3), dtype=np.uint8)
    expected = ExportNetwork(model, Preprocessing(info.pixels))(torch.from_numpy(images)).numpy()
    outputs = (open_onnx(path) if format == "onnx" else run_pt2(path)[0])(images)
    np.testing.assert_allclose(outputs, expected, atol=1e-5)


def run_pt2(path: Path) -> tuple[Callable[[np.ndarray], np.ndarray], dict[str, str]]:
    """Return the network in a pt2 file, loaded as the page `export` says, and its metadata."""
    extra_files = {"segapp.json": ""}
    module = torch.export.load(path, extra_files=extra_files).module(check_guards=False)
    with torch.no_grad():
        return lambda images: module(torch.from_numpy(images)).numpy(), json.loads(extra_files["segapp.json"])


@pytest.mark.slow
def test_pt2_file_gives_labels_and_metadata(tmp_path):
    model = SmallNet()
    info = info_of(model, output="labels", file_ids=(7, 8, 11))
    found = write_export(model, info, tmp_path / "x.pt2", "pt2")
    assert found.agreement >= 0.999
    assert found.max_difference is None
    compute, properties = run_pt2(tmp_path / "x.pt2")
    assert properties == info.as_properties()
    for size in ((1, 41, 67), (2, 1, 179), (2, 133, 5)):
        images = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        expected = ExportNetwork(model, Preprocessing(info.pixels))(torch.from_numpy(images)).argmax(1)
        labels = compute(images)
        assert labels.dtype == np.uint8
        assert labels.shape == size
        assert (labels == expected.numpy()).mean() > 0.999
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt2"]
    assert check_export(compute, info, SmallNet(seed=1), [(1, 41, 67)]).agreement < 0.99


@pytest.mark.parametrize(
    ("format", "step", "said"),
    [
        ("onnx", "_trace", "tracing by torch.export"),
        ("pt2", "_trace", "tracing by torch.export"),
        ("onnx", "_write_onnx", "conversion to ONNX"),
        ("pt2", "_write_pt2", "saving as pt2"),
    ],
)
def test_file_with_wrong_output_is_not_written(format, step, said, tmp_path, monkeypatch):
    def not_finite(images: np.ndarray) -> np.ndarray:
        return np.full((len(images), 3, *images.shape[1:3]), np.nan, np.float32)

    def write_wrong(program: Any, network: ExportNetwork, info: ExportInfo, path: Path) -> Any:
        path.write_bytes(b"")
        return not_finite

    # A file that differs from its network is what the check is for; no step makes one.
    trace, model = write._trace, SmallNet()
    info = info_of(model, fixed_size_px=(24, 36))
    wrong = write.build_network(SmallNet(seed=1), info)
    monkeypatch.setattr(write, step, (lambda _, pixels: trace(wrong, pixels)) if step == "_trace" else write_wrong)
    with pytest.raises(RunError, match=rf"after {said}, largest difference (inf|[\d.]+) of .* of 1x24x36 2x24x36; "):
        write_export(model, info, tmp_path / f"x.{format}", format)
    assert list(tmp_path.iterdir()) == []


def test_missing_packages_are_named_in_one_error(tmp_path, monkeypatch):
    find = write.importlib.util.find_spec
    monkeypatch.setattr(write.importlib.util, "find_spec", lambda name: None if "onnx" in name else find(name))
    model = SmallNet()
    with pytest.raises(ConfigError, match=r"onnx, onnxscript, onnxruntime: run `uv sync --extra export`"):
        write_export(model, info_of(model), tmp_path / "x.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_exported_run_matches_predict_and_runs_alone(tiny, tiny_root, tmp_path, trusted_code, monkeypatch, command):
    model = {"library": "python", "name": "tests.support.own_parts:PaddedNet"}
    config = merged({**tiny, "model": model}, train={"steps": 2})
    assert train(config, tmp_path / "run") == 0
    monkeypatch.chdir(tmp_path)
    code, said, _ = command("export", "run", "--format", "onnx", "--out", "net.onnx")
    assert code == 0
    assert "(3 validation images): largest difference" in said
    assert "same class at" in said

    session = onnxruntime.InferenceSession(str(tmp_path / "net.onnx"))
    properties = session.get_modelmeta().custom_metadata_map
    assert json.loads(properties["classes"]) == list(CLASSES)
    assert json.loads(properties["run"]) == "run"  # its folder: "tiny" is the name of every run of this config
    assert json.loads(properties["run_id"]) == json.loads((tmp_path / "run" / "run.json").read_text())["id"]
    assert [entry.shape for entry in session.get_inputs()] == [["batch", "height", "width", 3]]
    assert {entry.version for entry in onnx.load(tmp_path / "net.onnx").opset_import if not entry.domain} == {20}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["net.onnx", "run"]  # no external data
    code, said, _ = command("export", "run", "--size", "33x70", "--opset", "18", "--out", "one.onnx")
    assert code == 0
    padding = "(padded to 40x72: --size 40x72 needs none)"
    assert f"images of 33x70 px only {padding} -> logits" in said
    assert "checked with onnxruntime on 1x33x70 1x33x70 (3 validation images)" in said
    only = onnxruntime.InferenceSession(str(tmp_path / "one.onnx"))
    facts = {name: json.loads(text) for name, text in only.get_modelmeta().custom_metadata_map.items()}
    assert [facts[name] for name in ("fixed_size_px", "batch_size", "opset")] == [[33, 70], 1, 18]
    assert facts["input"] == "images: uint8 (1, 33, 70, 3), RGB"
    image = np.random.default_rng(3).integers(0, 256, (1, 33, 70, 3), dtype=np.uint8)
    both = [each.run(None, {"images": image})[0] for each in (only, session)]
    np.testing.assert_allclose(*both, atol=1e-4)
    trained = load(tmp_path / "run")
    for size in ((1, 179), (133, 5), (37, 53)):
        image = np.random.default_rng(size).integers(0, 256, (*size, 3), dtype=np.uint8)
        found = torch.from_numpy(session.run(None, {"images": image[None]})[0]).softmax(1)[0].numpy()
        np.testing.assert_allclose(found, trained.probabilities(image), atol=1e-4, err_msg=str(size))

    photo = cv2.resize(cv2.imread(str(next((tiny_root / "images" / "val").glob("*.png")))), (101, 77))
    cv2.imwrite(str(tmp_path / "photo.png"), photo)
    assert command("predict", "run", "photo.png", "--out", "own")[0] == 0
    own = cv2.imread(str(tmp_path / "own" / "labels" / "photo.png"), cv2.IMREAD_UNCHANGED)
    logits = session.run(None, {"images": photo[None, :, :, ::-1].copy()})[0]
    assert (logits[0].argmax(0) == own).mean() > 0.999


@pytest.mark.parametrize("format", ["onnx", "pt2", "safetensors"])
def test_export_is_whole_or_not_there(format, tmp_path, monkeypatch):
    model = SmallNet()
    info = info_of(model, fixed_size_px=(24, 36), batch_size=1)
    program = write._trace(write.build_network(model, info), info)
    monkeypatch.setattr(write, "_trace", lambda *_: program)  # only once, as it takes longest

    def export(path: Path) -> None:
        if format == "safetensors":
            write_weights(model, info, path)
        else:
            write_export(model, info, path, format)

    export(whole := tmp_path / f"whole.{format}")
    needed = whole.stat().st_size
    last = (needed - 1) // BLOCK_BYTES
    for k in (last // 2, (needed - 1) / BLOCK_BYTES):
        path = tmp_path / f"{k} blocks" / f"a.{format}"
        path.parent.mkdir()
        with pytest.raises((StorageError, RunError)) as error, disk_of(int(k * BLOCK_BYTES)):
            export(path)
        assert path.name in str(error.value)
        assert [*path.parent.iterdir()] == []


def section(library: str, name: str, encoder: str) -> dict[str, Any]:
    return {"library": library, "name": name, "encoder": encoder, "options": {}}


FAMILIES: dict[str, dict[str, Any]] = {
    "LR-ASPP": section("torchvision", "lraspp", "mobilenet_v3_large"),
    "DeepLabV3": section("torchvision", "deeplabv3", "resnet18"),
    "PSPNet": section("smp", "PSPNet", "resnet18"),
    "DeepLabV3Plus": section("smp", "DeepLabV3Plus", "mobilenet_v2"),
    "UPerNet": section("smp", "UPerNet", "tu-test_resnet"),
    "PAN": section("smp", "PAN", "tu-test_resnet"),
    "EfficientNet-Lite": section("smp", "Unet", "tu-tf_efficientnet_lite0"),  # "same" padding, which takes ceilings
    "Segformer": section("smp", "Segformer", "mit_b0"),
    "EoMT-DINOv3": EOMT["model"],
    "EoMT-DINOv2": NETWORKS["DINOv2"][0],
    "DPT-DINOv3": DPT["model"],
    "DPT at 448 px": {
        **DPT["model"],
        "encoder": "tu-vit_tiny_patch16_224",
        "options": {**DPT["model"]["options"], "img_size": 448},
    },
    "ConvNeXt": NETWORKS["ConvNeXt"][0],
    "Swin": NETWORKS["Swin"][0],
}
"""`model` sections of a config; one takes images of one size."""


def run_openvino(path: Path, images: np.ndarray) -> np.ndarray:
    openvino = pytest.importorskip("openvino", reason="openvino is not installed: uv pip install openvino")
    compiled = openvino.Core().compile_model(str(path), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    return compiled({"images": images})["logits"]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # torch traces "same" padding of any size for minutes
@pytest.mark.parametrize("form", ["onnx", "pt2", "one size", "one size, openvino"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_exports_and_runs_at_odd_sizes(name, form, tmp_path):
    """The file computes the network's logits, at other sizes than those of the export's own check."""
    about = FAMILIES[name]
    model = network(
        about["library"], about["name"], about["encoder"], aux=about.get("aux", False), **about.get("options", {})
    )
    assert (model.fixed_size_px is not None) == ("448" in name)
    format = "pt2" if form == "pt2" else "onnx"
    info, path = info_of(model), tmp_path / f"x.{format}"
    if form.startswith("one size"):
        info = info.model_copy(update={"fixed_size_px": model.fixed_size_px or (101, 150), "batch_size": 1})
    found = write_export(model, info, path, format)
    assert found.agreement >= 0.9999
    assert found.max_difference is not None
    tolerance = 1e-4 * max(1.0, found.max_logit)
    assert found.max_difference < tolerance
    sizes = ((1, 61, 75), (3, 129, 64)) if info.fixed_size_px is None else (found.sizes[0],)
    for size in sizes:
        images = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        expected = ExportNetwork(model, Preprocessing(info.pixels))(torch.from_numpy(images)).numpy()
        if form == "one size":
            outputs = run_opencv(path, images, cv2.dnn.ENGINE_AUTO)
        elif form == "one size, openvino":
            outputs = run_openvino(path, images)
        else:
            outputs = (open_onnx(path) if format == "onnx" else run_pt2(path)[0])(images)
        np.testing.assert_allclose(outputs, expected, atol=tolerance)
