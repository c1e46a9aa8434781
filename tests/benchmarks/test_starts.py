"""Seconds to the first line of every command on a terminal.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_starts.py
"""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time

import pytest

from tests.test_first_lines import COMMANDS

pytestmark = pytest.mark.benchmark


def first_line_s(words: list[str]) -> float:
    """Return the seconds from the start of the program to the first byte on its terminal."""
    ours, theirs = pty.openpty()
    began_s = time.perf_counter()
    program = subprocess.Popen([sys.executable, "-m", "segapp", *words], stdin=theirs, stdout=theirs, stderr=theirs)
    try:
        assert select.select([ours], [], [], 120)[0], words
        return time.perf_counter() - began_s
    finally:
        program.kill()
        program.wait()
        os.close(ours)
        os.close(theirs)


def test_seconds_to_the_first_line() -> None:
    first_line_s(["--help"])  # the files are read from memory then
    found = {name: min(first_line_s(line.split()) for _ in range(3)) for name, line in COMMANDS.items()}
    for name, seconds in sorted(found.items(), key=lambda item: -item[1]):
        print(f"{name:12} {seconds:.2f} s")
