"""Peak memory of `segapp check` and of evaluations, in tiles and in windows, on tiled TIFFs of 12000 x 12000 px.

Each runs in a process of its own, whose largest memory the kernel counts.

    pytest tests/benchmarks/test_large_tiff_memory.py -m benchmark -n 0 -s
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tifffile = pytest.importorskip("tifffile", reason="writes the images")
pytest.importorskip("rasterio", reason="the extra geo is not installed")

SIDE_PX = 12_000
PROGRAM = """
import contextlib, io, json, sys, time
from pathlib import Path
import torch
from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_pixels, build_scheme
from segapp.commands.check import check_data
from segapp.config import load_config
from segapp.datasets.loader import EvalLoader
from segapp.inference.evaluate import EvaluationSettings, evaluate
from segapp.models.normalizer import Normalizer
from segapp.inference.sliding import Inference
from segapp.inference.workspace import HostLimit
from segapp.losses import CriterionCE

class Net(torch.nn.Module):  # a cheap network, whose memory is small beside that of the images
    fixed_size_px, in_channels = None, 3

    def suitable_size(self, height, width):
        return -(-height // 8) * 8, -(-width // 8) * 8

    def forward(self, images):
        return (torch.nn.functional.avg_pool2d(images, 8),)

def peak_kib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

config, what = load_config(Path(sys.argv[1]) / "config.yaml"), sys.argv[2]
before, start = peak_kib(), time.perf_counter()
if what == "check":
    with contextlib.redirect_stdout(io.StringIO()):
        check_data(config, as_json=True)
else:
    scheme = build_scheme(config.data)
    dataset = build_dataset(config.data, scheme, "val", is_training=False, seed=0)
    inference = Inference(Normalizer((0.5,) * 3, (0.2,) * 3), window_px=(512, 512) if what == "windows" else None)
    settings = EvaluationSettings(inference, 3, 255, torch.device("cpu"), CriterionCE(), host=HostLimit(1))
    evaluate(Net(), EvalLoader(dataset).batches(reads_windows=settings.reads_windows), settings)
print(json.dumps({"s": time.perf_counter() - start, "mib": (peak_kib() - before) / 1024}))
"""


def draw(root: Path, side_px: int) -> None:
    """Write a data set of one image for each split, and its config."""
    rng = np.random.default_rng(0)
    options = {"tile": (512, 512), "compression": "zlib"}
    for split, side in (("train", side_px), ("val", side_px)):
        for kind in ("images", "masks"):
            (root / kind / split).mkdir(parents=True, exist_ok=True)
        coarse = rng.integers(0, 250, (side // 16, side // 16, 3), np.uint8)
        image = coarse.repeat(16, 0).repeat(16, 1)
        image += rng.integers(0, 5, (side, side, 1), np.uint8)
        tifffile.imwrite(root / "images" / split / "a.tif", image, photometric="rgb", **options)
        mask = (coarse[..., 0] % 3).repeat(16, 0).repeat(16, 1)
        tifffile.imwrite(root / "masks" / split / "a.tif", mask, **options)
    (root / "config.yaml").write_text(
        f"name: large\ndata: {{format: folder, root: {root}, classes: [a, b, c], workers: 0, crop_px: [512, 512]}}\n"
    )


@pytest.mark.benchmark
@pytest.mark.timeout(1800)
def test_peak_memory_on_a_large_tiff(tmp_path: Path) -> None:
    draw(tmp_path, SIDE_PX)
    for what in ("check", "tiles", "windows"):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), what], capture_output=True, text=True, check=True
        )
        found = json.loads(done.stdout.splitlines()[-1])
        print(f"\n{what}: {found['mib']:.0f} MiB beside the imports, {found['s']:.0f} s")
