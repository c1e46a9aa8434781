"""Differences of runs on the same images: against SciPy's bootstrap, by hand, and left out where they say nothing."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from segapp.errors import DataError
from segapp.report.compare import verdict
from segapp.report.differences import ImageCounts, differences_of, fold_counts


def drawn(num_images: int, gain: float, num_classes: int = 3, seed: int = 0) -> tuple[Any, Any]:
    """Counts of two networks of the same images; the second one finds a larger share of each class."""
    rng = np.random.default_rng(seed)
    target = rng.integers(50, 500, (num_images, num_classes))
    share = rng.uniform(0.4, 0.8, (num_images, num_classes))
    pairs = []
    for own in (share, np.clip(share + gain + rng.normal(0, 0.05, share.shape), 0, 1)):
        inter = np.rint(own * target).astype(np.int64)
        pairs.append(np.stack([inter, target, inter + rng.integers(0, 60, target.shape)], axis=-1))
    return pairs[0], pairs[1]


def iou(counts: Any) -> Any:
    inter, target, predicted = np.moveaxis(counts.sum(-3), -1, 0)
    return inter / (target + predicted - inter)


def test_margins_are_those_of_scipys_paired_bootstrap() -> None:
    first, second = drawn(40, 0.03)
    found = differences_of(first, second)

    def statistic(places: Any, axis: int = -1) -> Any:
        return (iou(second[places]) - iou(first[places])).mean(-1)

    other = stats.bootstrap(
        (np.arange(40),), statistic, vectorized=True, n_resamples=4000, random_state=1, method="percentile"
    )
    difference = statistic(np.arange(40))
    margin = np.quantile(np.abs(other.bootstrap_distribution - difference), 0.95)
    assert found.miou == pytest.approx(difference, abs=1e-12)
    assert found.miou_margin == pytest.approx(margin, rel=0.06)  # of 2,000 and of 4,000 draws
    assert np.allclose(found.iou, iou(second) - iou(first), atol=1e-12)
    assert np.all(found.iou_margin > found.miou_margin)


def test_draws_are_those_of_a_loop_over_images() -> None:
    first, second = drawn(12, 0.02, seed=3)
    found = differences_of(first, second, seed=5)
    rng = np.random.default_rng(5)
    distances = []
    for _ in range(10):
        for times in rng.multinomial(12, np.full(12, 1 / 12), 200):
            places = np.repeat(np.arange(12), times)
            distances.append(abs((iou(second[places]) - iou(first[places])).mean() - found.miou))
    assert found.miou_margin == pytest.approx(np.quantile(distances, 0.95), abs=1e-12)


def test_effect_of_an_image_is_the_difference_without_it() -> None:
    first, second = drawn(11, 0.1, seed=2)
    found = differences_of(first, second)
    for place in range(11):
        others = np.delete(np.arange(11), place)
        without = (iou(second[others]) - iou(first[others])).mean()
        assert found.effects[place] == pytest.approx(found.miou - without, abs=1e-12)


def test_too_few_images_have_no_margin_and_a_rare_class_neither() -> None:
    first, second = drawn(9, 0.1)
    assert math.isnan(differences_of(first, second).miou_margin)
    first, second = drawn(10, 0.1)
    first[1:, 2] = second[1:, 2] = 0
    found = differences_of(first, second)
    assert np.isfinite([found.miou_margin, *found.iou_margin]).tolist() == [True, True, True, False]
    assert np.isfinite(found.iou).all()


def counts(names: str, classes: tuple[str, ...], values: Any) -> ImageCounts:
    return ImageCounts(tuple(names), classes, "val", np.asarray(values, np.int64), np.zeros((1, 1), np.int64))


def test_runs_are_compared_on_common_images_masks_and_classes() -> None:
    """Image b has another mask, c and d lack in one run; class "x" is only predicted by the second run."""
    one = counts(
        "abce",
        ("road", "sky", "x"),
        [[[4, 8, 8], [2, 4, 4], [0, 0, 0]], [[1, 1, 1]] * 3, [[1, 1, 1]] * 3, [[8, 8, 8], [0, 4, 0], [0, 0, 0]]],
    )
    two = counts("aebd", ("sky", "road", "x"), [
        [[4, 4, 4], [6, 8, 8], [0, 0, 0]], [[1, 4, 1], [8, 8, 9], [0, 0, 3]],
        [[1, 2, 1]] * 3, [[1, 1, 1]] * 3])  # fmt: skip
    found = fold_counts(["one", "two"], [one, two], 1)
    assert (found["num_images"], found["num_left_out"], found["num_scored"]) == (2, 2, 2)
    road, sky = (12 / 20, 14 / 19), (2 / 10, 5 / 8)
    first, second = found["runs"]
    assert first["iou"] == {"road": road[0], "sky": sky[0], "x": None}
    assert second["iou"] == {"road": pytest.approx(road[1]), "sky": sky[1], "x": 0.0}
    assert second["iou_difference"]["x"] is None
    assert second["difference"] == pytest.approx((road[1] - road[0] + sky[1] - sky[0]) / 2)
    assert second["margin"] is None
    (image,) = found["images"]
    assert image["name"] == "a"
    assert image["miou"] == [pytest.approx((4 / 12 + 2 / 6) / 2), pytest.approx((1 + 6 / 10) / 2)]
    text = verdict(found, second)
    assert text.startswith("two against one: mIoU +28.1 points (2 images of val, 2 classes)")
    assert "Fewer than 10 images" in text
    with pytest.raises(DataError, match="no image with the same mask"):
        fold_counts(["one", "two"], [one, counts("z", ("road",), [[[1, 1, 1]]])], 1)
    with pytest.raises(DataError, match="no class"):
        fold_counts(["one", "two"], [one, counts("a", ("other",), [[[1, 1, 1]]])], 1)


@pytest.mark.parametrize(
    ("difference", "margin", "words"),
    [
        (0.012, 0.008, "two is better than one: mIoU +1.2 ± 0.8 points"),
        (-0.012, 0.008, "two is worse than one: mIoU -1.2 ± 0.8 points"),
        (0.003, 0.008, "two and one do not differ clearly: mIoU +0.3 ± 0.8 points"),
        (None, None, "two and one have no class in common"),
    ],
)
def test_verdict_names_the_better_run_only_if_it_is_clear(
    difference: float | None, margin: float | None, words: str
) -> None:
    found = {"names": ["one", "two"], "num_images": 20, "split": "val", "num_scored": 3}
    run = {"name": "two", "difference": difference, "margin": margin}
    assert verdict(found, run).startswith(words)
    assert ("95 %" in verdict(found, run)) == (margin is not None)
