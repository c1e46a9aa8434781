"""Shapes of each annotation program as pixels, worked by hand, on a mask of 24 x 20 pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from segapp.onboarding.annotations import _draw_cvat, _draw_label_studio, _draw_labelme, yolo_shape
from segapp.onboarding.conversion import blank_mask

SIZE = (24, 20)
VALUES = {"road": 3}


def rectangle(left: int, top: int, right: int, bottom: int) -> np.ndarray[Any, Any]:
    mask = np.zeros(SIZE, np.uint8)
    mask[top : bottom + 1, left : right + 1] = 3
    return mask


BOX = rectangle(2, 5, 9, 13)
CORNERS = [[2, 5], [9, 5], [9, 13], [2, 13]]


@pytest.mark.parametrize(
    "shape",
    [
        {"points": CORNERS},
        {"shape_type": "polygon", "points": CORNERS},
        {"shape_type": "rectangle", "points": [[2, 5], [9, 13]]},
        {"shape_type": "rectangle", "points": [[9, 13], [2, 5]]},
    ],
)
def test_boxes_of_labelme_fill_their_corners(shape: dict[str, Any]) -> None:
    mask = blank_mask(*SIZE)
    _draw_labelme(mask, {"label": "road", **shape}, VALUES)
    np.testing.assert_array_equal(mask, BOX)


def is_disc(mask: np.ndarray[Any, Any], x: int, y: int, radius: int) -> bool:
    """Return True if a mask holds the pixels within a radius, give or take the rounding of the outline."""
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    distance = np.hypot(rows - y, columns - x)
    return bool((mask[distance <= radius - 0.5] == 3).all() and (mask[distance >= radius + 0.9] == 0).all())


def test_circles_lines_and_points_of_labelme() -> None:
    mask = blank_mask(*SIZE)
    _draw_labelme(mask, {"label": "road", "shape_type": "circle", "points": [[10, 12], [13, 8]]}, VALUES)
    assert is_disc(mask, 10, 12, 5)
    mask = blank_mask(*SIZE)
    line = {"label": "road", "shape_type": "linestrip", "points": [[2, 5], [9, 5], [9, 13]]}
    _draw_labelme(mask, line, VALUES)
    wanted = rectangle(2, 5, 9, 5) | rectangle(9, 5, 9, 13)
    np.testing.assert_array_equal(mask, wanted)
    for kind in ("point", "points"):
        _draw_labelme(mask, {"label": "road", "shape_type": kind, "points": [[1, 1]]}, VALUES)
    np.testing.assert_array_equal(mask, wanted)
    with pytest.raises(ValueError, match="shape_type 'cube' is not known"):
        _draw_labelme(mask, {"label": "road", "shape_type": "cube", "points": []}, VALUES)


def test_shapes_of_cvat_fill_their_pixels() -> None:
    mask = blank_mask(*SIZE)
    box = {"label": "road", "xtl": "2.2", "ytl": "4.9", "xbr": "9.4", "ybr": "13.0"}
    _draw_cvat(mask, ("box", box), VALUES)
    np.testing.assert_array_equal(mask, BOX)
    mask = blank_mask(*SIZE)
    _draw_cvat(mask, ("polygon", {"label": "road", "points": "2.0,5.0;10.0,5.0;10.0,14.0;2.0,14.0"}), VALUES)
    np.testing.assert_array_equal(mask, BOX)
    mask = blank_mask(*SIZE)
    _draw_cvat(mask, ("ellipse", {"label": "road", "cx": "10.1", "cy": "11.9", "rx": "6", "ry": "6"}), VALUES)
    assert is_disc(mask, 10, 12, 6)
    flat, turned = blank_mask(*SIZE), blank_mask(*SIZE)
    ellipse = {"label": "road", "cx": "10", "cy": "12", "rx": "8", "ry": "3"}
    _draw_cvat(flat, ("ellipse", ellipse), VALUES)
    _draw_cvat(turned, ("ellipse", {**ellipse, "rotation": "90"}), VALUES)
    assert (np.ptp(np.nonzero(flat)[1]), np.ptp(np.nonzero(flat)[0])) == (16, 6)
    assert (np.ptp(np.nonzero(turned)[1]), np.ptp(np.nonzero(turned)[0])) == (6, 16)
    with pytest.raises(ValueError, match="a line has no area"):
        _draw_cvat(mask, ("polyline", {"label": "road", "points": "1,1;2,2"}), VALUES)


def test_boxes_of_label_studio_are_percent_of_the_sides() -> None:
    mask = blank_mask(*SIZE)
    value = {"x": 10.4, "y": 20.8333, "width": 39.9, "height": 37.5, "rectanglelabels": ["road"]}
    _draw_label_studio(mask, {"type": "rectanglelabels", "value": value}, VALUES)
    np.testing.assert_array_equal(mask, BOX)  # 10.4 % of 20 is 2.08, left of the center of pixel 2
    with pytest.raises(ValueError, match="a rotated rectangle cannot be read: draw it as a polygon"):
        _draw_label_studio(mask, {"type": "rectanglelabels", "value": {**value, "rotation": 5}}, VALUES)


@pytest.mark.parametrize(
    ("line", "corners"),
    [
        (b"7 0.5 0.5 0.25 0.5", [(29.5, 9.5), (49.5, 9.5), (49.5, 29.5), (29.5, 29.5)]),
        (b"7 0.5 0.5 0.25 0.5 0.93", [(29.5, 9.5), (49.5, 9.5), (49.5, 29.5), (29.5, 29.5)]),  # with a confidence
        (b"7 0 0 1 0 0.5 1", [(-0.5, -0.5), (79.5, -0.5), (39.5, 39.5)]),
    ],
)
def test_lines_of_yolo_are_boxes_or_polygons(line: bytes, corners: list[tuple[float, float]]) -> None:
    """On an image of 80 x 40 pixels."""
    assert yolo_shape(line, 40, 80) == (7, corners)
