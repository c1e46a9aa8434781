"""Images per second of the training loader over a hand-written cv2 + albumentations loop with the same transform.

Both load in one process, in turns within one run, so that a busy machine slows both. The photographs of CamVid are used
where they lie beside the repository, else drawn JPEGs of the same size.

    pytest tests/benchmarks/test_loader_throughput.py -m benchmark -s
"""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import albumentations as A
import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from segapp.datasets.augment import TrainTransform
from segapp.datasets.cache import PixelCache, memory_files
from segapp.datasets.dataset import SegmentationDataset, image_sizes
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs
from segapp.datasets.loader import TrainLoader

CROP = (240, 320)
BATCH = 8
NUM_IMAGES = 96
ROUNDS = 7


class HandWritten(Dataset):
    """What most people write."""

    def __init__(self, pairs: Sequence[ImagePair]) -> None:
        self.pairs = pairs
        self.transform = A.Compose(
            [
                A.RandomScale(scale_limit=(-0.5, 1.0), p=1.0),
                A.PadIfNeeded(*CROP, fill_mask=255),
                A.RandomCrop(*CROP),
                A.HorizontalFlip(),
                A.ColorJitter(),
                A.Normalize(),
                A.ToTensorV2(),
            ]
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        pair = self.pairs[index]
        image = cv2.cvtColor(cv2.imread(str(pair.image)), cv2.COLOR_BGR2RGB)
        mask = cv2.imread(str(pair.mask), cv2.IMREAD_UNCHANGED)
        result = self.transform(image=image, mask=mask)
        return result["image"], result["mask"]


def draw_pairs(folder: Path) -> tuple[ImagePair, ...]:
    pairs = []
    y, x = np.mgrid[:360, :480]
    for i in range(NUM_IMAGES):
        rng = np.random.default_rng(i)
        image = np.clip(127 + 60 * np.sin(x / 9 + i) + 50 * np.cos(y / 7) + rng.normal(0, 12, (360, 480)), 0, 255)
        image = np.stack([image, image[::-1], image[:, ::-1]], -1).astype(np.uint8)
        mask = (x * (1 + i % 3) // 70 + y // 60) % 11
        Image.fromarray(image).save(folder / f"{i:03}.jpg", quality=90)
        Image.fromarray(mask.astype(np.uint8)).save(folder / f"{i:03}.png")
        pairs.append(ImagePair(folder / f"{i:03}.jpg", folder / f"{i:03}.png", f"{i:03}"))
    return tuple(pairs)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> tuple[ImagePair, ...]:
    camvid = Path(__file__).resolve().parents[2].parent / "shared" / "camvid"
    if camvid.is_dir():
        return find_pairs(DataLocation("camvid", camvid), "train")[:NUM_IMAGES]
    return draw_pairs(tmp_path_factory.mktemp("drawn"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = cv2.getNumThreads(), torch.get_num_threads()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    yield
    cv2.setNumThreads(before[0])
    torch.set_num_threads(before[1])


def images_per_s(batches: Callable[[], Iterator[object]]) -> tuple[float, float]:
    """Images per second by the clock on the wall, and per second of this process' own work."""
    wall_s, work_s = time.perf_counter(), time.process_time()
    count = sum(BATCH for _ in batches())
    return count / (time.perf_counter() - wall_s), count / (time.process_time() - work_s)


def compare(ours: list[float], theirs: list[float]) -> str:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return (
        f"{statistics.median(ours):6.0f} (ratio {statistics.median(ratios):.2f}, {min(ratios):.2f}..{max(ratios):.2f})"
    )


@pytest.mark.benchmark
def test_loader_throughput_against_a_hand_written_loop(pairs: tuple[ImagePair, ...]) -> None:
    scheme = class_scheme("camvid")
    plain = TrainLoader(SegmentationDataset(pairs, scheme, TrainTransform(CROP)), BATCH)
    cache = PixelCache(memory_files(), pairs, image_sizes(pairs), scheme.dtype)
    cached = TrainLoader(SegmentationDataset(pairs, scheme, TrainTransform(CROP), cache=cache), BATCH)
    hand_written = DataLoader(HandWritten(pairs), BATCH, shuffle=True, drop_last=True)
    epochs = iter(range(1000))
    loops: dict[str, Callable[[], Iterator[object]]] = {
        "hand-written": lambda: iter(hand_written),
        "segapp": lambda: plain.epoch(next(epochs)),
        "segapp, cache: ram": lambda: cached.epoch(next(epochs)),
    }
    for loop in loops.values():
        images_per_s(loop)  # fills caches, ours and the system's
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in loops}
    for _ in range(ROUNDS):
        for name, loop in loops.items():
            speeds[name].append(images_per_s(loop))
    theirs = list(zip(*speeds["hand-written"], strict=True))
    print()
    for name, values in speeds.items():
        wall, work = (compare(list(a), list(b)) for a, b in zip(zip(*values, strict=True), theirs, strict=True))
        print(f"{name:20} images/s {wall}, per second of work {work}")


@pytest.mark.benchmark
def test_time_of_each_part_of_a_sample(pairs: tuple[ImagePair, ...]) -> None:
    """Where the time of one sample goes, in microseconds."""
    dataset = SegmentationDataset(pairs, class_scheme("camvid"), TrainTransform(CROP))
    image, mask = dataset.read(0)
    parts: dict[str, Callable[[int], object]] = {
        "decode and check": lambda i: dataset.read(i % len(pairs)),
        "transform": lambda i: dataset.transform(image, mask, i, None) if dataset.transform else None,
        "whole sample": lambda i: dataset[0, i % len(pairs)],
    }
    print()
    for name, part in parts.items():
        start = time.perf_counter()
        for i in range(2 * NUM_IMAGES):
            part(i)
        print(f"{name:20} {(time.perf_counter() - start) / (2 * NUM_IMAGES) * 1e6:7.0f} us")
