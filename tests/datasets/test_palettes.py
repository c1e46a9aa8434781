"""Indexed masks whose palettes disagree are refused by every reader, with both files; what says nothing is accepted."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segapp.assembly.pairs import build_pairs, build_scheme
from segapp.config import DataConfig
from segapp.datasets.inspection import examine
from segapp.datasets.masks import read_mask
from segapp.datasets.targets import read_targets
from segapp.errors import DataError

BLACK, RED, BLUE, GREEN = (0, 0, 0), (255, 0, 0), (0, 0, 255), (0, 200, 0)
COLORS = [BLACK, RED, BLUE]
NAMES = ["road", "car", "sky"]


def picture(number: int) -> np.ndarray:
    """Classes in stripes of unequal widths."""
    return np.tile(np.repeat([0, 1, 2], [9, 4 + number, 18 - number]), (23, 1)).astype(np.uint8)


def save(path: Path, classes: np.ndarray, order: list[int], colors: list[Any], rest: Any = BLACK) -> None:
    """Saves classes as an indexed PNG whose index k means class `order[k]`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(np.argsort(order).astype(np.uint8)[classes], "P")
    image.putpalette([value for one in order for value in colors[one]] + [*rest] * (256 - len(order)))
    image.save(path)


def data(root: Path, **keys: Any) -> DataConfig:
    return DataConfig(format="folder", root=str(root), classes=NAMES, **keys)


def folder(root: Path, orders: dict[str, list[int]], **how: Any) -> None:
    for number, (name, order) in enumerate(orders.items()):
        pixels = np.random.default_rng(number).integers(0, 255, (23, 31, 3), np.uint8)
        image = root / "images" / f"{name}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(image)
        save(root / "masks" / f"{name}.png", picture(number), order, COLORS, **how)


AGREE, SWAPPED = [0, 1, 2], [0, 2, 1]


def test_readers_refuse_a_palette_of_another_order(tmp_path: Path) -> None:
    orders = {"train/q": AGREE, "train/b": AGREE, "train/k": AGREE, "val/m": SWAPPED, "val/c": AGREE}
    folder(tmp_path, orders)
    scheme = build_scheme(data(tmp_path))
    train, val = (build_pairs(data(tmp_path), split) for split in ("train", "val"))
    read_targets(train, "train", scheme, total_px=1, is_training=True)
    other = pickle.loads(pickle.dumps(scheme))  # in another process
    with pytest.raises(DataError, match=r"\[0, 0, 255\] is 2 in .*train/\w.png and 1 in .*val/m.png") as raised:
        read_targets(val, "val", scheme, total_px=1, is_training=False)
    assert "data.rgb_masks" in str(raised.value)
    with pytest.raises(DataError, match=r"is 2 in .*train/.* and 1 in"):
        read_mask(tmp_path / "masks" / "val" / "m.png", other)
    reports = examine({"train": train, "val": val}, build_scheme(data(tmp_path)), crop_px=(16, 16), threads=1)
    found = [finding for report in reports for finding in report.findings if finding.severity == "error"]
    assert [(one.kind, one.split) for one in found] == [("mask", "val")]
    assert "val/m.png" in found[0].message
    assert "/train/" in found[0].message


@pytest.mark.parametrize(("rgb", "expected"), [(False, [0, 2, 1]), (True, [0, 1, 2])])
def test_the_config_decides_what_counts(rgb: bool, expected: list[int], tmp_path: Path) -> None:
    folder(tmp_path, {"train/a": AGREE, "train/b": SWAPPED})
    scheme = build_scheme(data(tmp_path, rgb_masks=rgb, palette=COLORS if rgb else None))
    read = [read_mask(tmp_path / "masks" / "train" / f"{name}.png", scheme) for name in "ab"]
    np.testing.assert_array_equal(read[0], picture(0))
    np.testing.assert_array_equal(read[1], np.array(expected, np.uint8)[picture(1)])


def test_a_palette_of_the_config_in_another_order_is_refused(tmp_path: Path) -> None:
    folder(tmp_path, {"train/a": AGREE, "train/b": AGREE})
    mask = tmp_path / "masks" / "train" / "b.png"
    with pytest.raises(DataError, match=r"\[255, 0, 0\] is 2 in data.palette and 1 in .*b.png"):
        read_mask(mask, build_scheme(data(tmp_path, palette=[BLACK, BLUE, RED])))
    # the id in the file counts, not the class, and colors that no mask has are for pictures only
    mapped = build_scheme(data(tmp_path, palette=[RED, BLACK, BLUE], label_map={1: 0, 0: 1, 2: 2}))
    np.testing.assert_array_equal(read_mask(mask, mapped), np.array([1, 0, 2], np.uint8)[picture(1)])
    others = build_scheme(data(tmp_path, palette=[(9, 9, 9), GREEN, (1, 2, 3)]))
    np.testing.assert_array_equal(read_mask(mask, others), picture(1))


GRAYS = [(k, k, k) for k in (0, 90, 255)]


@pytest.mark.parametrize(
    ("second", "rest", "drops"),
    [
        (COLORS, RED, None),  # entries that no pixel uses
        (COLORS, (7, 8, 9), None),
        ([BLACK, BLACK, BLACK], BLACK, None),
        ([BLACK, RED, BLACK], BLACK, None),  # the entry of the sky was forgotten
        ([BLACK, BLUE, BLUE], BLACK, 1),  # an unused entry with the color of another
        (GRAYS, BLACK, None),
        ([(k, k, k) for k in range(3)], (50, 50, 50), None),
    ],
)
def test_what_says_nothing_is_accepted(second: list[Any], rest: Any, drops: int | None, tmp_path: Path) -> None:
    pictures = {"a": picture(0), "b": picture(1), "c": picture(2)}
    if drops is not None:
        pictures["b"][pictures["b"] == drops] = 0
    save(tmp_path / "a.png", pictures["a"], AGREE, COLORS)
    save(tmp_path / "b.png", pictures["b"], AGREE, second, rest)
    Image.fromarray(pictures["c"]).save(tmp_path / "c.png")
    scheme = build_scheme(data(tmp_path))
    for name in "abcba":
        np.testing.assert_array_equal(read_mask(tmp_path / f"{name}.png", scheme), pictures[name])


@pytest.mark.parametrize(
    ("first", "second", "order", "colors", "words"),
    [
        ([0, 1, 2], [0, 1, 2], AGREE, [BLACK, GREEN, BLUE], r"1 is \[255, 0, 0\] in .*a.png and \[0, 200, 0\] in .*b"),
        ([0, 1, 2], [0, 1, 2], [2, 1, 0], COLORS, r"\[0, 0, 0\] is 0 in .*a.png and 2|\[0, 0, 255\] is 2 .* and 0"),
        ([0, 1, 2], [0, 1, 2], [1, 2, 0], COLORS, r"\[255, 0, 0\] is 1 in .*a.png and 0 in .*b.png"),
        # an optimizer of PNGs drops unused entries: no index is in both files
        ([0, 2, 2], [0, 1, 1], [0, 1], [BLACK, BLUE], r"\[0, 0, 255\] is 2 in .*a.png and 1 in .*b.png"),
    ],
    ids=["another color", "reversed", "shifted", "an unused class"],
)  # fmt: skip
def test_each_way_to_disagree_is_said(
    first: list[int], second: list[int], order: list[int], colors: list[Any], words: str, tmp_path: Path
) -> None:
    save(tmp_path / "a.png", np.array(first, np.uint8)[picture(0)], AGREE, COLORS)
    save(tmp_path / "b.png", np.array(second, np.uint8)[picture(1)], order, colors, (1, 1, 1))
    scheme = build_scheme(data(tmp_path))
    read_mask(tmp_path / "a.png", scheme)
    with pytest.raises(DataError, match=words):
        read_mask(tmp_path / "b.png", scheme)
