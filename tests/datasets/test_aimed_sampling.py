"""Class-balanced and foreground sampling: counts by hand, crops that contain their class, equal in any process."""

import hashlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segapp.assembly.data import build_order
from segapp.config import DataConfig
from segapp.datasets.augment import TrainTransform
from segapp.datasets.augment.crop import AxisPlan
from segapp.datasets.dataset import SegmentationDataset, compute_class_frequencies
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import LoadOptions
from segapp.datasets.sampling import SampleKey, aimed_order, sample_order, uniform_order
from segapp.errors import ConfigError

CROP = (16, 20)
CLASSES = ("ground", "road", "rare", "absent")


@pytest.fixture
def dataset(tmp_path: Path) -> SegmentationDataset:
    """Return 12 images of ground; every other one has some road, number 5 alone 4 x 4 pixels of the rare class."""
    pairs = []
    for number in range(12):
        mask = np.zeros((60, 80), np.uint8)
        if number % 2:
            mask[40:, 50:] = 1
        if number == 5:
            mask[10:14, 70:74] = 2
        image = np.repeat((mask * 80 + number)[..., None], 3, 2)
        paths = tmp_path / f"{number}.png", tmp_path / f"{number}_mask.png"
        Image.fromarray(image).save(paths[0])
        Image.fromarray(mask).save(paths[1])
        pairs.append(ImagePair(*paths, str(number)))
    pairs.append(ImagePair(pairs[0].image, None, "without a mask"))
    return SegmentationDataset(pairs, class_scheme("folder", classes=list(CLASSES)), TrainTransform(CROP), seed=4)


def loader(
    dataset: SegmentationDataset, workers: int = 0, rank: int = 0, ranks: int = 1, **data: object
) -> TrainLoader:
    config = DataConfig(format="folder", root="data", classes=list(CLASSES), **data)
    order = build_order(config, dataset, compute_class_frequencies(dataset), 1)
    return TrainLoader(
        dataset, 2, seed=1, options=LoadOptions(workers), drop_last=False, rank=rank, world_size=ranks, order=order
    )


# --- order


def test_every_class_is_aimed_at_equally_often() -> None:
    order = aimed_order(12, {0: range(12), 1: (1, 3, 5, 7, 9, 11), 2: (5,)}, 1.0, seed=0)
    for epoch in range(3):
        keys = order(epoch)
        assert Counter(key.aim for key in keys) == {0: 4, 1: 4, 2: 4}
        assert all(key.image % 2 for key in keys if key.aim == 1)
        assert len({key.image for key in keys if key.aim == 1}) == 4  # none again before all were used
        assert [key.image for key in keys if key.aim == 2] == [5] * 4
        assert len(set(keys)) == 12
        seen: Counter[int] = Counter()
        for key in keys:
            assert (key.epoch, key.draw) == (epoch, seen[key.image])
            seen[key.image] += 1
        assert keys == order(epoch)
    assert order(0) != [key._replace(epoch=0) for key in order(1)]
    assert order(0) != aimed_order(12, {0: range(12), 1: (1, 3, 5, 7, 9, 11), 2: (5,)}, 1.0, seed=1)(0)


@pytest.mark.parametrize(("share", "aimed"), [(1 / 3, 30), (0.33, 29), (0.5, 45), (1.0, 90), (0.01, 0)])
def test_share_of_aimed_samples_is_exact_and_spread(share: float, aimed: int) -> None:
    keys = aimed_order(90, {1: (3, 4)}, share, seed=0)(2)
    assert len(keys) == 90
    assert sum(key.aim is not None for key in keys) == aimed
    places = [at for at, key in enumerate(keys) if key.aim is not None]
    assert len(set(np.diff(places))) <= 2
    others = [key.image for key in keys if key.aim is None]
    assert others == sample_order(90, 0, 2)[: 90 - aimed]


def test_uniform_order_is_that_of_older_runs() -> None:
    assert uniform_order(7, 5)(3) == [SampleKey(3, index) for index in sample_order(7, 5, 3)]


def test_order_of_a_config_by_hand(dataset: SegmentationDataset) -> None:
    balanced = loader(dataset, sampling="class-balanced")._order(1)
    assert len(balanced) == len(dataset) == 13
    assert sorted(Counter(key.aim for key in balanced).values()) == [4, 4, 5]
    assert 12 not in {key.image for key in balanced}  # it has no mask
    foreground = loader(dataset, sampling="foreground", foreground_share=0.5)._order(1)
    assert Counter(key.aim for key in foreground) == {None: 7, 1: 3, 2: 3}


# --- crops


def test_aimed_crops_contain_their_class(dataset: SegmentationDataset) -> None:
    for sampling in ("class-balanced", "foreground"):
        made = loader(dataset, sampling=sampling)
        aims = {(key.image, key.draw): key.aim for epoch in (1, 2, 3) for key in made._order(epoch)}
        assert len(aims) > 10
        for epoch in (1, 2, 3):
            keys = made._order(epoch)
            targets = [target.numpy() for batch in made.epoch(epoch) for target in batch.target]
            assert all(key.aim is None or (target == key.aim).any() for key, target in zip(keys, targets, strict=True))
    uniform = [dataset[epoch, 5].target.numpy() for epoch in range(60)]
    assert np.mean([(target == 2).any() for target in uniform]) < 0.5  # which is what the aim is for


def test_positions_around_a_pixel_by_hand() -> None:
    from random import Random

    plan = AxisPlan(10, 1.0, 4)
    assert {plan.draw(Random(seed), 0).start for seed in range(50)} == {0}
    assert {plan.draw(Random(seed), 5).start for seed in range(99)} == {2, 3, 4, 5}
    assert {plan.draw(Random(seed), 9).start for seed in range(50)} == {6}


def test_class_that_is_not_in_the_mask_gives_any_crop(dataset: SegmentationDataset) -> None:
    assert (dataset[SampleKey(0, 0, aim=3)].target.numpy() == dataset[0, 0].target.numpy()).all()


# --- equal in any process


@pytest.mark.parametrize("sampling", ["class-balanced", "foreground"])
def test_aimed_samples_are_the_same_in_workers_resumes_and_ranks(sampling: str, dataset: SegmentationDataset) -> None:
    def digests(workers: int, start: int = 0) -> list[str]:
        made = loader(dataset, workers, sampling=sampling)
        found = [hashlib.sha256(batch.images.numpy().tobytes()).hexdigest() for batch in made.epoch(3, start)]
        made.close()
        return found

    whole = digests(0)
    assert len(set(whole)) == 7
    assert digests(1) == digests(2) == whole
    assert digests(2, 3) == whole[3:]
    parts = [list(loader(dataset, rank=rank, ranks=2, sampling=sampling).epoch(3)) for rank in (0, 1)]
    for batch, *ranks in zip(loader(dataset, sampling=sampling).epoch(3), *parts, strict=True):
        assert batch.indices == ranks[0].indices + ranks[1].indices
        np.testing.assert_array_equal(batch.images, np.concatenate([rank.images for rank in ranks]))


def test_sampling_needs_a_crop_that_can_be_aimed() -> None:
    from segapp.config import validate_config

    data = {"format": "camvid", "root": "data", "sampling": "foreground", "augment": [{"RandomCrop": {"height": 9}}]}
    with pytest.raises(ConfigError, match=r"data.sampling: foreground needs ScaledCrop"):
        validate_config({"name": "a", "data": data})
