"""The figures of `tests.gpu.figures_training`, tried with small shapes on the CPU."""

from __future__ import annotations

import pytest

from tests.gpu import figures_training


@pytest.mark.slow
def test_training_figures_have_a_row_for_each_mode() -> None:
    rows = figures_training.training_figures("cpu")
    assert [row["mode"] for row in rows] == ["single", "dp x3 on one card", "ddp"]
    assert all(row["images/s"] > 0 and row["CPU s a step"] > 0 for row in rows)


@pytest.mark.slow
def test_plan_and_evaluation_figures_have_rows() -> None:
    (row,) = figures_training.plan_figures("cpu")
    assert row["planned MiB"] > 1
    assert row["measured MiB"] is None
    assert {row["images"] for row in figures_training.evaluation_figures("cpu")} == {"one size", "many sizes"}
