"""The table in tests/faults/README.md: each fault, what must hold after it, and the result when it was last run.

A case is a test marked `@case("F06", how=..., passes=...)`, in any folder. Two steps make the table:

    SEGAPP_FAULT_RESULTS=.pytest_cache/faults.json uv run pytest -m case       # all; -m faults: the short ones
    uv run python -m tests.support.fault_table .pytest_cache/faults.json

The table shows one run of pytest: the first step writes its outcomes to a new file, with commit, date, duration and
machine, and refuses a file that is there already; the second replaces the whole table, and lists the rows not run.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

RESULTS_VARIABLE = "SEGAPP_FAULT_RESULTS"
BEGIN, END = "<!-- table: made by python -m tests.support.fault_table -->", "<!-- end of the table -->"
_HEAD = ["| case | how | passes | result | s |", "|---|---|---|---|---:|"]

MATRIX = {
    "F": [*range(1, 26), *range(30, 48)],
    "R": range(1, 12),
    "N": range(1, 7),
    "X": range(1, 5),
    "M": range(1, 6),
    "G": range(1, 2),
    "D": range(1, 17),
    "C": range(1, 6),
    "S": range(1, 14),
    "W": range(1, 5),
}
"""The rows of the fault matrix; F17b and F17c belong to it too."""

Outcome = dict[str, Any]
"""Of one test of a case: row, how, passes, test, outcome, seconds, reason, figure."""


def case(row: str, *, how: str, passes: str) -> Callable[[Any], Any]:
    """Returns a decorator that marks a test as a case of a row: how the fault is injected, and what must hold then."""
    return pytest.mark.case(row=row, how=how, passes=passes)


def matrix_rows() -> set[str]:
    """The rows of the matrix."""
    return {*(f"{letter}{number:02}" for letter, numbers in MATRIX.items() for number in numbers), "F17b", "F17c"}


def table_of(run: str, outcomes: Iterable[Outcome]) -> str:
    """Returns the table in Markdown: a summary, the run, the rows that did not run, one line a case.

    Raises:
        ValueError: a row is not in the matrix.
    """
    cases: dict[tuple[str, str], list[Outcome]] = {}
    for each in outcomes:
        if each["row"] not in matrix_rows():
            raise ValueError(f"{each['row']} is no row of the matrix: add it to MATRIX")
        cases.setdefault((each["row"], each["how"]), []).append(each)
    found: dict[str, list[str]] = {row: [] for row in sorted(matrix_rows())}
    lines = []
    for (row, how), tests in sorted(cases.items()):
        found[row].append(_result(tests))
        cells = [row, how, tests[0]["passes"], found[row][-1], f"{sum(each['seconds'] for each in tests):.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    passed = [row for row, words in found.items() if any(word.startswith("passed") for word in words)]
    passed = [row for row in passed if not any("failed" in word for word in found[row])]
    summary = [f"{len(passed)} of the {len(found)} rows of the matrix pass. One run: {run}."]
    not_run = [row for row, words in found.items() if not words]
    summary += [f"No case of these rows was in that run: {', '.join(not_run)}."] if not_run else []
    return "\n".join([*summary, "", *_HEAD, *lines])


def _result(tests: list[Outcome]) -> str:
    """`passed (3 tests)` with figures and what was skipped, or what failed."""
    failed = [each for each in tests if each["outcome"] == "failed"]
    skipped = [each["reason"].removeprefix("Skipped: ") for each in tests if each["outcome"] == "skipped"]
    count = len(tests) - len(skipped)
    if failed:
        return f"**failed** ({len(failed)} of {len(tests)} tests)"
    if not count:
        return f"not run: {skipped[0]}"
    figures = "; ".join(dict.fromkeys(each["figure"] for each in tests if each["figure"]))
    words = f"passed ({count} test{'s' if count > 1 else ''})" + (f": {figures}" if figures else "")
    return words if not skipped else f"{words}, {len(skipped)} not run: {skipped[0]}"


def describe_run(duration_s: float) -> str:
    """Returns date, commit, duration and machine of this run."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    place = f"{os.cpu_count()} CPUs ({platform.machine()}), {versions}, {system}"
    return f"{datetime.date.today()}, commit {commit}, {duration_s / 60:.0f} min, {place}"


# --- hooks, for tests/conftest.py -------------------------------------------------------------------------------------


def note_cases(items: Iterable[pytest.Item]) -> None:
    """Copies the case markers of tests into their reports."""
    for item in items:
        for marker in item.iter_markers("case"):
            item.user_properties.append(("case", dict(marker.kwargs)))


def check_results_path() -> None:
    """Raises UsageError if the file that SEGAPP_FAULT_RESULTS names is there already: results of another run."""
    path = os.environ.get(RESULTS_VARIABLE)
    if path and Path(path).exists():
        raise pytest.UsageError(f"{RESULTS_VARIABLE}: {path} holds another run: remove it, or name another file")


def write_results(reports: Iterable[pytest.TestReport], duration_s: float) -> None:
    """Writes the outcomes of the cases of a run to the new file that SEGAPP_FAULT_RESULTS names.

    What fails after a test, such as a failpoint that never acted, comes later and replaces its outcome.
    """
    outcomes: dict[tuple[str, str, str], Outcome] = {}
    for report in reports:
        if report.when != "call" and report.outcome == "passed":
            continue
        figures = ", ".join(str(value) for name, value in report.user_properties if name == "figure")
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
        facts = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration}
        for name, value in report.user_properties:
            if name == "case" and isinstance(value, dict):
                key = value["row"], value["how"], report.nodeid
                outcomes[key] = {**value, **facts, "reason": reason, "figure": figures}
    path = Path(os.environ[RESULTS_VARIABLE])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x") as file:
        json.dump({"run": describe_run(duration_s), "outcomes": list(outcomes.values())}, file, indent=1)


def write_table(readme: Path, results: Path) -> None:
    """Replaces the table of a README by that of a run."""
    table = table_of(**json.loads(results.read_text()))
    text = re.sub(rf"(?s){BEGIN}.*{END}", lambda _: f"{BEGIN}\n{table}\n{END}", readme.read_text())
    readme.write_text(text)


if __name__ == "__main__":
    write_table(ROOT / "tests" / "faults" / "README.md", Path(sys.argv[1]))
