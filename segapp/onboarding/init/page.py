"""The page of `segapp init --html`: what a folder may be, with pictures of images and masks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from segapp.datasets.files import shown
from segapp.datasets.images.reading import read_picture_of
from segapp.datasets.layouts.published_classes import bit_palette
from segapp.errors import DataError
from segapp.onboarding.convert.conversion import Conversion
from segapp.onboarding.init.candidates import Candidate
from segapp.onboarding.survey.content import stored_pixels
from segapp.onboarding.survey.tree import Tree
from segapp.report.render import data_url, render, save_page

_MAX_CANDIDATES, _MAX_PAIRS = 6, 4
_THUMBNAIL_PX = 240


def save_candidates(out: Path, tree: Tree, found: Sequence[Candidate]) -> None:
    """Write the page.

    Raises:
        StorageError: it cannot be written.
    """
    values = {
        "name": shown(tree.root),
        "candidates": [(candidate, list(_pictures(tree, candidate))) for candidate in found[:_MAX_CANDIDATES]],
    }
    save_page(out, render("init.html.j2", values))


def _pictures(tree: Tree, candidate: Candidate) -> Iterator[tuple[str, Markup, Markup]]:
    """Yield the names and the pictures of some pairs; those that cannot be read are left out."""
    if isinstance(candidate, Conversion):
        for item in candidate.items[:: max(1, len(candidate.items) // _MAX_PAIRS)][:_MAX_PAIRS]:
            try:
                if item.preview is not None:
                    image = read_picture_of(tree.root / item.preview)
                elif item.image_bytes is not None:
                    decoded = cv2.imdecode(np.frombuffer(item.image_bytes(), np.uint8), cv2.IMREAD_COLOR)
                    image = np.asarray(decoded)[..., ::-1]
                else:
                    image = read_picture_of(tree.root / item.image)
                yield shown(item.image), _thumbnail(image), _thumbnail(_colored(item.paint().astype(np.int64)))
            except (DataError, OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, cv2.error):
                continue
        return
    for pair in candidate.pairs[:: max(1, len(candidate.pairs) // _MAX_PAIRS)][:_MAX_PAIRS]:
        try:
            image = read_picture_of(tree.root / pair.image)
            mask, _ = stored_pixels(tree.root / pair.mask, as_rgb=False)
        except (DataError, OSError, ValueError, SyntaxError):
            continue
        yield f"{shown(pair.image)} + {shown(pair.mask)}", _thumbnail(image), _thumbnail(_colored(mask))


def _colored(mask: NDArray[np.uint8] | NDArray[np.uint8 | np.int64]) -> NDArray[np.uint8]:
    """Return a mask as colours: ids (H, W) get distinct ones, colours stay."""
    if mask.ndim == 3:
        return mask.astype(np.uint8)
    colors = np.array([(0, 0, 0), *bit_palette(254, first=1), (255, 255, 255)], np.uint8)
    return np.asarray(colors[np.asarray(mask) & 255])


def _thumbnail(pixels: NDArray[np.uint8]) -> Markup:
    factor = min(1.0, _THUMBNAIL_PX / max(pixels.shape[:2]))
    size = (max(1, round(pixels.shape[1] * factor)), max(1, round(pixels.shape[0] * factor)))
    small = cv2.resize(np.ascontiguousarray(pixels), size, interpolation=cv2.INTER_NEAREST)
    return Markup(data_url(np.asarray(small), ".png"))
