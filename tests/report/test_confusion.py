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


def test_svg_names_classes_and_shares_and_is_inert() -> None:
    root = ElementTree.fromstring(confusion_file(MATRIX, ["<b>\x1b", "sky"], ".svg"))
    texts = [node.text for node in root.iter() if node.text]
    assert texts.count("sky") == 2
    assert {"90", "10"} <= set(texts)
    assert "<b>\\x1b predicted as sky: 10.0% of its pixels" in texts
