"""Class-balanced and foreground sampling, CutMix and ClassMix: by hand and by their published definitions."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segapp.assembly.data import build_mix, build_order
from segapp.config import DataConfig, validate_config
from segapp.datasets.augment import TrainTransform
from segapp.datasets.augment.crop import AxisPlan
from segapp.datasets.dataset import PairMix, SegmentationDataset, compute_class_frequencies
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import LoadOptions
from segapp.datasets.sampling import SampleKey, aimed_order, sample_order
from tests.support.drawn_data import draw_image, draw_mask

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
    return TrainLoader(dataset, 2, seed=1, options=LoadOptions(workers), rank=rank, world_size=ranks, order=order)


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
            keys = made._order(epoch)[:12]  # the last batch, of one image, is left out
            targets = [target.numpy() for batch in made.epoch(epoch) for target in batch.target]
            assert all(key.aim is None or (target == key.aim).any() for key, target in zip(keys, targets, strict=True))
    assert len({dataset[SampleKey(0, 5, draw, aim=2)].image.numpy().tobytes() for draw in range(4)}) == 4
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


MIXED = (24, 32)


def pair(value: int, num_bands: int = 3, dtype: type = np.uint8) -> tuple[np.ndarray, np.ndarray]:
    """Return an image and a mask of one value."""
    return np.full((*MIXED, num_bands), value, dtype), np.full(MIXED, value, np.uint8)


# --- CutMix and ClassMix


@pytest.mark.parametrize(("num_bands", "dtype"), [(3, np.uint8), (1, np.uint16), (5, np.float32)])
def test_cutmix_pastes_a_rectangle_of_the_drawn_area(num_bands: int, dtype: type) -> None:
    mix = PairMix(cutmix=1.0)
    shares = []
    for seed in range(300):
        image, mask = mix(pair(1, num_bands, dtype), pair(2, num_bands, dtype), seed)
        assert (image.shape, image.dtype, mask.dtype) == ((*MIXED, num_bands), dtype, np.uint8)
        np.testing.assert_array_equal(image, np.repeat(mask[..., None], num_bands, 2))
        is_pasted = mask == 2
        rows, columns = np.flatnonzero(is_pasted.any(1)), np.flatnonzero(is_pasted.any(0))
        assert is_pasted.sum() == len(rows) * len(columns)  # a rectangle
        shares.append(is_pasted.mean())
    # Beta(1, 1) is uniform: the mean of the area within the image, by 40 000 draws of the published procedure, is 0.32
    assert abs(np.mean(shares) - 0.32) < 0.06


def test_classmix_pastes_half_of_the_classes() -> None:
    mix = PairMix(classmix=1.0)
    own, other = pair(9), (draw_image(2, *MIXED), draw_mask(2, *MIXED))
    classes = set(np.unique(other[1])) - {255}
    chosen = set()
    for seed in range(40):
        image, mask = mix(own, other, seed)
        pasted = set(np.unique(mask)) - {9}
        assert (len(pasted), len(classes)) == (3, 5)
        is_pasted = np.isin(other[1], list(pasted))
        np.testing.assert_array_equal(mask, np.where(is_pasted, other[1], 9))
        np.testing.assert_array_equal(image, np.where(is_pasted[..., None], other[0], 9))
        chosen |= pasted
    assert chosen == classes
    nothing = np.zeros((*MIXED, 3), np.uint8), np.full(MIXED, 255, np.uint8)
    for one, same in zip(mix(own, nothing, 0), own, strict=True):
        np.testing.assert_array_equal(one, same)


def test_shares_and_partners_by_their_probabilities() -> None:
    mix = PairMix(cutmix=0.45, classmix=0.15)
    partners = [mix.partner(2, 5, seed) for seed in range(3000)]
    counts = {each: partners.count(each) for each in set(partners)}
    assert set(counts) == {None, 0, 1, 3, 4}
    assert counts[None] == pytest.approx(1200, abs=110)
    assert all(counts[each] == pytest.approx(450, abs=85) for each in (0, 1, 3, 4))
    assert mix.partner(0, 1, partners.index(0)) == 0  # the only image is mixed with another crop of itself
    drawn: list[str] = []

    class Named(PairMix):
        def _cutmix(self, *_: object) -> None:
            drawn.append("cutmix")

        def _classmix(self, *_: object) -> None:
            drawn.append("classmix")

    for seed in range(1200):
        Named(cutmix=0.45, classmix=0.15)(pair(1), pair(2), seed)
    assert [drawn.count(way) for way in ("cutmix", "classmix")] == pytest.approx([900, 300], abs=70)


def test_image_that_is_drawn_again_is_mixed_anew(dataset: SegmentationDataset) -> None:
    dataset.mix = PairMix(cutmix=1.0)  # into image 0, of which all crops are alike
    assert len({dataset[SampleKey(0, 0, draw)].image.numpy().tobytes() for draw in range(4)}) == 4


def test_mix_of_a_config() -> None:
    def data(**mix: float) -> DataConfig:
        return validate_config({"name": "a", "data": {"format": "camvid", "root": "data", **mix}}).data

    assert build_mix(data(), 255) is None
    assert build_mix(data(cutmix=0.5), 7) == PairMix(cutmix=0.5, ignore_index=7)
