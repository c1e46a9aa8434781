"""A layout as keys of the `data` section, where they can express it; otherwise it is written as lists."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from segapp.datasets.layouts.formats import DataLocation, find_pairs
from segapp.errors import DataError
from segapp.onboarding.survey.families import common_beginning
from segapp.onboarding.survey.hypotheses import Layout, Pair


def folder_keys(root: Path, layout: Layout, words: Mapping[str, str]) -> dict[str, str] | None:
    """Return `image_dir`, `mask_dir` and endings with which format `folder` finds exactly these pairs; None without.

    Args:
        root: of the data set.
        layout: whose splits are folders.
        words: split -> its word on disk, of the splits that the config names.
    """
    wanted = {split: {(pair.image, pair.mask) for pair in layout.pairs if pair.split == split} for split in words}
    for keys in _candidates(layout):
        if all(_found(root, keys, words[split]) == pairs for split, pairs in wanted.items()):
            return {key: value for key, value in keys.items() if (key, value) not in _DEFAULTS}
    return None


_DEFAULTS = {("image_dir", "images/{split}"), ("mask_dir", "masks/{split}")}


def _candidates(layout: Layout) -> Iterator[dict[str, str]]:
    image_dir, mask_dir = _common_folder(layout.image_pattern), _common_folder(layout.mask_pattern)
    if image_dir is None or mask_dir is None or "{split}" not in image_dir:
        return
    keys = {"image_dir": image_dir, "mask_dir": mask_dir}
    yield keys
    if (endings := _constant_endings(layout.pairs)) is not None:
        yield {**keys, "image_suffix": endings[0], "mask_suffix": endings[1]}


def _common_folder(pattern: tuple[str, ...]) -> str | None:
    """Return the folders up to those that vary; None if folders with a role follow them."""
    fixed = list(pattern)
    while fixed and fixed[-1] == "*":
        fixed.pop()
    return None if "*" in fixed else "/".join(fixed)


def _constant_endings(pairs: tuple[Pair, ...]) -> tuple[str, str] | None:
    """Return the endings of image and mask names that follow what both have in common, if all pairs have the same."""
    endings = set()
    for pair in pairs:
        image, mask = os.path.basename(pair.image), os.path.basename(pair.mask)
        common = common_beginning(image, mask).rstrip(".")
        endings.add((image[len(common) :], mask[len(common) :]))
    return endings.pop() if len(endings) == 1 else None


def _found(root: Path, keys: Mapping[str, Any], split: str) -> set[tuple[str, str]] | None:
    location = DataLocation("folder", root, **keys, allow_outside_root=True)
    try:
        pairs = find_pairs(location, split)
    except DataError:
        return None
    return {
        (os.path.relpath(pair.image, root), os.path.relpath(pair.mask, root)) for pair in pairs if pair.mask is not None
    }
