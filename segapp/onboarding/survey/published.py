"""Recognise the published data sets that have a format of their own, by their folders and names of files."""

from __future__ import annotations

import os
import re
from pathlib import Path

from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import DATASETS, DataLocation, find_pairs
from segapp.errors import DataError
from segapp.onboarding.survey.hypotheses import Layout, Pair
from segapp.onboarding.survey.tree import Tree

_NAMES = {
    "cityscapes": r".*_leftImg8bit",
    "camvid": r"(0001TP|0006R0|0016E5|Seq05VD)_\w+",
    "voc": r"\d{4}_\d{6}",
    "ade20k": r"ADE_(train|val|valid|validation|test)_\d+",
}
"""Names of the published images; other images in the same folders have classes of their own."""


def published_layout(tree: Tree) -> Layout | None:
    """Return the layout of a published data set, named after its format; None for other folders."""
    for format, expression in _NAMES.items():
        splits = {}
        for split in ("train", "val"):
            splits[split] = _pairs(tree, format, split)
        if not splits["train"] or not splits["val"]:
            continue
        pairs = [pair for found in splits.values() for pair in found]
        known = sum(re.fullmatch(expression, pair.image.stem) is not None for pair in pairs)
        if known < 0.9 * len(pairs):
            continue
        placed = [
            Pair(_relative(pair.image, tree.root), _relative(pair.mask, tree.root), split)
            for split, found in splits.items()
            for pair in found
            if pair.mask is not None
        ]
        evidence = (f"folders and names of {format}: {DATASETS[format].expected}",)
        return Layout(format, tuple(placed), 0.99, evidence)
    return None


def _pairs(tree: Tree, format: str, split: str) -> tuple[ImagePair, ...]:
    try:
        return find_pairs(DataLocation(format, tree.root, allow_outside_root=True), split)
    except DataError:
        return ()


def _relative(path: Path, root: Path) -> str:
    return os.path.relpath(path, root)
