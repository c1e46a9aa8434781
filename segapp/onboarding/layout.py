"""An interpretation of a data folder: which files are images and masks, and how missing masks are made."""

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from segapp.errors import DataError

Item = TypeVar("Item")
Mask = NDArray[np.uint8]
"""Ids, (H, W)."""


@dataclass(frozen=True)
class Drawing:
    """How the mask of a pair, or its image, is made from an annotation."""

    origin: str  # file and entry of the annotation, for messages
    # returns the mask, (H, W), unless it is a file of the data set; raises DataError, or an error of reading an entry
    paint: Callable[[], Mask] | None
    # returns the image's file, unless the image is a file of the data set
    image_bytes: Callable[[], bytes] | None = None


@dataclass(frozen=True)
class Pair:
    """An image and its mask, relative to the root; written files are relative to the folder where they are written."""

    image: str
    mask: str
    split: str | None = None  # "train", "val" or "test", if it is known
    scene: tuple[str, ...] = ()  # folders of its scene
    group: str | None = None  # the patient, video or scene in a table
    # how the mask or the image is made; None: both are files of the data
    drawing: Drawing | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Layout:
    """An interpretation of a folder."""

    name: str  # for `--layout`
    pairs: Sequence[Pair]  # sorted by image, or in the order of the annotations, where an image may have several
    confidence: float  # 0 to 1
    evidence: tuple[str, ...] = ()  # sentences
    # lists, tables, annotations and other files of the folder that were read, relative to the root
    sources: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()  # images without a mask, which are left out
    image_name: str = ""  # folders and ending of the images, to distinguish layouts with the same masks
    naming: str = ""  # shape of the mask names, to distinguish layouts with the same folders
    title: str = ""  # format of the annotations; empty: images and masks are files of the data set
    classes: tuple[str, ...] = ()  # names by id in the written masks; empty: determined from the masks
    classes_reason: str = ""  # source of the names
    notes: tuple[str, ...] = ()  # sentences about omissions in the written masks

    @property
    def is_drawn(self) -> bool:
        """True if masks or images are made from annotations."""
        return bool(self.title)

    @property
    def writes(self) -> str:
        """Kind of the written files: "masks", with or without images; "images" if masks exist; "" for none."""
        first = self.pairs[0].drawing
        return "" if first is None else "images" if first.paint is None else "masks"

    @property
    def files(self) -> frozenset[tuple[str, str]]:
        """Images and masks."""
        return frozenset((pair.image, pair.mask) for pair in self.pairs)


def evenly(items: Sequence[Item], most: int) -> Sequence[Item]:
    """Return up to `most` items, evenly spread."""
    return items[:: max(1, -(-len(items) // most))]


def by_image(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """Return pairs sorted by the bytes of their image paths."""
    return tuple(sorted(pairs, key=lambda pair: os.fsencode(pair.image)))


SURE = 0.6  # confidence below which the user is asked about an interpretation, even if there is no other


class OpenQuestionError(DataError):
    """A folder has several plausible interpretations, or an unlikely one, and no option chooses one.

    The message names the option and its possible values.

    Attributes:
        option: the option that answers it, such as `--layout`.
        answers: its possible values, most likely first, with their meaning in words.
    """

    option: str
    answers: Mapping[str, str]


def open_question(question: str, option: str, answers: Mapping[str, str], advice: str = "") -> OpenQuestionError:
    """Return the error for a question, a sentence without an end mark; the first answer is the most likely one."""
    listed = "; ".join(f"{option} {shlex.quote(value)} ({words})" for value, words in answers.items())
    error = OpenQuestionError(f"{question}: answer with {listed}" + (f"; {advice}" if advice else ""))
    error.option, error.answers = option, answers
    return error
