"""The confusion matrix as a picture: colours and texts follow the counts."""

from __future__ import annotations

import io
from xml.etree import ElementTree

import numpy as np
from PIL import Image

from segapp.report.confusion import confusion_file

MATRIX = np.array([[90, 10], [0, 0]])


def test_png_has_the_shades_of_the_matrix() -> None:
    picture = np.array(Image.open(io.BytesIO(confusion_file(MATRIX, ["road", "sky"], ".png")))).astype(int)
    first = 8 + round(6.6 * 4) + 4  # inside the first cell of 30 px, left of its number
    hit, miss, empty = (picture[22 + first + 30 * row, first + 30 * column] for row, column in ((0, 0), (0, 1), (1, 1)))
    assert hit.sum() < miss.sum() < empty.sum() == 3 * 255
    in_hit, in_miss = (picture[22 + 34 : 22 + 63, 34 + 30 * column : 63 + 30 * column].sum(-1) for column in (0, 1))
    assert in_hit.max() > 600  # the number is light on a dark cell
    assert in_miss.min() < 250  # and dark on a light one


def test_png_names_the_classes_beside_rows_and_above_columns() -> None:
    picture = np.array(Image.open(io.BytesIO(confusion_file(MATRIX, ["road", "sky"], ".png")))).astype(int)
    is_ink = picture.sum(-1) < 400
    beside = [is_ink[22 + 34 + 30 * i : 22 + 64 + 30 * i, :34].any(0).sum() for i in (0, 1)]
    above = [is_ink[22 : 22 + 34, 34 + 30 * i : 64 + 30 * i].any(1).sum() for i in (0, 1)]
    assert min(beside) > 10
    np.testing.assert_allclose(above, beside, atol=2)  # as long when rotated


def test_svg_names_classes_and_shares_and_is_inert() -> None:
    root = ElementTree.fromstring(confusion_file(MATRIX, ["<b>\x1b", "sky"], ".svg"))
    texts = [node.text for node in root.iter() if node.text]
    assert texts.count("sky") == 2
    assert {"90", "10"} <= set(texts)
    assert "<b>\\x1b read as sky, 10.0% of its pixels" in texts
    opacities = [float(node.get("fill-opacity")) for node in root.iter() if node.get("fill-opacity")]
    assert opacities == [0.95, 0.36]  # 0.06 + 0.94 sqrt(0.9), and of 0.1; the row without pixels has no cells
    kinds = [node.get("class") for node in root.iter() if node.get("class") in ("hit", "miss")]
    assert kinds == ["hit", "miss"]
    values = {node.text: node.get("class") for node in root.iter() if "value" in (node.get("class") or "")}
    assert values == {"90": "mid value on", "10": "mid value"}


def test_long_names_are_shortened_beside_the_cells_only() -> None:
    names = ["a" * 18, "b" * 19]
    root = ElementTree.fromstring(confusion_file(np.eye(2, dtype=np.int64), names, ".svg"))
    texts = [node.text for node in root.iter() if node.text]
    assert (texts.count("a" * 18), texts.count("b" * 17 + "…"), texts.count("b" * 19)) == (2, 2, 0)
    assert f"{'b' * 19} read as {'b' * 19}, 100.0% of its pixels" in texts
