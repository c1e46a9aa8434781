"""A plugin of pytest: start and outcome of each test as lines of JSON, and no test that has an outcome already.

They are on the disk as soon as they are known: after a stop they name what has passed, failed, and not ended.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.cases import RESULTS_VARIABLE, add_line, done_names


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    done = done_names()
    left_out = [item for item in items if item.nodeid in done]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item.nodeid not in done]


def pytest_runtest_logstart(nodeid: str) -> None:
    _add_line(case=nodeid, began=time.time())


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    reason = ""
    if report.outcome == "skipped":
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
    elif report.outcome == "failed":
        reason = getattr(getattr(report.longrepr, "reprcrash", None), "message", str(report.longrepr))
        reason = f"in {report.when}: {reason}" if report.when != "call" else reason
    _add_line(
        case=report.nodeid,
        outcome=report.outcome,
        reason=reason.strip().partition("\n")[0],
        seconds=report.duration,
    )


def _add_line(**values: Any) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # the process that the workers report to writes
        add_line(Path(os.environ[RESULTS_VARIABLE]), **values)
