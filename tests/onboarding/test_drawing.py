"""Pieces, polygons and areas of annotations, and the shapes of each program, against loops and cases worked by hand."""

from __future__ import annotations

import itertools
from fractions import Fraction
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.onboarding.conversion import area_of, fill_area, fill_polygon
from segapp.onboarding.layout import DrawnMask


def canvas_on(mask: np.ndarray[Any, Any]) -> DrawnMask:
    """A mask whose image was annotated at its size."""
    return DrawnMask(mask, mask.shape)


def test_pasted_piece_is_cut_off_at_every_side() -> None:
    rng = np.random.default_rng(0)
    piece = rng.random((3, 4)) < 0.6
    for top, left in itertools.product(range(-4, 7), range(-5, 8)):
        before = rng.integers(0, 3, (5, 6)).astype(np.uint8)
        wanted, found = before.copy(), before.copy()
        for y, x in itertools.product(range(3), range(4)):
            if piece[y, x] and 0 <= y + top < 5 and 0 <= x + left < 6:
                wanted[y + top, x + left] = 9
        canvas_on(found).paste(piece, left, top, 9)
        np.testing.assert_array_equal(found, wanted)


def test_polygons_fill_their_outline_but_not_their_holes() -> None:
    mask = np.full((9, 8), 2, np.uint8)
    rings = [[(1, 1), (6.4, 1), (6.4, 7.4), (1, 7.4)], [(2, 2), (5, 2), (5, 6), (2, 6)]]
    fill_polygon(canvas_on(mask), [np.array(ring) for ring in rings], 5)
    wanted = np.full((9, 8), 2, np.uint8)
    wanted[1:8, 1:7] = 5
    wanted[3:6, 3:5] = 2  # the outline of the hole belongs to the polygon
    np.testing.assert_array_equal(mask, wanted)


def test_area_of_a_polygon_is_the_same_in_both_directions() -> None:
    ring = [(1.0, 1.0), (5.0, 1.0), (5.0, 4.0), (1.0, 7.0)]  # 4 x 3 and a triangle of 4 x 3 / 2
    for start in range(4):
        turned = [*ring[start:], *ring[:start]]
        assert area_of(np.array(turned)) == area_of(np.array(turned[::-1])) == 18.0


def inside(rings: list[np.ndarray[Any, Any]], height: int, width: int) -> np.ndarray[Any, Any]:
    """Pixels whose centers lie inside rings in exact arithmetic: an odd number of crossings to their left."""
    exact = [[(Fraction(float(x)), Fraction(float(y))) for x, y in ring] for ring in rings]
    edges = [edge for corners in exact for edge in itertools.pairwise([*corners, corners[0]])]
    mask = np.zeros((height, width), np.uint8)
    for row in range(height):
        y = row + Fraction(1, 2)
        borders = []
        for (xa, ya), (xb, yb) in edges:
            if min(ya, yb) <= y < max(ya, yb):
                borders.append(xa + (y - ya) * (xb - xa) / (yb - ya))
        for column in range(width):
            mask[row, column] = sum(border <= column + Fraction(1, 2) for border in borders) % 2
    return mask


@pytest.mark.parametrize("reach", [40.0, 1e5, 2e8])
def test_polygons_far_outside_match_exact_arithmetic(reach: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second ring, whose inside is a hole in the first, and some edges at a time."""
    monkeypatch.setattr("segapp.onboarding.conversion._CROSSINGS_AT_ONCE", 30)
    rng = np.random.default_rng(int(reach) % 97)
    for number in range(12):
        rings = [rng.uniform(-reach, reach, (3 + number, 2)), rng.uniform(0, 24, (4, 2))]
        rings[0][0] = rng.uniform(0, 24, 2)
        mask = np.zeros((20, 24), np.uint8)
        fill_area(canvas_on(mask), rings, 1)
        wanted = inside(rings, 20, 24)
        if wanted.any():
            np.testing.assert_array_equal(mask, wanted)


def test_polygons_inside_the_image_are_those_of_opencv() -> None:
    rng = np.random.default_rng(0)
    for number in range(200):
        rings = [np.rint(rng.uniform(0, (49, 39), (3 + number % 9, 2))) for _ in range(1 + number % 2)]
        wanted, mask = np.zeros((40, 50), np.uint8), np.zeros((40, 50), np.uint8)
        cv2.fillPoly(wanted, [ring.astype(np.int32) for ring in rings], 1)
        fill_polygon(canvas_on(mask), rings, 1)
        np.testing.assert_array_equal(mask, wanted)


def test_pieces_of_another_size_are_read_at_centers_of_pixels() -> None:
    """Of 10 x 9 pixels, the centers of 4 x 3 pixels are the rows 1, 3, 6, 8 and the columns 1, 4, 7."""
    mask = np.full((4, 3), 2, np.uint8)
    piece = np.ones((6, 7), bool)
    piece[3, 4] = False  # row 6 and column 7
    DrawnMask(mask, (10, 9)).paste(piece, 3, 3, 5)
    np.testing.assert_array_equal(mask, [[2, 2, 2], [2, 5, 5], [2, 5, 2], [2, 5, 5]])


@pytest.mark.parametrize(("sign", "reach"), [(1, 1.7), (-1, 1.4)])
def test_reach_is_that_of_outlines_and_pieces_on_all_sides(sign: int, reach: float) -> None:
    """The piece ends 14 columns behind 20, or 8 before 0; the outline 4 rows behind 10, or before 0."""
    piece, outline = (canvas_on(np.zeros((10, 20), np.uint8)) for _ in range(2))
    piece.paste(np.ones((2, 4), bool), 30 if sign > 0 else -8, 3, 1)
    fill_area(outline, [np.array([(5, 5), (9, 14.0 if sign > 0 else -4.0), (12, 6)])], 1)
    assert (piece.reach, outline.reach) == pytest.approx((reach, 1.4))
