"""Differences of runs on the same images: by hand, and left out where they say nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from segapp.errors import DataError
from segapp.metrics import counts_for
from segapp.report.images import ImageCounts, fold_counts


def counts(names: str, classes: tuple[str, ...], values: Any) -> ImageCounts:
    return ImageCounts(tuple(names), classes, "val", np.asarray(values, np.int64), counts_for(1, 255, multilabel=False))


def iou_differences(runs: Any) -> Any:
    """Return the mean over the classes of the IoU of each run after the first minus that of the first run."""
    inter, target, predicted = np.moveaxis(runs.sum(1), -1, 0).astype(float)
    with np.errstate(invalid="ignore"):  # a class in neither target nor prediction
        iou = inter / (target + predicted - inter)
    return np.nanmean(iou[1:] - iou[0], axis=1)


def test_effect_of_an_image_is_the_difference_without_it() -> None:
    """Only image e has poles, and only the third run sees poles in image h."""
    rng, names = np.random.default_rng(2), "abcdefghijk"
    target = rng.integers(50, 500, (len(names), 3))
    target[np.arange(len(names)) != 4, 2] = 0
    inter = np.rint(target * rng.uniform(0.4, 0.9, (3, *target.shape))).astype(int)
    wrong = np.where(target > 0, rng.integers(0, 60, inter.shape), 0)
    wrong[2, 7, 2] = 90
    runs = np.stack([inter, np.broadcast_to(target, inter.shape), inter + wrong], axis=-1)
    found = fold_counts(["one", "two", "three"], [counts(names, ("road", "sky", "pole"), run) for run in runs], 4)
    differences = iou_differences(runs)
    assert [run["difference"] for run in found["runs"][1:]] == pytest.approx(differences.tolist(), abs=1e-12)
    effects = {names[at]: differences - iou_differences(np.delete(runs, at, axis=1)) for at in range(len(names))}
    largest = sorted(names, key=lambda name: -np.abs(effects[name]).max())
    assert [image["name"] for image in found["images"]] == largest[:4]
    assert "e" in largest[:4]
    for image in found["images"]:
        assert image["effects"] == pytest.approx(effects[image["name"]].tolist(), abs=1e-12)


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
    assert (found["num_images"], found["num_left_out"], found["num_scored"]) == (2, 3, 2)
    road, sky = (12 / 20, 14 / 19), (2 / 10, 5 / 8)
    first, second = found["runs"]
    assert first["iou"] == {"road": road[0], "sky": sky[0], "x": None}
    assert second["iou"] == {"road": pytest.approx(road[1]), "sky": sky[1], "x": 0.0}
    wanted = {"road": pytest.approx(road[1] - road[0]), "sky": pytest.approx(sky[1] - sky[0]), "x": None}
    assert second["iou_difference"] == wanted
    assert second["difference"] == pytest.approx((road[1] - road[0] + sky[1] - sky[0]) / 2)
    (image,) = found["images"]
    assert image["name"] == "a"
    assert image["miou"] == [pytest.approx((4 / 12 + 2 / 6) / 2), pytest.approx((1 + 6 / 10) / 2)]
    with pytest.raises(DataError, match="no image with the same mask"):
        fold_counts(["one", "two"], [one, counts("z", ("road",), [[[1, 1, 1]]])], 1)
    with pytest.raises(DataError, match="no class"):
        fold_counts(["one", "two"], [one, counts("a", ("other",), [[[1, 1, 1]]])], 1)
