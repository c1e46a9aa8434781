"""Copies of masks that were saved with loss or smoothed: each pixel becomes the nearest of the frequent values."""

from __future__ import annotations

import os
from collections.abc import Callable

import numpy as np

from segapp.datasets.convert.conversion import Conversion, Item, Mask
from segapp.datasets.files import ImagePair, shown
from segapp.datasets.layouts.published_classes import Color
from segapp.datasets.survey.class_files import find_class_files
from segapp.datasets.survey.content import dominant_levels, nearest_level, read_contents, stored_pixels
from segapp.datasets.survey.encoding import read_classes
from segapp.datasets.survey.hypotheses import Layout
from segapp.datasets.survey.tree import Tree
from segapp.errors import DataError


def cleaned(tree: Tree, layout: Layout) -> Conversion:
    """Return the conversion of a layout's masks to masks with only the values that are frequent in them.

    Raises:
        DataError: the masks have no frequent values.
    """
    pairs = [ImagePair(tree.root / pair.image, tree.root / pair.mask, pair.image) for pair in layout.pairs]
    content = read_contents(pairs)
    levels = dominant_levels(content)
    if not 2 <= len(levels) <= 64:
        raise DataError(f"{layout.name}: the masks have {len(levels)} frequent values: nothing to clean them by")
    as_rgb = bool(content.colors)
    content.colors.clear()
    content.values.clear()
    for level in levels:
        (content.colors if isinstance(level, tuple) else content.values)[level] = 10**9  # type: ignore[index]
        content.masks_with[level] = content.num_masks
    content.num_lossy = content.num_smooth = 0
    classes = read_classes(content, find_class_files(tree), layout.pairs[0].mask)
    ids = _ids_of(levels, classes.palette, classes.label_map, len(classes.names))
    items = [
        Item(
            pair.image,
            os.path.splitext(pair.mask)[0],
            shown(pair.mask),
            (pair.mask, levels, os.stat(tree.root / pair.mask).st_size),
            _painter(tree, pair.mask, levels, ids, as_rgb=as_rgb),
            pair.split,
            pair.scene,
        )
        for pair in layout.pairs
    ]
    shown_levels = ", ".join(str(list(level)) if isinstance(level, tuple) else str(level) for level in levels[:8])
    return Conversion(
        f"{layout.name}-cleaned",
        f"{layout.name}, cleaned",
        classes.names,
        items,
        layout.confidence,
        layout.evidence,
        classes.names_reason,
        (f"each pixel is the nearest of {len(levels)} frequent values: {shown_levels}", *classes.notes),
    )


def _ids_of(
    levels: list[Color] | list[int], palette: tuple[Color, ...], label_map: object, num_classes: int
) -> list[int]:
    """Return the class of each level, 255 for an ignored one."""
    ids = []
    for level in levels:
        if isinstance(level, tuple):
            number = palette.index(level)
        else:
            number = label_map.get(level, level) if isinstance(label_map, dict) else level
        ids.append(number if 0 <= number < num_classes else 255)
    return ids


def _painter(
    tree: Tree, mask: str, levels: list[Color] | list[int], ids: list[int], *, as_rgb: bool
) -> Callable[[], Mask]:
    table = np.array(ids, np.uint8)

    def paint() -> Mask:
        pixels, _ = stored_pixels(tree.root / mask, as_rgb=as_rgb)
        return table[nearest_level(pixels, levels)]

    return paint
