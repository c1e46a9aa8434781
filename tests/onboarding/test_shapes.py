"""Shapes of each annotation program as pixels, worked by hand, on a mask of 24 x 20 pixels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segapp.onboarding.annotations import find_cvat, find_label_studio, find_labelme, find_yolo
from segapp.onboarding.layout import DrawnMask, Layout
from segapp.onboarding.tree import Tree

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
