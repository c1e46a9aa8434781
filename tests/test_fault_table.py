"""The fault table: made by one run, which says what it was; another run is refused, not merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segapp import failpoints
from tests.support import fault_table
from tests.support.fault_runs import assert_acted
from tests.support.fault_table import BEGIN, END, table_of, write_results, write_table


def report(when: str, outcome: str, *hows: str) -> pytest.TestReport:
    properties = [("case", {"row": "F47", "how": how, "passes": "exact | bitwise"}) for how in hows]
    return pytest.TestReport("test_x", ("x", 1, "x"), {}, outcome, None, when, user_properties=properties)  # type: ignore[arg-type]


def test_fault_table_is_replaced_by_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme, results = tmp_path / "README.md", tmp_path / "new" / "faults.json"
    readme.write_text(f"before\n{BEGIN}\n| F02 | of another run |\n{END}\nafter\n")
    monkeypatch.setenv(fault_table.RESULTS_VARIABLE, str(results))
    fault_table.check_results_path()
    reports = [report("setup", "passed", "once", "always"), report("call", "passed", "once", "always")]
    write_results([*reports, report("teardown", "failed", "always")], 60.0)
    write_table(readme, results)
    text = readme.read_text()
    assert text.startswith(f"before\n{BEGIN}\n0 of the 110 rows of the matrix pass. One run: ")
    assert text.endswith(f"{END}\nafter\n")
    assert "| F47 | once | exact \\| bitwise | passed (1 test) | 0 |" in text
    assert "| F47 | always | exact \\| bitwise | **failed** (1 of 1 tests) | 0 |" in text
    assert "No case of these rows was in that run: C01, C02" in text
    assert "F02 | of another run" not in text
    for word in ("commit ", ", 1 min, ", " CPUs ("):
        assert word in text
    with pytest.raises(pytest.UsageError, match="holds another run"):
        fault_table.check_results_path()
    with pytest.raises(ValueError, match="Z09 is no row"):
        table_of("monday", [{**json.loads(results.read_text())["outcomes"][0], "row": "Z09"}])


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
