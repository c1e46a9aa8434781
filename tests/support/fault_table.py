"""The table in tests/faults/README.md: each fault, what must hold after it, and the result when it was last run.

A case is a test marked `@case("F06", how=..., passes=...)`, in any folder. Two steps make the table:

    SEGAPP_FAULT_RESULTS=.pytest_cache/faults.json uv run pytest -m faults     # or -m faults_long, or -m case: all
    uv run python -m tests.support.fault_table [.pytest_cache/faults.json]

The first adds the outcomes of its tests to the file, with the commit, date and machine; the second writes the lines of
these cases and keeps the other lines of the table, each with the key of the run that it comes from.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT

RESULTS_VARIABLE = "SEGAPP_FAULT_RESULTS"
DEFAULT_RESULTS = ROOT / ".pytest_cache" / "faults.json"

_README = ROOT / "tests" / "faults" / "README.md"
_BEGIN, _END = "<!-- table: made by python -m tests.support.fault_table -->", "<!-- end of the table -->"
_HEAD = ["| case | how | passes | result | s | run |", "|---|---|---|---|---:|---|"]

MATRIX = {
    "F": [*range(1, 26), *range(30, 48)],
    "R": range(1, 12),
    "N": range(1, 7),
    "X": range(1, 5),
    "G": range(1, 2),
    "D": range(1, 17),
    "C": range(1, 6),
    "S": range(1, 13),
}
"""The rows of the fault matrix; F17b and F17c belong to it too. Rows of other letters (W) are additions to it."""


def case(row: str, *, how: str, passes: str) -> Callable[[Any], Any]:
    """Returns a decorator that marks a test as a case of the matrix.

    Args:
        row: the row, such as `F06`.
        how: how the fault is injected.
        passes: what must hold afterwards.
    """
    return pytest.mark.case(row=row, how=how, passes=passes)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test of a case, and the run of pytest that it comes from (commit, date, machine)."""

    row: str
    how: str
    passes: str
    test: str
    outcome: str
    seconds: float
    reason: str
    figure: str
    run: str


@dataclass(frozen=True)
class Line:
    """One line of the table: the outcomes of a case."""

    row: str
    how: str
    passes: str
    result: str
    seconds: str
    run: str

    @property
    def key(self) -> tuple[str, str]:
        """The row and the fault: a line replaces the one of the same key."""
        return self.row, self.how


def write_table(outcomes: Iterable[Outcome]) -> None:
    """Writes the lines of these outcomes into the README's table; other lines and the runs they name stay."""
    before, _, rest = _README.read_text().partition(_BEGIN)
    table, _, after = rest.partition(_END)
    lines = {line.key: line for line in _read_lines(table)}
    names = dict(re.findall(r"^- (\w): (.+)$", table, re.MULTILINE))
    lines |= {line.key: line for line in lines_of(outcomes, names)}
    _README.write_text(f"{before}{_BEGIN}\n{table_of(lines.values(), names)}\n{_END}{after}")


def lines_of(outcomes: Iterable[Outcome], names: dict[str, str]) -> list[Line]:
    """Returns a line for each case; a run without a key in `names` (key to run) gets one there."""
    cases: dict[tuple[str, str], list[Outcome]] = {}
    for each in outcomes:
        cases.setdefault((each.row, each.how), []).append(each)
    for run in {each.run: None for tests in cases.values() for each in tests}:
        if run not in names.values():
            names[next(letter for letter in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if letter not in names)] = run
    keys = {run: key for key, run in names.items()}
    return [
        Line(
            row,
            how,
            tests[0].passes,
            _result(tests),
            f"{sum(each.seconds for each in tests):.0f}",
            ", ".join(sorted({keys[each.run] for each in tests})),
        )
        for (row, how), tests in cases.items()
    ]


def table_of(lines: Iterable[Line], names: dict[str, str]) -> str:
    """Returns the table in Markdown: a summary, the runs, one line a case; runs without a line are left out."""
    ordered = sorted(lines, key=lambda line: (_row_key(line.row), line.how))
    by_row: dict[str, list[Line]] = {row: [] for row in matrix_rows()}
    for line in ordered:
        by_row.setdefault(line.row, []).append(line)
    passed = {row for row, found in by_row.items() if _has_passed(found)}
    others = sorted(by_row.keys() - matrix_rows(), key=_row_key)
    summary = (
        f"{len(passed & matrix_rows())} of the {len(matrix_rows())} rows of the matrix pass, "
        f"and {len(passed & set(others))} of {len(others)} others ({', '.join(others)}). Runs:"
    )
    used = {key for line in ordered for key in line.run.split(", ")}
    runs = [f"- {key}: {run}" for key, run in sorted(names.items()) if key in used]
    not_run = [f"Not run yet: {row}." for row in sorted(matrix_rows(), key=_row_key) if not by_row[row]]
    cells = [[line.row, line.how, line.passes, line.result, line.seconds, line.run] for line in ordered]
    rows = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells]
    return "\n".join([summary, "", *runs, *not_run, "", *_HEAD, *rows])


def matrix_rows() -> set[str]:
    """The 100 rows of the matrix."""
    return {*(f"{letter}{number:02}" for letter, numbers in MATRIX.items() for number in numbers), "F17b", "F17c"}


def _has_passed(lines: list[Line]) -> bool:
    """True if a case of the row passed and none failed; cases that this machine cannot run do not count."""
    return any(line.result.startswith("passed") for line in lines) and not any(
        "failed" in line.result for line in lines
    )


def _read_lines(table: str) -> list[Line]:
    cells = [re.split(r"(?<!\\) \| ", line[2:-2]) for line in table.splitlines() if re.match(r"\| [A-Z]\d", line)]
    return [Line(*(cell.replace("\\|", "|") for cell in row)) for row in cells]


def _result(tests: list[Outcome]) -> str:
    """`passed (3 tests)` with figures and what was skipped, or what failed."""
    failed = [each for each in tests if each.outcome == "failed"]
    skipped = [each for each in tests if each.outcome == "skipped"]
    if failed:
        return f"**failed** ({len(failed)} of {len(tests)} tests)"
    if len(skipped) == len(tests):
        return "not run: " + skipped[0].reason.removeprefix("Skipped: ")
    count = len(tests) - len(skipped)
    figures = "; ".join(dict.fromkeys(each.figure for each in tests if each.figure))
    words = f"passed ({count} test{'s' if count > 1 else ''})" + (f": {figures}" if figures else "")
    return words if not skipped else f"{words}, {len(skipped)} not run: {skipped[0].reason.removeprefix('Skipped: ')}"


def _row_key(row: str) -> tuple[str, int, str]:
    letter, number, rest = re.fullmatch(r"([A-Z]+)(\d+)(.*)", row).groups()  # type: ignore[union-attr]
    return letter, int(number), rest


def read_results(path: Path) -> list[Outcome]:
    """Returns the outcomes in a results file."""
    return [Outcome(**each) for each in json.loads(path.read_text())]


def describe_run() -> str:
    """Returns the date, commit and machine of this run."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    place = f"{os.cpu_count()} CPUs, {versions}, {platform.system()} {platform.release().split('-')[0]}"
    return f"{datetime.date.today()}, commit {commit.stdout.strip() or 'unknown'}, {place}"


# --- hooks, for tests/conftest.py -------------------------------------------------------------------------------------


def note_cases(items: Iterable[pytest.Item]) -> None:
    """Copies the case markers of tests into their reports."""
    for item in items:
        for marker in item.iter_markers("case"):
            item.user_properties.append(("case", dict(marker.kwargs)))


def add_results(reports: Iterable[pytest.TestReport]) -> None:
    """Adds the outcomes of cases to the file that SEGAPP_FAULT_RESULTS names, in place of those of the same tests."""
    path, run = Path(os.environ[RESULTS_VARIABLE]), describe_run()
    results = {(each.row, each.test): each for each in read_results(path)} if path.exists() else {}
    results |= {(each.row, each.test): each for report in reports for each in _outcomes_of(report, run)}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(each) for each in results.values()], indent=1))


def _outcomes_of(report: pytest.TestReport, run: str) -> list[Outcome]:
    """One outcome for each case of the report's test; none where it has no case or has not ended."""
    is_result = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if not is_result:
        return []
    cases = [value for name, value in report.user_properties if name == "case" and isinstance(value, dict)]
    figures = ", ".join(str(value) for name, value in report.user_properties if name == "figure")
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    facts = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason}
    return [Outcome(**facts, figure=figures, run=run, **each) for each in cases]


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description="Writes the table in tests/faults/README.md from a results file.")
    parser.add_argument("results", nargs="?", type=Path, default=DEFAULT_RESULTS, help="default: %(default)s")
    write_table(read_results(parser.parse_args().results))


if __name__ == "__main__":
    main()
