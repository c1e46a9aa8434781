"""Groups of images: the part of the path that names them, or a question; and divisions that keep groups whole."""

from __future__ import annotations

import hashlib
import itertools
import re
import shlex
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segapp.errors import ConfigError, DataError
from segapp.onboarding.division import EACH_IMAGE, Grouping, divide, divide_into_folds, find_shared_groups, group_pairs
from segapp.onboarding.layout import OpenQuestionError, Pair


def pairs_of(*images: str) -> list[Pair]:
    return [Pair(image, f"{image}.png", scene=tuple(image.split("/")[:-1])) for image in images]


def crossed(template: str, *values: Sequence[object]) -> list[str]:
    """Names with every combination of the values."""
    return [template.format(*each) for each in itertools.product(*values)]


def partition(groups: Sequence[str]) -> set[frozenset[int]]:
    return {frozenset(i for i, each in enumerate(groups) if each == group) for group in groups}


BEGINNING = "beginning of the name"
FIVE = ["austin", "chicago", "kitsap", "tyrol", "vienna"]


@pytest.mark.parametrize(
    ("images", "kind", "groups"),
    [
        ("s1/a s1/b s2/a s2/b s3/a s3/b", "folder", "s1 s1 s2 s2 s3 s3"),
        ("x_1 x_2 y_1 y_2 z_1 z_2", BEGINNING, "x x y y z z"),
        ("a b c", "image", None),
        ("x_1 x_2 y_1 y_2", "image", None),  # two groups are too few
        ("x_1 x_2 y_1 y_2 z_1", "image", None),  # of fewer than two images on average
        ("x_1 x_2 x_3 x_4 x_5 x_6 x_7 x_8 y_1 z_1", BEGINNING, "x x x x x x x x y z"),
        ("x_1 x_2 x_3 x_4 x_5 x_6 x_7 x_8 x_9 y_1 z_1", "image", None),  # one of them holds nearly all
        ("1/a_1 1/a_2 1/b_1 1/b_2 2/c_1 2/c_2 3/d_1 3/d_2", "folder", "1 1 1 1 2 2 3 3"),  # folders before names
        ("x_1 x_2 y_1 y_2 z_q_1 z_q_2", "image", None),  # names of different shapes
        ("img_01L img_01R img_02L img_02R img_03L img_03R", "word 2 of the name", "01 01 02 02 03 03"),
        ("a/patient1/1 a/patient2/1 b/patient1/1 b/patient2/1", "patient in the name",
         "patient1 patient2 patient1 patient2"),
        ("patientA_1 patientA_2 patientB_1", "patient in the name", "patientA patientA patientB"),
        ("P01-x_1 P01_2 P02_1", "p in the name", "P01 P01 P02"),  # names of different shapes
        ("case_0001_0000 case_0002_0000 case_0003_0000", "image", None),  # one image each
        ("pug_1 pug_2 poodle_1 poodle_2", "image", None),  # p is no person here
        ("zk_¹_0 zk_¹_1 zk_²_0 zk_²_1", "image", None),  # digits that int refuses
    ],
)  # fmt: skip
def test_groups_are_folders_or_words_of_names(images: str, kind: str, groups: str | None) -> None:
    pairs = pairs_of(*(f"{image}.png" for image in images.split()))
    found = group_pairs(pairs, None)
    assert found.groups == (tuple(pair.image for pair in pairs) if groups is None else tuple(groups.split()))
    assert found.kind == kind
    assert not found.pattern or group_pairs(pairs, found.pattern).groups == found.groups


@pytest.mark.parametrize(
    ("images", "kind", "number"),
    [
        (crossed("slice{}_patient{:02}_{}.png", range(3), range(6), range(2)), "patient in the name", 6),
        (crossed("sub-{:02}_ses-{}_slice{:03}.png", range(8), range(2), range(5)), "subject in the name", 8),
        (crossed("site{}_patient{:02}_{}.png", range(5), range(8), range(3)), "patient in the name", 8),
        (crossed("scene{}/cam{}_{:04}.png", range(4), range(2), range(5)), "scene in the name", 4),
        (crossed("{}{}_{}_{}.png", FIVE, range(1, 5), (0, 512), (0, 512)), BEGINNING, 5),
        (crossed("{:04}_{}_{}.png", range(9), (0, 512, 1024), (0, 512, 1024)), BEGINNING, 9),
        (crossed("{}_{:06}_000019.png", FIVE, range(7)), BEGINNING, 5),
        (crossed("img_{:04}_patch_{}.png", range(20), range(4)), "word 2 of the name", 20),
        (crossed("IMG_202001{:02}_12{:02}00.png", range(1, 8), range(5)), "word 2 of the name", 7),
        (crossed("2020-01-{:02}_12-{:02}-00.png", range(1, 8), range(5)), "word 3 of the name", 7),
        (crossed("{:02}_{:04}.png", range(7), range(9)), BEGINNING, 7),
        (crossed("{:04}.png", range(40)), "image", 40),
        (crossed("frame{:04}.png", range(40)), "image", 40),
    ],
)
def test_groups_of_usual_names(images: list[str], kind: str, number: int) -> None:
    found = group_pairs(pairs_of(*images), None)
    assert (found.kind, found.num_groups) == (kind, number)
    if found.pattern:
        assert partition(group_pairs(pairs_of(*images), found.pattern).groups) == partition(found.groups)


@pytest.mark.parametrize(
    "images",
    [
        crossed("{}_{:02}_{}.png", range(6), range(6), range(2)),
        crossed("{}_{}_{}.png", FIVE, ("dawn", "day", "dusk", "night", "noon"), range(3)),
    ],
)
def test_two_words_that_divide_differently_are_a_question(images: list[str]) -> None:
    pairs = pairs_of(*images)
    with pytest.raises(OpenQuestionError, match="several parts of the names may say it") as raised:
        group_pairs(pairs, None)
    *answers, each = raised.value.answers
    assert raised.value.option == "--group"
    first, second = (group_pairs(pairs, answer).groups for answer in answers)
    assert [set(first), set(second)] == [{name.split("_")[i] for name in images} for i in (0, 1)]
    assert re.search(r": \d+ groups; .*: \d+ images such as ", raised.value.answers[answers[0]])
    assert each == EACH_IMAGE
    assert group_pairs(pairs, EACH_IMAGE) == Grouping(tuple(images), "image", EACH_IMAGE)


def test_column_of_a_table_is_the_group() -> None:
    pairs = [Pair(f"patient{i}_{k}.png", "m.png", group=f"eye {k}") for i in range(5) for k in range(3)]
    found = group_pairs(pairs, None)
    assert (set(found.groups), found.kind) == ({"eye 0", "eye 1", "eye 2"}, "column of the table")


_WORDED = ["patient{:02}", "sub-{:02}", "case_{:03}", "video{}", "scene_{}", "seq{:02}", "slide{}", "P{:02}"]
_NUMBERED = ["{}", "{:02}", "{:04}"]
_NAMES = ["aachen", "bochum", "cologne", "dusseldorf", "erfurt", "frankfurt", "giessen", "hanover"]


@st.composite
def drawn_names(draw: st.DrawFn) -> tuple[list[str], list[str]]:
    """Names with a true group among words that say nothing, and the true group of each.

    A group without a group word has at least five values; if it is a number, words with letters have fewer, and another
    number follows. Otherwise no name could tell it from a counter.
    """
    kind = draw(st.sampled_from(["worded", "letters", "number", "date"]))
    number = draw(st.integers(2 if kind == "worded" else 5, 8))
    if kind in ("worded", "number"):
        template = draw(st.sampled_from(_WORDED if kind == "worded" else _NUMBERED))
        words = [template.format(i + 1) for i in range(number)]
    else:
        words = _NAMES[:number] if kind == "letters" else [f"202103{i + 1:02}" for i in range(number)]
    others = {
        "slice": [f"slice{i}" for i in range(draw(st.integers(2, 7)))],
        "category": ["dawn", "dusk", "night", "noon"][: draw(st.integers(2, 4))],
        "number": [f"{i:02}" for i in range(draw(st.integers(2, 7)))],
        "constant": ["data"],
        "positions": ["0", "256", "512"],
    }
    chosen = draw(st.lists(st.sampled_from(sorted(others)), max_size=2, unique=True))
    columns = [(key, others[key]) for key in chosen]
    columns.insert(draw(st.integers(0, len(columns))), ("group", words))
    columns.append(("index", [f"{i:03}" for i in range(draw(st.integers(2, 4)))]))
    rows = [list(row) for row in itertools.product(*(values for _, values in columns))]
    position = [key for key, _ in columns].index("group")
    separator = draw(st.sampled_from("_-")) if kind != "date" else "_"
    if draw(st.booleans()):  # some images are missing
        rows = draw(st.lists(st.sampled_from(rows), min_size=len(rows) // 2, max_size=len(rows), unique_by=tuple))
    return [separator.join(row) + ".png" for row in rows], [row[position] for row in rows]


@given(drawn_names(), st.sampled_from([0.3, 0.5]), st.integers(0, 3))
def test_true_groups_stay_on_one_side_or_init_asks(drawn: tuple[list[str], list[str]], share: float, seed: int) -> None:
    images, true = drawn
    pairs = pairs_of(*images)
    try:
        found = group_pairs(pairs, None)
    except OpenQuestionError as question:
        for answer in question.answers:
            group_pairs(pairs, answer)  # matches every image
        return
    if found.kind == "image":
        return
    for sides in (divide(pairs, found, share, seed), divide_into_folds(found, 2, seed)):
        assert len(set(zip(true, sides, strict=True))) == len(set(true)), found.kind


def test_patients_in_both_splits_are_found() -> None:
    images = {
        "train": crossed("case1_patient{:02}_{}.png", range(4), range(3)),
        "val": crossed("case3_patient{:02}_{}.png", range(2, 6), range(3, 5)),
    }
    found = find_shared_groups(images)
    assert found is not None
    assert found.startswith(
        "2 of the 4 groups of val (patient in the name) are in train too, such as case1_patient02_0.png "
        "and case3_patient02_3.png: scores on val are too good"
    )
    (pattern,) = shlex.split(found.partition(" --group ")[2])
    groups = group_pairs(pairs_of(*images["val"]), pattern).groups
    assert groups == tuple(f"patient{number:02}" for number in (2, 2, 3, 3, 4, 4, 5, 5))


@pytest.mark.parametrize(
    ("train", "val"),
    [
        (["patient1_1.png", "patient1_2.png"], ["patient2_1.png", "patient2_2.png"]),
        (["seq1/1.png", "seq1/2.png", "seq2/1.png"], ["seq1/1.png", "seq1/2.png"]),  # numbers begin again
        (["beagle_1.png", "beagle_2.png"], ["beagle_3.png"]),  # a breed
        (["1.png"], []),
    ],
)
def test_other_splits_share_no_group(train: list[str], val: list[str]) -> None:
    assert find_shared_groups({"train": train, "val": val}) is None


@pytest.mark.parametrize(
    ("pattern", "groups"), [(r"/(.)_", ("x", "y")), (r"._\d", ("x_1", "y_2")), ("(q)?p", ("p", "q"))]
)
def test_groups_are_what_an_expression_matches(pattern: str, groups: tuple[str, str]) -> None:
    pairs = pairs_of("p/x_1.png", "qp/y_2.png")
    assert group_pairs(pairs, pattern) == Grouping(groups, f"--group {pattern}", pattern)


def test_wrong_expressions_for_groups_are_named() -> None:
    with pytest.raises(ConfigError, match=r"--group \(: not a regular expression"):
        group_pairs(pairs_of("a.png"), "(")
    with pytest.raises(
        ConfigError, match=r"--group \^z: matches nothing in a\.png: write one that matches every image"
    ):
        group_pairs(pairs_of("z.png", "a.png", "b.png"), "^z")


# --- divisions into splits and folds


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
