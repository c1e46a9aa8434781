"""Images that look alike: changed copies and still frames are found, other images are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from segapp.datasets.inspection import find_copies, nearest_hashes, perceptual_hash

Grey = NDArray[np.uint8]
CAMVID = Path(__file__).parents[2].parent / "shared" / "camvid"


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


def test_lookalikes_of_nothing() -> None:
    one = hash_of(landscape(0))
    assert list(nearest_hashes([], [one])) == list(nearest_hashes([one], [])) == list(nearest_hashes([], [])) == []


def test_pairs_are_named_among_thousands() -> None:
    hashes = [np.random.default_rng(seed).bytes(32) for seed in range(2051)]
    assert list(nearest_hashes(hashes, [hashes[n] for n in (2049, 1026, 3)])) == [(3, 2, 0), (1026, 1, 0), (2049, 0, 0)]
    assert list(find_copies([*hashes[:5], None, *hashes[5:], hashes[1026], hashes[3]])) == [(1027, 2052), (3, 2053)]


@pytest.mark.skipif(not CAMVID.is_dir(), reason="needs CamVid in ../shared/camvid")
def test_camvid_leaks_when_divided_at_random_only() -> None:
    def hashes(paths: list[Path]) -> list[bytes]:
        return [hash_of(np.asarray(cv2.imread(str(path), 0), np.uint8)) for path in paths]

    train = [path for path in sorted((CAMVID / "train").iterdir()) if "0016E5_04" <= path.stem < "0016E5_07"]
    val, others = train[2::5], [path for number, path in enumerate(train) if number % 5 != 2]
    published = hashes(sorted((CAMVID / "val").iterdir())[::3])
    frames = hashes(others)
    assert list(nearest_hashes(published, frames)) == []
    found = list(nearest_hashes(hashes(val), frames))
    assert len(val) / 5 < len(found) < len(val)
    for number, nearest, _ in found:
        one, other = val[number].stem.split("_"), others[nearest].stem.split("_")
        assert one[0] == other[0]
        assert abs(int(one[1]) - int(other[1])) <= 600  # 20 s: the car stands


def test_nearest_hash_is_found_before_and_after_its_place() -> None:
    far = [bytes([number ^ 0b11111100] * 32) for number in range(40)]
    small, large = bytes(32), bytes([0b11] * 32)
    assert list(nearest_hashes([bytes([0b1] * 32)], [*far, small])) == [(0, 40, 32)]
    high = [bytes([number] * 32) for number in range(0b1000000, 0b1000000 + 40)]
    assert list(nearest_hashes([bytes([0b11111110] * 32)], [*high, bytes([255] * 32)])) == [(0, 40, 32)]
    assert list(nearest_hashes([large], [large, *far])) == [(0, 0, 0)]


def test_comparisons_grow_with_the_images_not_with_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    count_bits, compared = np.bitwise_count, 0

    def counted(bits: NDArray[np.uint64]) -> NDArray[np.uint8]:
        nonlocal compared
        compared += len(bits)
        return np.asarray(count_bits(bits))

    monkeypatch.setattr(np, "bitwise_count", counted)
    rng = np.random.default_rng(5)
    num_compared, found = [], []
    for num in (400, 4000):
        compared, train = 0, [rng.bytes(32) for _ in range(num)]
        still = [bytes([hash_[0] ^ 0b101, *hash_[1:31], hash_[31] ^ 1]) for hash_ in train[num // 2 :: 97]]
        val = [*still, *(rng.bytes(32) for _ in range(num // 5))]
        found.append(list(nearest_hashes(val, train)) == [(i, num // 2 + 97 * i, 3) for i in range(len(still))])
        found.append(list(find_copies([*train, *still])) == [(num // 2 + 97 * i, num + i) for i in range(len(still))])
        num_compared.append(compared)
    assert all(found)
    assert num_compared[1] <= 10.5 * num_compared[0]
