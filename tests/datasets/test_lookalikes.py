"""Images that look alike: changed copies and still frames are found, other images are not."""

from __future__ import annotations

from collections.abc import Callable

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from segapp.datasets.inspection import nearest_hashes, perceptual_hash

Grey = NDArray[np.uint8]


def landscape(seed: int, side_px: int = 480) -> Grey:
    """A picture with structure at several scales."""
    rng = np.random.default_rng(seed)
    total = np.zeros((side_px, side_px), np.float32)
    for cells in (4, 12, 48, 160):
        total += cv2.resize(rng.random((cells, cells), np.float32), (side_px, side_px), interpolation=cv2.INTER_CUBIC)
    return np.asarray(np.clip(total * 64, 0, 255), np.uint8)


def as_jpeg(pixels: Grey, quality: int = 60) -> Grey:
    return np.asarray(cv2.imdecode(cv2.imencode(".jpg", pixels, [cv2.IMWRITE_JPEG_QUALITY, quality])[1], 0), np.uint8)


def hash_of(pixels: Grey) -> bytes:
    found = perceptual_hash(pixels)
    assert found is not None
    return found


@pytest.mark.parametrize(
    "change",
    [
        as_jpeg,
        lambda pixels: cv2.resize(pixels, None, fx=0.6, fy=0.6, interpolation=cv2.INTER_AREA),
        lambda pixels: (pixels * 0.7 + 20).astype(np.uint8),
    ],
)
def test_changed_images_look_like_their_source(change: Callable[[Grey], Grey]) -> None:
    sources = [landscape(seed) for seed in range(12)]
    hashes = [hash_of(change(pixels)) for pixels in sources[:6]]
    found = nearest_hashes(hashes, [hash_of(pixels) for pixels in reversed(sources)])
    assert [(number, 11 - other) for number, other, _ in found] == [(number, number) for number in range(6)]
    assert list(nearest_hashes(hashes, [hash_of(pixels) for pixels in sources[6:]])) == []


def test_flat_images_are_not_compared() -> None:
    one = [hash_of(landscape(0))]
    assert [*nearest_hashes([], one), *nearest_hashes(one, []), *nearest_hashes([], [])] == []
    flat = np.full((200, 300), 130, np.uint8)
    assert perceptual_hash(flat) is None
    flat[3, 4] = 137
    assert perceptual_hash(flat) is None
    flat[3, 4] = 138
    assert perceptual_hash(flat) is not None


def test_logo_in_one_corner_is_no_lookalike() -> None:
    logo = landscape(99, 40)
    pictures = [landscape(seed) for seed in range(6)]
    for picture in pictures:
        picture[:40, -40:] = logo
    hashes = [hash_of(picture) for picture in pictures]
    assert list(nearest_hashes(hashes[:3], hashes[3:])) == []


def test_nearest_hash_is_found_before_and_after_its_place() -> None:
    far = [bytes([number ^ 0b11111100] * 32) for number in range(40)]
    small, large = bytes(32), bytes([0b11] * 32)
    assert list(nearest_hashes([bytes([0b1] * 32)], [*far, small])) == [(0, 40, 32)]
    high = [bytes([number] * 32) for number in range(0b1000000, 0b1000000 + 40)]
    assert list(nearest_hashes([bytes([0b11111110] * 32)], [*high, bytes([255] * 32)])) == [(0, 40, 32)]
    assert list(nearest_hashes([large], [large, *far])) == [(0, 0, 0)]
