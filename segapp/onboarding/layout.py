"""An interpretation of a data folder: which files are images and masks, and how missing masks are made."""

import math
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.orientation import Size
from segapp.errors import DataError

_MAX_CORNER = 2**28  # OpenCV computes with integers of 32 bits

Mask = NDArray[np.uint8]
"""Ids, (H, W)."""


@dataclass
class DrawnMask:
    """A mask whose objects are drawn in the pixels of the image that was annotated, which may have another size."""

    mask: Mask  # (H, W)
    drawn_px: Size  # height and width of the image that was annotated
    reach: float = 0.0  # the largest distance of a corner from the opposite side, as a share of the image's side
    # the largest x and y of a corner; infinite with a piece, whose pixels are whole numbers
    far_px: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))

    @property
    def num_px(self) -> int:
        return math.prod(self.drawn_px)

    def scaled(self, points: NDArray[np.float64], offset: float = 0.0) -> NDArray[np.float64]:
        """Return points (V, 2) in pixels of the mask; (0, 0) lies `offset` from the corner of the first pixel."""
        if (points == points[0]).all():
            raise ValueError("the outline has no area: its corners are one point")
        shape, sides = (np.array(size[::-1]) for size in (self.mask.shape, self.drawn_px))
        self.far_px = np.maximum(self.far_px, np.abs(points).max(axis=0))
        self._note_reach(points)
        scaled = points if self.drawn_px == self.mask.shape else (points + offset) * (shape / sides) - offset
        if np.abs(scaled).max() > _MAX_CORNER:
            raise ValueError(f"a corner lies {np.abs(scaled).max():.0f} pixels away: is its unit pixels?")
        return scaled

    def _note_reach(self, points: NDArray[np.float64]) -> None:
        shares = points / self.drawn_px[::-1]
        self.reach = max(self.reach, float(np.abs(shares - 0.5).max()) + 0.5)

    def paste(self, piece: NDArray[np.bool_], left: int, top: int, value: int) -> None:
        """Set the pixels of a piece; parts outside the image are cut off."""
        height, width = piece.shape
        self.far_px = np.full(2, np.inf)
        self._note_reach(np.array([(left, top), (left + width, top + height)]))
        places, sources = [], []
        for side, drawn, first, length in zip(self.mask.shape, self.drawn_px, (top, left), piece.shape, strict=True):
            own = ((np.arange(side) + 0.5) * drawn / side).astype(int) - first  # the nearest to each center
            places.append(np.flatnonzero((own >= 0) & (own < length)))
            sources.append(own[places[-1]])
        part = self.mask[np.ix_(*places)]
        part[piece[np.ix_(*sources)]] = value
        self.mask[np.ix_(*places)] = part


@dataclass(frozen=True)
class Drawing:
    """How the mask of a pair, or its image, is made from an annotation."""

    origin: str  # file and entry of the annotation, for messages
    # returns the mask, (H, W), unless it is a file of the data set; raises DataError, or an error of reading an entry
    paint: Callable[[DrawnMask], Mask] | None
    # returns the image's file, unless the image is a file of the data set
    image_bytes: Callable[[], bytes] | None = None
    sides: tuple[Any, Any] = (None, None)  # height and width of the image in the annotation, which may be anything


@dataclass(frozen=True)
class Pair:
    """An image and its mask, relative to the root; written files are relative to the folder where they are written."""

    image: str
    mask: str
    split: str | None = None  # "train", "val" or "test", if it is known
    scene: tuple[str, ...] = ()  # folders of its scene
    group: str | None = None  # the patient, video or scene in a table
    valid_area: str = ""  # the field of view of the image, outside which its mask is ignored; "": everywhere valid
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
    notes: tuple[str, ...] = ()  # sentences about omissions in the masks

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
        return frozenset((pair.image, pair.mask) for pair in self.pairs)


def by_image(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
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
