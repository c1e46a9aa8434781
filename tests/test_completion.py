"""Completion of commands and options, by typer's script for bash."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def completed(words: str, count: str = "1") -> subprocess.CompletedProcess[str]:
    asked = {"_SEGAPP_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": count}
    command = [sys.executable, "-P", "-m", "segapp"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **asked})


@pytest.mark.parametrize(("line", "expected"), [("segapp tr", ["train"]), ("segapp train --res", ["--resume"])])
def test_commands_and_options_are_completed(line: str, expected: list[str]) -> None:
    done = completed(line, str(line.count(" ")))
    assert done.stdout.split() == expected, done.stderr


@pytest.mark.parametrize("words", ["segapp nonsense --x ", "segapp train --config", "'"])
def test_impossible_lines_print_nothing_on_stderr(words: str) -> None:
    done = completed(words, "7")
    assert (done.returncode, done.stderr) == (0, "")
