"""What a training says about its data: where a cache is filled, how far it is, and that the device waits."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from segapp import failpoints
from segapp.datasets import cache as cache_module
from segapp.datasets.augment import TrainTransform
from segapp.datasets.cache import PixelCache, disk_files
from segapp.datasets.dataset import SegmentationDataset, image_sizes
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import TrainLoader
from segapp.training.reporting import DataWatch, cache_notes
from tests.support.drawn_data import draw_image, draw_mask

SCHEME = class_scheme("folder", classes=list("abcde"))


@pytest.fixture
def pairs(tmp_path: Path) -> list[ImagePair]:
    pairs = []
    for i in range(8):
        image, mask = tmp_path / f"{i}.png", tmp_path / f"{i}_mask.png"
        Image.fromarray(draw_image(i, 40, 50)).save(image)
        Image.fromarray(draw_mask(i, 40, 50)).save(mask)
        pairs.append(ImagePair(image, mask, str(i)))
    return pairs


@pytest.fixture
def cached(tmp_path: Path, pairs: list[ImagePair], monkeypatch: pytest.MonkeyPatch) -> SegmentationDataset:
    monkeypatch.setattr(cache_module, "RESERVE_BYTES", 0)
    files = disk_files(tmp_path / "cache", "root", "train", SCHEME)
    cache = PixelCache(files, pairs, image_sizes(pairs), SCHEME.dtype)
    return SegmentationDataset(pairs, SCHEME, TrainTransform((24, 32)), cache=cache)


def watch_of(dataset: SegmentationDataset, pairs: list[ImagePair]) -> DataWatch:
    validation = SegmentationDataset(pairs, SCHEME, notes=["a note"])
    return DataWatch(TrainLoader(dataset, 2), validation, cores=8)


def test_cache_on_disk_is_announced(cached: SegmentationDataset, pairs: list[ImagePair]) -> None:
    watch = watch_of(cached, pairs)
    assert watch.at_start() == ["a note"]  # the place of a cache is no alert
    (start,) = cache_notes("training", cached.cache)
    assert start.startswith("data.cache = disk: 0 of 8 training images are in ")
    assert "cache/train-" in start
    assert "(0.0 MiB); the others are stored when they are first read, 0.1 MiB of " in start
    for index in range(8):
        cached.read(index)
        assert watch.after_interval(0, 1) == []
    assert cache_notes("training", cached.cache) == []  # complete
    assert cache_notes("validation", None) == []


def test_full_disk_is_told_once(cached: SegmentationDataset, pairs: list[ImagePair]) -> None:
    watch = watch_of(cached, pairs)
    watch.at_start()
    failpoints.arm("cache.before_pixels=raise:ENOSPC")
    try:
        cached.read(0)
    finally:
        failpoints.arm("")
    (message,) = watch.after_interval(0, 1)
    assert message.startswith("data.cache = disk has no room in ")
    assert "for 8 of 8 training images, 0.1 MiB (No space left on device)" in message
    assert message.endswith("name a folder on another disk in XDG_CACHE_HOME")
    assert watch.after_interval(0, 1) == []


def test_damaged_records_are_told(cached: SegmentationDataset, pairs: list[ImagePair]) -> None:
    """Each time their number since the last message."""
    watch = watch_of(cached, pairs)
    for index in range(8):
        cached.read(index)
    watch.at_start()
    for record in Path(cached.cache.files.path).iterdir():  # type: ignore[union-attr]
        with record.open("r+b") as file:
            file.seek(100)
            file.write(b"damage")
    for indices in ((0,), (3, 4), (7,)):
        for index in indices:
            cached.read(index)
        (message,) = watch.after_interval(0, 1)
        assert message.startswith(f"data.cache: {len(indices)} damaged training images in ")
        assert watch.after_interval(0, 1) == []


def test_batch_larger_than_the_data_set_is_told(pairs: list[ImagePair]) -> None:
    dataset = SegmentationDataset(pairs, SCHEME, TrainTransform((24, 32)))
    assert DataWatch(TrainLoader(dataset, 8), dataset, cores=8).at_start() == []
    (message,) = DataWatch(TrainLoader(dataset, 64), dataset, cores=8).at_start()
    assert message.startswith("train.batch_size = 64 is more than the 8 training images: each step takes 8")


def test_waiting_for_data_is_told_once_it_costs(pairs: list[ImagePair]) -> None:
    watch = watch_of(SegmentationDataset(pairs, SCHEME, TrainTransform((24, 32))), pairs)
    watch.at_start()
    assert watch.after_interval(5, 10) == []  # too little to speak of
    (message,) = watch.after_interval(5, 10)
    assert message.startswith("the device waits for data 50% of the time (0 data workers, 8 processors)")
    assert watch.after_interval(50, 50) == []
    busy = watch_of(SegmentationDataset(pairs, SCHEME, TrainTransform((24, 32))), pairs)
    assert busy.after_interval(15, 100) == []
