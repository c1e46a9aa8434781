"""The metrics of memory plans, by hand."""

import pytest

from tests.support.plan_scores import (
    failure_probability,
    median_relative_error,
    memory_conserved,
    memory_unused,
    relative_errors,
)


def test_metrics_of_a_case_worked_by_hand():
    pairs = [(110.0, 100.0), (90.0, 100.0), (300.0, 200.0)]
    assert relative_errors(pairs) == pytest.approx([0.1, -0.1, 0.5])
    assert median_relative_error(pairs) == pytest.approx(0.1)
    assert failure_probability([True, False, False, False]) == 0.25
    assert memory_conserved([(1000.0, 300.0, False), (1000.0, 500.0, True)]) == (700 - 500) / 2
    assert memory_unused(400.0, 300.0) == 0.25
    assert memory_unused(400.0, 500.0) == 0.0
