"""CutMix and ClassMix by hand and against their published definitions; equal samples in any process."""

import hashlib
from collections.abc import Callable

import numpy as np
import pytest

from segapp.assembly.data import build_mix
from segapp.config import DataConfig, validate_config
from segapp.datasets import dataset as dataset_module
from segapp.datasets.augment import TrainTransform
from segapp.datasets.dataset import PairMix, SegmentationDataset
from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.loader import TrainLoader
from segapp.datasets.pool import Batch, LoadOptions
from segapp.errors import ConfigError
from tests.support.drawn_data import draw_image, draw_mask

WritePairs = Callable[..., tuple[ImagePair, ...]]
CROP = (24, 32)


def digest(batch: Batch) -> str:
    return hashlib.sha256(batch.images.numpy().tobytes() + batch.target.numpy().tobytes()).hexdigest()


def pair(value: int, num_bands: int = 3, dtype: type = np.uint8) -> tuple[np.ndarray, np.ndarray]:
    """Return an image and a mask of one value."""
    return np.full((*CROP, num_bands), value, dtype), np.full(CROP, value, np.uint8)


# --- the three ways


@pytest.mark.parametrize(("num_bands", "dtype"), [(3, np.uint8), (1, np.uint16), (5, np.float32)])
def test_cutmix_pastes_a_rectangle_of_the_drawn_area(num_bands: int, dtype: type) -> None:
    mix = PairMix(cutmix=1.0)
    shares = []
    for seed in range(300):
        image, mask = mix(pair(1, num_bands, dtype), pair(2, num_bands, dtype), seed)
        assert (image.shape, image.dtype, mask.dtype) == ((*CROP, num_bands), dtype, np.uint8)
        np.testing.assert_array_equal(image, np.repeat(mask[..., None], num_bands, 2))
        is_pasted = mask == 2
        rows, columns = np.flatnonzero(is_pasted.any(1)), np.flatnonzero(is_pasted.any(0))
        assert is_pasted.sum() == len(rows) * len(columns)  # a rectangle
        shares.append(is_pasted.mean())
    # Beta(1, 1) is uniform: the mean of the area within the image, by 40 000 draws of the published procedure, is 0.32
    assert abs(np.mean(shares) - 0.32) < 0.06


def test_classmix_pastes_half_of_the_classes() -> None:
    mix = PairMix(classmix=1.0)
    own, other = pair(9), (draw_image(3, *CROP), draw_mask(3, *CROP))
    classes = set(np.unique(other[1])) - {255}
    chosen = set()
    for seed in range(40):
        image, mask = mix(own, other, seed)
        pasted = set(np.unique(mask)) - {9}
        assert len(pasted) == (len(classes) + 1) // 2
        is_pasted = np.isin(other[1], list(pasted))
        np.testing.assert_array_equal(mask, np.where(is_pasted, other[1], 9))
        np.testing.assert_array_equal(image, np.where(is_pasted[..., None], other[0], 9))
        chosen |= pasted
    assert chosen == classes
    nothing = np.zeros((*CROP, 3), np.uint8), np.full(CROP, 255, np.uint8)
    for one, same in zip(mix(own, nothing, 0), own, strict=True):
        np.testing.assert_array_equal(one, same)


# --- which samples


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


@pytest.mark.parametrize("way", ["cutmix", "classmix"])
def test_mixed_samples_are_the_same_in_workers_resumes_and_ranks(
    way: str, write_pairs: WritePairs, scheme: ClassScheme
) -> None:
    dataset = SegmentationDataset(write_pairs([(40 + i, 50) for i in range(7)]), scheme, TrainTransform(CROP), seed=3)
    plain = [digest(batch) for batch in TrainLoader(dataset, 2, seed=1).epoch(4)]
    dataset.mix = PairMix(**{way: 0.9})
    whole = [digest(batch) for batch in TrainLoader(dataset, 2, seed=1).epoch(4)]
    assert len({*plain, *whole}) == 6
    for workers in (1, 2):
        loader = TrainLoader(dataset, 2, seed=1, options=LoadOptions(workers))
        assert [digest(batch) for batch in loader.epoch(4)] == whole
        assert [digest(batch) for batch in loader.epoch(4, 2)] == whole[2:]
        loader.close()
    expected = [batch.images.numpy() for batch in TrainLoader(dataset, 2, seed=1).epoch(4)]
    ranks = [TrainLoader(dataset, 2, seed=1, rank=rank, world_size=2).epoch(4) for rank in (0, 1)]
    for batch, *parts in zip(expected, *ranks, strict=True):
        np.testing.assert_array_equal(batch, np.concatenate([part.images.numpy() for part in parts]))


def test_partner_is_read_through_the_cache(
    write_pairs: WritePairs, scheme: ClassScheme, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = SegmentationDataset(write_pairs([(40, 50)] * 3), scheme, TrainTransform(CROP))
    dataset.mix = PairMix(cutmix=1.0)
    read: list[int] = []
    original = dataset.read
    monkeypatch.setattr(dataset, "read", lambda index: read.append(index) or original(index))
    dataset[0, 1]
    assert len(read) == 2
    assert read[0] == 1 != read[1]
    assert dataset_module.PairMix is PairMix


def test_mix_of_a_config() -> None:
    def data(**mix: float) -> DataConfig:
        return validate_config({"name": "a", "data": {"format": "camvid", "root": "data", **mix}}).data

    assert build_mix(data(), 255) is None
    assert build_mix(data(cutmix=0.5), 7) == PairMix(cutmix=0.5, ignore_index=7)
    with pytest.raises(ConfigError, match=r"data.cutmix: .* add up to 1.2"):
        data(cutmix=0.5, classmix=0.7)
    with pytest.raises(ConfigError, match=r"data.cutmx: did you mean data.cutmix"):
        data(cutmx=0.5)
