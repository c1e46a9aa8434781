"""The table in tests/faults/README.md: each fault, what must hold after it, and the result when it was last run.

A case is a test marked `@case("F06", how=..., passes=...)`, in any folder. Two steps make the table:

    SEGAPP_FAULT_RESULTS=.pytest_cache/faults.json uv run pytest -m case       # all; -m faults: the short ones
    uv run python -m tests.support.fault_table [.pytest_cache/faults.json]

The table shows one run of pytest: the first step writes its outcomes to a new file, with commit, date, duration and
machine, and refuses a file that is there already; the second replaces the whole table, and lists the rows not run.
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


def case(row: str, *, how: str, passes: str) -> Callable[[Any], Any]:
    """Returns a decorator that marks a test as a case of a row: how the fault is injected, and what must hold then."""
    return pytest.mark.case(row=row, how=how, passes=passes)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one test of a case."""

    row: str
    how: str
    passes: str
    test: str
    outcome: str
    seconds: float
    reason: str
    figure: str


@dataclass(frozen=True)
class Results:
    """One run of pytest: what describes it (date, commit, duration, machine), and the outcomes of its cases."""

    run: str
    outcomes: tuple[Outcome, ...]


def write_table(results: Results) -> None:
    """Replaces the README's table by that of a run."""
    before, _, rest = _README.read_text().partition(_BEGIN)
    _, _, after = rest.partition(_END)
    _README.write_text(f"{before}{_BEGIN}\n{table_of(results)}\n{_END}{after}")


def table_of(results: Results) -> str:
    """Returns the table in Markdown: a summary, the run, the rows that did not run, one line a case.

    Raises:
        ValueError: a row is not in the matrix.
    """
    cases: dict[tuple[str, str], list[Outcome]] = {}
    for each in results.outcomes:
        if each.row not in matrix_rows():
            raise ValueError(f"{each.row} is no row of the matrix: add it to MATRIX")
        cases.setdefault((each.row, each.how), []).append(each)
    found: dict[str, list[str]] = {row: [] for row in sorted(matrix_rows(), key=_row_key)}
    lines = []
    for (row, how), tests in sorted(cases.items(), key=lambda item: (_row_key(item[0][0]), item[0][1])):
        result = _result(tests)
        found[row].append(result)
        cells = [row, how, tests[0].passes, result, f"{sum(each.seconds for each in tests):.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    passed = [row for row, words in found.items() if any(word.startswith("passed") for word in words)]
    passed = [row for row in passed if not any("failed" in word for word in found[row])]
    summary = [f"{len(passed)} of the {len(found)} rows of the matrix pass. One run: {results.run}."]
    not_run = [row for row, words in found.items() if not words]
    summary += [f"No case of these rows was in that run: {', '.join(not_run)}."] if not_run else []
    return "\n".join([*summary, "", *_HEAD, *lines])


def matrix_rows() -> set[str]:
    """The rows of the matrix."""
    return {*(f"{letter}{number:02}" for letter, numbers in MATRIX.items() for number in numbers), "F17b", "F17c"}


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


def read_results(path: Path) -> Results:
    """Returns what `write_results` wrote."""
    found = json.loads(path.read_text())
    return Results(found["run"], tuple(Outcome(**each) for each in found["outcomes"]))


def describe_run(duration_s: float) -> str:
    """Returns date, commit, duration and machine of this run."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = " with changes" if git("status", "--porcelain", "--untracked-files=no") else ""
    commit = f"commit {git('rev-parse', '--short', 'HEAD') or 'unknown'}{changed}"
    versions = f"Python {platform.python_version()}, torch {importlib.metadata.version('torch')}"
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    place = f"{os.cpu_count()} CPUs ({platform.machine()}), {versions}, {system}"
    return f"{datetime.date.today()}, {commit}, {duration_s / 60:.0f} min, {place}"


# --- hooks, for tests/conftest.py -------------------------------------------------------------------------------------


def note_cases(items: Iterable[pytest.Item]) -> None:
    """Copies the case markers of tests into their reports."""
    for item in items:
        for marker in item.iter_markers("case"):
            item.user_properties.append(("case", dict(marker.kwargs)))


def check_results_path() -> None:
    """Refuses results beside those of another run.

    Raises:
        pytest.UsageError: the file that SEGAPP_FAULT_RESULTS names is there already.
    """
    path = os.environ.get(RESULTS_VARIABLE)
    if path and Path(path).exists():
        raise pytest.UsageError(f"{RESULTS_VARIABLE}: {path} holds another run: remove it, or name another file")


def write_results(reports: Iterable[pytest.TestReport], duration_s: float) -> None:
    """Writes the outcomes of the cases of a run to the new file that SEGAPP_FAULT_RESULTS names."""
    outcomes = {(each.row, each.how, each.test): each for report in reports for each in _outcomes_of(report)}
    path = Path(os.environ[RESULTS_VARIABLE])
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {"run": describe_run(duration_s), "outcomes": [asdict(each) for each in outcomes.values()]}
    with path.open("x") as file:
        json.dump(found, file, indent=1)


def _outcomes_of(report: pytest.TestReport) -> list[Outcome]:
    """One outcome for each case of the report's test; none where it has no case or has not ended.

    What fails after the test, such as a failpoint that never acted, comes later and replaces its outcome.
    """
    is_result = report.when == "call" or report.outcome != "passed"
    if not is_result:
        return []
    cases = [value for name, value in report.user_properties if name == "case" and isinstance(value, dict)]
    figures = ", ".join(str(value) for name, value in report.user_properties if name == "figure")
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    facts = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason}
    return [Outcome(**facts, figure=figures, **each) for each in cases]


def main() -> None:
    """Writes the table."""
    parser = argparse.ArgumentParser(description="Writes the table in tests/faults/README.md from a results file.")
    parser.add_argument("results", nargs="?", type=Path, default=DEFAULT_RESULTS, help="default: %(default)s")
    write_table(read_results(parser.parse_args().results))


if __name__ == "__main__":
    main()
