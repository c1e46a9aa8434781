"""What a person shows others: the report of a run, and several runs beside each other, each one HTML file."""

from segapp.report.compare import compare_runs
from segapp.report.page import write_report

__all__ = ["compare_runs", "write_report"]
