"""The table in this folder's README: what every case of the matrix does and did, from real results.

`SEGAPP_FAULTS_TABLE=1 uv run pytest -m "faults or faults_long"` runs the cases, puts what they did into results.json in
place of what stood there of the same tests, and writes the table anew. `python tests/faults/table.py` only writes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

TABLE_VARIABLE = "SEGAPP_FAULTS_TABLE"

_HERE = Path(__file__).parent
_RESULTS, _README = _HERE / "results.json", _HERE / "README.md"
_BEGIN, _END = "<!-- table: made by table.py -->", "<!-- end of the table -->"


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
    results = {each.test: each for each in _read_results()}
    results.update({each.test: each for each in outcomes})
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
    for row in sorted(rows, key=_row_key):
        tests = rows[row]
        how = "; ".join(dict.fromkeys(each.how for each in tests))
        passes = "; ".join(dict.fromkeys(each.passes for each in tests))
        lines.append(f"| {row} | {how} | {passes} | {_result(tests)} | {sum(e.seconds for e in tests):.0f} |")
    num_passed = sum(_result(tests).startswith("passed") for tests in rows.values())
    return "\n".join([f"{num_passed} of {len(rows)} cases pass.", "", *lines])


def _result(tests: list[Outcome]) -> str:
    """`passed (3 tests)`, or what did not."""
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


if __name__ == "__main__":
    write_table([])
