"""The figure of the page `masks`: an image, its mask in an image viewer, the mask in colors, and its ignored pixels.

python -m tests.support.mask_figure --write   writes segapp/docs/pictures/masks.png
"""

from __future__ import annotations

import sys

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from segapp.assembly.pairs import build_pairs, build_scheme
from segapp.config import load_config
from segapp.datasets.images.reading import read_image
from segapp.datasets.masks import read_mask
from tests.support import ROOT

FIGURE = ROOT / "segapp" / "docs" / "pictures" / "masks.png"
GAP_PX = 6
GRAY = 127
"""Of the gaps between the parts, in a light and in a dark theme."""


def figure() -> NDArray[np.uint8]:
    """Return the four parts in two rows, (H, W, 3), read and colored as a training does."""
    data = load_config(ROOT / "configs/demo.yaml", [f"data.root={ROOT / 'data/demo'}"]).data
    scheme, pair = build_scheme(data), build_pairs(data, "val")[0]
    ids = read_mask(pair.mask, scheme)
    is_ignored = ids == scheme.ignore_index
    colors = np.array([*scheme.palette, (0, 0, 0)], np.uint8)
    as_viewed = np.repeat(np.array(Image.open(pair.mask))[..., None], 3, 2)
    parts = [
        read_image(pair.image),
        as_viewed,
        colors[np.where(is_ignored, len(scheme.palette), ids)],
        np.repeat(np.where(is_ignored, 255, 0).astype(np.uint8)[..., None], 3, 2),
    ]
    height, width = ids.shape
    page = np.full((2 * height + GAP_PX, 2 * width + GAP_PX, 3), GRAY, np.uint8)
    for number, part in enumerate(parts):
        top, left = number // 2 * (height + GAP_PX), number % 2 * (width + GAP_PX)
        page[top : top + height, left : left + width] = part
    return page


def main() -> None:
    """Write the figure."""
    if "--write" in sys.argv[1:]:
        Image.fromarray(figure()).save(FIGURE, optimize=True)


if __name__ == "__main__":
    main()
