"""The fault table: lines of cases that ran are replaced, other lines stay with the run that they come from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fault_table
from tests.support.fault_table import Outcome, write_table


def outcome(row: str, how: str, run: str, outcome: str = "passed") -> Outcome:
    return Outcome(row, how, "exact | bitwise", f"test_{how}", outcome, 1.4, "", "", run)


def test_fault_table_replaces_only_the_cases_that_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{fault_table._BEGIN}\n{fault_table._END}\nafter\n")
    monkeypatch.setattr(fault_table, "_README", readme)
    write_table([outcome("F02", "kills", "monday", "failed"), outcome("F01", "a | b", "monday")])
    first = readme.read_text()
    write_table([])
    assert readme.read_text() == first
    assert "- A: monday" in first
    assert "| F02 | kills | exact \\| bitwise | **failed** (1 of 1 tests) | 1 | A |" in first
    write_table([outcome("F02", "kills", "tuesday")])
    second = readme.read_text()
    assert "| F01 | a \\| b | exact \\| bitwise | passed (1 test) | 1 | A |" in second
    assert "| F02 | kills | exact \\| bitwise | passed (1 test) | 1 | B |" in second
    assert second.startswith("before\n")
    assert second.endswith("\nafter\n")
    assert "2 of the 100 rows of the matrix pass" in second
