"""The table of classes: its order, changes and cells, worked by hand."""

from __future__ import annotations

import pytest
from textual.geometry import Size

from segapp.run.events import Val
from segapp.tui.classes import class_rows, classes_content, classes_title
from segapp.tui.widgets import ascii_text
from segapp.view.history import Evaluations
from segapp.view.view import View


@pytest.fixture
def view() -> View:
    view = View()
    view.classes = ["road", "Sky", "pole", "car", "bus"]
    view.vals = Evaluations(
        [
            Val(epoch=1, step=20, loss=0.5, miou=0.3, iou=[0.4, 0.9, 0.3, None, None]),
            Val(epoch=2, step=30, loss=0.5, miou=0.9, iou=[0.1]),  # of another number of classes
            Val(epoch=3, step=40, loss=0.5, miou=0.4, iou=[0.5, 0.9, 0.2, 0.2, None]),
        ]
    )
    view.best = view.vals[1]
    return view


def test_worst_classes_come_first_and_absent_ones_last(view: View) -> None:
    assert [row.name for row in class_rows(view)] == ["pole", "car", "road", "Sky", "bus"]


def test_changes_are_since_the_evaluation_of_the_same_classes(view: View) -> None:
    rows = {row.name: (row.iou, row.delta) for row in class_rows(view)}
    assert rows == {
        "road": (0.5, pytest.approx(0.1)), "Sky": (0.9, 0.0), "pole": (0.2, pytest.approx(-0.1)), "car": (0.2, None),
        "bus": (None, None),
    }  # fmt: skip
    assert [row.name for row in class_rows(view, "S")] == ["Sky", "bus"]
    view.vals = Evaluations()
    assert [(row.name, row.iou) for row in class_rows(view)] == [(name, None) for name in view.classes]


def test_rows_have_a_bar_a_number_and_a_change(view: View) -> None:
    lines = ascii_text(classes_content(view, Size(46, 9)).plain).splitlines()
    assert lines == [
        "pole   " + "====-".ljust(23) + " 0.200  -0.100 !",
        "car    " + "====-".ljust(23) + " 0.200          ",
        "road   " + "===========-".ljust(23) + " 0.500  +0.100  ",
        "Sky    " + "====================-".ljust(23) + " 0.900  =0.000  ",
        "bus    " + " " * 25 + "    -         ",
    ]
    columns = ascii_text(classes_content(view, Size(94, 3)).plain).splitlines()
    assert [line.split()[0] for line in columns] == ["pole", "car", "road"]
    assert [len(line) for line in columns] == [94, 94, 46]
    assert "  Sky  " in columns[0]
    narrow = ascii_text(classes_content(view, Size(25, 9)).plain).splitlines()
    assert narrow[2] == "road    0.500  +0.100  "


def test_selected_row_is_reversed_and_low_values_are_marked(view: View) -> None:
    found = classes_content(view, Size(46, 9), cursor=3)
    styles = [(found.plain[span.start : span.end].strip(), span.style) for span in found.spans]
    assert [text for text, style in styles if style == "reverse"] == ["Sky"]
    bars = {text: style for text, style in styles if text.startswith("━━")}
    assert bars == {"━" * 11 + "╸": "$text-primary", "━" * 20 + "╸": "$text-primary", "━" * 4 + "╸": "$text-error"}
    assert [style for text, style in styles if text.endswith("0.100")] == ["$text-error", "$text-success"]
    assert ascii_text(classes_content(View(), Size(46, 9)).plain) == "no classes yet"
    shown = ascii_text(classes_content(view, Size(46, 9), wanted="x").plain)
    assert shown == "no class has this name: press esc to show all"


def test_title_names_the_scores_and_the_search(view: View) -> None:
    assert classes_title(view, "", 99).plain == "3 Classes  e3 mIoU 0.400 (4/5)  best 0.900 (1/1) e2"
    assert classes_title(view, "ro", 99).plain.endswith("best 0.900 (1/1) e2  /ro")
    assert classes_title(view, "ro", 36).plain == "3 Classes  e3 mIoU 0.400 (4/5)  /ro"
