"""The images for training and validation: the splits of the data set, or a division by groups, or folds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import cv2
import numpy as np

from segapp.datasets.files import shown
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.reading import read_image
from segapp.datasets.lookalikes import Look, find_lookalikes, look_of
from segapp.errors import ConfigError, DataError
from segapp.onboarding.division import (
    Grouping,
    divide,
    divide_into_folds,
    find_shared_groups,
    group_pairs,
    split_word_of,
)
from segapp.onboarding.layout import Pair

DEFAULT_SHARE = 0.2
TEST_VALIDATES = (
    "the best checkpoint is chosen on the test images, for lack of a val split; --val-share SHARE of segapp init keeps "
    "a part of train instead"
)
_MAX_IMAGES = 100
_MAX_PX = 2**25  # number of pixels that are read: half a second


@dataclass(frozen=True)
class Division:
    """The images of the splits; with folds, the images of the first fold."""

    train: Sequence[Pair]
    val: Sequence[Pair]
    words: Mapping[str, str]  # "train" and the validation split -> their names on disk
    lists: Mapping[str, Sequence[Pair]]  # name of a list -> its pairs
    num_folds: int = 0  # 0 without folds
    is_new: bool = True  # the division was made by segapp, not by the data set
    lines: tuple[str, ...] = field(default=())  # description
    kind: str = ""  # the part of the paths that names a group in a new division; "image" if there is none


def divided(
    pairs: Sequence[Pair], share: float | None, group: str | None, folds: int | None, seed: int, *, is_published: bool
) -> Division:
    """Return the pairs for training and for validation; the options are the same as in `InitRequest`.

    The splits of a published data set keep their names. ConfigError is raised if the data have splits and a share or
    groups are given, or if a side would be empty.
    """
    splits = {pair.split for pair in pairs}
    val_split = next((split for split in ("val", "test") if split in splits), None)
    if folds is not None:
        return _folds([pair for pair in pairs if pair.split != "test"] or pairs, group, folds, seed)
    has_only_test = "train" in splits and val_split == "test"
    if has_only_test and (share is not None or group is not None):
        test = [pair for pair in pairs if pair.split == "test"]
        rest = [pair for pair in pairs if pair.split != "test"]
        kept = divided(
            [replace(pair, split=None) for pair in rest], share, group, None, seed, is_published=is_published
        )
        line = kept.lines[0].replace("the data have none", f"{len(test)} test images are left for segapp eval")
        return replace(kept, lists={**kept.lists, "test": test}, lines=(line,))
    if "train" in splits and val_split is not None:
        if share is not None or group is not None:
            raise ConfigError(
                f"the data are divided already (train, {val_split}): leave --val-share and --group out, or give --folds"
            )
        train = [pair for pair in pairs if pair.split == "train"]
        val = [pair for pair in pairs if pair.split == val_split]
        words = {split: split if is_published else split_word_of(pairs, split) for split in ("train", val_split)}
        lines = [f"splits: {len(train)} training images (train), {len(val)} validation images ({val_split})"]
        if has_only_test:
            lines.append(f"val_split: {words['test']} - {TEST_VALIDATES}")
        published = {"train": train, val_split: val}
        images = {split: [pair.image for pair in own] for split, own in published.items()}
        columns = {split: [pair.group for pair in own] for split, own in published.items()}
        if (both := find_shared_groups(images, columns)) is not None:
            lines.append(f"warning: {both}")
        return Division(train, val, words, {"train": train, "val": val}, is_new=False, lines=tuple(lines))
    share = DEFAULT_SHARE if share is None else share
    grouping = group_pairs(pairs, group)
    sides = divide(pairs, grouping, share, seed)
    train, val = ([pair for pair, side in zip(pairs, sides, strict=True) if side == own] for own in ("train", "val"))
    named = sorted(split for split in splits if split is not None)
    known = f"only {' and '.join(named)} has images with masks" if named else "the data have none"
    line = (
        f"splits: {known}: {len(train)} training and {len(val)} validation images, {grouping.num_groups} "
        f"groups ({grouping.kind}) divided by --val-share {share:g}"
    )
    lists = {"train": train, "val": val}
    return _new(pairs, grouping, {"train": "train", "val": "val"}, lists, line)


def _new(
    pairs: Sequence[Pair],
    grouping: Grouping,
    words: Mapping[str, str],
    lists: Mapping[str, Sequence[Pair]],
    line: str,
    num_folds: int = 0,
) -> Division:
    """Return a new division, with a line about its groups."""
    images = [pair.image for pair in pairs]
    groups = f"groups: {grouping.examples(images)}"
    if grouping.kind == "image":
        groups = (
            f"groups: none is named by {shown(images[0])} to {shown(images[-1])}; if neighbors show the same scene, "
            "keep them together with --group REGEX"
        )
    train, val = (lists[word] for word in words.values())
    return Division(train, val, words, lists, num_folds, lines=(line, groups), kind=grouping.kind)


def _folds(pairs: Sequence[Pair], group: str | None, folds: int, seed: int) -> Division:
    grouping = group_pairs(pairs, group)
    fold_of = divide_into_folds(grouping, folds, seed)
    lists: dict[str, Sequence[Pair]] = {}
    for fold in range(folds):
        lists[f"fold{fold}-train"] = [pair for pair, own in zip(pairs, fold_of, strict=True) if own != fold]
        lists[f"fold{fold}-val"] = [pair for pair, own in zip(pairs, fold_of, strict=True) if own == fold]
    sizes = ", ".join(str(len(lists[f"fold{fold}-val"])) for fold in range(folds))
    line = f"folds: {sizes} validation images; {grouping.num_groups} groups ({grouping.kind}) were divided"
    return _new(pairs, grouping, {"train": "fold0-train", "val": "fold0-val"}, lists, line, folds)


def neighbor_lines(division: Division, root: Path, pixels: PixelFormat | None, size_px: tuple[int, int]) -> list[str]:
    """Return a warning if validation images look like training images; no line if the names have groups.

    The first images in the order of their names are compared, as many as can be read in about half a second; `size_px`
    is the usual height and width of an image.
    """
    if not division.is_new or division.kind != "image":
        return []
    number = min(_MAX_IMAGES, _MAX_PX // max(1, size_px[0] * size_px[1]))
    first = sorted({pair.image for pair in (*division.train, *division.val)})[:number]
    train, val = (_looks(pairs, first, root, pixels or RGB8) for pairs in (division.train, division.val))
    found = find_lookalikes([look for _, look in val], [look for _, look in train])
    if not found:
        return []
    one, other = val[found[0].number][0], train[found[0].other][0]
    return [
        f"warning: {len(found)} of {len(val)} validation images that were compared look like a training image, such as "
        f"{shown(one)} and {shown(other)}: scores would be too good; keep neighbors together with --group REGEX"
    ]


def _looks(pairs: Sequence[Pair], first: Sequence[str], root: Path, pixels: PixelFormat) -> list[tuple[str, Look]]:
    found = []
    for image in sorted({pair.image for pair in pairs} & set(first)):
        try:
            rgb = pixels.as_rgb(read_image(root / image, pixels))
        except DataError:  # check reports it
            continue
        found.append((image, look_of(np.asarray(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY), np.uint8))))
    return found
