"""The images for training and validation: the splits of the data set, or a division by groups, or folds.

Images of one patient, video or place resemble each other, so a group on both sides of a division makes the scores too
good. The first of these rules that fits all images names their groups:

1. a column of a table, or the match of `--group`;
2. a word such as patient or subject in the paths, with its number;
3. a word such as video or scene with its number, or a folder of scenes, the coarser one;
4. the word of the names that divides the images into at least three groups; if several do, the user is asked;
5. each image is its own group.
"""

import hashlib
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import shown
from segapp.datasets.images.tiles import Tiles
from segapp.errors import ConfigError, DataError
from segapp.onboarding.layout import Pair, open_question
from segapp.onboarding.tree import known_words

DEFAULT_SHARE = 0.2
EACH_IMAGE = ".+"  # value of `--group` with which each image is its own group

TilesOf = Callable[[Sequence[Pair]], Tiles]
"""Function that returns the places of the images of some pairs."""

_MIN_GROUPS = 3
_MOST_IN_ONE = 0.8  # largest share of the images in one group, unless a word names it
_PERSONS, _RECORDINGS = known_words("groups", "persons"), known_words("groups", "recordings")
_WORD = r"[^_\-. /]+"
_LEAST_STEP_PX = 16  # numbers that are multiples of such a step are positions of tiles
_LONG = {"pt": "patient", "pat": "patient", "subj": "subject", "sub": "subject"}


@dataclass(frozen=True)
class Grouping:
    """The group of each image, and the part of the path that names it, with a regular expression if there is one."""

    groups: tuple[str, ...]
    kind: str
    pattern: str = ""

    @property
    def num_groups(self) -> int:
        return len(set(self.groups))

    def examples(self, images: Sequence[str]) -> str:
        """Return the first two groups as text, each with its number of images and an example."""
        sizes = Counter(self.groups)
        return "; ".join(
            f"{shown(group)}: {sizes[group]} images such as {shown(images[self.groups.index(group)])}"
            for group in sorted(sizes)[:2]
        )


def group_pairs(pairs: Sequence[Pair], pattern: str | None) -> Grouping:
    """Return the group of each pair by the rules of this module; `pattern` is the value of `--group`."""
    images = [pair.image for pair in pairs]
    if pattern is not None:
        kind = "image" if pattern == EACH_IMAGE else f"--group {pattern}"
        return Grouping(_matches(images, pattern), kind, pattern)
    if pairs and all(pair.group is not None for pair in pairs):
        return Grouping(tuple(str(pair.group) for pair in pairs), "column of the table")
    levels = range(min((len(pair.scene) for pair in pairs), default=0))  # of folders of scenes, outer ones first
    folders = (tuple("/".join(pair.scene[: level + 1]) for pair in pairs) for level in levels)
    recordings = [*_by_words(images, _RECORDINGS), *(Grouping(own, "folder") for own in folders if _are_groups(own))]
    recordings.sort(key=lambda one: one.num_groups)
    rules = chain(_by_words(images, _PERSONS), recordings, _by_names(images))
    return next(rules, Grouping(tuple(images), "image", EACH_IMAGE))


def _matches(images: Sequence[str], pattern: str) -> tuple[str, ...]:
    """Return the first group, or the match, of an expression in each path; ConfigError if it is invalid or has none."""
    try:
        found = {image: re.search(pattern, image) for image in images}
    except re.error as error:
        raise ConfigError(
            f"--group {pattern}: not a regular expression ({error}): write one such as '^([^/_]+)_'"
        ) from None
    if unmatched := [image for image, match in found.items() if match is None]:
        raise ConfigError(
            f"--group {pattern}: matches nothing in {shown(unmatched[0])}: write one that matches every image"
        )
    matches = [match for image in images if (match := found[image]) is not None]
    return tuple(match[1] if match.re.groups and match[1] is not None else match[0] for match in matches)


def _by_words(images: Sequence[str], words: frozenset[str]) -> Iterator[Grouping]:
    """Yield the groups by words that every path has with a number, a letter or a name: patient01, patientB, sub-x."""
    for word in sorted(words):
        pattern = rf"(?<![^\W\d_])((?i:{word})(?:[_\-. ]?\d+|[_\-. ][^_\-. /]+|[A-Z](?![a-z])))"
        found = takewhile(bool, (re.search(pattern, image) for image in images))
        groups = tuple(match[1] for match in found if match is not None)
        if len(groups) == len(images) and 2 <= len(set(groups)) < len(images):
            yield Grouping(groups, f"{_LONG.get(word, word)} in the name", pattern)


def _by_names(images: Sequence[str]) -> Iterator[Grouping]:
    """Yield the groups by the words of the names, which must be equally many.

    OpenQuestionError is raised if several words divide the images, and none is coarser than the others.
    """
    words = [re.findall(_WORD, os.path.splitext(image.rpartition("/")[2])[0]) for image in images]
    columns = [*_columns([*zip(*words, strict=True)])] if len({len(own) for own in words}) == 1 else []
    for one in sorted(columns, key=lambda one: one.num_groups):
        if all(len(set(zip(one.groups, other.groups, strict=True))) == other.num_groups for other in columns):
            yield one
            return
    if columns:
        answers = {one.pattern: f"{one.kind}: {one.num_groups} groups; {one.examples(images)}" for one in columns}
        raise open_question(
            "images of one patient, scene or video must stay on one side of the division, and several parts of the "
            "names may say it",
            "--group",
            answers | {EACH_IMAGE: "each image is its own group"},
        )


def _columns(columns: Sequence[tuple[str, ...]]) -> Iterator[Grouping]:
    """Yield the words at each position that may be groups, and the letters or digits with which such words begin.

    The last word that varies counts the images. Multiples of 16 are positions of tiles.
    """
    varying = [number for number, column in enumerate(columns) if len(set(column)) > 1]
    for number in varying:
        column = columns[number]
        is_position = all(word.isdecimal() for word in column) and math.gcd(*map(int, column)) >= _LEAST_STEP_PX
        kind = f"word {number + 1} of the name" if number else "beginning of the name"
        runs = [_WORD, r"[^\W\d_]+(?=\d+$)", r"\d+(?=[^\W\d_]+$)"]
        # As a whole, the last word that varies would make each image a group.
        for run in runs if number != varying[-1] else runs[1:]:
            found = [match for word in column if (match := re.match(run, word))]
            groups = tuple(match[0] for match in found)
            if len(groups) == len(column) and _are_groups(groups) and not is_position:
                own = run.replace("$)", r"(?:[_\-. ]|\.[^.]*$))")
                yield Grouping(groups, kind, rf"^(?:.*/)?[_\-. ]*(?:{_WORD}[_\-. ]+){{{number}}}({own})[^/]*$")


def _are_groups(groups: Sequence[str]) -> bool:
    sizes = Counter(groups)
    return _MIN_GROUPS <= len(sizes) <= len(groups) / 2 and max(sizes.values()) <= _MOST_IN_ONE * len(groups)


def find_shared_groups(images: Mapping[str, Sequence[str]]) -> str | None:
    """Return a sentence on the patients, videos or other groups that have images in two splits; None if none has.

    Numbers that start again in each split, so that the same names are in both, are ignored.
    """
    (first, firsts), (second, seconds) = images.items()
    same = len(set(firsts) & set(seconds))
    if not firsts or not seconds or same > min(len(firsts), len(seconds)) / 2:
        return None
    for one in chain.from_iterable(_by_words([*firsts, *seconds], words) for words in (_PERSONS, _RECORDINGS)):
        trained, scored = one.groups[: len(firsts)], one.groups[len(firsts) :]
        if both := sorted({*trained} & {*scored}):
            images_of_both = firsts[trained.index(both[0])], seconds[scored.index(both[0])]
            return (
                f"{len(both)} of the {len({*scored})} groups of {second} ({one.kind}) are in {first} too, such as "
                f"{' and '.join(map(shown, images_of_both))}: scores on {second} are too good; divide anew with "
                f"segapp init --folds 5 --group {shlex.quote(one.pattern)}"
            )
    return None


def divide(pairs: Sequence[Pair], grouping: Grouping, share: float, seed: int) -> list[str]:
    """Return "train" or "val" for each pair.

    Groups are processed in the order of a hash of their names and the seed, so images that are added later rarely
    change the division. A group becomes validation images if that brings their share closer to the requested one.
    DataError is raised for a single group, ConfigError if one side would be empty.
    """
    sizes = Counter(grouping.groups)
    if len(pairs) == 1:
        image, mask = shown(pairs[0].image), shown(pairs[0].mask)
        raise DataError(
            f"{image} is the only image with a mask: cut both into tiles, such as gdal_retile.py -ps 512 512 "
            f"-targetDir tiles/images {image} and gdal_retile.py -ps 512 512 -targetDir tiles/masks {mask}, then run "
            "segapp init tiles"
        )
    if len(sizes) < 2:
        raise DataError(
            f"{len(pairs)} images in one group ({grouping.kind}) cannot be divided into training and validation "
            "images: add images, or name smaller groups with --group REGEX"
        )
    wanted, taken = share * len(pairs), 0
    val: set[str] = set()
    for group in sorted(sizes, key=lambda group: _rank(group, seed)):
        # At least one group stays for training.
        if abs(taken + sizes[group] - wanted) < abs(taken - wanted) and len(val) < len(sizes) - 1:
            val.add(group)
            taken += sizes[group]
    if not val and share * len(pairs) >= 0.5:
        val.add(min(sizes, key=lambda group: (sizes[group], _rank(group, seed))))
    if not val:
        raise ConfigError(
            f"--val-share {share:g} of {len(pairs)} images in {len(sizes)} groups ({grouping.kind}) leaves one split "
            "empty: choose another share, or other groups with --group REGEX"
        )
    return ["val" if group in val else "train" for group in grouping.groups]


def divide_into_folds(grouping: Grouping, num_folds: int, seed: int) -> list[int]:
    """Return the fold, from 0, of each pair: large groups first, each in the fold with the fewest images.

    Groups of equal size are ordered by a hash. ConfigError is raised if there are fewer groups than folds.
    """
    if grouping.num_groups < num_folds:
        raise ConfigError(
            f"--folds {num_folds}: there are only {grouping.num_groups} groups ({grouping.kind}): fewer folds, or "
            "smaller groups with --group REGEX"
        )
    sizes = Counter(grouping.groups)
    filled = [0] * num_folds
    fold_of: dict[str, int] = {}
    for group in sorted(sizes, key=lambda group: (-sizes[group], _rank(group, seed))):
        fold_of[group] = filled.index(min(filled))
        filled[fold_of[group]] += sizes[group]
    return [fold_of[group] for group in grouping.groups]


def _rank(group: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{group}".encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True)
class Division:
    """The images of the splits; with folds, the images of the first fold."""

    train: Sequence[Pair]
    val: Sequence[Pair]
    lists: Mapping[str, Sequence[Pair]]  # name of a list -> its pairs
    is_new: bool = True  # the division was made by segapp, not by the data set
    lines: tuple[str, ...] = field(default=())  # description


def divided(
    pairs: Sequence[Pair], share: float | None, group: str | None, folds: int | None, seed: int, tiles_of: TilesOf
) -> Division:
    """Return the pairs for training and for validation; the options are the same as in `InitRequest`.

    Images whose tiles touch, as `tiles_of` returns them, stay on one side, unless `group` says otherwise.

    ConfigError is raised if the data have splits and a share or groups are given, or if a side would be empty.
    """
    splits = {pair.split for pair in pairs}
    test = [pair for pair in pairs if pair.split == "test"]
    rest = [pair for pair in pairs if pair.split != "test"]
    if folds is not None:
        in_folds = _in_folds(rest or pairs, group, folds, seed, tiles_of(rest or pairs))
        return replace(in_folds, lists={**in_folds.lists, **({"test": test} if test and rest else {})})
    has_options = share is not None or group is not None
    # Published test images serve for validation, unless the user asks for a share of the training images.
    if "train" in splits and ("val" in splits or (test and not has_options)):
        if has_options:
            raise ConfigError(
                "the data are divided already (train, val): leave --val-share and --group out, or give --folds"
            )
        return _published(pairs, "val" if "val" in splits else "test", tiles_of)
    lists: dict[str, Sequence[Pair]] = {}
    named = sorted(split for split in splits if split is not None)
    known = f"only {' and '.join(named)} has images with masks" if named else "the data have none"
    if "train" in splits and test:
        pairs, lists["test"] = rest, test
        known = f"{len(test)} test images are left for segapp eval"
    share = DEFAULT_SHARE if share is None else share
    tiles = tiles_of(pairs)
    grouping, lines = _with_neighbors(pairs, group, tiles, share * len(pairs), 2, seed)
    sides = divide(pairs, grouping, share, seed)
    train, val = ([pair for pair, side in zip(pairs, sides, strict=True) if side == own] for own in ("train", "val"))
    line = (
        f"splits: {known}: {len(train)} training and {len(val)} validation images, {grouping.num_groups} "
        f"groups ({grouping.kind}) divided by --val-share {share:g}"
    )
    lists = {"train": train, "val": val, **lists}
    lines = [line, _groups_line(pairs, grouping), *lines, *touching_notes(tiles, sides)]
    return Division(train, val, lists, lines=tuple(lines))


def touching_notes(tiles: Tiles, splits: Sequence[str], val: str = "val", train: str = "train") -> list[str]:
    """Return a sentence on the images of a split that touch one of another split by their georeferences, or none."""
    num, num_all = sum(splits[each] == val for each in tiles.across(splits)), splits.count(val)
    what = f"warning: {num} of {num_all} images of {val} touch one of {train} by their georeferences"
    return [f"{what}: scores on {val} are too good"] if num else []


def _with_neighbors(
    pairs: Sequence[Pair], group: str | None, tiles: Tiles, size: float, least: int, seed: int
) -> tuple[Grouping, list[str]]:
    """Return the groups of the pairs after those that touch were joined, and a line about them.

    If the joined groups are too large for at least `least` groups of about `size` images, the largest is cut into such
    parts along its longer side; its own groups stay whole.
    """
    own = group_pairs(pairs, group)
    groups, num = tiles.joined(own.groups)
    if group is not None or not num:
        return own, []
    kind = "tiles that touch" if own.kind == "image" else f"{own.kind}, tiles that touch"
    line, rest = f"tiles: {num} of {len(pairs)} images touch another one by their georeferences", "and stay on one side"
    sizes = Counter(groups)
    is_enough = len(sizes) >= least and sum(each for each in sizes.values() if each < 2 * size) >= size / 2
    if not is_enough:
        largest = max(sizes, key=lambda each: (sizes[each], each))
        inside = [number for number, each in enumerate(groups) if each == largest]
        for number, part in zip(inside, _parts(tiles, own.groups, inside, size, least, seed), strict=True):
            groups[number] = f"{largest}, part {part + 1}"
        rest = f"and {len(inside)} images are one scene, which is cut into contiguous parts"
    return Grouping(tuple(groups), kind), [f"{line}, {rest}"]


def _parts(
    tiles: Tiles, groups: Sequence[str], inside: Sequence[int], size: float, least: int, seed: int
) -> NDArray[np.intp]:
    """Return the part of each image of a scene: parts of about `size` images, or for two, one of them and the rest."""
    corners = np.nan_to_num(tiles.corners[inside])
    across, down = np.median(corners[:, 1] - corners[:, 0], axis=0)  # the axes of the tiles, which may be rotated
    corners = corners @ np.array([(across, -down), (down, across)])
    unit = np.unique([groups[number] for number in inside], return_inverse=True)[1]
    centers = np.array([corners[unit == each].mean((0, 1)) for each in range(unit.max() + 1)])[unit]
    axis = int(np.ptp(centers, axis=0).argmax())
    columns = np.round(2 * centers[:, [axis]] / np.median(np.ptp(corners[..., axis], axis=1)))
    part = np.zeros(len(inside), np.intp)
    # Whole columns of tiles if they give enough parts, so that the cut is straight; else single tiles, or their groups.
    for key in (columns, np.column_stack([centers[:, [axis, 1 - axis]], unit])):
        _, rank, counts = np.unique(key, axis=0, return_inverse=True, return_counts=True)
        rank = rank.ravel()
        if seed % 2:
            rank, counts = len(counts) - 1 - rank, counts[::-1]
        part = ((np.cumsum(counts) - counts / 2) / size).astype(np.intp)[rank]
        part = np.minimum(part, 1) if least == 2 else part
        if len({*part.tolist()}) >= least:
            break
    return part


def _published(pairs: Sequence[Pair], val_split: str, tiles_of: TilesOf) -> Division:
    """Return the division of the data set, with a warning if a patient or a recording is in both splits."""
    own = {split: [pair for pair in pairs if pair.split == split] for split in ("train", val_split)}
    train, val = own.values()
    lists: dict[str, Sequence[Pair]] = {"train": train, "val": val}
    lines = [f"splits: {len(train)} training images (train), {len(val)} validation images ({val_split})"]
    if val_split != "test" and (test := [pair for pair in pairs if pair.split == "test"]):
        lists["test"] = test
        lines[0] += f"; {len(test)} test images are left for segapp eval"
    if val_split == "test":
        lines.append(
            "val_split: test - the best checkpoint is chosen on the test images, for lack of a val split; --val-share "
            "SHARE of segapp init keeps a part of train instead"
        )
    images = {split: [pair.image for pair in found] for split, found in own.items()}
    if (both := find_shared_groups(images)) is not None:
        lines.append(f"warning: {both}")
    sides = ["train"] * len(train) + [val_split] * len(val)
    lines += touching_notes(tiles_of([*train, *val]), sides, val_split)
    return Division(train, val, lists, is_new=False, lines=tuple(lines))


def _in_folds(pairs: Sequence[Pair], group: str | None, folds: int, seed: int, tiles: Tiles) -> Division:
    grouping, lines = _with_neighbors(pairs, group, tiles, len(pairs) / folds, folds, seed)
    fold_of = divide_into_folds(grouping, folds, seed)
    lists: dict[str, Sequence[Pair]] = {}
    for fold in range(folds):
        lists[f"fold{fold}-train"] = [pair for pair, own in zip(pairs, fold_of, strict=True) if own != fold]
        lists[f"fold{fold}-val"] = [pair for pair, own in zip(pairs, fold_of, strict=True) if own == fold]
    sizes = ", ".join(str(len(lists[f"fold{fold}-val"])) for fold in range(folds))
    line = f"folds: {sizes} validation images; {grouping.num_groups} groups ({grouping.kind}) were divided"
    lines = [line, _groups_line(pairs, grouping), *lines]
    if num := len(tiles.across(fold_of)):
        what = f"{num} of {len(pairs)} images touch one of another fold by their georeferences"
        lines.append(f"warning: {what}: scores on val are too good")
    return Division(lists["fold0-train"], lists["fold0-val"], lists, lines=tuple(lines))


def _groups_line(pairs: Sequence[Pair], grouping: Grouping) -> str:
    images = [pair.image for pair in pairs]
    if grouping.kind != "image":
        return f"groups: {grouping.examples(images)}"
    return (
        f"groups: none is named by {shown(images[0])} to {shown(images[-1])}; if neighbors show the same scene, "
        "keep them together with --group REGEX"
    )
