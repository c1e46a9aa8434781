"""A picture of 16k x 12k pixels: memory stays under the bound that the page `predict` states."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

from segapp.inference.predict.outputs import PngWriter

HEIGHT, WIDTH = 12_000, 16_000
BOUND_MIB = 6 * HEIGHT * WIDTH / 2**20 + 2048

PROGRAM = """
import resource, sys
from pathlib import Path
import torch
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.models import build_model
from segapp.models.normalizer import Normalizer
from segapp.inference.sliding import Inference
from segapp.inference.predict.outputs import OutputPlan
from segapp.inference.predict.pipeline import predict_files
from segapp.inference.predict.predictor import TrainedPredictor
from segapp.inference.predict.reading import find_images

torch.set_num_threads(2)
torch.manual_seed(0)
model = build_model("torchvision", "lraspp", 19, encoder="mobilenet_v3_small").eval()
scheme = ClassScheme(tuple(map(str, range(19))), tuple((i, i, i) for i in range(19)))
inference = Inference(Normalizer((0.5, 0.5, 0.5), (0.25, 0.25, 0.25)))
predictor = TrainedPredictor(model, inference, scheme, torch.device("cpu"))
predictor.labels(__import__("numpy").zeros((1, 64, 64, 3), "uint8"))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
tally = predict_files(predictor, find_images([sys.argv[1]])[0], OutputPlan(Path(sys.argv[2]), scheme))
print(before, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, tally.seconds, *tally.problems, *tally.notes)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_memory_of_a_huge_image_stays_under_the_stated_bound(tmp_path: Path) -> None:
    strip = cv2.resize(np.random.default_rng(0).integers(0, 256, (20, 500, 3), np.uint8), (WIDTH, 600))
    with open(tmp_path / "huge.png", "wb") as file:
        writer = PngWriter(file, (HEIGHT, WIDTH), channels=3, is_photo=True)
        for _ in range(HEIGHT // 600):
            writer.write(strip)
        writer.finish()
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "huge.png"), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, done.stderr
    before, peak, seconds, notes = done.stdout.split(" ", 3)
    print(f"\n{peak} MiB at its peak, {before} MiB before, {seconds} s; bound {BOUND_MIB:.0f} MiB above")
    assert "predicted in tiles" in notes
    assert float(peak) - float(before) < BOUND_MIB
    Image.MAX_IMAGE_PIXELS = None
    for kind in ("labels", "color", "overlay"):
        with Image.open(tmp_path / "out" / kind / "huge.png") as picture:
            assert picture.size == (WIDTH, HEIGHT)
            picture.load()
