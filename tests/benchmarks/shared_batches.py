"""CPU time of a cached training sample: in one process, and through two data workers that write to a ring or not.

`CAMVID=FOLDER python -m tests.benchmarks.shared_batches [--rounds 5]` prints the ratios to the samples in one process,
for crops of 352x480 in batches of 16 that are cut into 8 parts, as with eight workers. The cases take turns, and the
medians of their rounds are compared. Processor time does not count waiting, so other programs matter little.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import cv2
import psutil
import torch

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_scheme
from segapp.config import validate_config
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import LoadOptions
from segapp.parallel.distributed import Ranks

BATCH, PARTS, WORKERS = 16, 8, 2


def camvid_set(root: str) -> SegmentationDataset:
    """Return the training set of CamVid, all of which is cached in memory."""
    data = {"format": "camvid", "root": root, "crop_px": [352, 480], "cache": "ram", "scale": [0.6, 1.6]}
    config = validate_config({"name": "ring", "data": {**data, "photometric": 0.7}})
    dataset = build_dataset(config.data, build_scheme(config.data), "train", is_training=True, seed=0, ranks=Ranks())
    for epoch in (0, 1):  # one pass fills the cache, one compares the sums
        for index in range(len(dataset)):
            dataset[epoch, index]
    return dataset


def children_s() -> float:
    """Return the processor time of the workers in seconds."""
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())


def loader_of(dataset: SegmentationDataset, *, has_ring: bool) -> TrainLoader:
    """Return a loader with two workers that cut a batch into as many parts as eight."""
    loader = TrainLoader(dataset, BATCH, options=LoadOptions(WORKERS))
    pool = loader.pool
    pool._ring_size = BATCH if has_ring else None
    pool._num_parts, pool._work._part_size = PARTS, BATCH // PARTS
    return loader


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    root = os.environ.get("CAMVID")
    if root is None or not Path(root).is_dir():
        raise SystemExit("set CAMVID to the folder of CamVid")
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    dataset = camvid_set(root)
    num_samples = len(dataset) // BATCH * BATCH
    ways: dict[str, Callable[[int], Iterable[object]]] = {
        "in one process": lambda epoch: (dataset[epoch, index] for index in range(num_samples)),
        "parts passed on": loader_of(dataset, has_ring=False).epoch,
        "a ring": loader_of(dataset, has_ring=True).epoch,
    }
    times_ms: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for epoch in range(1, rounds + 3):
        for name, load in ways.items():
            main_s, workers_s = time.process_time(), children_s()
            for _ in load(epoch):
                pass
            time.sleep(0.05)  # the times of the workers are updated
            spent_s = time.process_time() - main_s, children_s() - workers_s
            times_ms[name].append((1e3 * spent_s[0] / num_samples, 1e3 * spent_s[1] / num_samples))
    print(f"CamVid, cached, batches of {BATCH} in {PARTS} parts, {WORKERS} workers: ms of a sample (ratios)")
    medians = {
        name: [statistics.median(each) for each in zip(*times[2:], strict=True)] for name, times in times_ms.items()
    }
    base_ms = medians["in one process"][0]
    for name, (main_ms, workers_ms) in medians.items():
        both_ms = main_ms + workers_ms
        main, both = (f"{ms:.2f} ({ms / base_ms:.2f})" for ms in (main_ms, both_ms))
        print(f"{name:16} main {main}  with workers {both}")


if __name__ == "__main__":
    main()
