"""Pieces, polygons and areas of annotations against loops over the pixels and cases worked by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from segapp.onboarding.convert.conversion import area_of, blank_mask, fill_polygon, paste


def test_pasted_piece_is_cut_off_at_every_side() -> None:
    rng = np.random.default_rng(0)
    piece = rng.random((3, 4)) < 0.6
    for top, left in itertools.product(range(-4, 7), range(-5, 8)):
        before = rng.integers(0, 3, (5, 6)).astype(np.uint8)
        wanted, found = before.copy(), before.copy()
        for y, x in itertools.product(range(3), range(4)):
            if piece[y, x] and 0 <= y + top < 5 and 0 <= x + left < 6:
                wanted[y + top, x + left] = 9
        paste(found, piece, left, top, 9)
        np.testing.assert_array_equal(found, wanted)


def test_polygons_fill_their_outline_but_not_their_holes() -> None:
    mask = blank_mask(9, 8, 2)
    assert (mask == 2).all()
    assert mask.shape == (9, 8)
    fill_polygon(mask, [[(1, 1), (6.4, 1), (6.4, 7.4), (1, 7.4)], [(2, 2), (5, 2), (5, 6), (2, 6)]], 5)
    wanted = np.full((9, 8), 2, np.uint8)
    wanted[1:8, 1:7] = 5
    wanted[3:6, 3:5] = 2  # the outline of the hole belongs to the polygon
    np.testing.assert_array_equal(mask, wanted)


def test_corners_may_have_further_numbers() -> None:
    plain, labelled = blank_mask(5, 5), blank_mask(5, 5)
    fill_polygon(plain, [[(1, 1), (3, 1), (1, 3)]], 1)
    fill_polygon(labelled, [[(1, 1, 7), (3, 1, 7), (1, 3, 7)]], 1)
    np.testing.assert_array_equal(plain, labelled)


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        ([(0, 0), (1, 1)], "a polygon of 2 corners"),
        ([(0,), (1,), (2,)], "a polygon of 3 corners"),
        ([(0, 0), (1, math.nan), (2, 2)], "a corner is not a number"),
        ([(0, 0), (1, 2.0**41), (2, 2)], "a corner is not a number"),
    ],
)
def test_polygon_that_cannot_be_filled_leaves_the_mask(ring: list[tuple[float, ...]], message: str) -> None:
    mask = blank_mask(4, 4)
    with pytest.raises(ValueError, match=message):
        fill_polygon(mask, [ring], 1)
    assert not mask.any()
    fill_polygon(mask, [[(0, 0), (2.0**40, 0), (0, 2.0**40)]], 1)
    assert mask.all()


@pytest.mark.parametrize("size_px", [(0, 5), (5, 0), (-1, 5), (65_537, 1), (1, 65_537), (65_536, 4097)])
def test_mask_of_an_impossible_size_is_refused(size_px: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"a size of {size_px[1]} x {size_px[0]} pixels"):
        blank_mask(*size_px)
    assert blank_mask(65_536, 1).shape == blank_mask(1, 65_536).T.shape == (65_536, 1)


def test_area_of_a_polygon_is_the_same_in_both_directions() -> None:
    ring = [(1.0, 1.0), (5.0, 1.0), (5.0, 4.0), (1.0, 7.0)]  # 4 x 3 and a triangle of 4 x 3 / 2
    for start in range(4):
        turned = [*ring[start:], *ring[:start]]
        assert area_of(turned) == area_of(turned[::-1]) == 18.0
