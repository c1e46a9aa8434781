"""The table of classes: its order, changes and cells, worked by hand."""

from __future__ import annotations

from typing import Any

import pytest
from textual.geometry import Size

from segapp.run.events import RunStart, Step, Val
from segapp.tui.classes import class_rows, classes_content, classes_title, first_evaluation
from segapp.tui.widgets import ascii_text
from segapp.view.history import Evaluations
from segapp.view.source import Status
from segapp.view.view import Evaluating, View


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


def test_worst_classes_come_first_and_absent_ones_apart(view: View) -> None:
    rows, absent = class_rows(view)
    assert ([row.name for row in rows], absent) == (["pole", "car", "road", "Sky"], ["bus"])


def test_changes_are_since_the_evaluation_of_the_same_classes(view: View) -> None:
    rows = {row.name: (row.iou, row.delta) for row in class_rows(view)[0]}
    assert rows == {
        "road": (0.5, pytest.approx(0.1)), "Sky": (0.9, 0.0), "pole": (0.2, pytest.approx(-0.1)), "car": (0.2, None),
    }  # fmt: skip
    rows_of_s, absent = class_rows(view, "S")
    assert ([row.name for row in rows_of_s], absent) == (["Sky"], ["bus"])


@pytest.mark.parametrize(
    ("settings", "options", "status", "wanted"),
    [
        ({"eval.every_epochs": 5}, {}, "live", "first evaluation after epoch 5, in about 11s"),  # 20 x 0.6 - 1
        ({"eval.every_epochs": 2}, {}, "live", "first evaluation after epoch 4, in about 4s"),
        ({"eval.every_epochs": 99}, {}, "live", "first evaluation after epoch 7, in about 24s"),  # the end of the run
        ({"eval.every_epochs": 99}, {"steps": 60}, "live", "first evaluation after epoch 6, in about 14s"),
        ({"eval.every_epochs": 5, "eval.every_steps": 40}, {}, "live", "first evaluation after step 40, in about 2s"),
        ({"eval.every_epochs": 5}, {"is_paused": True}, "live", "first evaluation after epoch 5"),
        ({"eval.every_epochs": 5}, {"evaluating": Evaluating(0.0, 0.0)}, "live", "the first evaluation is running"),
        ({"eval.every_epochs": 5}, {}, "failed", "the run ended before its first evaluation"),
        ({}, {}, "live", "no evaluation yet"),
    ],
)
def test_pane_says_when_the_first_evaluation_comes(
    settings: dict[str, int], options: dict[str, Any], status: Any, wanted: str
) -> None:
    start = RunStart(classes=["road"], num_params=9, batch_size=8, epochs=7, steps_per_epoch=11, devices=[])
    view = View(start=start.model_copy(update={"steps": options.pop("steps", None)}), epoch=4, **options)
    view.step = Step(epoch=4, step=35, loss=0.5, lr=0.1, step_s=0.6, t=99.0)
    assert first_evaluation(view, Status(status, status, now_s=100.0), settings) == wanted


def test_rows_have_a_bar_a_number_and_a_change(view: View) -> None:
    lines = ascii_text(classes_content(view, Size(46, 9)).plain).splitlines()
    assert lines == [
        "pole   " + "====-".ljust(23) + " 0.200  -0.100 !",
        "car    " + "====-".ljust(23) + " 0.200          ",
        "road   " + "===========-".ljust(23) + " 0.500  +0.100  ",
        "Sky    " + "====================-".ljust(23) + " 0.900  =0.000  ",
        "absent: bus",
    ]
    columns = ascii_text(classes_content(view, Size(94, 3)).plain).splitlines()
    assert [line.split()[0] for line in columns] == ["pole", "car", "absent:"]
    assert [len(line) for line in columns[:2]] == [94, 94]
    assert "  Sky  " in columns[1]
    narrow = ascii_text(classes_content(view, Size(25, 9)).plain).splitlines()
    assert narrow[2] == "road    0.500  +0.100  "


def test_selected_row_is_reversed_and_low_values_are_marked(view: View) -> None:
    found = classes_content(view, Size(46, 9), cursor=3)
    styles = [(found.plain[span.start : span.end].strip(), span.style) for span in found.spans]
    assert [text for text, style in styles if style == "reverse"] == ["Sky"]
    bars = {text: style for text, style in styles if text.startswith("━━")}
    assert bars == {"━" * 11 + "╸": "$text-primary", "━" * 20 + "╸": "$text-primary", "━" * 4 + "╸": "$text-error"}
    assert [style for text, style in styles if text.endswith("0.100")] == ["$text-error", "$text-success"]
    shown = ascii_text(classes_content(view, Size(46, 9), wanted="x").plain)
    assert shown == "no class has this name: press esc to show all"


def test_title_names_the_scores_and_the_search(view: View) -> None:
    assert classes_title(view, "", 99).plain == "3 Classes  e3 mIoU 0.400  best 0.900 (1/1) e2  4 of 5 classes"
    assert classes_title(view, "ro", 99).plain.endswith("best 0.900 (1/1) e2  4 of 5 classes  /ro")
    assert classes_title(view, "ro", 50).plain == "3 Classes  e3 mIoU 0.400  best 0.900 (1/1) e2  /ro"
    assert classes_title(view, "ro", 36).plain == "3 Classes  e3 mIoU 0.400  /ro"
