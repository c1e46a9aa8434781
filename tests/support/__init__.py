"""Helpers of the tests: runs, programs, terminals, drawn data, cases; imported as `tests.support.NAME`."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The root of the repository; `python -m tests.support.NAME` runs from here."""
