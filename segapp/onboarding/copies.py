"""Copies of masks whose pixels are no class ids: smoothed or lossy ones, instance numbers, opacity."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import ImagePair, open_bytes, read_bytes, read_header, shown
from segapp.datasets.layouts.published_classes import Color
from segapp.errors import DataError
from segapp.onboarding.class_files import find_class_files
from segapp.onboarding.content import (
    UNREADABLE,
    MaskContent,
    Value,
    dominant_levels,
    nearest_level,
    read_contents,
    stored_pixels,
)
from segapp.onboarding.conversion import IGNORED, MAX_CLASSES, mask_target
from segapp.onboarding.encoding import INSTANCE_STEP, MASK_KINDS, Classes, MaskChoices, read_classes
from segapp.onboarding.layout import Drawing, Layout, Mask
from segapp.onboarding.tree import Tree


def copies_of(tree: Tree, layout: Layout, choices: MaskChoices, *, clean: bool) -> Layout | None:
    """Return the conversion of a layout's masks to masks of class ids; None if they can be used unchanged.

    With `clean`, each pixel gets the nearest frequent value; DataError is raised if there are none.
    """
    if clean:
        return cleaned(tree, layout, choices)
    if choices.masks not in (None, "ids"):
        kind = choices.masks
        note = f"--masks {kind}: {MASK_KINDS[kind]}"
        return _copied(tree, layout, kind, lambda mask: _classes_of_instances(tree, mask, kind), note)
    if _are_opacity(tree, layout):
        note = "the masks have one color, and the object is where they are opaque"
        return _copied(tree, layout, "opacity", lambda mask: (_rgba(tree, mask)[..., 3] > 0).astype(np.uint8), note)
    return None


def _copied(
    tree: Tree,
    layout: Layout,
    kind: str,
    read: Callable[[str], Mask],
    note: str,
    classes: Classes | None = None,
    more: Any = None,
) -> Layout:
    """Return the conversion that writes a copy of each mask; `read` returns the copy for the mask's path.

    Without `classes`, they are read from the copies; these depend on `more` in addition to the mask.
    """
    classes = classes or Classes((), "")
    pairs = []
    for pair in layout.pairs:
        content = (kind, pair.mask, more, os.stat(tree.root / pair.mask).st_size)
        drawing = Drawing(shown(pair.mask), content, partial(read, pair.mask))
        pairs.append(replace(pair, mask=f"{mask_target(pair.mask)}.png", split_word=None, drawing=drawing))
    return Layout(
        f"{layout.name}-{kind}",
        pairs,
        layout.confidence,
        layout.evidence,
        tuple(dict.fromkeys([*layout.sources, *(pair.mask for pair in layout.pairs)])),
        title=f"{layout.name}, {kind}",
        classes=classes.names,
        classes_reason=classes.names_reason,
        notes=(note, *classes.notes),
    )


def cleaned(tree: Tree, layout: Layout, choices: MaskChoices) -> Layout:
    """Return the conversion of a layout's masks to masks that have only the frequent values."""
    pairs = [ImagePair(tree.root / pair.image, tree.root / pair.mask, pair.image) for pair in layout.pairs]
    content = read_contents(pairs)
    levels = dominant_levels(content)
    if not 2 <= len(levels) <= 64:
        raise DataError(f"{layout.name}: the masks have {len(levels)} frequent values: too few to clean the masks")
    as_rgb = bool(content.colors)
    classes = read_classes(
        _with_levels(content, levels),
        find_class_files(tree),
        [pair.mask for pair in layout.pairs],
        replace(choices, masks="ids"),
    )
    table = np.array([IGNORED if (own := classes.class_of(level)) is None else own for level in levels], np.uint8)
    named = ", ".join(str(list(level)) if isinstance(level, tuple) else str(level) for level in levels[:8])
    return _copied(
        tree,
        layout,
        "cleaned",
        lambda mask: table[nearest_level(stored_pixels(tree.root / mask, as_rgb=as_rgb)[0], levels)],
        f"each pixel is the nearest of {len(levels)} frequent values: {named}",
        classes,
        levels,
    )


def _with_levels(content: MaskContent, levels: list[Color] | list[int]) -> MaskContent:
    """Return the content of masks after each pixel is set to the nearest of some values or colors."""
    nearest: Counter[Any] = Counter()
    stored: list[Any] = list(content.colors or content.values)
    for one, number in zip(stored, nearest_level(np.array([stored]), levels)[0].tolist(), strict=True):
        nearest[levels[number]] += content.pixels_of(one)
    masks_with: Counter[Value] = Counter(dict.fromkeys([*levels], content.num_masks))
    values, colors = (Counter(), nearest) if content.colors else (nearest, Counter())
    return MaskContent(content.num_masks, content.num_all, values=values, colors=colors, masks_with=masks_with)


def _classes_of_instances(tree: Tree, mask: str, kind: str) -> Mask:
    """Return the classes of an instance mask; raise DataError if a class does not fit into 8 bits."""
    stored, _ = stored_pixels(tree.root / mask, as_rgb=False)
    classes: NDArray[Any]
    if kind == "object":
        classes = np.asarray(stored.any(axis=2) if stored.ndim == 3 else stored > 0)
    else:
        classes = stored // INSTANCE_STEP
    if kind == "panoptic":
        classes = np.where(stored < INSTANCE_STEP, stored, classes)
    if int(classes.max()) > MAX_CLASSES:
        raise DataError(
            f"{shown(mask)}: class {int(classes.max())}, but 8-bit masks hold at most {MAX_CLASSES} classes", path=mask
        )
    return classes.astype(np.uint8)


def _are_opacity(tree: Tree, layout: Layout) -> bool:
    """Return True if all masks have the same single color and opacity 0 or 255; DataError for other opacities."""
    colors: set[tuple[int, ...]] = set()
    opacities: set[int] = set()
    try:
        if read_header(tree.root / layout.pairs[0].mask).mode not in ("LA", "PA", "RGBA"):
            return False
        for pair in layout.pairs:
            pixels = np.unique(_rgba(tree, pair.mask).reshape(-1, 4), axis=0)
            colors |= {tuple(color) for color in pixels[:, :3].tolist()}
            opacities |= set(pixels[:, 3].tolist())
            if len(colors) > 1:
                return False
    except UNREADABLE:
        return False
    if len(opacities) > 1 and opacities != {0, 255}:
        raise DataError(
            f"the masks have one color, and {len(opacities)} values of opacity, such as "
            f"{shown(layout.pairs[0].mask)}: export them as PNG of ids without smoothing and without transparency"
        )
    return len(opacities) > 1


def _rgba(tree: Tree, mask: str) -> NDArray[np.uint8]:
    path = tree.root / mask
    return np.asarray(open_bytes(read_bytes(path), path).convert("RGBA"))
