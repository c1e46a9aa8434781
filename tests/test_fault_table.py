"""The fault table: made by one run, which says what it was; another run is refused, not merged."""

from __future__ import annotations

from pathlib import Path

import pytest

from segapp import failpoints
from tests.support import fault_table
from tests.support.fault_runs import assert_acted
from tests.support.fault_table import Outcome, Results, write_results, write_table


def outcome(row: str, how: str, outcome: str = "passed") -> Outcome:
    return Outcome(row, how, "exact | bitwise", "test_x", outcome, 1.4, "", "")


def report(when: str, outcome: str, *hows: str) -> pytest.TestReport:
    properties = [("case", {"row": "F47", "how": how, "passes": "exact"}) for how in hows]
    return pytest.TestReport("test_x", ("x", 1, "x"), {}, outcome, None, when, user_properties=properties)  # type: ignore[arg-type]


def test_fault_table_is_replaced_by_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{fault_table._BEGIN}\n{fault_table._END}\nafter\n")
    monkeypatch.setattr(fault_table, "_README", readme)
    write_table(Results("monday", (outcome("F02", "kills", "failed"), outcome("F01", "a | b"))))
    first = readme.read_text()
    assert "| F02 | kills | exact \\| bitwise | **failed** (1 of 1 tests) | 1 |" in first
    assert "1 of the 110 rows of the matrix pass. One run: monday." in first
    write_table(Results("tuesday", (outcome("S13", "paths"),)))
    second = readme.read_text()
    assert "monday" not in second
    assert "| F0" not in second
    assert "| S13 | paths | exact \\| bitwise | passed (1 test) | 1 |" in second
    assert "No case of these rows was in that run: C01, C02" in second
    assert second.startswith("before\n")
    assert second.endswith("\nafter\n")
    with pytest.raises(ValueError, match="Z09 is no row"):
        write_table(Results("monday", (outcome("Z09", "x"),)))


def test_two_cases_of_one_test_are_both_in_the_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "faults.json"
    monkeypatch.setenv(fault_table.RESULTS_VARIABLE, str(path))
    fault_table.check_results_path()
    reports = [report("setup", "passed", "once", "always"), report("call", "passed", "once", "always")]
    write_results([*reports, report("teardown", "failed", "always")], 60.0)
    found = fault_table.read_results(path)
    assert [(each.how, each.outcome) for each in found.outcomes] == [("once", "passed"), ("always", "failed")]
    for word in ("commit ", ", 1 min, ", " CPUs ("):
        assert word in found.run
    with pytest.raises(pytest.UsageError, match="holds another run"):
        fault_table.check_results_path()


def test_armed_failpoint_that_never_acts_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(failpoints.MARKS_VARIABLE, str(tmp_path))
    failpoints.arm("x.near=2:nan;x.far=3:nan")
    try:
        assert [failpoints.failpoint(name) for name in ("x.near", "x.near", "x.far")] == [None, "nan", None]
    finally:
        failpoints.arm("")
    with pytest.raises(AssertionError, match=r"was due: x\.far$"):
        assert_acted(tmp_path)
    (tmp_path / "x.far").write_text("1\n")
    assert_acted(tmp_path)
