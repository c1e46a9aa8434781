"""Division of images without splits: whole groups on one side, shares and folds as near as groups allow."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from segapp.errors import ConfigError, DataError
from segapp.onboarding.division import Grouping, divide, divide_into_folds
from segapp.onboarding.layout import Pair


def pairs_of(*images: str) -> list[Pair]:
    return [Pair(image, f"{image}.png", scene=tuple(image.split("/")[:-1])) for image in images]


def grouped(*sizes: int) -> tuple[list[Pair], Grouping]:
    """Groups a, b, ... of so many images."""
    groups = tuple("abcdefghij"[number] for number, size in enumerate(sizes) for _ in range(size))
    return pairs_of(*(f"{group}{i}" for i, group in enumerate(groups))), Grouping(groups, "folder")


@pytest.mark.parametrize(
    ("sizes", "share", "num_val"),
    [
        ((1,) * 10, 0.2, 2),
        ((1,) * 10, 0.24, 2),
        ((1,) * 10, 0.26, 3),
        ((50, 10, 10, 10, 10, 10), 0.2, 20),  # the large group never fits
        ((10, 10), 0.4, 10),
        ((10, 10), 0.5, 10),
        ((5, 5), 0.05, 5),  # too many rather than none
        ((2,) * 10, 0.15, 2),  # 2 and 4 are as near to 3
        ((5, 5, 5), 0.9, 10),
        ((10, 10), 0.9, 10),  # one group must be left for training
    ],
)
def test_share_is_the_nearest_that_whole_groups_allow(sizes: tuple[int, ...], share: float, num_val: int) -> None:
    pairs, grouping = grouped(*sizes)
    for seed in range(8):
        found = divide(pairs, grouping, share, seed)
        sides = {group: {side for side, own in zip(found, grouping.groups, strict=True) if own == group}
                 for group in grouping.groups}  # fmt: skip
        assert all(len(side) == 1 for side in sides.values())
        assert found.count("val") == num_val
    assert len({tuple(divide(pairs, grouping, share, seed)) for seed in range(8)}) > 1


def test_groups_are_taken_in_the_order_of_a_hash() -> None:
    """The order is the same in every version, so that a repeated command divides as before."""

    def ranked(groups: str, seed: int) -> list[str]:
        return sorted(groups, key=lambda group: hashlib.sha256(f"{seed}:{group}".encode()).digest())

    for seed in range(3):
        pairs, grouping = grouped(*[2] * 6)
        found = divide(pairs, grouping, 0.5, seed)
        assert {group for group, side in zip(grouping.groups, found, strict=True) if side == "val"} == set(
            ranked("abcdef", seed)[:3]
        )
        folds = dict(zip(grouping.groups, divide_into_folds(grouping, 4, seed), strict=True))
        assert [folds[group] for group in ranked("abcdef", seed)] == [0, 1, 2, 3, 0, 1]
        pairs, grouping = grouped(5, 5, 9)
        found = divide(pairs, grouping, 0.05, seed)  # the smallest rather than none
        val = {group for group, side in zip(grouping.groups, found, strict=True) if side == "val"}
        assert val == {ranked("ab", seed)[0]}


def test_added_groups_hardly_change_a_division() -> None:
    pairs, grouping = grouped(*[2] * 9)
    more, larger = grouped(*[2] * 10)
    before = dict(zip(grouping.groups, divide(pairs, grouping, 0.3, 0), strict=True))
    after = dict(zip(larger.groups, divide(more, larger, 0.3, 0), strict=True))
    assert sum(before[group] != after[group] for group in before) <= 1


def test_impossible_divisions_name_the_next_move() -> None:
    pairs, one = grouped(5)
    with pytest.raises(DataError, match=r"5 images in one group \(folder\) cannot be divided.*--group REGEX"):
        divide(pairs, one, 0.2, 0)
    pairs, grouping = grouped(5, 5)
    with pytest.raises(ConfigError, match=r"--val-share 0\.04 of 10 images in 2 groups \(folder\) leaves one split"):
        divide(pairs, grouping, 0.04, 0)  # not half an image
    with pytest.raises(ConfigError, match=r"--folds 3: there are only 2 groups \(folder\)"):
        divide_into_folds(grouping, 3, 0)


def test_folds_are_even_and_hold_whole_groups() -> None:
    _, grouping = grouped(4, 3, 3, 2, 2, 1, 1)
    for seed in range(5):
        folds = divide_into_folds(grouping, 3, seed)
        assert sorted(Counter(folds).values()) == [5, 5, 6]  # 4 1 1 | 3 2 | 3 2
        assert set(folds) == {0, 1, 2}
        assert len(set(zip(grouping.groups, folds, strict=True))) == 7
    assert sorted(divide_into_folds(grouped(3, 3)[1], 2, 0)) == [0, 0, 0, 1, 1, 1]
