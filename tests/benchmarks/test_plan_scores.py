"""How good memory plans are: beside real steps on the CPU.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_plan_scores.py
"""

import statistics

import pytest

from tests.gpu.report import table
from tests.support.own_process import in_own_process
from tests.support.plan_scores import relative_errors
from tests.support.real_steps import NETWORKS, plan_row

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3600)]


def percent(planned, measured):
    (error,) = relative_errors([(planned, measured)])
    return f"{100 * error:+.1f} %"


def test_plans_beside_real_steps_on_the_cpu(capsys):
    rows = [in_own_process(plan_row, name, has_allocator=True) for name in NETWORKS]
    shown = [
        row | {f"plan / {name}": percent(row["planned"], row[name]) for name in ("ledger", "allocator")} for row in rows
    ]
    errors = {
        measured: [abs(error) for error in relative_errors((row["planned"], row[measured]) for row in rows)]
        for measured in ("ledger", "allocator")
    }
    with capsys.disabled():
        print(f"\npeak of a step, MiB\n{table(shown)}")
        for measured, found in errors.items():
            print(f"{measured}: median {100 * statistics.median(found):.3f} %, worst {100 * max(found):.2f} %")
    assert statistics.median(errors["ledger"]) <= 0.01
    assert max(errors["ledger"]) <= 0.03
