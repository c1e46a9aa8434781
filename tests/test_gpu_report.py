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


def test_loss_metrics_are_ratios_of_graphs_within_a_shape() -> None:
    plain = "interpolate + cross_entropy"
    times = {("a", "float32", "ours"): 0.3, ("a", "float32", plain): 3.0, ("b", "float32", plain): 1.0}
    times |= {("b", "float32", "ours"): 0.2, ("b", "bfloat16", "ours"): 0.1, ("b", "bfloat16", plain): None}
    rows = [
        {"shape": shape, "logits": dtype, "way": way, "ms": 9.0, "ms, graph": graph_ms}
        for (shape, dtype, way), graph_ms in times.items()
    ]
    assert [line.partition(" of the time")[0] for line in report.loss_metrics(rows).splitlines()] == [
        "- a, float32: 0.10",
        "- b, float32: 0.20",
    ]
    assert "no card" in report.loss_metrics(rows[-1:])


@pytest.mark.parametrize(("value", "text"), [(True, "True"), (1234.5, "1234"), (0.01234, "0.0123"), (None, "")])
def test_cells_are_short(value: object, text: str) -> None:
    assert report.shown(value) == text
