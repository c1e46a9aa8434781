"""Pieces, polygons and areas of annotations, and the shapes of each program, against loops and cases worked by hand."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.onboarding.annotations import find_cvat, find_label_studio, find_labelme, find_yolo
from segapp.onboarding.conversion import area_of, fill_area, fill_polygon
from segapp.onboarding.layout import DrawnMask, Layout
from segapp.onboarding.tree import Tree


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
    mask = np.zeros((9, 8), np.uint8)
    mask[:] = 2
    assert mask.shape == (9, 8)
    fill_polygon(canvas_on(mask), [[(1, 1), (6.4, 1), (6.4, 7.4), (1, 7.4)], [(2, 2), (5, 2), (5, 6), (2, 6)]], 5)
    wanted = np.full((9, 8), 2, np.uint8)
    wanted[1:8, 1:7] = 5
    wanted[3:6, 3:5] = 2  # the outline of the hole belongs to the polygon
    np.testing.assert_array_equal(mask, wanted)


def test_corners_may_have_further_numbers() -> None:
    plain, labelled = np.zeros((5, 5), np.uint8), np.zeros((5, 5), np.uint8)
    fill_polygon(canvas_on(plain), [[(1, 1), (3, 1), (1, 3)]], 1)
    fill_polygon(canvas_on(labelled), [[(1, 1, 7), (3, 1, 7), (1, 3, 7)]], 1)
    np.testing.assert_array_equal(plain, labelled)


@pytest.mark.parametrize(
    ("ring", "message"),
    [
        ([(0, 0), (1, 1)], "a polygon of 2 corners"),
        ([(0,), (1,), (2,)], "a polygon of 3 corners"),
        ([(0, 0), (1, math.nan), (2, 2)], "a corner is not a number"),
        ([(0, 0), (1, 2.0**29), (2, 2)], "a corner is not a number"),
    ],
)
def test_polygon_that_cannot_be_filled_leaves_the_mask(ring: list[tuple[float, ...]], message: str) -> None:
    mask = np.zeros((4, 4), np.uint8)
    with pytest.raises(ValueError, match=message):
        fill_polygon(canvas_on(mask), [ring], 1)
    for far in (math.inf, -math.inf, math.nan, 1e300):
        with pytest.raises(ValueError, match="a corner is not a number"):
            fill_area(canvas_on(mask), [[(0, 0), (far, 1), (2, 2)]], 1)
    assert not mask.any()
    fill_polygon(canvas_on(mask), [[(0, 0), (2.0**28, 0), (0, 2.0**28)]], 1)
    assert mask.all()


def test_area_of_a_polygon_is_the_same_in_both_directions() -> None:
    ring = [(1.0, 1.0), (5.0, 1.0), (5.0, 4.0), (1.0, 7.0)]  # 4 x 3 and a triangle of 4 x 3 / 2
    for start in range(4):
        turned = [*ring[start:], *ring[:start]]
        assert area_of(turned) == area_of(turned[::-1]) == 18.0


def inside(ring: np.ndarray[Any, Any], height: int, width: int) -> np.ndarray[Any, Any]:
    """Pixels whose centers lie inside a ring in exact arithmetic: an odd number of crossings to their left."""
    corners = [(Fraction(float(x)), Fraction(float(y))) for x, y in ring]
    mask = np.zeros((height, width), np.uint8)
    for row in range(height):
        y = row + Fraction(1, 2)
        borders = []
        for (xa, ya), (xb, yb) in itertools.pairwise([*corners, corners[0]]):
            if min(ya, yb) <= y < max(ya, yb):
                borders.append(xa + (y - ya) * (xb - xa) / (yb - ya))
        for column in range(width):
            mask[row, column] = sum(border <= column + Fraction(1, 2) for border in borders) % 2
    return mask


@pytest.mark.parametrize("reach", [40.0, 1e5, 2e8])
def test_polygons_far_outside_match_exact_arithmetic(reach: float) -> None:
    rng = np.random.default_rng(int(reach) % 97)
    for number in range(12):
        ring = rng.uniform(-reach, reach, (3 + number, 2))
        ring[0] = rng.uniform(0, 24, 2)
        mask = np.zeros((20, 24), np.uint8)
        fill_area(canvas_on(mask), [ring.tolist()], 1)
        wanted = inside(ring, 20, 24)
        if wanted.any():
            np.testing.assert_array_equal(mask, wanted)


def test_polygons_inside_the_image_are_those_of_opencv() -> None:
    rng = np.random.default_rng(0)
    for number in range(200):
        rings = [np.rint(rng.uniform(0, (49, 39), (3 + number % 9, 2))) for _ in range(1 + number % 2)]
        wanted, mask = np.zeros((40, 50), np.uint8), np.zeros((40, 50), np.uint8)
        cv2.fillPoly(wanted, [ring.astype(np.int32) for ring in rings], 1)
        fill_polygon(canvas_on(mask), [ring.tolist() for ring in rings], 1)
        np.testing.assert_array_equal(mask, wanted)


def test_pieces_of_another_size_are_read_at_centers_of_pixels() -> None:
    """Of 10 x 9 pixels, the centers of 4 x 3 pixels are the rows 1, 3, 6, 8 and the columns 1, 4, 7."""
    mask = np.full((4, 3), 2, np.uint8)
    piece = np.ones((6, 7), bool)
    piece[3, 4] = False  # row 6 and column 7
    DrawnMask(mask, (10, 9)).paste(piece, 3, 3, 5)
    np.testing.assert_array_equal(mask, [[2, 2, 2], [2, 5, 5], [2, 5, 2], [2, 5, 5]])


# --- shapes of each program on a mask of 24 x 20 pixels

SIZE = (24, 20)
CORNERS = [[2, 5], [9, 5], [9, 13], [2, 13]]
BOX = np.zeros(SIZE, np.uint8)
BOX[5:14, 2:10] = 1


def painted(folder: Path, find: Callable[[Tree], Layout | None], file: str, content: str) -> np.ndarray:
    """Returns the mask of an image of 24 x 20 pixels whose annotations are in a file."""
    (folder / file).write_text(content)
    layout = find(Tree(folder, ("a.jpg",), (file,), leads_outside=False))
    assert layout is not None
    drawing = layout.pairs[0].drawing
    assert drawing is not None
    assert drawing.paint is not None
    return np.asarray(drawing.paint(DrawnMask(np.zeros(SIZE, np.uint8), SIZE)))


def labelme(folder: Path, *shapes: dict[str, Any]) -> np.ndarray:
    named = [{"label": "road", **shape} for shape in shapes]
    return painted(folder, find_labelme, "a.json", json.dumps({"imagePath": "a.jpg", "shapes": named}))


def cvat(folder: Path, shape: str) -> np.ndarray:
    text = f'<annotations><image name="a.jpg">{shape}</image></annotations>'
    return painted(folder, find_cvat, "a.xml", text)


def label_studio(folder: Path, **value: Any) -> np.ndarray:
    region = {"type": "rectanglelabels", "value": {"rectanglelabels": ["road"], **value}}
    task = {"data": {"image": "a.jpg"}, "annotations": [{"result": [region]}]}
    return painted(folder, find_label_studio, "a.json", json.dumps([task]))


@pytest.mark.parametrize(
    "shape",
    [
        {"points": CORNERS},
        {"shape_type": "polygon", "points": CORNERS},
        {"shape_type": "rectangle", "points": [[2, 5], [9, 13]]},
        {"shape_type": "rectangle", "points": [[9, 13], [2, 5]]},
    ],
)
def test_boxes_of_labelme_fill_their_corners(shape: dict[str, Any], tmp_path: Path) -> None:
    np.testing.assert_array_equal(labelme(tmp_path, shape), BOX)


def test_points_of_labelme_are_skipped_and_circles_refused(tmp_path: Path) -> None:
    assert not labelme(tmp_path, *({"shape_type": kind, "points": [[1, 1]]} for kind in ("point", "points"))).any()
    for kind in ("circle", "line", "linestrip", "cube"):
        with pytest.raises(ValueError, match=f"shape_type '{kind}' is not read: draw it as a polygon"):
            labelme(tmp_path, {"shape_type": kind, "points": [[10, 12], [13, 8]]})


def test_shapes_of_cvat_fill_their_pixels(tmp_path: Path) -> None:
    for shape in (
        '<box label="road" xtl="2.2" ytl="4.9" xbr="9.4" ybr="13.0"/>',
        '<polygon label="road" points="2.0,5.0;10.0,5.0;10.0,14.0;2.0,14.0"/>',
    ):
        np.testing.assert_array_equal(cvat(tmp_path, shape), BOX)
    ellipse = '<ellipse label="road" cx="10.1" cy="11.9" rx="6" ry="6"/>'
    for kind, shape in (("ellipse", ellipse), ("polyline", '<polyline label="road" points="1,1;2,2"/>')):
        with pytest.raises(ValueError, match=f"the shape {kind} is not read: draw it as a polygon"):
            cvat(tmp_path, shape)


def test_boxes_of_label_studio_are_percent_of_the_sides(tmp_path: Path) -> None:
    value = {"x": 10.4, "y": 20.8333, "width": 39.9, "height": 37.5}
    np.testing.assert_array_equal(label_studio(tmp_path, **value), BOX)  # 2.08 is left of the center of pixel 2
    with pytest.raises(ValueError, match="a rotated rectangle cannot be read: draw it as a polygon"):
        label_studio(tmp_path, **value, rotation=5)


def test_lines_of_yolo_are_polygons_and_boxes_are_refused(tmp_path: Path) -> None:
    corners = " ".join(f"{(x + 0.5) / 20} {(y + 0.5) / 24}" for x, y in CORNERS)
    np.testing.assert_array_equal(painted(tmp_path, find_yolo, "a.txt", f"0 {corners}"), BOX)
    for box in ("3 0.5 0.5 0.25 0.5", "3 0.5 0.5 0.25 0.5 0.93"):  # with a confidence
        with pytest.raises(ValueError, match=r"a box of [45] numbers is not read: draw it as a polygon"):
            painted(tmp_path, find_yolo, "a.txt", f"0 {corners}\n{box}")
