"""Order, seeds and shares; equal batches for any number of workers and after any interruption."""

import hashlib
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from segapp.assembly.data import build_order
from segapp.config import DataConfig
from segapp.datasets import targets
from segapp.datasets.augment import TrainTransform
from segapp.datasets.dataset import PairMix, SegmentationDataset, compute_class_frequencies
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import EvalLoader, TrainLoader
from segapp.datasets.pool import Batch, LoadOptions
from segapp.datasets.sampling import mix_seed, part_of, plan_shares, sample_order
from segapp.datasets.targets import ClassFrequencies
from segapp.errors import DataError
from tests.support.drawn_data import LABEL_MAP, draw_image, draw_mask
from tests.support.fault_table import case

WritePairs = Callable[..., tuple[ImagePair, ...]]
CROP = (24, 32)


def digest(batch: Batch) -> tuple[tuple[int, ...], bytes]:
    content = batch.images.numpy().tobytes() + batch.target.numpy().tobytes()
    return batch.indices, hashlib.sha256(content).digest()


@pytest.fixture
def dataset(pairs: tuple[ImagePair, ...], scheme: ClassScheme) -> SegmentationDataset:
    return SegmentationDataset(pairs, scheme, TrainTransform(CROP), seed=5)


# --- order and shares


@given(st.integers(0, 300), st.integers(0, 2**40), st.integers(0, 1000))
def test_every_epoch_shows_every_sample_once(num_samples: int, seed: int, epoch: int) -> None:
    order = sample_order(num_samples, seed, epoch)
    assert sorted(order) == list(range(num_samples))
    assert order == sample_order(num_samples, seed, epoch)


def test_seed_and_epoch_change_the_order() -> None:
    """The seeds are stored values: a change would alter every resumed run."""
    orders = {tuple(sample_order(50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert len({sample_order(50, seed, 0)[0] for seed in range(500)}) == 50
    assert mix_seed("sample", 0, 1, 2) == 1682758051236030847
    assert mix_seed("order", 7, 3) == 6970498340325694984


@given(st.integers(0, 60), st.integers(1, 17), st.integers(0, 5))
def test_parts_of_the_ranks_are_even_and_in_order(num_samples: int, world_size: int, epoch: int) -> None:
    batch, shares = sample_order(num_samples, 0, epoch), plan_shares(num_samples, world_size)
    assert list(shares) == sorted(shares, reverse=True)
    assert max(shares) - min(shares) <= 1
    assert [index for rank in range(world_size) for index in part_of(batch, rank, shares)] == batch


@pytest.mark.parametrize(("num_samples", "sizes"), [(13, [4, 4, 4]), (12, [4, 4, 4]), (7, [4]), (4, [4]), (3, [3])])
def test_number_of_batches_by_hand(num_samples: int, sizes: list[int], dataset: SegmentationDataset) -> None:
    part = SegmentationDataset(dataset.pairs[:num_samples], dataset.scheme, dataset.transform)
    loader = TrainLoader(part, 4)
    assert len(loader) == len(sizes)
    assert [len(batch) for batch in loader.epoch(0)] == sizes


def test_impossible_numbers_are_refused(dataset: SegmentationDataset) -> None:
    for options in ({"batch_size": 0}, {"batch_size": 2, "world_size": 3}, {"batch_size": 2, "rank": 1}):
        with pytest.raises(ValueError, match="every rank needs a sample"):
            TrainLoader(dataset, **options)
    with pytest.raises(ValueError, match="out of range"):
        EvalLoader(dataset, batch_size=0)


# --- equal batches with and without workers

LISTED = [
    {"ScaledCrop": {"crop_px": [24, 24]}},
    {"RandomRotate90": {}},
    {"ElasticTransform": {"alpha": 40, "sigma": 5}},
    {"OneOf": {"transforms": [{"MotionBlur": {}}, {"SaltAndPepper": {}}, {"RandomGamma": {}}], "p": 1.0}},
    {"SomeOf": {"transforms": [{"HorizontalFlip": {}}, {"Sharpen": {}}, {"GridDistortion": {}}], "n": 2}},
    {"PadIfNeeded": {"min_height": 24, "min_width": 32}},
]


@case("R10", how="0, 1 and 2 workers", passes="the same batches")
@pytest.mark.parametrize("way", ["plain", "list", "cutmix", "classmix", "class-balanced", "foreground"])
def test_workers_resumes_and_ranks_give_the_same_samples(way: str, dataset: SegmentationDataset) -> None:
    """Ranks have 1, 0 and 2 samples of a batch."""
    order = None
    if way == "list":
        dataset.transform = TrainTransform(CROP, LISTED)
    if way in ("cutmix", "classmix"):
        dataset.mix = PairMix(**{way: 0.9})
    if way in ("class-balanced", "foreground"):
        data = DataConfig(format="folder", root="data", classes=list("abcde"), sampling=way)
        order = build_order(data, dataset, compute_class_frequencies(dataset), 1)

    def batches(workers: int = 0, start: int = 0, **rank: Any) -> list[Batch]:
        made = TrainLoader(dataset, 3, seed=2, options=LoadOptions(workers), order=order, **rank)
        found = list(made.epoch(7, start))
        made.close()
        return found

    whole = batches()
    expected = [digest(batch) for batch in whole]
    assert [(batch.first, len(batch)) for batch in whole] == [(0, 3), (3, 3), (6, 3), (9, 3)]
    assert len({pixels for _, pixels in expected}) == 4
    for workers, start in ((1, 0), (2, 1), (0, 2), (3, 2), (0, 9)) if way == "plain" else ((2, 1), (0, 2)):
        assert [digest(batch) for batch in batches(workers, start)] == expected[start:]
    shares = (1, 0, 2)
    ranks = [batches(rank=rank, world_size=3, divide=lambda _: shares) for rank in range(3)]
    for batch, *parts in zip(whole, *ranks, strict=True):
        assert tuple(len(part) for part in parts) == shares
        assert sum((part.indices for part in parts), ()) == batch.indices
        assert [part.first - batch.first for part in parts] == [0, 1, 1]
        for kind in ("images", "target"):
            assert torch.equal(torch.cat([getattr(part, kind) for part in parts]), getattr(batch, kind))


def test_batches_before_the_start_are_not_loaded(dataset: SegmentationDataset) -> None:
    order = sample_order(13, 0, 0)
    for index in order[:8]:
        dataset.pairs[index].image.unlink()
    assert [batch.indices for batch in TrainLoader(dataset, 4).epoch(0, start_batch=2)] == [tuple(order[8:12])]


@pytest.mark.parametrize("workers", [0, 2])
def test_abandoned_epoch_does_not_change_the_next(workers: int, dataset: SegmentationDataset) -> None:
    expected = [digest(batch) for batch in TrainLoader(dataset, 2).epoch(1)]
    loader = TrainLoader(dataset, 2, options=LoadOptions(workers))
    abandoned = loader.epoch(2)
    next(abandoned)
    assert [digest(batch) for batch in loader.epoch(1)] == expected
    with pytest.raises(RuntimeError, match="a later one started"):
        next(abandoned)
    loader.close()
    assert [digest(batch) for batch in loader.epoch(1)] == expected  # a closed loader can be used again
    loader.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_loader_uses_no_global_generator(workers: int, dataset: SegmentationDataset) -> None:
    def state() -> tuple[object, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()

    before = state()
    loader = TrainLoader(dataset, 4, options=LoadOptions(workers))
    expected = [digest(batch) for batch in loader.epoch(0)]
    evaluation = EvalLoader(dataset, options=LoadOptions(workers))
    list(evaluation)
    assert state() == before
    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert [digest(batch) for batch in loader.epoch(0)] == expected
    loader.close()
    evaluation.close()


@case("R10", how="every sample of two epochs", passes="no two crops alike")
def test_every_sample_is_augmented_differently_in_every_epoch(write_pairs: WritePairs, scheme: ClassScheme) -> None:
    """Other loaders repeat one stream of augmentations in every worker, or in every epoch."""
    (pair,) = write_pairs([(60, 60)])
    dataset = SegmentationDataset([pair] * 12, scheme, TrainTransform(CROP))
    loader = TrainLoader(dataset, 4, options=LoadOptions(2))
    images = [image.numpy().tobytes() for epoch in range(3) for batch in loader.epoch(epoch) for image in batch.images]
    loader.close()
    assert len(set(images)) == len(images) == 36


@case("R10", how="any sample asked for twice", passes="the same pixels")
def test_sample_is_a_function_of_seed_epoch_and_index(dataset: SegmentationDataset) -> None:
    copy = pickle.loads(pickle.dumps(dataset))
    other = SegmentationDataset(dataset.pairs, dataset.scheme, dataset.transform, seed=6)
    for key in ((0, 3), (4, 3), (4, 12)):
        assert torch.equal(dataset[key].image, copy[key].image)
        assert not torch.equal(dataset[key].image, other[key].image)
    assert not torch.equal(dataset[0, 3].image, dataset[1, 3].image)


# --- contents of a batch


def test_batches_hold_the_files_as_uint8(write_pairs: WritePairs, scheme: ClassScheme) -> None:
    dataset = SegmentationDataset(write_pairs([(20, 31)] * 3), scheme)
    for batch in TrainLoader(dataset, 3, seed=1).epoch(4):
        assert batch.images.is_contiguous()
        assert batch.target.is_contiguous()
        for image, target, index in zip(batch.images.numpy(), batch.target.numpy(), batch.indices, strict=True):
            assert (image.dtype, target.dtype) == (np.uint8, np.uint8)
            np.testing.assert_array_equal(image, draw_image(index, 20, 31).transpose(2, 0, 1))
            np.testing.assert_array_equal(target, draw_mask(index, 20, 31))
    assert batch.indices != (0, 1, 2)


def test_target_type_and_ignored_pixels_follow_the_scheme(write_pairs: WritePairs, scheme: ClassScheme) -> None:
    (pair,) = write_pairs([(20, 31)])
    without = SegmentationDataset([ImagePair(pair.image, None, pair.name)], scheme)[0, 0]
    assert without.target.shape == (20, 31)
    assert (without.target == 255).all()
    names = [str(i) for i in range(5)]
    wide = class_scheme("folder", classes=names, ignore_index=-1, label_map={**LABEL_MAP, 255: -1})
    sample = SegmentationDataset([pair], wide, TrainTransform((40, 40), ignore_index=-1))[0, 0]
    assert sample.target.dtype == torch.int16
    assert sample.target.min() == -1
    with pytest.raises(DataError, match="no images"):
        SegmentationDataset([], scheme)


@pytest.mark.usefixtures("no_worker_is_left")
@pytest.mark.parametrize("workers", [0, 2])
def test_images_of_several_sizes_in_a_batch_are_refused(
    workers: int, write_pairs: WritePairs, scheme: ClassScheme
) -> None:
    dataset = SegmentationDataset(write_pairs([(20, 31), (20, 31), (20, 30), (20, 30)]), scheme)
    with pytest.raises(DataError, match=r"images of 3\dx20 and 3\dx20 pixels cannot share a batch: set data.crop_px"):
        list(TrainLoader(dataset, 4, options=LoadOptions(workers)).epoch(1))


# --- evaluation


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_yields_every_image_once_at_its_size(
    workers: int, write_pairs: WritePairs, scheme: ClassScheme
) -> None:
    sizes = [(20, 30), (20, 30), (20, 30), (25, 30), (20, 30), (20, 30)]
    dataset = SegmentationDataset(write_pairs(sizes), scheme)
    for batch_size, expected in ((1, [1] * 6), (2, [2, 1, 1, 2]), (8, [3, 1, 2])):
        loader = EvalLoader(dataset, options=LoadOptions(workers), batch_size=batch_size)
        for _ in range(2):
            batches = list(loader)
            assert [len(batch) for batch in batches] == expected
            assert len(loader) == len(expected)
            assert [index for batch in batches for index in batch.indices] == list(range(6))
            assert all(tuple(b.images.shape[2:]) == sizes[b.indices[0]] == tuple(b.target.shape[1:]) for b in batches)
        loader.close()
    np.testing.assert_array_equal(batches[1].images[0].numpy(), draw_image(3, 25, 30).transpose(2, 0, 1))


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_evaluate_every_image_once(world_size: int, write_pairs: WritePairs, scheme: ClassScheme) -> None:
    dataset = SegmentationDataset(write_pairs([(20, 30)] * 5), scheme)
    seen = []
    for rank in range(world_size):
        loader = EvalLoader(dataset, batch_size=2, rank=rank, world_size=world_size)
        batches = list(loader)
        assert len(batches) == len(loader)
        seen += [index for batch in batches for index in batch.indices]
    assert seen == list(range(5))


# --- counts


@pytest.mark.parametrize("threads", [1, 4])
def test_class_frequencies_by_hand(threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "MASK_READERS", threads)  # a constant: no config sets it
    masks = [np.array(rows, np.uint8) for rows in ([[0, 0, 2, 255, 0]], [[0, 3, 3, 3]], [[255, 255]], [[3, 2, 2]])]
    pairs = []
    for i, mask in enumerate(masks):
        Image.fromarray(mask).save(tmp_path / f"{i}.png")
        pairs.append(ImagePair(tmp_path / "no image is needed", tmp_path / f"{i}.png", str(i)))
    scheme = class_scheme("folder", classes=["a", "b", "c", "d"])
    counts = compute_class_frequencies(SegmentationDataset(pairs, scheme))
    assert counts == ClassFrequencies(
        pixels=(4, 0, 3, 4),
        images=(2, 0, 2, 2),
        pixels_where_present=(8, 0, 7, 7),
        ignored_px=3,
        num_images=4,
        classes_of_masks=((0, 2), (0, 3), (), (2, 3)),
    )
