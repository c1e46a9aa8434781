"""Uneven splits over ranks in real runs: started, changed by commands, resumed; ranks that start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import dump_config
from tests.support.rank_runs import (
    check_killed_rank,
    check_other_numbers_of_ranks,
    check_restart_after_out_of_memory,
    check_split_change,
    check_stop_by_signal,
    ranks_of,
)
from tests.support.runs import differing, segapp

CPUS: list[str | int] = ["cpu", "cpu"]


@pytest.mark.slow
def test_split_of_ranks_is_changed_by_command_and_exact(tiny: dict[str, Any], tmp_path: Path) -> None:
    check_split_change(tiny, tmp_path, CPUS)


@pytest.mark.slow
def test_ranks_start_again_in_pieces_after_out_of_memory(tiny: dict[str, Any], tmp_path: Path) -> None:
    check_restart_after_out_of_memory(tiny, tmp_path, CPUS)


@pytest.mark.slow
def test_ranks_stop_at_the_same_step_and_save(tiny: dict[str, Any], tmp_path: Path) -> None:
    check_stop_by_signal(tiny, tmp_path, CPUS)


@pytest.mark.slow
def test_killed_rank_ends_all_ranks_within_seconds(tiny: dict[str, Any], tmp_path: Path) -> None:
    check_killed_rank(tiny, tmp_path, CPUS)


@pytest.mark.slow
def test_run_goes_between_two_ranks_three_and_one_device(tiny: dict[str, Any], tmp_path: Path) -> None:
    check_other_numbers_of_ranks(tiny, tmp_path, "cpu")


@pytest.mark.slow
def test_uneven_ranks_resume_bit_for_bit(tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 3, CPUS, gpu0_bsz=1)))
    for name, stages in (("whole", (3,)), ("parts", (1, 3))):
        for epochs in stages:
            resume = ["--resume", name] if (tmp_path / name).exists() else ["--run", name]
            words = [f"train.epochs={epochs}", "schedule.name=constant", "schedule.warmup_steps=0"]
            assert segapp("train", "--config", "ddp.yaml", *resume, *words, cwd=tmp_path).returncode == 0
    states = [torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True) for name in ("whole", "parts")]
    found = [path for path in differing(*states) if not path.startswith(("/best", "/memory"))]
    assert found == []
