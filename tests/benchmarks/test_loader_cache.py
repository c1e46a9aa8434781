"""Images per second of a core, and memory of the processes, for `data.cache: none`, `ram` and `disk`.

Drawn PNGs of 2048x1024 pixels and about 2.9 MB, crops of 768x768, in turns within one run.

    pytest tests/benchmarks/test_loader_cache.py -m benchmark -n 0 -s
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest
import torch

from segapp.datasets.augment import TrainTransform
from segapp.datasets.cache import PixelCache, disk_files, memory_files
from segapp.datasets.dataset import SegmentationDataset, image_sizes
from segapp.datasets.files import ImagePair
from segapp.datasets.images.png import decode_image_png_u8
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import LoadOptions

pytestmark = pytest.mark.benchmark

KINDS = ("none", "ram", "disk")
NUM_IMAGES = 24
ROUNDS = 5
WORKERS = 2
NUM_CLASSES = 19
SCHEME = class_scheme("folder", classes=[f"class {i}" for i in range(NUM_CLASSES)])


def draw_pngs(folder: Path, num_images: int) -> tuple[ImagePair, ...]:
    """Draw images with the noise of a camera and masks of smooth regions, each with all classes."""
    height, width = 1024, 2048
    y, x = np.mgrid[:height, :width]
    pairs = []
    for i in range(num_images):
        rng = np.random.default_rng(i)
        waves = 127 + 60 * np.sin(x / 37 + i) + 50 * np.cos(y / 29)
        noise = rng.normal(0, 1.6, (height, width, 1)) + rng.normal(0, 0.9, (height, width, 3))
        pixels = np.clip(np.stack([waves, waves[::-1], waves[:, ::-1]], -1) + noise, 0, 255).astype(np.uint8)
        regions = ((np.sin(x / 190 + i) + np.cos(y / 130) + 2) * (NUM_CLASSES - 1) / 4).astype(np.uint8)
        image, mask = folder / f"{i:03}.png", folder / f"{i:03}_mask.png"
        cv2.imwrite(str(image), pixels)
        cv2.imwrite(str(mask), regions)
        pairs.append(ImagePair(image, mask, f"{i:03}"))
    return tuple(pairs)


def large_dataset(kind: str, pairs: tuple[ImagePair, ...], folder: Path) -> SegmentationDataset:
    """Return the training set with `data.cache: kind`; a cache on disk lies in `folder`."""
    cache = None
    if kind != "none":
        files = memory_files() if kind == "ram" else disk_files(folder, str(folder), "train", SCHEME)
        cache = PixelCache(files, pairs, image_sizes(pairs), SCHEME.dtype)
    return SegmentationDataset(pairs, SCHEME, TrainTransform((768, 768)), cache=cache)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImagePair, ...]:
    return draw_pngs(tmp_path_factory.mktemp("drawn"), NUM_IMAGES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = cv2.getNumThreads(), torch.get_num_threads()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    yield
    cv2.setNumThreads(before[0])
    torch.set_num_threads(before[1])


def test_images_per_second_of_a_core(pairs: tuple[ImagePair, ...], tmp_path: Path) -> None:
    """By processor time, so that other programs on the machine count little; the first pass fills the caches."""
    sizes = [pair.image.stat().st_size / 1e6 for pair in pairs]
    print(f"\n{NUM_IMAGES} PNGs of {min(sizes):.2f} to {max(sizes):.2f} MB")
    datasets = {kind: large_dataset(kind, pairs, tmp_path) for kind in KINDS}
    speeds: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for epoch in range(ROUNDS + 2):  # one pass fills, one compares the sums
        for kind, dataset in datasets.items():
            began_s = time.process_time()
            for index in range(NUM_IMAGES):
                dataset[epoch, index]
            speeds[kind].append(NUM_IMAGES / (time.process_time() - began_s))
    medians = {kind: statistics.median(values[2:]) for kind, values in speeds.items()}
    for kind, values in speeds.items():
        print(
            f"cache {kind:5} {medians[kind]:6.1f} images/s a core, {medians[kind] / medians['none']:5.1f} of none; "
            f"filling {values[0]:5.1f}, comparing sums {values[1]:6.1f}"
        )
    least = 8 if decode_image_png_u8 is None else 4
    assert medians["disk"] >= least * medians["none"]
    assert medians["ram"] >= least * medians["none"]


def private_mib() -> float:
    """Memory of this process and its workers, shared pages in proportion, without pages of files (smaps_rollup)."""
    total_kib = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        found = {name: int(rest.split()[0]) for name, rest in (line.split(":") for line in lines)}
        total_kib += found["Pss_Anon"] + found["Pss_Shmem"]
    return total_kib / 1024


def test_memory_of_the_processes(pairs: tuple[ImagePair, ...], tmp_path: Path) -> None:
    """The highest of several samples in the last of three epochs, each kind in a process of its own."""
    print()
    peaks = {}
    for kind in KINDS:
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                loader = TrainLoader(large_dataset(kind, pairs, tmp_path), 4, options=LoadOptions(WORKERS))
                for epoch in range(2):
                    for _ in loader.epoch(epoch):
                        pass
                peak = max(private_mib() for _ in loader.epoch(2))
                loader.close()
                os.write(writing, f"{peak}".encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        peaks[kind] = float(os.read(reading, 100))
        decoded_mib = NUM_IMAGES * 2048 * 1024 * 4 / 2**20
        ratio = peaks[kind] / peaks["none"]
        print(f"cache {kind:5} {peaks[kind]:6.0f} MiB, {ratio:.2f} of none ({decoded_mib:.0f} MiB decoded)")
        os.close(reading)
        os.close(writing)
    assert peaks["disk"] <= 1.1 * peaks["none"]
    assert peaks["ram"] <= 1.1 * peaks["none"] + decoded_mib
