"""Shapes of each annotation program as pixels, worked by hand, on a mask of 24 x 20 pixels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from segapp.onboarding.annotations import _draw_cvat, _draw_label_studio, _draw_labelme, _draw_yolo, _yolo_corners
from segapp.onboarding.layout import DrawnMask

SIZE = (24, 20)
VALUE = 3


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
    mask = np.zeros(SIZE, np.uint8)
    _draw_labelme(DrawnMask(mask, SIZE), {"label": "road", **shape}, VALUE)
    np.testing.assert_array_equal(mask, BOX)


def test_points_of_labelme_are_skipped_and_circles_refused() -> None:
    mask = np.zeros(SIZE, np.uint8)
    for kind in ("point", "points"):
        _draw_labelme(DrawnMask(mask, SIZE), {"label": "road", "shape_type": kind, "points": [[1, 1]]}, VALUE)
    assert not mask.any()
    for kind in ("circle", "line", "linestrip", "cube"):
        with pytest.raises(ValueError, match=f"shape_type '{kind}' is not read: draw it as a polygon"):
            _draw_labelme(
                DrawnMask(mask, SIZE), {"label": "road", "shape_type": kind, "points": [[10, 12], [13, 8]]}, VALUE
            )


def test_shapes_of_cvat_fill_their_pixels() -> None:
    mask = np.zeros(SIZE, np.uint8)
    box = {"label": "road", "xtl": "2.2", "ytl": "4.9", "xbr": "9.4", "ybr": "13.0"}
    _draw_cvat(DrawnMask(mask, SIZE), ("box", box), VALUE)
    np.testing.assert_array_equal(mask, BOX)
    mask = np.zeros(SIZE, np.uint8)
    _draw_cvat(
        DrawnMask(mask, SIZE), ("polygon", {"label": "road", "points": "2.0,5.0;10.0,5.0;10.0,14.0;2.0,14.0"}), VALUE
    )
    np.testing.assert_array_equal(mask, BOX)
    ellipse = {"label": "road", "cx": "10.1", "cy": "11.9", "rx": "6", "ry": "6"}
    for kind, shape in (("ellipse", ellipse), ("polyline", {"label": "road", "points": "1,1;2,2"})):
        with pytest.raises(ValueError, match=f"the shape {kind} is not read: draw it as a polygon"):
            _draw_cvat(DrawnMask(mask, SIZE), (kind, shape), VALUE)


def test_boxes_of_label_studio_are_percent_of_the_sides() -> None:
    mask = np.zeros(SIZE, np.uint8)
    value = {"x": 10.4, "y": 20.8333, "width": 39.9, "height": 37.5, "rectanglelabels": ["road"]}
    _draw_label_studio(DrawnMask(mask, SIZE), {"type": "rectanglelabels", "value": value}, VALUE)
    np.testing.assert_array_equal(mask, BOX)  # 10.4 % of 20 is 2.08, left of the center of pixel 2
    with pytest.raises(ValueError, match="a rotated rectangle cannot be read: draw it as a polygon"):
        _draw_label_studio(DrawnMask(mask, SIZE), {"type": "rectanglelabels", "value": {**value, "rotation": 5}}, VALUE)


def test_lines_of_yolo_are_polygons_and_boxes_are_refused() -> None:
    """On an image of 80 x 40 pixels."""
    assert _yolo_corners(b"7 0 0 1 0 0.5 1", 40, 80) == [(-0.5, -0.5), (79.5, -0.5), (39.5, 39.5)]
    for box in (b"3 0.5 0.5 0.25 0.5", b"3 0.5 0.5 0.25 0.5 0.93"):  # with a confidence
        with pytest.raises(ValueError, match=r"a box of [45] numbers is not read: draw it as a polygon"):
            _draw_yolo(DrawnMask(np.zeros(SIZE, np.uint8), SIZE), box, VALUE)
