"""The report of figures: tables, skipped and failing sections, a machine without a GPU."""

import pytest
import torch

from tests.gpu import report
from tests.gpu.report import Outcome, Section


def test_table_has_every_column_and_three_digits() -> None:
    rows = [{"shape": "2x19", "ms": 0.12345, "mib": 12345.6}, {"shape": "a|b", "ratio": None, "ms": 2}]
    assert report.table(rows).splitlines() == [
        "| shape | ms | mib | ratio |",
        "| --- | --- | --- | --- |",
        "| 2x19 | 0.123 | 12346 |  |",
        "| a\\|b | 2 |  |  |",
    ]


def test_crash_of_a_section_is_a_failure_with_its_error() -> None:
    outcome = report.read_outcome(1, "some output\n", "Traceback\nRuntimeError: CUDA error: an illegal access\n")
    assert outcome == Outcome(reason="failed: exit 1: RuntimeError: CUDA error: an illegal access", is_failure=True)


def test_rows_are_read_from_the_last_line() -> None:
    outcome = report.read_outcome(0, 'a warning\n{"rows": [{"ms": 1.5}], "reason": ""}\n', "")
    assert outcome == Outcome([{"ms": 1.5}])


def test_missing_package_is_a_skip_that_names_it(capsys: pytest.CaptureFixture[str]) -> None:
    report.print_section(Section("t", "no_such_package_here", "f_figures"), "cpu")
    assert (
        report.read_outcome(0, capsys.readouterr().out, "").reason == "skipped: no_such_package_here is not installed"
    )
    with pytest.raises(ModuleNotFoundError):
        report.print_section(Section("t", "tests.gpu.no_such_module", "f_figures"), "cpu")


def test_later_sections_are_skipped_when_time_is_over() -> None:
    text, is_good = report.report("cpu", report.SECTIONS[:1], budget_s=0)
    assert is_good
    assert "skipped: the 520 s of the report are over" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_machine_without_a_gpu_is_told_the_next_move(capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([]) == 2
    assert "--device cpu" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("section", report.SECTIONS, ids=lambda section: section.name)
def test_every_section_runs_on_the_cpu(section: Section) -> None:
    outcome = report.run_section(section, "cpu", 300)
    assert not outcome.is_failure, outcome.reason
    assert outcome.rows
