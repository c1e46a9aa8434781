"""The metrics of memory plans, by hand, and the plans of two networks beside their real steps on the CPU."""

import json
import subprocess
import sys

import pytest

from tests.support import ROOT
from tests.support.plan_on_cpu import QUICK
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


@pytest.mark.slow
def test_plans_are_within_1_percent_of_real_steps_on_the_cpu():
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.plan_on_cpu", "--ledger", *QUICK],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [row["network"] for row in rows] == list(QUICK)
    for row in rows:
        assert row["planned"] == pytest.approx(row["ledger"], rel=0.01), row
