"""Reports as single HTML files: one run, or several runs side by side."""

from segapp.report.compare import compare_runs
from segapp.report.page import write_report

__all__ = ["compare_runs", "write_report"]
