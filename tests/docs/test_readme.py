"""The README's table: what its column of segapp says is held by these tests."""

from __future__ import annotations

import re

from tests.support import ROOT

TESTS = {
    "loss of ranks with unequal ignored pixels": "tests/parallel/test_exactness.py",
    "another share for each GPU": "tests/training/test_rank_splits.py",
    "gradient penalties through synchronised BatchNorm": "tests/parallel/test_penalties.py",
    "memory of each GPU before the training": "tests/memory/test_simulation_against_torch.py",
    "out of memory during a training": "tests/training/recovery/test_out_of_memory.py",
    "resume within an epoch": "tests/training/test_resume.py",
    "data checked before the training": "tests/datasets/test_inspection.py",
    "screen in the terminal, from any shell": "tests/tui/test_terminal.py",
}


def test_each_row_of_the_table_has_a_test() -> None:
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| ([^|]+?) \| ", text.partition("## Compared")[2].partition("##")[0], re.M)
    assert [row for row in rows if row] == list(TESTS)
    assert [path for path in TESTS.values() if not (ROOT / path).exists()] == []


def test_gate_runs_the_test_command_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert "python3 -m uv run pytest\n```" in text
    assert (ROOT / ".ci" / "run").read_text().endswith("\n$uv run pytest\n")
