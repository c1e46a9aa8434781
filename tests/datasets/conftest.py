"""Fixtures of the data tests."""

from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from segapp.datasets.files import ImagePair
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.layouts.schemes import ClassScheme
from tests.support.drawn_data import NUM_CLASSES, draw_image, draw_mask


@pytest.fixture
def scheme() -> ClassScheme:
    return class_scheme("folder", classes=[f"class {i}" for i in range(NUM_CLASSES)])


@pytest.fixture
def write_pairs(tmp_path: Path) -> Callable[..., tuple[ImagePair, ...]]:
    """Write drawn pairs of the given sizes and return them."""

    def write(sizes: list[tuple[int, int]], folder: str = "set") -> tuple[ImagePair, ...]:
        place = tmp_path / folder
        place.mkdir()
        pairs = []
        for i, (height, width) in enumerate(sizes):
            image, mask = place / f"{i:03}.png", place / f"{i:03}_mask.png"
            Image.fromarray(draw_image(i, height, width)).save(image, compress_level=1)
            Image.fromarray(draw_mask(i, height, width)).save(mask)
            pairs.append(ImagePair(image, mask, f"{i:03}"))
        return tuple(pairs)

    return write
