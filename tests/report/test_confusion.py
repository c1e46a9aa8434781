"""The confusion matrix as a picture: colours and texts follow the counts."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np

from segapp.report.confusion import confusion_figure

MATRIX = np.array([[90, 10], [0, 0]])


def drawn(matrix: np.ndarray, names: list[str]) -> ElementTree.Element:
    """Return the figure of a matrix, whose attribute without quotes XML does not know."""
    return ElementTree.fromstring(str(confusion_figure(matrix, names)).replace("role=img", 'role="img"'))


def test_svg_names_classes_and_shares_and_is_inert() -> None:
    root = drawn(MATRIX, ["<b>\x1b", "sky"])
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
    root = drawn(np.eye(2, dtype=np.int64), names)
    texts = [node.text for node in root.iter() if node.text]
    assert (texts.count("a" * 18), texts.count("b" * 17 + "…"), texts.count("b" * 19)) == (2, 2, 0)
    assert f"{'b' * 19} read as {'b' * 19}, 100.0% of its pixels" in texts
