"""What a network sees of an image is the same in every use, whatever key of the preprocessing is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import tifffile
import torch
import torch.nn.functional as F
from PIL import Image

import segapp
from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_pixels
from segapp.assembly.trained import TrainedModel, load_trained
from segapp.commands.export import export_target
from segapp.commands.predict import predictor_of
from segapp.export.write import open_onnx
from segapp.inference.predict.predictor import EnsemblePredictor, predict_image
from segapp.inference.workspace import HostLimit
from segapp.report.images import predict_pair
from tests.support.runs import merged, train

OWN = {"library": "python", "name": "tests.support.own_parts:PaddedNet", "options": {}}  # its sides are multiples of 8
PADDED = {  # its sides are multiples of 16
    "library": "smp",
    "name": "DeepLabV3Plus",
    "encoder": "tu-test_resnet",
    "aux": False,
    "options": {"decoder_channels": 32, "decoder_atrous_rates": [3, 6, 9]},
}
GEOTIFFS = {"bands": [3, 1], "dtype": "float32", "value_range": [[-2, 30], [7, 40]]}
NODATA = -9999
KEYS: dict[str, dict[str, Any]] = {
    "resize_px": {"data": {"resize_px": [32, 48]}, "loss": {"name": "dice"}},
    "none": {},
    "resize_px of a padded network": {"data": {"resize_px": [27, 35], "crop_px": [32, 48]}, "model": PADDED},
    "windows": {"eval": {"slide": True, "slide_px": [24, 40]}},
    "resize_px in windows": {"data": {"resize_px": [40, 56]}, "eval": {"slide": True, "slide_px": [24, 40]}},
    "aligned corners": {"loss": {"align_corners": True}},
    "mean and std": {"data": {"mean": [0.2, 0.5, 0.7], "std": [0.3, 0.2, 0.1]}},
    "bands, dtype and range": {
        "data": {
            "bands": [3, 1],
            "dtype": "uint16",
            "value_range": [[500, 60000], [9000, 20000]],
            "resize_px": [30, 46],
        }
    },
    "nodata": {"data": GEOTIFFS},
    "orientation": {"data": {"resize_px": [32, 48], "mask_orientation": "upright"}},
    "nodata of large files": {"data": {**GEOTIFFS, "mean": [0.2, 0.5], "std": [0.3, 0.2]}},
}
SIZES = [(43, 61), (66, 37), (150, 170)]
EXPORTED = ("resize_px of a padded network", "bands, dtype and range")


def draw(root: Path, key: str) -> None:
    """Draws images of two sizes, upright or lying on their side; their masks are upright."""
    rng = np.random.default_rng(4)
    for split, sizes in {"train": [(43, 61)] * 4, "val": SIZES}.items():
        for number, (height, width) in enumerate(sizes):
            image = cv2.resize(rng.integers(0, 256, (6, 8, 3)).astype(np.uint8), (width, height))
            for kind in ("images", "masks"):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
            place = root / "images" / split / f"{number}.png"
            if "nodata" in key:
                write_geotiff(place.with_suffix(".tif"), image)
            elif "dtype" in key:
                cv2.imwrite(str(place), image.astype(np.uint16) * 251)
            else:
                exif = Image.Exif()
                exif[0x0112] = 6 if key == "orientation" else 1  # stored turned by 90 degrees to the left
                stored = np.rot90(image) if key == "orientation" else image
                Image.fromarray(np.ascontiguousarray(stored)).save(place, exif=exif)
            cv2.imwrite(str(root / "masks" / split / f"{number}.png"), (image[..., 0] // 86).astype(np.uint8))


def write_geotiff(path: Path, image: np.ndarray) -> None:
    """Band 3 and band 1 have no data in 9 and 4 columns, of which 4 are the same; band 2, unused, in other ones."""
    rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")
    bands = image.astype(np.float32) * 0.2 - 8
    bands[:, :9, 2] = bands[:, 4:8, 0] = bands[2:19, 20:, 1] = NODATA
    kind = {"driver": "GTiff", "height": len(image), "width": image.shape[1], "count": 3, "dtype": "float32"}
    place = rasterio.transform.from_origin(5e5, 5e6, 10, 10)
    with rasterio.open(path, "w", **kind, nodata=NODATA, crs="EPSG:32632", transform=place) as file:
        file.write(np.moveaxis(bands, -1, 0))


def by_hand(trained: TrainedModel, image: np.ndarray) -> torch.Tensor:
    """Logits (C, H, W) in float64 of the stored bands of an upright image, whole, with 0 for nodata once normalized."""
    data, model = trained.config.data, trained.model.double()
    mean, std = (torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) for values in build_pixels(data).statistics)
    low, high = torch.tensor(build_pixels(data).ranges, dtype=torch.float64).T.reshape(2, -1, 1, 1)
    pixels = torch.from_numpy(image.astype(np.float64)).permute(2, 0, 1)[None]
    size = data.resize_px or image.shape[:2]
    pixels = F.interpolate(pixels, size, mode="bilinear", align_corners=False)
    pixels = torch.where(pixels == NODATA, 0, (((pixels - low) / (high - low)).clamp(0, 1) - mean) / std)
    frame = model.suitable_size(*size)
    with torch.no_grad():
        logits = model.compute_logits(F.pad(pixels, (0, frame[1] - size[1], 0, frame[0] - size[0])))[0]
    is_aligned: Any = trained.config.loss.align_corners  # resolved
    if frame != tuple(size):  # otherwise the logits are enlarged once, also for an image that is resized
        logits = F.interpolate(logits, frame, mode="bilinear", align_corners=is_aligned)[..., : size[0], : size[1]]
    model.float()
    return F.interpolate(logits, image.shape[:2], mode="bilinear", align_corners=is_aligned)[0]


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("trusted_code")
@pytest.mark.parametrize("key", KEYS)
def test_one_image_has_one_prediction_in_every_use(
    key: str, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path / "data", key)
    is_resized = "resize_px" in KEYS[key].get("data", {})
    if is_resized:  # the last image does not fit, and is no larger for the network than the others
        monkeypatch.setattr("segapp.inference.predict.predictor.host_budget", lambda: 0)
    has_nodata, suffix = "nodata" in key, ".tif" if "nodata" in key else ".png"
    if "large" in key:
        monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", 1)
    sections = {"model": OWN, **KEYS[key], "data": {"root": str(tmp_path / "data"), **KEYS[key].get("data", {})}}
    config = merged(tiny, **sections, train={"steps": 2})
    assert train(config, tmp_path / "run") == 0
    run, trained = str(tmp_path / "run"), load_trained(str(tmp_path / "run"))
    network, predictor = segapp.load(run, device="cpu"), predictor_of(trained)
    is_whole = "windows" not in key
    formats = ("onnx", "pt2", "safetensors") if key in EXPORTED else ()
    for format in formats:
        export_target(run, tmp_path / f"net.{format}", format=None, argmax=False)
    dataset = build_dataset(trained.config.data, trained.scheme, "val", is_training=False, seed=0)
    segapp.predict(run, sorted((tmp_path / "data" / "images" / "val").iterdir()), out=tmp_path / "out", save="labels")
    matrix = np.zeros((3, 3), np.int64)
    for index, size in enumerate(SIZES):
        path = tmp_path / "data" / "images" / "val" / f"{index}{suffix}"
        image, target, labels = predict_pair(trained, dataset, index)  # of the report
        assert labels.shape == target.shape == size
        found = {
            "files": cv2.imread(str(tmp_path / "out" / "labels" / f"{index}{suffix}"), cv2.IMREAD_UNCHANGED),
            "path": network.predict(path),
            "array": network.predict(image),
            "ensemble": EnsemblePredictor([("a", predictor), ("b", predictor)]).labels(image[None])[0],
        }
        if is_resized:
            limit = HostLimit(max_px=64)
            found["short of memory"] = predict_image(trained.model, trained.inference, image, trained.device, limit)
        decided, stored = np.ones(size, bool), image
        if has_nodata:
            stored = tifffile.imread(path)[..., [2, 0]]
            hidden = (stored == NODATA).all(-1)
            np.testing.assert_array_equal(hidden, np.arange(size[1]) // 4 * np.ones((size[0], 1)) == 1)
            np.testing.assert_array_equal(target == 255, hidden)
            np.testing.assert_array_equal(found["files"] == 255, hidden)
            decided = ~hidden
        if is_whole:
            logits = by_hand(trained, stored)
            best = logits.topk(2, 0)
            decided &= (best.values[0] - best.values[1] > 1e-3).numpy()
            assert decided.mean() > (0.8 if has_nodata else 0.95)
            found["by hand"] = best.indices[0].numpy()
            np.testing.assert_allclose(network.probabilities(path), logits.softmax(0), rtol=0, atol=1e-4)
        if formats:
            pt2 = torch.export.load(tmp_path / "net.pt2").module(check_guards=False)
            onnx = open_onnx(tmp_path / "net.onnx")(image[None])[0]
            np.testing.assert_allclose(onnx, logits, rtol=1e-3, atol=1e-3)
            found["onnx"] = onnx.argmax(0)
            found["pt2"] = pt2(torch.from_numpy(image[None].copy()))[0].argmax(0).numpy()
            found["safetensors"] = segapp.load(tmp_path / "net.safetensors", device="cpu").predict(path)
        assert {name: int((each != labels)[decided].sum()) for name, each in found.items()} == dict.fromkeys(found, 0)
        np.add.at(matrix, (target[target < 3], labels[target < 3]), 1)
    np.testing.assert_array_equal(segapp.evaluate(run).confusion, matrix)


@pytest.mark.slow
def test_file_of_a_model_of_one_size_takes_this_size(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Windows over the resized image are no part of the file."""
    draw(tmp_path / "data", "none")
    swin = {"img_size": 64, "window_size": 2, "embed_dim": 12, "num_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1]}
    encoder = {"encoder": "tu-swin_tiny_patch4_window7_224", "options": {"decoder_channels": [8] * 5, **swin}}
    model = {"library": "smp", "name": "Unet", "aux": False, **encoder}
    data = {"root": str(tmp_path / "data"), "resize_px": [96, 160], "crop_px": [64, 64]}
    assert train(merged(tiny, data=data, model=model, train={"steps": 1}), tmp_path / "run") == 0
    export_target(str(tmp_path / "run"), tmp_path / "net.onnx", format=None, argmax=False)
    assert "images of 64x64 px only -> logits" in capsys.readouterr().out
    assert open_onnx(tmp_path / "net.onnx")(np.zeros((1, 64, 64, 3), np.uint8)).shape == (1, 3, 64, 64)
