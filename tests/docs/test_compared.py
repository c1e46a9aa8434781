"""The comparison with other trainers: tests hold what it says of segapp, and the README has five of its rows."""

from __future__ import annotations

import ast
import re

from segapp.docs.pages import find_page
from tests.support import ROOT

TESTS = {
    "same loss on any number of GPUs, with ignored pixels": (
        "tests/parallel/test_exactness.py", "test_84_random_steps_match_one_device_in_float64",
    ),
    "uneven batch per GPU": (
        "tests/training/test_rank_splits.py", "test_split_of_ranks_is_changed_by_command_and_exact",
    ),
    "gradient penalties with SyncBatchNorm": (
        "tests/parallel/test_penalties.py", "test_penalties_match_their_formulas_at_every_split",
    ),
    "peak memory of each GPU before training": (
        "tests/memory/test_measured_on_h200.py", "test_planned_peaks_are_near_the_measured_ones",
    ),
    "continues after out of memory": (
        "tests/training/recovery/test_recompute_rung.py", "test_a_step_out_of_memory_recomputes_all_blocks",
    ),
    "resumes within an epoch": (
        "tests/training/test_resume.py", "test_run_stopped_at_any_safe_point_resumes_bitwise",
    ),
    "checks every mask before training": (
        "tests/datasets/test_inspection.py", "test_each_of_many_faults_gives_one_finding",
    ),
    "terminal UI, from any shell": (
        "tests/tui/test_terminal.py", "test_q_exits_with_attach_hint_and_restores_the_terminal",
    ),
    "activation checkpointing": ("tests/parallel/test_recompute.py", "test_recomputation_changes_no_bit"),
}  # fmt: skip
"""Row that segapp has -> the test of that claim."""


def table(text: str) -> dict[str, list[str]]:
    """Return the cells of each row of the tables in a text behind its name."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in re.findall(r"^\|.*\|$", text, re.M)]
    return {cells[0]: cells[1:] for cells in rows if cells[0] and set(cells[0]) != {"-"}}


def test_rows_of_segapp_are_held_by_tests() -> None:
    _, has, lacks = find_page("compared")[0].text().split("\n## ")
    rows = table(has)
    assert (
        {name for name, (own, *_) in rows.items() if own == "yes"}
        == rows.keys()
        == TESTS.keys() | {"permissive license"}
    )
    for path, test in TESTS.values():
        tree = ast.parse((ROOT / path).read_text())
        assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (path, test)
    assert len(table(lacks)) >= 5
    assert {own for own, *_ in table(lacks).values()} == {"no"}


def test_cells_are_short_and_each_row_has_one_link() -> None:
    for name, (*cells, more) in table(find_page("compared")[0].text()).items():
        assert set(cells) <= {"yes", "no", "part"}, name
        assert len(cells) == 7, name
        assert re.fullmatch(r"\[[^\]]+\]\([^)]+\.md\)", more), name


def test_readme_has_five_of_the_rows() -> None:
    of_readme = table((ROOT / "README.md").read_text().partition("## What it does not do")[2])
    rows = {name: cells[:-1] for name, cells in table(find_page("compared")[0].text()).items()}
    assert len(of_readme) == 5
    assert of_readme == {name: rows[name] for name in of_readme}
    assert {own for own, *_ in of_readme.values()} == {"yes", "no"}


def test_gate_runs_the_test_command_of_the_readme() -> None:
    text = (ROOT / "README.md").read_text()
    assert "python3 -m uv run pytest\n```" in text
    assert "\n$uv run pytest\n" in (ROOT / ".ci" / "run").read_text()
