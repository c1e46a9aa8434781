"""Copies of instance masks with the classes of their instances."""

import os
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import shown
from segapp.errors import DataError
from segapp.onboarding.content import stored_pixels
from segapp.onboarding.conversion import MAX_CLASSES, mask_target
from segapp.onboarding.encoding import INSTANCE_STEP, MASK_KINDS
from segapp.onboarding.layout import Drawing, Layout, Mask
from segapp.onboarding.tree import Tree


def classes_of_instances(tree: Tree, layout: Layout, kind: str) -> Layout:
    """Return the conversion of a layout's instance masks of a kind of `MASK_KINDS` to masks of classes."""
    pairs = []
    for pair in layout.pairs:
        content = (kind, pair.mask, os.stat(tree.root / pair.mask).st_size)
        drawing = Drawing(shown(pair.mask), content, partial(_classes_of, tree, pair.mask, kind))
        pairs.append(replace(pair, mask=f"{mask_target(pair.mask)}.png", split_word=None, drawing=drawing))
    return replace(
        layout,
        name=f"{layout.name}-{kind}",
        pairs=pairs,
        sources=tuple(dict.fromkeys([*layout.sources, *(pair.mask for pair in layout.pairs)])),
        title=f"{layout.name}, {kind}",
        notes=(f"--masks {kind}: {MASK_KINDS[kind]}",),
    )


def _classes_of(tree: Tree, mask: str, kind: str) -> Mask:
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
