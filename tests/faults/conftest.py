"""Fixtures of the fault cases, and the record of what each did, from which the table is made."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import FaultRun, Invariants, References
from table import TABLE_VARIABLE, Outcome, write_table

_outcomes: list[Outcome] = []


@pytest.fixture(scope="session")
def references(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> References:
    """Uninterrupted runs to hold the others against."""
    return References(tiny_root, tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="session")
def invariants(references: References) -> Invariants:
    """What holds after any fault."""
    return Invariants(references)


@pytest.fixture
def new_run(references: References, tmp_path: Path) -> Iterator[Callable[..., FaultRun]]:
    """Makes runs, `new_run(train={"precision": "fp16"})`; what is left of their processes is killed at the end."""
    made: list[FaultRun] = []

    def make(name: str = "work", **sections: Any) -> FaultRun:
        made.append(FaultRun(tmp_path / name, references.config(**sections)))
        return made[-1]

    yield make
    for run in made:
        run.kill_all()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for marker in item.iter_markers("case"):
            item.user_properties.append(("case", dict(marker.kwargs)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    cases = [value for name, value in report.user_properties if name == "case"]
    is_result = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if is_result:
        figures = ", ".join(value for name, value in report.user_properties if name == "figure")
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        facts = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason}
        _outcomes.extend(Outcome(**facts, figure=figures, **each) for each in cases)


def pytest_sessionfinish(session: pytest.Session) -> None:
    is_controller = not hasattr(session.config, "workerinput")
    if is_controller and os.environ.get(TABLE_VARIABLE) and _outcomes:
        write_table(_outcomes)
