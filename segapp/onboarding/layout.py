"""A reading of a data folder: which files are images and masks, and how masks are made that are not there yet."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
Mask = NDArray[np.uint8]
WideMask = Mask | NDArray[np.uint16]
"""Ids, (H, W), of 8 bits, or of 16 bits for sets of more than eight classes."""


@dataclass(frozen=True)
class Drawing:
    """How the mask of a pair, or its image, is made from an annotation.

    Attributes:
        origin: file and entry of the annotation, for messages.
        content: what the mask depends on; its digest marks the finished file.
        paint: returns the mask, (H, W); raises DataError, or an error of an entry that cannot be read.
        is_mask_there: the mask is a file of the data; only the image is written.
        image_bytes: the image's file, if it is not one on disk already.
        has_image: returns True for such a file that is there and need not be written.
        preview: an image of the data that stands for one of `image_bytes` in pictures.
    """

    origin: str
    content: Any
    paint: Callable[[], WideMask]
    is_mask_there: bool = False
    image_bytes: Callable[[], bytes] | None = None
    has_image: Callable[[Path], bool] = Path.is_file
    preview: str | None = None


@dataclass(frozen=True)
class Pair:
    """An image and its mask, relative to the root; files that are written: to the folder where they are written.

    Attributes:
        image: path of the image.
        mask: path of the mask.
        split: "train", "val" or "test", if it is known.
        split_word: the split as it is written on disk.
        scene: folders of its scene.
        group: the patient, video or scene that a table names.
        drawing: how the mask or the image is made; None: both are files of the data.
    """

    image: str
    mask: str
    split: str | None = None
    split_word: str | None = None
    scene: tuple[str, ...] = ()
    group: str | None = None
    drawing: Drawing | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Layout:
    """A reading of a folder.

    Attributes:
        name: for `--layout`.
        pairs: sorted by image, or in the order of the annotations, where an image may have several.
        confidence: 0 to 1.
        evidence: sentences.
        sources: lists, tables, annotations and other files of the folder that were read, relative to the root.
        unpaired: images without a mask, which are left out.
        image_pattern: folders of the images, with `{split}` and `*`.
        mask_pattern: folders of the masks.
        name_weight: factor of the confidence for the words in the names of folders and files.
        image_name: folders and ending of the images, to tell layouts with the same masks apart.
        naming: shape of the names of the masks, to tell layouts with the same folders apart.
        title: of the format of the annotations; empty: images and masks are files of the data.
        classes: names by id in the masks that are written; empty: the masks say them.
        classes_reason: where the names are from.
        notes: sentences about what is left out of masks that are written.
        is_multilabel: a value in its masks is a set of classes: bit c stands for class c.
    """

    name: str
    pairs: Sequence[Pair]
    confidence: float
    evidence: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()
    image_pattern: tuple[str, ...] = ()
    mask_pattern: tuple[str, ...] = ()
    name_weight: float = 1.0
    image_name: str = ""
    naming: str = ""
    title: str = ""
    classes: tuple[str, ...] = ()
    classes_reason: str = ""
    notes: tuple[str, ...] = ()
    is_multilabel: bool = False

    @property
    def splits(self) -> Counter[str | None]:
        """Number of pairs of each split."""
        return Counter(pair.split for pair in self.pairs)

    @property
    def is_drawn(self) -> bool:
        """True if masks or images are made from annotations."""
        return bool(self.title)

    @property
    def writes(self) -> str:
        """What is written: "masks", with or without images; "images" for masks that are there; "" for neither."""
        first = self.pairs[0].drawing
        return "" if first is None else "images" if first.is_mask_there else "masks"

    @property
    def files(self) -> frozenset[tuple[str, str]]:
        """Images and masks."""
        return frozenset((pair.image, pair.mask) for pair in self.pairs)


def evenly(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return up to `most` items, evenly spread."""
    return items[:: max(1, len(items) // most)][:most]


def by_image(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return pairs in the byte order of their images."""
    return tuple(sorted(pairs, key=lambda pair: os.fsencode(pair.image)))
