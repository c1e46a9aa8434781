"""Workers that continue with the next epoch, and that load a batch together: the same batches, never more than allowed.

The expected batches come from `sample_order` and from the data set itself, sample by sample, without a loader.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from itertools import chain

import numpy as np
import pytest
import torch

from segapp.datasets.augment import TrainTransform
from segapp.datasets.dataset import SegmentationDataset
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import EvalLoader, TrainLoader
from segapp.datasets.pool import Batch, BatchPool, LoadOptions
from segapp.datasets.sampling import mix_seed, sample_order
from segapp.errors import DataError

WritePairs = Callable[..., tuple[ImagePair, ...]]
pytestmark = pytest.mark.usefixtures("no_worker_is_left")
CROP = (24, 32)
NUM_IMAGES, SEED, OWN_SEED = 13, 11, 5
"""`SEED` is the seed of the order, `OWN_SEED` the data set's own, of its augmentation."""


class Recorder:
    """A transform that writes the process and the seed of each sample into a pipe, and tells what all have loaded."""

    crop_px = CROP

    def __init__(self, pairs: tuple[ImagePair, ...], scheme: ClassScheme) -> None:
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._reading, False)
        self.act: Callable[[int], object] = lambda seed: None
        self.plain = TrainTransform(CROP)
        self.dataset = SegmentationDataset(pairs, scheme, self, seed=OWN_SEED)
        self._loaded: list[tuple[int, tuple[int, int]]] = []
        self._keys = {
            mix_seed("sample", OWN_SEED, epoch, index): (epoch, index) for epoch in range(9) for index in range(99)
        }

    def __call__(
        self, image: np.ndarray, mask: np.ndarray, seed: int, aim: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        os.write(self._writing, f"{os.getpid()} {seed}\n".encode())
        self.act(seed)
        return self.plain(image, mask, seed, aim)

    def loaded(self) -> list[tuple[int, tuple[int, int]]]:
        """Return (process, (epoch, image)) of each sample."""
        try:
            lines = os.read(self._reading, 2**16).decode().splitlines()
        except BlockingIOError:
            lines = []
        for line in lines:
            pid, seed = map(int, line.split())
            self._loaded.append((pid, self._keys[seed]))
        return self._loaded

    def keys_within(self, seconds: float, count: int) -> list[tuple[int, int]]:
        """Wait until `count` samples are loaded, or for the time, and return all."""
        deadline = time.monotonic() + seconds
        while len(self.loaded()) < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return [key for _, key in self._loaded]


@pytest.fixture
def recorder(pairs: tuple[ImagePair, ...], scheme: ClassScheme) -> Recorder:
    return Recorder(pairs, scheme)


@pytest.fixture
def starts(monkeypatch: pytest.MonkeyPatch) -> list[BatchPool]:
    """The pools that were told to load other batches than they had begun, once for each time."""
    found: list[BatchPool] = []
    original = BatchPool._start
    monkeypatch.setattr(BatchPool, "_start", lambda pool, batches: found.append(pool) or original(pool, batches))
    return found


def keys_of(epochs: Iterable[int], batch_size: int) -> list[list[tuple[int, int]]]:
    """Return (epoch, image) of each sample of each full batch, computed from the seed alone."""
    batches = []
    for epoch in epochs:
        order = sample_order(NUM_IMAGES, SEED, epoch)
        batches += [
            [(epoch, image) for image in order[at : at + batch_size]]
            for at in range(0, NUM_IMAGES - batch_size + 1, batch_size)
        ]
    return batches


def assert_batches(
    batches: Iterable[Batch], expected: list[list[tuple[int, int]]], dataset: SegmentationDataset
) -> None:
    """Check images, targets, indices and epochs of batches against samples that are read one at a time."""
    reread = SegmentationDataset(dataset.pairs, dataset.scheme, TrainTransform(CROP), seed=OWN_SEED)
    for batch, keys in zip(batches, expected, strict=True):
        samples = [reread[key] for key in keys]
        assert batch.indices == tuple(index for _, index in keys)
        assert {batch.epoch} == {epoch for epoch, _ in keys}
        assert torch.equal(batch.images, torch.stack([sample.image for sample in samples]))
        assert torch.equal(batch.target, torch.stack([sample.target for sample in samples]))


@pytest.mark.parametrize(("workers", "batch_size"), [(0, 4), (3, 5)])
def test_three_epochs_equal_samples_read_one_by_one(
    recorder: Recorder, starts: list[BatchPool], workers: int, batch_size: int
) -> None:
    loader = TrainLoader(recorder.dataset, batch_size, seed=SEED, options=LoadOptions(workers))
    expected = keys_of((1, 2, 3), batch_size)
    batches = chain.from_iterable(loader.epoch(epoch, last_epoch=3) for epoch in (1, 2, 3))
    assert_batches(batches, expected, recorder.dataset)
    assert len(starts) == (1 if workers else 0), "the workers continue across the borders"
    loader.close()
    loaded = recorder.keys_within(0, 0)
    assert sorted(loaded) == sorted(key for batch in expected for key in batch), "each sample is loaded once"


@pytest.mark.parametrize(
    ("workers", "batch_size", "share", "ahead"), [(1, 3, 3, 18), (4, 3, 3, 16), (3, 6, 1, 6), (8, 11, 11, 59)]
)
def test_six_batches_at_most_are_loaded_ahead(
    recorder: Recorder, workers: int, batch_size: int, share: int, ahead: int
) -> None:
    """Also where that is more than the rest of an epoch, and no more while the consumer does nothing.

    Four workers have four samples each. Of a share of 1, the workers could hold more. Eight workers load parts of two
    samples, and the last one of a batch of 11 has one.
    """
    shares, options = (share, batch_size - share), LoadOptions(workers)
    loader = TrainLoader(recorder.dataset, batch_size, seed=SEED, options=options, divide=lambda _: shares)
    next(loader.epoch(1, len(loader) - 1, last_epoch=8))
    batches = keys_of(range(1, 9), batch_size)[len(loader) - 1 :]
    in_order = [key for batch in batches for key in batch[:share]]
    recorder.keys_within(5, share + ahead)
    time.sleep(0.3)
    assert sorted(recorder.keys_within(0, 0)) == sorted(in_order[: share + ahead])
    loader.close()


def test_batch_is_loaded_by_several_workers(recorder: Recorder) -> None:
    """In equal parts; a batch of 7 is not divided among 3 workers, one of whom would have more to do."""
    for batch_size, sizes in ((6, {2}), (4, {2}), (7, {7})):
        num_before = len(recorder.loaded())
        loader = TrainLoader(recorder.dataset, batch_size, seed=SEED, options=LoadOptions(3))
        list(loader.epoch(1))
        loader.close()
        first = set(keys_of((1,), batch_size)[0])
        by_worker: dict[int, int] = {}
        for pid, key in recorder.loaded()[num_before:]:
            if key in first:
                by_worker[pid] = by_worker.get(pid, 0) + 1
        assert set(by_worker.values()) == sizes
        assert len(by_worker) == batch_size // next(iter(sizes))


# --- other batches than those loaded ahead


def test_changed_shares_at_a_border_take_effect(recorder: Recorder, starts: list[BatchPool]) -> None:
    """The workers have loaded the next epoch with the old shares; as at a change of `gpu0_bsz` of ranks."""
    shares = [4, 2]
    loader = TrainLoader(
        recorder.dataset, 6, seed=SEED, options=LoadOptions(2), rank=1, world_size=2, divide=lambda _: shares
    )
    for epoch, changed in ((1, [4, 2]), (2, [1, 5]), (3, [1, 5])):
        shares[:] = changed
        batches = list(loader.epoch(epoch, last_epoch=3))
        assert_batches(batches, [keys[changed[0] :] for keys in keys_of((epoch,), 6)], recorder.dataset)
        assert [batch.first for batch in batches] == [changed[0], 6 + changed[0]]
    assert len(starts) == 2
    loader.close()


def test_resumed_position_is_loaded_instead(recorder: Recorder, starts: list[BatchPool]) -> None:
    """As after a return to an earlier checkpoint; the same epoch and others, in and out of order."""
    loader = TrainLoader(recorder.dataset, 3, seed=SEED, options=LoadOptions(2))
    for epoch, start in ((1, 0), (1, 2), (3, 1), (2, 3), (3, 0)):
        batches = loader.epoch(epoch, start, last_epoch=3)
        assert_batches([next(batches)], keys_of((epoch,), 3)[start : start + 1], recorder.dataset)
    assert_batches(batches, keys_of((3,), 3)[1:], recorder.dataset)
    assert len(starts) == 4, "batch 0 of epoch 3 follows batch 3 of epoch 2"
    loader.close()


# --- failures


def test_error_ahead_is_reported_when_its_batch_is_due(recorder: Recorder) -> None:
    failing = sample_order(NUM_IMAGES, SEED, 2)[5]  # in the second batch of epoch 2

    def fail(seed: int) -> None:
        if seed == mix_seed("sample", OWN_SEED, 2, failing):
            raise ValueError("of epoch 2")

    recorder.act = fail
    loader = TrainLoader(recorder.dataset, 4, seed=SEED, options=LoadOptions(2))
    first = loader.epoch(1, last_epoch=3)
    next(first)
    assert (2, failing) in recorder.keys_within(5, 4 * 7), "the fault has happened already"
    assert_batches(first, keys_of((1,), 4)[1:], recorder.dataset)
    second = loader.epoch(2, last_epoch=3)
    assert_batches([next(second)], keys_of((2,), 4)[:1], recorder.dataset)
    with pytest.raises(DataError, match=rf"{3 * failing + 4:03}\.png: .* failed with ValueError: of epoch 2"):
        next(second)


def test_interrupt_within_a_batch_leaves_no_part_behind(recorder: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second part of a batch is still to come when Ctrl-C is pressed; the next batch must not begin with it."""
    loader = TrainLoader(recorder.dataset, 4, seed=SEED, options=LoadOptions(2))
    batches = loader.epoch(1, last_epoch=2)
    next(batches)
    original, parts = BatchPool._received, []

    def interrupted(pool: BatchPool, part: list) -> object:
        parts.append(part)
        if len(parts) == 2:
            raise KeyboardInterrupt
        return original(pool, part)

    with monkeypatch.context() as patch:
        patch.setattr(BatchPool, "_received", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
    assert len(parts) == 2
    assert_batches(loader.epoch(1, 1, last_epoch=1), keys_of((1,), 4)[1:], recorder.dataset)
    loader.close()


# --- evaluation


def test_prepared_evaluation_returns_every_image_once(recorder: Recorder, starts: list[BatchPool]) -> None:
    loader = EvalLoader(recorder.dataset, options=LoadOptions(2), batch_size=1)
    for number in range(3):
        loader.prepare(reads_windows=False)
        loader.prepare(reads_windows=False)
        at = number * NUM_IMAGES
        assert recorder.keys_within(5, at + 1)[at] in {(0, 0), (0, 1)}, "before it is asked for"
        assert [batch.indices for batch in loader] == [(index,) for index in range(NUM_IMAGES)]
        assert len(starts) == number + 1
    loader.close()
