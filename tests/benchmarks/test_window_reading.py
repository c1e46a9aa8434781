"""A training crop of an 8000 x 8000 px TIFF: seconds and memory of windows over decoding the whole.

Each way runs in a process of its own, whose largest memory the kernel counts.

    pytest tests/benchmarks/test_window_reading.py -m benchmark -n 0 -s
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

tifffile = pytest.importorskip("tifffile", reason="writes the image")
pytest.importorskip("rasterio", reason="the extra geo is not installed")

SIDE_PX = 8000
PROGRAM = """
import json, sys, time
import segapp.datasets.dataset as module
from segapp.datasets.augment import TrainTransform
from segapp.datasets.files import ImagePair
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.layouts.formats import class_scheme
from pathlib import Path

def peak_kib():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])

folder, way, num_crops = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if way == "whole":
    module.LARGE_PX = 2**40
scheme = class_scheme("folder", classes=["a", "b", "c"])
pixels = PixelFormat((1, 2, 3, 4), "uint16", ((0.0, 4000.0),) * 4)
pair = ImagePair(folder / "image.tif", folder / "mask.tif", "image")
dataset = module.SegmentationDataset([pair], scheme, TrainTransform((512, 512)), pixels=pixels)
before = peak_kib()
start = time.perf_counter()
for epoch in range(num_crops):
    dataset[(epoch, 0)]
seconds = (time.perf_counter() - start) / num_crops
print(json.dumps({"s": seconds, "mib": (peak_kib() - before) / 1024}))
"""


@pytest.mark.benchmark
@pytest.mark.timeout(900)
def test_crop_of_a_large_tiff_in_windows_over_the_whole(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 3500, (SIDE_PX // 16, SIDE_PX // 16, 4), np.uint16)
    image = np.kron(coarse, np.ones((16, 16, 1), np.uint16)) + rng.integers(0, 16, (SIDE_PX, SIDE_PX, 1), np.uint16)
    options = {"tile": (512, 512), "compression": "zlib"}
    tifffile.imwrite(tmp_path / "image.tif", image, planarconfig="contig", photometric="minisblack", **options)
    tifffile.imwrite(
        tmp_path / "mask.tif", (coarse[..., 0] % 3).astype(np.uint8).repeat(16, 0).repeat(16, 1), **options
    )
    del image
    found = {}
    for way, num_crops in (("windows", 12), ("whole", 2)):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, str(tmp_path), way, str(num_crops)],
            capture_output=True,
            text=True,
            check=True,
        )
        found[way] = json.loads(done.stdout)
        print(f"\n{way}: {found[way]['s']:.3f} s a crop, {found[way]['mib']:.0f} MiB beside the imports")
    seconds, memory = (found["whole"][key] / max(found["windows"][key], 1e-9) for key in ("s", "mib"))
    print(f"whole / windows: {seconds:.1f} times the seconds, {memory:.1f} times the memory")
