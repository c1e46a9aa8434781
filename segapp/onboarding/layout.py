"""A reading of a data folder: which files are images and masks, and how masks are made that are not there yet."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Item = TypeVar("Item")
Mask = NDArray[np.uint8]
WideMask = Mask | NDArray[np.uint16]
"""Ids, (H, W), of 8 bits, or of 16 bits for sets of more than eight classes."""


@dataclass(frozen=True)
class Drawing:
    """How the mask of a pair, or its image, is made from an annotation."""

    origin: str  # file and entry of the annotation, for messages
    content: Any  # what the files depend on; its digest marks the finished ones
    # returns the mask, (H, W); raises DataError, or an error of an entry that cannot be read
    paint: Callable[[], WideMask]
    is_mask_there: bool = False  # the mask is a file of the data; only the image is written
    # returns the image's file with a digest inside, if it is not one on disk already
    image_bytes: Callable[[str], bytes] | None = None
    has_digest: bool = True  # such a file holds the digest; else a file that is there is kept as it is
    preview: str | None = None  # an image of the data that stands for one of `image_bytes` in pictures


@dataclass(frozen=True)
class Pair:
    """An image and its mask, relative to the root; files that are written: to the folder where they are written."""

    image: str
    mask: str
    split: str | None = None  # "train", "val" or "test", if it is known
    split_word: str | None = None  # the split as it is written on disk
    scene: tuple[str, ...] = ()  # folders of its scene
    group: str | None = None  # the patient, video or scene that a table names
    # how the mask or the image is made; None: both are files of the data
    drawing: Drawing | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Layout:
    """A reading of a folder."""

    name: str  # for `--layout`
    pairs: Sequence[Pair]  # sorted by image, or in the order of the annotations, where an image may have several
    confidence: float  # 0 to 1
    evidence: tuple[str, ...] = ()  # sentences
    # lists, tables, annotations and other files of the folder that were read, relative to the root
    sources: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()  # images without a mask, which are left out
    image_pattern: tuple[str, ...] = ()  # folders of the images, with `{split}` and `*`
    mask_pattern: tuple[str, ...] = ()  # folders of the masks
    name_weight: float = 1.0  # factor of the confidence for the words in the names of folders and files
    image_name: str = ""  # folders and ending of the images, to tell layouts with the same masks apart
    naming: str = ""  # shape of the names of the masks, to tell layouts with the same folders apart
    title: str = ""  # of the format of the annotations; empty: images and masks are files of the data
    classes: tuple[str, ...] = ()  # names by id in the masks that are written; empty: the masks say them
    classes_reason: str = ""  # where the names are from
    notes: tuple[str, ...] = ()  # sentences about what is left out of masks that are written
    is_multilabel: bool = False  # a value in its masks is a set of classes: bit c stands for class c

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
