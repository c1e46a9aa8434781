"""The table in tests/faults/README.md: what every case of the fault matrix does and did, from real results.

A case is a test with `@case("F06", how=..., passes=...)`, wherever it stands. `SEGAPP_FAULTS_TABLE=1 uv run pytest -m
case` runs them all, puts what they did into tests/faults/results.json in place of what stood there of the same tests,
and writes the table anew; so does any part of them (`-m faults`). `python tests/support/fault_table.py` only writes it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

TABLE_VARIABLE = "SEGAPP_FAULTS_TABLE"

_HERE = Path(__file__).parents[1] / "faults"
_RESULTS, _README = _HERE / "results.json", _HERE / "README.md"
_BEGIN, _END = "<!-- table: made by tests/support/fault_table.py -->", "<!-- end of the table -->"


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
"""The rows of the matrix, to which F17b and F17c belong; W rows are cases of ours beside it."""

NOT_RUN: dict[str, str] = {}
"""Why a row has no case."""


def case(row: str, *, how: str, passes: str) -> Callable[[Any], Any]:
    """Marks a test as a case of the matrix.

    Args:
        row: its row, such as `F06`.
        how: how the fault is injected.
        passes: what must hold.
    """
    return pytest.mark.case(row=row, how=how, passes=passes)


@dataclass(frozen=True)
class Outcome:
    """What one test of a case did."""

    row: str
    how: str
    passes: str
    test: str
    outcome: str
    seconds: float
    reason: str = ""
    figure: str = ""


def write_table(outcomes: Iterable[Outcome]) -> None:
    """Puts outcomes in place of older ones of the same tests, and writes the README's table anew."""
    results = {(each.row, each.test): each for each in _read_results()}
    results.update({(each.row, each.test): each for each in outcomes})
    ordered = sorted(results.values(), key=lambda each: (_row_key(each.row), each.test))
    text = json.dumps([{**asdict(each), "seconds": round(each.seconds, 1)} for each in ordered], indent=1)
    _RESULTS.write_text(text + "\n")
    readme = _README.read_text()
    before, after = readme.split(_BEGIN)[0], readme.split(_END)[1]
    _README.write_text(f"{before}{_BEGIN}\n{table_of(ordered)}\n{_END}{after}")


def table_of(outcomes: Iterable[Outcome]) -> str:
    """The table in Markdown, one line a row of the matrix."""
    rows: dict[str, list[Outcome]] = {}
    for each in outcomes:
        rows.setdefault(each.row, []).append(each)
    lines = ["| case | how | passes | result | s |", "|---|---|---|---|---:|"]
    matrix = [*matrix_rows(), *(row for row in rows if row not in matrix_rows())]
    for row in sorted(matrix, key=_row_key):
        tests = rows.get(row, [])
        how = "; ".join(dict.fromkeys(each.how for each in tests))
        passes = "; ".join(dict.fromkeys(each.passes for each in tests))
        cells = [row, how, passes, _result(row, tests), f"{sum(each.seconds for each in tests):.0f}"]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    num_passed = sum(_result(row, rows.get(row, [])).startswith("passed") for row in matrix_rows())
    others = sorted((row for row in rows if row not in matrix_rows()), key=_row_key)
    num_others = sum(_result(row, rows[row]).startswith("passed") for row in others)
    summary = (
        f"{num_passed} of the {len(matrix_rows())} rows of the matrix pass, and {num_others} of {len(others)} others"
    )
    return "\n".join([f"{summary} ({', '.join(others)}).", "", *lines])


def matrix_rows() -> list[str]:
    """The 100 rows of the matrix."""
    return [*(f"{letter}{number:02}" for letter, numbers in MATRIX.items() for number in numbers), "F17b", "F17c"]


def _result(row: str, tests: list[Outcome]) -> str:
    """`passed (3 tests)`, or what did not."""
    if not tests:
        return "not run: " + NOT_RUN.get(row, "in no results yet")
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


def _read_results() -> list[Outcome]:
    return [Outcome(**each) for each in json.loads(_RESULTS.read_text())] if _RESULTS.exists() else []


# --- hooks, for tests/conftest.py -------------------------------------------------------------------------------------


def note_cases(items: Iterable[pytest.Item]) -> None:
    """Puts the cases of tests into their reports."""
    for item in items:
        for marker in item.iter_markers("case"):
            item.user_properties.append(("case", dict(marker.kwargs)))


def outcomes_of(report: pytest.TestReport) -> list[Outcome]:
    """What a report says about the cases of its test; nothing where the test has none or has not ended."""
    is_result = report.when == "call" or (report.when == "setup" and report.outcome != "passed")
    if not is_result:
        return []
    cases = [value for name, value in report.user_properties if name == "case" and isinstance(value, dict)]
    figures = ", ".join(str(value) for name, value in report.user_properties if name == "figure")
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else ""
    facts = {"test": report.nodeid, "outcome": report.outcome, "seconds": report.duration, "reason": reason}
    return [Outcome(**facts, figure=figures, **each) for each in cases]


def is_asked_for() -> bool:
    """Whether the table is to be written."""
    return bool(os.environ.get(TABLE_VARIABLE))


if __name__ == "__main__":
    write_table([])
