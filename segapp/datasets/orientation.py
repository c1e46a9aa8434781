"""The header of an image, and how a mask or an annotation lies on it, which its size may tell.

A drawing was made on the upright image, as viewers show it, or on the raw one, as the file stores its pixels.
"""

import operator
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from segapp.datasets.images.pixel_format import Pixels, StoredPixels

Size = tuple[int, int]
"""Height and width in pixels."""
Fit = Literal["upright", "raw", "either", "neither"]
"""The image that a drawing fits; either: its size is unknown, or fits both."""


@dataclass(frozen=True)
class Header:
    """Header of an image file."""

    format: str  # Pillow's name
    height_px: int  # height with the EXIF orientation applied
    width_px: int  # width with the EXIF orientation applied
    orientation: int = 1  # EXIF orientation, 1 to 8; 1: stored upright
    stored: StoredPixels | None = None  # the pixels of a PNG or a TIFF; None for formats whose decoder reports them

    @property
    def size_px(self) -> Size:
        """Upright height and width."""
        return self.height_px, self.width_px

    @property
    def raw_px(self) -> Size:
        return self.size_px[::-1] if self.orientation >= 5 else self.size_px


def upright(pixels: Pixels, orientation: int) -> Pixels:
    """Return pixels (H, W, ...) with an EXIF orientation applied (CIPA DC-008, 4.6.5.1.6)."""
    if orientation in {5, 6, 7, 8}:
        pixels = pixels.swapaxes(0, 1)
    if orientation in {3, 4, 7, 8}:
        pixels = pixels[::-1]
    if orientation in {2, 3, 6, 7}:
        pixels = pixels[:, ::-1]
    return np.ascontiguousarray(pixels)


def has_same_ratio(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    """Return True if one size is the other one, scaled and rounded to pixels.

    >>> [has_same_ratio((67, 100), other) for other in [(134, 200), (1000, 1500), (100, 100), (1, 1)]]
    [True, True, False, False]
    """
    difference = abs(one[0] * other[1] - one[1] * other[0])
    return difference < min(max(sum(one), sum(other)), 0.05 * one[0] * other[1])


def fit_of(image: Header, drawn_px: Size | None, *, may_scale: bool = False) -> Fit:
    """Return the image that a drawing of this size fits; with `may_scale`, the ratio of the sides decides at last."""
    # An equal size says more than an equal ratio.
    for agree in (operator.eq, has_same_ratio)[: 1 + may_scale]:
        is_upright, is_raw = (drawn_px is None or agree(size, drawn_px) for size in (image.size_px, image.raw_px))
        if is_upright or is_raw:
            return "either" if is_upright and is_raw else "raw" if is_raw else "upright"
    return "neither"


def fit_of_mask(image: Header, mask: Header) -> Fit:
    """Return the image that a mask file fits; a mask with an EXIF orientation of its own is read upright."""
    if mask.orientation == 1:
        return fit_of(image, mask.size_px)
    return "upright" if mask.size_px == image.size_px else "neither"


_SAID = {
    "scaled": "{} images were annotated at another size, such as {}: their objects are scaled",
    "unsized": "{} images have no size in their annotation, such as {}: they are drawn as they are, unlike others",
    "beyond": "{} images have objects that leave them, such as {}: they are cut off; were they drawn at another size?",
    "raw": "{} photos have the size of their mask or annotation only before their EXIF orientation is applied, such as "
    "{}: these are read so, and turned upright",
    "either": "{} photos have an EXIF orientation; masks are taken to be drawn on the upright photo, because sizes do "
    "not tell: compare {} with its mask, and if one is turned or mirrored, {}",
}


@dataclass
class Turns:
    """The turns and the sizes of the drawings of a data set, counted for the messages about them."""

    choice: str | None = None  # `data.mask_orientation`, for drawings that fit the raw and the upright image
    num_images: int = 0
    names: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # of the images by a key of _SAID

    def turn(self, image: Header, fit: Fit, name: str) -> int:
        """Return the EXIF orientation that makes a drawing upright, and count its image."""
        self.num_images += 1
        if image.orientation != 1:
            self.names[fit].append(name)
        return image.orientation if fit == "raw" or (fit == "either" and self.choice == "raw") else 1

    def lines(self, option: str) -> Iterator[tuple[str, str]]:
        """Yield sentences on sizes that tell and on the assumption, each after its first image; `option` changes it."""
        is_said = {"either": self.choice is None, "unsized": bool(self.names["scaled"] or self.names["raw"])}
        for kind, said in _SAID.items():
            if (names := self.names[kind]) and is_said.get(kind, True):
                yield names[0], said.format(f"{len(names)} of {self.num_images}", names[0], option)
