"""Images that `segapp init` divides one by one, although neighbors in the order of their names look alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np

from segapp.datasets.files import shown
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.reading import read_image
from segapp.datasets.lookalikes import Look, find_lookalikes, look_of
from segapp.errors import DataError
from segapp.onboarding.init.splitting import Division
from segapp.onboarding.survey.hypotheses import Pair

_MAX_IMAGES = 100
_MAX_PX = 2**25
"""Pixels that are read: half a second."""


def neighbor_lines(division: Division, root: Path, pixels: PixelFormat | None, size_px: tuple[int, int]) -> list[str]:
    """Return a warning if validation images look like training images; no line if the names have groups.

    The first images in the order of their names are compared, as many as are read in about half a second.

    Args:
        division: of the images.
        root: of the images.
        pixels: bands and type of the images; None: 8-bit RGB.
        size_px: usual height and width of an image.
    """
    if not division.is_new or division.kind != "image":
        return []
    number = min(_MAX_IMAGES, _MAX_PX // max(1, size_px[0] * size_px[1]))
    first = sorted({pair.image for pair in (*division.train, *division.val)})[:number]
    train, val = (_looks(pairs, first, root, pixels or RGB8) for pairs in (division.train, division.val))
    found = find_lookalikes([look for _, look in val], [look for _, look in train])
    if not found:
        return []
    one, other = val[found[0].number][0], train[found[0].other][0]
    return [
        f"warning: {len(found)} of {len(val)} validation images that were compared look like a training image, such as "
        f"{shown(one)} and {shown(other)}: scores would be too good; keep neighbors together with --group REGEX"
    ]


def _looks(pairs: Sequence[Pair], first: Sequence[str], root: Path, pixels: PixelFormat) -> list[tuple[str, Look]]:
    found = []
    for image in sorted({pair.image for pair in pairs} & set(first)):
        try:
            rgb = pixels.as_rgb(read_image(root / image, pixels))
        except DataError:  # check names it
            continue
        found.append((image, look_of(np.asarray(cv2.cvtColor(rgb, cv2.COLOR_RGB2GRAY), np.uint8))))
    return found
