"""Uneven splits over ranks in real runs: started, changed by commands, resumed; ranks that start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.config import dump_config
from tests.support.fault_runs import sections_of
from tests.support.fault_table import case
from tests.support.rank_runs import check_restart_after_out_of_memory, check_split_change, trained_by_ranks
from tests.support.runs import events, final_state, losses, merged, segapp

TRUST = {"SEGAPP_TRUST_PARTS": "1"}
CPUS: list[str | int] = ["cpu", "cpu"]


@case(
    "R08",
    how="saved by three ranks, then by two, resumed by one process",
    passes="bare names; the course of one device",
)
def test_run_whose_ranks_come_and_go_equals_one_device(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Three ranks, two, then one, with dropout and uneven shares: the losses in float64 are those of one process."""
    sections = sections_of({"train": {"batch_size": 5}, "schedule": {"name": "constant", "warmup_steps": 0}})
    alone = merged(tiny, **sections_of({**sections, "parallel": {"mode": "single"}}))
    (tmp_path / "alone.yaml").write_text(dump_config(alone))
    done = segapp("train", "--config", "alone.yaml", "--run", "alone", "train.epochs=3", cwd=tmp_path, **TRUST)
    assert done.returncode == 0, done.stderr
    config = merged(tiny, **sections_of({**sections, "parallel": {"shares": [3, 1, 1]}}))
    (tmp_path / "ddp.yaml").write_text(dump_config(config))
    for epochs, num_ranks in enumerate((3, 2, 1), start=1):
        how = ["--resume", "run"] if epochs > 1 else ["--run", "run"]
        words = ["--plain", "--config", "ddp.yaml", *how, f"train.epochs={epochs}"]
        done = trained_by_ranks(*words, cwd=tmp_path, num_ranks=num_ranks, **TRUST)
        assert "Warning" not in done.stderr
        assert not [key for key in final_state(tmp_path / "run")["model"] if key.startswith("module.")]
    # The main rank has the first three of the five samples; the resumes keep its picture.
    run, whole = (cv2.imread(str(tmp_path / name / "samples" / "first_batch.png")) for name in ("run", "alone"))
    assert (run.shape, whole.shape) == ((50, 82, 3), (50, 124, 3))  # 24 x 40 px each, in two rows
    own = [run[:24, :40], run[:24, 42:], run[26:, :40]]
    assert all(np.array_equal(tile, whole[:24, 42 * i :][:, :40]) for i, tile in enumerate(own))
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=0, abs=1e-12)
    assert [event["seq"] for event in events(tmp_path / "run")] == list(range(1, len(events(tmp_path / "run")) + 1))
    vals = [[(e["loss"], e["miou"], e["num_images"]) for e in events(tmp_path / n, "val")] for n in ("run", "alone")]
    assert vals[0] == [pytest.approx(val, rel=1e-6) for val in vals[1]]
    for rank, log in enumerate([tmp_path / "run/trainer.log", tmp_path / "run/logs/rank-0001.log"]):
        assert f" rank {rank}, round 0, process " in log.read_text().splitlines()[0]
    found = [
        (e["topology"]["ranks"], e["topology"]["old_ranks"], e.get("split"), e["step"])
        for e in events(tmp_path / "run", "settings")
    ]
    assert found == [(2, 3, [4, 1], 2), (1, 2, None, 4)]
    alerts = [e["message"] for e in events(tmp_path / "run", "alert") if e["kind"] == "settings"]
    assert [text.partition(": ")[2] for text in alerts] == [
        "split [4, 1] is planned from the last one", "nothing is divided",
    ]  # fmt: skip


@pytest.mark.slow
def test_split_of_ranks_is_changed_by_command_and_exact(tiny: dict[str, Any], tmp_path: Path) -> None:
    tiny["data"]["workers"] = 2
    check_split_change(tiny, tmp_path, CPUS)


@case("N03", how="out of memory on rank 1", passes="all ranks end, a resume recomputes all blocks")
@pytest.mark.slow
def test_ranks_start_again_after_out_of_memory(tiny: dict[str, Any], tmp_path: Path) -> None:
    check_restart_after_out_of_memory(tiny, tmp_path, CPUS)
