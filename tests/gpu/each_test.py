"""A plugin of pytest: the outcome of each test as a line of JSON, and no test that has an outcome already.

JUnit XML is written when all tests are over; these lines are there after a stop too.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.gpu.cases import RESULTS_VARIABLE, add_line, done_names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = done_names()
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # the process that the worker reports to writes
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.outcome == "skipped":
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    elif report.outcome == "failed":
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        reason = f"in {report.when}: {reason}" if report.when != "call" else reason
    add_line(
        Path(os.environ[RESULTS_VARIABLE]),
        case=report.nodeid,
        outcome=report.outcome,
        reason=reason.strip().partition("\n")[0],
        seconds=report.duration,
    )
