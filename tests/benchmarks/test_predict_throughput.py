"""`segapp predict` beside the loop that one writes by hand with the same model."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from segapp.datasets.layouts.schemes import ClassScheme
from segapp.inference.predict.outputs import OutputPlan
from segapp.inference.predict.pipeline import predict_files
from segapp.inference.predict.predictor import TrainedPredictor
from segapp.inference.predict.reading import find_images
from segapp.inference.sliding import Inference
from segapp.models import SegmentationModel, build_model
from segapp.models.normalizer import Normalizer

pytestmark = pytest.mark.benchmark

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SCHEME = ClassScheme(tuple(map(str, range(19))), tuple((i, 2 * i, 3 * i) for i in range(19)))
NUM_IMAGES = 12
ROUNDS = 7


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JPEGs of 512 x 1024 px."""
    folder = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(0)
    for number in range(NUM_IMAGES):
        coarse = rng.integers(0, 256, (32, 64, 3), dtype=np.uint8)
        cv2.imwrite(str(folder / f"{number:02}.jpg"), cv2.resize(coarse, (1024, 512), interpolation=cv2.INTER_CUBIC))
    return folder


@torch.no_grad()
def plain_loop(model: SegmentationModel, folder: Path, out: Path, *, saves: bool) -> None:
    """Read with Pillow, normalise, forward, interpolate, argmax, and write with Pillow or not."""
    mean, std = torch.tensor(MEAN).view(1, 3, 1, 1), torch.tensor(STD).view(1, 3, 1, 1)
    for path in sorted(folder.iterdir()):
        image = np.array(Image.open(path).convert("RGB"))
        pixels = (torch.from_numpy(image).permute(2, 0, 1)[None] / 255 - mean) / std
        logits = F.interpolate(model(pixels)[0], image.shape[:2], mode="bilinear", align_corners=True)
        labels = logits.argmax(1)[0].to(torch.uint8).numpy()
        if saves:
            Image.fromarray(labels).save(out / f"{path.stem}.png")


@pytest.mark.parametrize(("name", "encoder"), [("lraspp", "mobilenet_v3_large"), ("deeplabv3", "resnet18")])
def test_predict_throughput_against_a_plain_loop(name: str, encoder: str, photos: Path, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    model = build_model("torchvision", name, 19, encoder=encoder, aux=False).eval()
    device = torch.device("cpu")
    predictor = TrainedPredictor(model, Inference(Normalizer(MEAN, STD)), SCHEME, device)
    files = find_images([photos])[0]
    ways: dict[str, Any] = {
        "segapp, labels": lambda: predict_files(predictor, files, OutputPlan(tmp_path, SCHEME, ("labels",))),
        "segapp, labels, color, overlay": lambda: predict_files(predictor, files, OutputPlan(tmp_path, SCHEME)),
        "plain loop, labels": lambda: plain_loop(model, photos, tmp_path, saves=True),
        "plain loop, nothing written": lambda: plain_loop(model, photos, tmp_path, saves=False),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, run in ways.items():
            start = time.perf_counter()
            run()
            seconds[way].append(time.perf_counter() - start)
    print(f"\n{name} {encoder}, {NUM_IMAGES} JPEGs of 512 x 1024 px, median and best of {ROUNDS} rounds in turns")
    for way, found in seconds.items():
        print(f"  {way:32} {NUM_IMAGES / statistics.median(found):6.2f} {NUM_IMAGES / min(found):6.2f} images/s")
    for theirs in ("plain loop, labels", "plain loop, nothing written"):
        pairs = zip(seconds[theirs], seconds["segapp, labels"], strict=True)
        ratio = statistics.median(plain / ours for plain, ours in pairs)
        best = min(seconds[theirs]) / min(seconds["segapp, labels"])
        print(f"  segapp, labels over {theirs}: {ratio:.3f} (median of pairs), {best:.3f} (best)")
