"""Recognize published data sets by the colors in masks or the names of files."""

import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from segapp.datasets.layouts.formats import DATASETS, DataLocation, find_pairs
from segapp.datasets.layouts.published_classes import PUBLISHED, Color, PublishedSet
from segapp.errors import DataError
from segapp.onboarding.layout import Layout, Pair
from segapp.onboarding.tree import Tree

PALETTES = tuple(known for known in PUBLISHED.values() if known.colors)
"""The data sets whose masks may be images of colors."""
_LEAST_SHARE = 0.4
_LEAST_COLORS = 4
_MIN_RARE = 2  # number of colors that no other palette has and that do not occur by chance


def recognise(colors: Collection[Color]) -> list[PublishedSet]:
    """Return the palettes that have all the colors, best match first; none if there are few colors."""
    found = []
    for palette in PALETTES:
        own, named = set(colors) - set(palette.ignored_colors), set(palette.colors)
        least = max(_LEAST_COLORS, len(named) // 15)  # many colors of a large palette also occur in others
        if own <= named and (len(own) >= least or (len(own) >= 2 and len(own) / len(named) >= _LEAST_SHARE)):
            found.append((len(own) / len(named), palette))
    return [palette for _, palette in sorted(found, key=lambda one: -one[0])]


def is_certain(palette: PublishedSet, colors: Collection[Color], mask: str) -> bool:
    """Return True if the colors are almost certainly from this data set.

    That is the case if all colors of the palette occur, or two that no other palette has, or if a folder is named after
    the data set. Few colors may come from an unknown data set: black, red, green and blue occur in most palettes.
    """
    own = set(colors) & set(palette.colors)
    others = {color for other in PALETTES if _family(other) != _family(palette) for color in other.colors}
    plain = {color for color in own if set(color) <= {0, 255} or set(color) <= {0, 128}}  # red, green, blue, their sums
    num_rare = len(own - plain - others)
    return num_rare >= _MIN_RARE or len(own) == len(set(palette.colors)) or _family(palette) in mask.lower()


def _family(palette: PublishedSet) -> str:
    """Return the name that all palettes of a data set share."""
    return palette.title.lower().replace("pascal ", "").split()[0]


def recognise_values(mask: str, values: Collection[int]) -> PublishedSet | None:
    """Return the data set with the folders of a mask and these values, apart from 255."""
    for known in PUBLISHED.values():
        if known.masks and re.search(known.masks, mask) and set(values) <= known.values.keys() | set(known.ignored_ids):
            return known
    return None


def published_layout(tree: Tree) -> Layout | None:
    """Return the layout of a published data set, named after its format; None for other folders."""
    for format, known in PUBLISHED.items():
        splits = [pairs_of_format(tree.root, format, split) for split in ("train", "val")] if known.images else [[]]
        if not all(splits):
            continue
        pairs = [pair for found in splits for pair in found]
        if sum(re.fullmatch(known.images, Path(pair.image).stem) is not None for pair in pairs) < 0.9 * len(pairs):
            continue
        evidence = (f"folders and names of {format}: {DATASETS[format].expected}",)
        return Layout(format, tuple(pairs), 0.99, evidence)
    return None


def pairs_of_format(root: Path, format: str, split: str, **keys: Any) -> list[Pair]:
    """Return the pairs that a format of `DATASETS` finds, relative to the root; none if it finds no complete split.

    The keyword arguments are further attributes of `DataLocation`.
    """
    try:
        found = find_pairs(DataLocation(format, root, **keys, allow_outside_root=True), split)
    except DataError:
        return []
    masked = ((pair.image, pair.mask) for pair in found if pair.mask is not None)
    return [Pair(os.path.relpath(image, root), os.path.relpath(mask, root), split) for image, mask in masked]
