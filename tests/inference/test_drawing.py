"""The picture of a batch, against images, colors and positions by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from segapp.datasets.images.pixel_format import RGB8, PixelFormat, Range
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.pool import Batch
from segapp.datasets.preprocessing import Preprocessing
from segapp.inference import drawing
from segapp.inference.drawing import draw_batch

PALETTE = ((200, 40, 0), (20, 60, 220), (90, 255, 10))
SCHEME = ClassScheme(("road", "sky", "tree"), PALETTE, ignore_index=1)
SETS = ClassScheme(("road", "sky", "tree"), PALETTE, ignore_index=-1, multilabel="bits")
RANGES: tuple[Range, ...] = ((0, 1000), (100, 600), (50, 2050), (0, 10))


def drawn(images: NDArray[Any], target: NDArray[Any], scheme: ClassScheme, pixels: PixelFormat = RGB8) -> NDArray[Any]:
    """The picture of images (N, B, H, W) in fp16, whose mean and std differ per band."""
    mean, std = ((0.5, 0.1, 0.3, 0.7)[: pixels.num_bands], (0.2, 0.3, 0.1, 0.4)[: pixels.num_bands])
    preprocessing = Preprocessing(replace(pixels, mean=mean, std=std), torch.float16)
    batch = Batch(torch.from_numpy(images), torch.from_numpy(target), tuple(range(len(images))))
    return draw_batch(batch, preprocessing, scheme).astype(int)


def stripes(height: int, width: int) -> NDArray[Any]:
    return np.array([[(110, 190)[(y + x) // 4 % 2] for x in range(width)] for y in range(height)])[..., None]


def as_shown(values: Any, ranges: tuple[Range, ...]) -> NDArray[Any]:
    """Bands (b, H, W) as colors (H, W, b)."""
    bands = [(band - low) / (high - low) for band, (low, high) in zip(values, ranges, strict=True)]
    return 255 * np.clip(np.nan_to_num(np.stack(bands, axis=-1)), 0, 1)


@pytest.mark.parametrize("kind", ["8-bit RGB", "uint16 of 4 bands", "float32 of 1 band"])
def test_batch_is_drawn_in_the_colors_of_its_files(kind: str) -> None:
    """Three samples of 20 x 33 px lie in two rows of two; class 1 is ignored."""
    rng, (height, width) = np.random.default_rng(4), (20, 33)
    target = rng.integers(0, 3, (3, height, width)).astype(np.uint8)
    if kind == "8-bit RGB":
        pixels, images = RGB8, rng.integers(0, 256, (3, 3, height, width), np.uint8)
        expected = list(images.transpose(0, 2, 3, 1))
    elif kind == "uint16 of 4 bands":
        pixels = PixelFormat((4, 2, 1, 7), "uint16", RANGES)
        images = rng.integers(0, 1200, (3, 4, height, width), np.uint16)
        expected = [as_shown(image[:3].astype(float), RANGES[:3]) for image in images]
    else:
        pixels = PixelFormat((2,), "float32", ((-1.0, 3.0),))
        images = rng.uniform(-2, 4, (3, 1, height, width)).astype(np.float32)
        expected = [np.repeat(as_shown(image, ((-1.0, 3.0),)), 3, axis=2) for image in images]
        images[:, :, 5:9, 7:11] = np.nan
        for image in expected:
            image[5:9, 7:11] = 0
    picture = drawn(images, target, SCHEME, pixels)
    assert picture.shape == (2 * height + 2, 2 * width + 2, 3)
    for number, (top, left) in enumerate([(0, 0), (0, width + 2), (height + 2, 0)]):
        ids = target[number]
        colors = np.where((ids == 1)[..., None], stripes(height, width), np.array(PALETTE)[ids])
        found = picture[top : top + height, left : left + width]
        np.testing.assert_allclose(found, (expected[number] + colors) / 2, atol=1.01)
    assert (picture[height : height + 2] == 255).all()
    assert (picture[height:, width:] == 255).all()


def test_sets_of_classes_have_mean_colors_or_none() -> None:
    target = np.array([[[0, 0b1, 0b101, -1, 0b110]]], np.int32).repeat(6, 1)
    picture = drawn(np.full((1, 3, 6, 5), 100, np.uint8), target, SETS)
    for column, color in enumerate([(100, 100, 100), PALETTE[0], (145, 147, 5), None, (55, 157, 115)]):
        own = stripes(6, 5)[:, column] if color is None else np.array(color)
        np.testing.assert_allclose(picture[:, column], np.broadcast_to((own + 100) / 2, (6, 3)), atol=1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("count", "size"), [(11, (450, 320)), (8, (350, 701)), (5, (1500, 250)), (1, (1050, 550)), (2, (200, 2501))]
)
def test_large_batch_is_reduced(count: int, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """The gray samples are in order, in the shape of their crop; there are at most eight."""
    assert drawing.MAX_BATCH_PX == 2e6
    monkeypatch.setattr(drawing, "MAX_BATCH_PX", drawing.MAX_BATCH_PX / 4)
    images = np.stack([np.full((3, *size), 20 * i, np.uint8) for i in range(count)])
    picture = drawn(images, np.full((count, *size), 0, np.int32), SETS)[..., 0]
    assert 0.45e6 < picture.size <= 0.5e6
    places = [np.argwhere(picture == 20 * i) for i in range(min(count, 8))]
    assert sum(map(len, places)) + (picture == 255).sum() == picture.size
    starts = [tuple(place.min(0)) for place in places]
    assert starts == sorted(starts)
    for place in places:
        height, width = place.max(0) - place.min(0) + 1
        assert height * width == len(place)
        assert height / width == pytest.approx(size[0] / size[1], rel=0.03)
