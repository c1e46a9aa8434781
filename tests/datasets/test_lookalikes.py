"""Images that look alike: copies and overlapping tiles are found, other images are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from segapp.datasets.lookalikes import Look, find_lookalikes, look_of

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


def tile(pixels: Grey, top: int, left: int, side_px: int = 240) -> Grey:
    return np.ascontiguousarray(pixels[top : top + side_px, left : left + side_px])


@pytest.mark.parametrize(
    "change",
    [
        as_jpeg,
        lambda pixels: cv2.resize(pixels, None, fx=0.6, fy=0.6, interpolation=cv2.INTER_AREA),
        lambda pixels: (pixels * 0.7 + 20).astype(np.uint8),
        lambda pixels: as_jpeg(tile(pixels, 40, 60, 360)),
    ],
)
def test_changed_images_look_like_their_source(change: Callable[[Grey], Grey]) -> None:
    sources = [landscape(seed) for seed in range(12)]
    looks = [look_of(change(pixels)) for pixels in sources[:6]]
    found = find_lookalikes(looks, [look_of(pixels) for pixels in reversed(sources)])
    assert [(each.number, 11 - each.other) for each in found] == [(number, number) for number in range(6)]
    assert find_lookalikes(looks, [look_of(pixels) for pixels in sources[6:]]) == []


def test_tiles_that_overlap_by_half_look_alike_and_others_do_not() -> None:
    mosaics = [landscape(seed) for seed in range(8)]
    first = [look_of(as_jpeg(tile(mosaic, 0, 0), 90)) for mosaic in mosaics]
    second = [look_of(as_jpeg(tile(mosaic, 21, 101), 90)) for mosaic in mosaics]
    found = find_lookalikes(second, first)
    assert [(each.number, each.other) for each in found] == [(number, number) for number in range(8)]
    assert all("features agree" in each.likeness for each in found)
    apart = [look_of(tile(mosaic, 240, 240)) for mosaic in mosaics]
    assert find_lookalikes(apart, first) == []


def test_plain_images_are_not_compared() -> None:
    black, grey = np.zeros((200, 300), np.uint8), np.full((200, 300), 130, np.uint8)
    dot = black.copy()
    dot[90:110, 140:160] = 255
    looks = [look_of(pixels) for pixels in (black, grey, dot)]
    assert [look.is_plain for look in looks] == [True, True, True]
    assert find_lookalikes(looks, looks) == []
    assert not look_of(landscape(0)).is_plain


def test_logo_in_one_corner_is_no_lookalike() -> None:
    logo = landscape(99, 40)
    pictures = [landscape(seed) for seed in range(6)]
    for picture in pictures:
        picture[:40, -40:] = logo
    looks = [look_of(picture) for picture in pictures]
    assert find_lookalikes(looks[:3], looks[3:]) == []


def test_features_that_most_images_share_are_no_evidence() -> None:
    """The hood of the same car is in every image."""
    hood = landscape(99, 300)[:60]
    pictures = [landscape(seed, 300) for seed in range(60)]
    for picture in pictures:
        picture[-60:] = hood
    looks = [Look(None, each.points, each.descriptors, each.side_px) for each in map(look_of, pictures)]
    assert find_lookalikes(looks[:10], looks[10:]) == []


def test_lookalikes_of_nothing() -> None:
    look = look_of(landscape(0))
    assert find_lookalikes([], [look]) == find_lookalikes([look], []) == find_lookalikes([], []) == []


@pytest.mark.skipif(not CAMVID.is_dir(), reason="needs CamVid in ../shared/camvid")
def test_camvid_leaks_when_divided_at_random_only() -> None:
    def looks(paths: list[Path]) -> list[Look]:
        return [look_of(np.asarray(cv2.imread(str(path), 0), np.uint8)) for path in paths]

    train = [path for path in sorted((CAMVID / "train").iterdir()) if "0016E5_04" <= path.stem < "0016E5_07"]
    val, others = train[2::5], [path for number, path in enumerate(train) if number % 5 != 2]
    published = looks(sorted((CAMVID / "val").iterdir())[::3])
    frames = looks(others)
    assert find_lookalikes(published, frames) == []
    found = find_lookalikes(looks(val), frames)
    assert len(val) / 5 < len(found) < len(val)
    for each in found:
        one, other = val[each.number].stem.split("_"), others[each.other].stem.split("_")
        assert one[0] == other[0]
        assert abs(int(one[1]) - int(other[1])) <= 600  # 20 s: the car stands
