"""Division of images without splits: whole groups (scenes, videos) go to one side, so that neighbours do not leak."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Sequence

from segapp.errors import ConfigError, DataError
from segapp.onboarding.division.groups import Grouping
from segapp.onboarding.survey.hypotheses import Pair
from segapp.onboarding.survey.words import SPLIT_WORDS


def divide(pairs: Sequence[Pair], grouping: Grouping, share: float, seed: int) -> list[str]:
    """Return "train" or "val" for each pair.

    Groups are taken in the order of a hash of their names and the seed, so that images added later hardly change the
    division; a group goes to the validation images if that brings their share nearer to the wanted one.

    Raises:
        DataError: there is only one group.
        ConfigError: one side would be empty.
    """
    sizes = Counter(grouping.groups)
    if len(sizes) < 2:
        raise DataError(
            f"{len(pairs)} images in one group ({grouping.kind}) cannot be divided into training and validation "
            "images: add images, or name smaller groups with --group REGEX"
        )
    wanted, taken = share * len(pairs), 0
    val: set[str] = set()
    for group in sorted(sizes, key=lambda group: _rank(group, seed)):
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
    """Return the fold, from 0, of each pair: groups in the order of a hash, each to the fold with fewest images.

    Raises:
        ConfigError: there are fewer groups than folds, or fewer than two folds.
    """
    if num_folds < 2:
        raise ConfigError(f"--folds {num_folds}: at least 2 folds are possible")
    if grouping.num_groups < num_folds:
        raise ConfigError(
            f"--folds {num_folds}: there are only {grouping.num_groups} groups ({grouping.kind}): fewer folds, or "
            "smaller groups with --group REGEX"
        )
    sizes = Counter(grouping.groups)
    filled = [0] * num_folds
    fold_of: dict[str, int] = defaultdict(int)
    for group in sorted(sizes, key=lambda group: (-sizes[group], _rank(group, seed))):
        fold = min(range(num_folds), key=lambda number: filled[number])
        fold_of[group] = fold
        filled[fold] += sizes[group]
    return [fold_of[group] for group in grouping.groups]


def split_word_of(pairs: Sequence[Pair], split: str) -> str:
    """Return the word of a split on disk; the split itself where pairs have different words or none."""
    words = {pair.split_word for pair in pairs if pair.split == split}
    only = words.pop() if len(words) == 1 else None
    return only if only is not None and only.lower() in SPLIT_WORDS else split


def _rank(group: str, seed: int) -> bytes:
    return hashlib.sha256(f"{seed}:{group}".encode("utf-8", "surrogateescape")).digest()
