"""The ring of batches that workers write to: bytes of each kind of sample, how long a batch is valid, killed workers.

The expected samples are read from the data set, one by one and without a loader.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.sharedctypes import RawArray
from typing import Any

import numpy as np
import pytest
import torch

from segapp.compat.torch import loader_workers
from segapp.datasets import pool as pool_module
from segapp.datasets.augment import BandValues, TrainTransform
from segapp.datasets.dataset import PairMix, SegmentationDataset
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import TrainLoader
from segapp.datasets.own_data import OwnData
from segapp.datasets.pool import Batch, LoadOptions
from segapp.datasets.sampling import sample_order
from segapp.errors import WorkerError
from tests.datasets.test_loading_ahead import CROP, NUM_IMAGES, OWN_SEED, SEED, Recorder, assert_batches, keys_of
from tests.datasets.test_loading_ahead import recorder as recorder  # a fixture

pytestmark = pytest.mark.usefixtures("no_worker_is_left")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What loaders tell the user."""
    found: list[str] = []
    monkeypatch.setattr(pool_module.logger, "warning", found.append)
    return found


class Drawn:
    """Images of 13 sizes with random values of a dtype, and masks of ids with gaps."""

    def __init__(self, pixels: PixelFormat, mask_dtype: str, ids: tuple[int, ...]) -> None:
        self._pixels, self._mask_dtype, self._ids = pixels, mask_dtype, ids

    def __len__(self) -> int:
        return NUM_IMAGES

    def image_and_mask(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Return an image (H, W, B) and its ids (H, W)."""
        rng = np.random.default_rng(index)
        size = 30 + index, 45 - index
        image = rng.uniform(0, 200, (*size, self._pixels.num_bands)).astype(self._pixels.dtype)
        return image, rng.choice(self._ids, size).astype(self._mask_dtype)


KINDS: list[tuple[str, tuple[int, ...] | None, str, dict[str, Any]]] = [
    ("uint8", None, "uint8", {}),
    ("uint16", (1, 2, 3, 4, 5), "uint16", {}),
    ("int16", (2,), "int32", {"ignore_index": -1}),
    ("float32", (1, 2), "uint8", {"multilabel": "bits"}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("dtype", "bands", "mask_dtype", "scheme"), KINDS, ids=[each[0] for each in KINDS])
@pytest.mark.parametrize(("workers", "way"), [(2, "cutmix"), (3, "classmix"), (3, "short")])
def test_ring_has_the_bytes_of_every_kind_of_sample(
    dtype: str, bands: tuple[int, ...] | None, mask_dtype: str, scheme: dict[str, Any], workers: int, way: str
) -> None:
    """Ranks have 1, 4 and 2 samples of a batch, then 0, 2 and 5; an only batch of 13 samples is short of 14."""
    num_bands = 3 if bands is None else len(bands)
    pixels = PixelFormat(bands, dtype, None if bands is None else ((0.0, 200.0),) * num_bands)
    classes = class_scheme("list", classes=("a", "b", "c", "d"), **scheme)
    data = OwnData(Drawn(pixels, mask_dtype, (0, 1, 3)), "own:Drawn", "train")
    values = BandValues(None if bands is None else pixels.ranges, pixels.fill)
    transform = TrainTransform(CROP, ignore_index=classes.ignore_index, bands=values)
    mix = None if way == "short" else PairMix(**{way: 0.7}, ignore_index=classes.ignore_index)
    dataset = SegmentationDataset(data.pairs(), classes, transform, pixels=pixels, seed=OWN_SEED, mix=mix)
    batch_size, first_shares = (14, [5, 6, 2]) if way == "short" else (7, [1, 4, 2])
    for rank in range(3):
        shares, options = first_shares.copy(), LoadOptions(workers)
        ranks: dict[str, Any] = {"rank": rank, "world_size": 3, "divide": lambda _, shares=shares: shares}
        loader = TrainLoader(dataset, batch_size, seed=SEED, options=options, **ranks)
        for epoch in (1, 2, 3):
            if way != "short" and epoch == 3:
                shares[:] = [0, 2, 5]
            order, at = sample_order(NUM_IMAGES, SEED, epoch), sum(shares[:rank])
            for batch in loader.epoch(epoch, last_epoch=3):
                assert batch.indices == tuple(order[at : at + shares[rank]])
                samples = [dataset[epoch, index] for index in batch.indices]
                assert batch.images.numpy().tobytes() == b"".join(each.image.numpy().tobytes() for each in samples)
                assert batch.target.numpy().tobytes() == b"".join(each.target.numpy().tobytes() for each in samples)
                assert (batch.images.dtype, batch.target.dtype) == (
                    dataset[0, 0].image.dtype,
                    dataset[0, 0].target.dtype,
                )
                assert batch.images.shape == (shares[rank], num_bands, *CROP)
                at += batch_size
            assert at == sum(shares[:rank]) + (14 if way == "short" else 7)
        assert loader.pool._guarded.ring is not None
        loader.close()


def copied(batch: Batch) -> Batch:
    """Return a batch that stays as it is."""
    return Batch(batch.images.clone(), batch.target.clone(), batch.indices, batch.epoch, batch.first)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_batch_is_valid_until_a_step_and_one_are_asked_for(recorder: Recorder, accumulate: int) -> None:
    """Then it gets the samples of a later batch: with the one that is waited for and six ahead, all slots are full."""
    options = LoadOptions(2, accumulate=accumulate)
    loader = TrainLoader(recorder.dataset, 3, seed=SEED, options=options)
    expected = keys_of(range(1, 9), 3)
    epochs = (batch for epoch in range(1, 9) for batch in loader.epoch(epoch, last_epoch=8))
    held: list[Batch] = []
    for number, batch in enumerate(epochs):
        held.append(batch)
        if number == accumulate + 3:
            break
    recorder.keys_within(5, 3 * (number + 7))
    time.sleep(0.2)  # the last sample is written
    assert_batches(held[-accumulate - 1 :], expected[number - accumulate : number + 1], recorder.dataset)
    reread = SegmentationDataset(recorder.dataset.pairs, recorder.dataset.scheme, TrainTransform(CROP), seed=OWN_SEED)
    assert torch.equal(held[-accumulate - 2].images[2], reread[expected[number + 6][2]].image)
    loader.close()


def test_without_room_or_for_a_gpu_there_is_no_ring(
    recorder: Recorder, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images and masks of 24 x 32 pixels take 3,072 bytes: eight slots of five take 122,880."""
    assert TrainLoader(recorder.dataset, 5, options=LoadOptions(2, pin_memory=True)).pool._new_ring() is None
    for free in (2 * 122_880, 2 * 122_880 - 1):
        monkeypatch.setattr(pool_module, "available_bytes", lambda free=free: free)
        loader = TrainLoader(recorder.dataset, 5, seed=SEED, options=LoadOptions(2))
        assert_batches(loader.epoch(1), keys_of((1,), 5), recorder.dataset)
        assert (loader.pool._guarded.ring is None) == (free < 2 * 122_880)
        loader.close()
    assert [message.partition(":")[0] for message in told] == [
        "no ring of shared batches (0 MiB, and 0 MiB of memory are free)"
    ]


# --- killed workers


@pytest.fixture
def kill_while_writing(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that lets so many of the next workers be killed when half of a part is written."""
    left = RawArray("i", 1)
    original = pool_module.collate

    def collate(parts: Any, *, out: Batch | None = None, **options: Any) -> Batch:
        if out is not None and left[0] > 0:
            left[0] -= 1
            out.images[:] = 7
            os.kill(os.getpid(), signal.SIGKILL)
        return original(parts, out=out, **options)

    monkeypatch.setattr(pool_module, "collate", collate)
    return lambda number: left.__setitem__(0, number)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [2, 1])
def test_killed_workers_start_again_with_the_same_samples(
    recorder: Recorder, told: list[str], kill_while_writing: Callable[[int], None], number: int
) -> None:
    """While they write batch 7, which is noticed there, and between two batches at the end of epoch 4."""
    loader = TrainLoader(recorder.dataset, 4, seed=SEED, options=LoadOptions(2))

    def batches() -> Iterator[Batch]:
        for epoch in range(1, 9):
            for at, batch in enumerate(loader.epoch(epoch, last_epoch=8)):
                if (epoch, at) == (1, 0):
                    kill_while_writing(number)
                if (epoch, at) == (4, 2):
                    recorder.keys_within(0.5, 9999)
                    for process in loader_workers(loader.pool._iterator)[:number]:
                        process.kill()
                yield batch

    assert_batches(batches(), keys_of(range(1, 9), 4), recorder.dataset)
    loader.close()
    places = [re.search(r"SIGKILL (while reading|between two files)", message) for message in told]
    assert [place and place[1] for place in places] == ["while reading", "between two files"]
    assert all("start again with the same samples" in message and "\n" not in message for message in told)


@pytest.mark.parametrize("epoch", [1, 2])
def test_second_death_in_an_epoch_ends_the_run(
    recorder: Recorder, told: list[str], kill_while_writing: Callable[[int], None], epoch: int
) -> None:
    """Also if an evaluation divides the epoch; the next epoch may lose a worker again."""
    recorder.act = lambda seed: time.sleep(0.1)  # the second one is killed before the epoch is loaded
    loader = TrainLoader(recorder.dataset, 1, seed=SEED, options=LoadOptions(2))
    batches = loader.epoch(1, last_epoch=2)
    next(batches)
    kill_while_writing(1)
    num_returned = 1
    while not told:
        next(batches)
        num_returned += 1
    kill_while_writing(1)
    rest = loader.epoch(epoch, num_returned, last_epoch=2)
    if epoch == 2:
        assert_batches(rest, keys_of((2,), 1)[num_returned:], recorder.dataset)
    else:
        with pytest.raises(WorkerError, match=r"ended by SIGKILL while reading \S+\.png: if memory ran out"):
            list(rest)
    assert len(told) == epoch
    loader.close()
    assert list(loader.pool._guarded.slots) == [0, 0], "no later message names the image of a killed worker"
