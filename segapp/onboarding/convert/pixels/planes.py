"""Masks of single classes become one mask: of classes that exclude each other, or of sets of classes.

Which of the two is measured: by the share of the labelled pixels that belong to several classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from segapp.errors import DataError
from segapp.onboarding.convert.conversion import Conversion, WideMask

Plane = NDArray[np.bool_]

FEW, MANY = 0.005, 0.05
"""Shares of the labelled pixels with several classes: below the first, classes exclude each other (borders that touch);
above the second they do not; between them the choice is the user's."""
MAX_SETS = 16
"""Most classes of masks of sets: the bits of a PNG's value."""
_UNLIKELY = 0.5


def combine(planes: Mapping[int, Plane], shape: tuple[int, int], num_classes: int, *, is_multilabel: bool) -> WideMask:
    """Return the mask of an image (H, W).

    Args:
        planes: the pixels (H, W) of each class, counted from 0 without the background.
        shape: height and width.
        num_classes: without the background.
        is_multilabel: the value is a set of classes, bit c for class c; else class c is c + 1, 0 is the background,
            and smaller areas lie on top of larger ones.

    Raises:
        ValueError: a plane has another shape.
    """
    for plane in planes.values():
        if plane.shape != shape:
            raise ValueError(
                f"a mask of {plane.shape[1]} x {plane.shape[0]} pixels for an image of {shape[1]} x {shape[0]}"
            )
    if is_multilabel:
        sets = np.zeros(shape, np.uint16)
        for number, plane in planes.items():
            sets |= plane.astype(np.uint16) << number
        return sets if num_classes > 8 else sets.astype(np.uint8)
    mask = np.zeros(shape, np.uint8)
    for number in sorted(planes, key=lambda number: (-int(planes[number].sum()), number)):
        mask[planes[number]] = number + 1
    return mask


def overlap_share(images: Iterable[Sequence[Plane]]) -> float:
    """Return the share of the labelled pixels that belong to several classes; 0 without any.

    Planes of other shapes than the first of their image are left out: converting the image names them.
    """
    labelled = several = 0
    for planes in images:
        counts = sum(plane.astype(np.uint8) for plane in planes if plane.shape == planes[0].shape)
        labelled += int(np.count_nonzero(counts))
        several += int(np.count_nonzero(np.asarray(counts) > 1))
    return several / labelled if labelled else 0.0


def both_readings(
    share: float, names: Sequence[str], build: Callable[[tuple[str, ...], bool], Conversion]
) -> list[Conversion]:
    """Return the conversions to classes that exclude each other and to sets of classes, the likelier one first.

    Args:
        share: of the labelled pixels that belong to several classes.
        names: of the classes, without the background.
        build: returns a conversion for names with the background and False, or without it and True.

    Raises:
        DataError: classes overlap that are too many for sets.
    """
    if len(names) == 1:
        return [build(("background", *names), False)]
    said = f"{share:.1%} of the labelled pixels belong to several classes"
    exclusive = build(("background", *names), False)
    if len(names) > MAX_SETS:
        if share > MANY:
            raise DataError(
                f"{said}, and masks of sets hold {MAX_SETS} classes, not {len(names)}: list a mask for each class with "
                "data.multilabel: files (segapp docs multilabel)"
            )
        return [replace(exclusive, evidence=(*exclusive.evidence, said))]
    sets = build(tuple(names), True)
    likely, unlikely = (exclusive, sets) if share < (FEW + MANY) / 2 else (sets, exclusive)
    is_open = FEW < share < MANY
    rest = likely.confidence * (1 if is_open else _UNLIKELY)
    words = {False: "one class per pixel", True: "several classes per pixel"}
    return [
        replace(one, confidence=confidence, evidence=(*one.evidence, f"{said}: {words[one.is_multilabel]}"))
        for one, confidence in ((likely, likely.confidence), (unlikely, rest))
    ]
