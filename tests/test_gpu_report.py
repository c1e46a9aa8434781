"""The tables and metrics of a session's page."""

from __future__ import annotations

import pytest

from tests.gpu import report


def test_table_has_every_column_and_three_digits() -> None:
    rows = [{"shape": "2x19", "ms": 0.12345, "mib": 12345.6}, {"shape": "a|b", "ratio": None, "ms": 2}]
    assert report.table(rows).splitlines() == [
        "| shape | ms | mib | ratio |",
        "| --- | --- | --- | --- |",
        "| 2x19 | 0.123 | 12346 |  |",
        "| a\\|b | 2 |  |  |",
    ]


def test_plan_metrics_are_those_of_a_case_worked_by_hand() -> None:
    rows = [
        {"planned MiB": 110.0, "measured MiB": 100.0, "fails in plan": False, "unused %": 12.0}
        | {"device MiB": 10240.0, "allowed MiB": 1024.0},
        {"planned MiB": 98.0, "measured MiB": 100.0, "fails in plan": True, "unused %": None}
        | {"device MiB": 10240.0, "allowed MiB": 2048.0},
        {"planned MiB": 205.0, "measured MiB": 200.0, "fails in plan": False, "unused %": 4.0},
        {"planned MiB": 50.0, "measured MiB": None},
    ]
    assert report.plan_metrics(rows).splitlines() == [
        "- median relative error: 2.5 % of 3 peaks",
        "- plans whose run then fails: 1 of 3 (33 %)",
        "- planned memory left unused, median: 8.0 %",
        "- memory left to others, mean: 3.5 GiB of a card",
    ]


def test_plan_metrics_without_a_card_say_so() -> None:
    assert "no card" in report.plan_metrics([{"planned MiB": 50.0, "measured MiB": None}])


@pytest.mark.parametrize(("value", "text"), [(True, "True"), (1234.5, "1234"), (0.01234, "0.0123"), (None, "")])
def test_cells_are_short(value: object, text: str) -> None:
    assert report.shown(value) == text
