"""The README's table: a cell of segapp is what the tests that it links hold, and a cell of a peer has a source."""

from __future__ import annotations

import ast
import re

from tests.support import ROOT

CELLS = {
    "loss across GPUs if they see different numbers of valid pixels": (
        "mean over all valid pixels", "tests/parallel/test_exactness.py",
        "test_220_random_steps_match_one_device_in_float64",
    ),
    "uneven batch per GPU": (
        "yes, also while it trains", "tests/training/test_rank_splits.py",
        "test_split_of_ranks_is_changed_by_command_and_exact",
    ),
    "gradient penalties with SyncBatchNorm": (
        "yes", "tests/parallel/test_penalties.py", "test_penalties_match_their_formulas_at_every_split",
    ),
    "memory of each GPU before training": (
        "predicted for each split", "tests/memory/test_simulation_against_torch.py",
        "test_simulated_peak_is_within_1_percent_of_the_profiler",
    ),
    "out of memory during training": (
        "recomputes, then splits the step", "tests/training/recovery/test_recompute_rung.py",
        "test_a_second_failure_of_the_step_cuts_pieces",
    ),
    "resume within an epoch": (
        "yes, no batch replayed", "tests/training/test_resume.py",
        "test_run_stopped_at_any_safe_point_resumes_bitwise",
    ),
    "data checked before training": (
        "every file and id, leaks", "tests/datasets/test_inspection.py", "test_one_planted_fault_gives_one_finding",
    ),
    "dashboard in the terminal, from any shell": (
        "yes", "tests/tui/test_terminal.py", "test_q_exits_with_attach_hint_and_restores_the_terminal",
    ),
}  # fmt: skip
"""Row -> what its cell says, and the test of that claim."""

WITHOUT = {
    "trained segmentation weights to download": "no",
    "3D volumes": "no",
    "instances, panoptic": "no",
    "Windows": "no",
    "community": "none yet",
}
"""Rows that segapp loses."""


def table() -> dict[str, list[str]]:
    """Return the cells of each row behind its name."""
    text = (ROOT / "README.md").read_text().partition("## Compared")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    return {cells[0]: cells[1:] for cells in rows if cells[0] and set(cells[0]) != {"-"}}


def test_cells_of_segapp_link_their_tests_and_others_a_source() -> None:
    rows = table()
    for name, (words, path, test) in CELLS.items():
        own, *peers = rows[name]
        assert own == f"[{words}]({path})"
        tree = ast.parse((ROOT / path).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, name
        assert [cell for cell in peers if not re.fullmatch(r"\[[^\]]+\]\(\S+\)", cell)] == [], name
    assert {name: rows[name][0] for name in WITHOUT} == WITHOUT
    assert rows.keys() == CELLS.keys() | WITHOUT.keys() | {"license"}


def test_gate_runs_the_test_command_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert "python3 -m uv run pytest\n```" in text
    assert (ROOT / ".ci" / "run").read_text().endswith("\n$uv run pytest\n")
