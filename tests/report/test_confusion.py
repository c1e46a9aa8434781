"""The confusion matrix as a picture: colours and texts follow the counts."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np

from segapp.report.charts import confusion_figure, top_confusions
from segapp.report.images import SplitEvaluation
from segapp.report.page import _confusion

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


def test_matrix_leaves_out_classes_that_do_not_occur() -> None:
    matrix = np.zeros((70, 70), np.int64)

    def shown() -> list[str] | None:
        found = _confusion(SplitEvaluation("val", None, matrix, [], 1), [f"n{i}" for i in range(70)])  # type: ignore[arg-type]
        return None if found is None else re.findall(r"class=.end.>(\w+)<", found)

    assert shown() is None
    matrix[3, 3], matrix[3, 7], matrix[9, 5] = 5, 1, 2
    assert shown() == ["n3", "n5", "n7", "n9"]
    matrix[np.arange(60), np.arange(60)] = 1
    assert shown() is not None
    matrix[0, 60] = 1
    assert shown() is None  # too many for a picture


def test_most_frequent_confusions_are_shares_of_the_target() -> None:
    matrix = np.array([[6, 3, 1], [0, 0, 0], [2, 0, 2]])
    expected = [("c", "a", 0.5, 2 / 6), ("a", "b", 0.3, 3 / 6), ("a", "c", 0.1, 1 / 6)]
    assert top_confusions(matrix, "abc", 12) == expected
    assert top_confusions(matrix, "abc", 2) == expected[:2]
