"""Uneven splits over ranks in real runs: started, changed by commands, resumed, reverted after out-of-memory errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import RunConfig, dump_config
from segapp.run.commands import parse_command, send_command
from tests.support.live_runs import assert_answered_once, background, seen, small, wait_for
from tests.support.runs import differing, events, segapp, train


def ranks_of(tiny: dict[str, Any], epochs: int, **parallel: Any) -> RunConfig:
    """Return the config of two ranks that share batches of 5; two steps an epoch."""
    parallel = {"mode": "ddp", "devices": ["cpu", "cpu"], **parallel}
    return small(tiny, epochs, parallel=parallel, train={"batch_size": 5})


def losses(folder: Path) -> list[float]:
    return [event["loss"] for event in events(folder, "step")]


def test_split_of_ranks_is_changed_by_command_and_exact(tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 5, gpu0_bsz=1)))
    run = tmp_path / "run"
    with background(tmp_path / "ddp.yaml", cwd=tmp_path, SEGAPP_FAILPOINTS="train.step=sleep:0.2") as process:
        wait_for(lambda: seen(run, "step"), process=process)
        command_id = send_command(run, parse_command("set gpu0_bsz=0"))
        assert process.wait(240) == 0
    splits = [event["split"] for event in events(run, "step")]
    assert splits[0] == [1, 4]
    assert splits[-1] == [0, 5]
    applied = next(event for event in events(run, "gpu0_bsz") if event["status"] == "applied")
    assert (applied["id"], applied["old"], applied["new"], applied["split"]) == (command_id, 1, 0, [0, 5])
    assert assert_answered_once(run)["set gpu0_bsz=0"]["status"] == "applied"
    start = events(run, "run_start")[0]
    assert (start["split"], start["mode"], start.get("mode_reason")) == ([1, 4], "ddp", None)
    alone = small(tiny, 5, parallel={"mode": "single"}, train={"batch_size": 5})
    assert train(alone, tmp_path / "alone") == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


def test_ranks_start_again_in_pieces_after_out_of_memory(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Rank 1 fails in the fourth step; the second start has fewer passes left than the failpoint counts to."""
    (tmp_path / "ddp.yaml").write_text(dump_config(ranks_of(tiny, 2)))
    points = "train.backward.rank1=4:oom"
    done = segapp("train", "--plain", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path, SEGAPP_FAILPOINTS=points)
    assert done.returncode == 0, done.stderr
    assert "the ranks start again" in done.stdout
    run = tmp_path / "run"
    assert [event["step"] for event in events(run, "step")] == [1, 2, 3, 4]
    starts = events(run, "run_start")
    assert [event.get("resumed_from_step") for event in starts] == [None, 2]
    assert events(run, "run_end")[-1]["status"] == "finished"
    assert torch.load(run / "checkpoints" / "last.pt", weights_only=True)["lessons"] == {"num_pieces": 2}


@pytest.mark.slow
def test_run_goes_between_two_ranks_three_and_one_device(tiny: dict[str, Any], tmp_path: Path) -> None:
    reference = small(tiny, 4, parallel={"mode": "single"}, train={"batch_size": 5})
    assert train(reference, tmp_path / "alone") == 0
    parts = [{"shares": [4, 1]}, {"devices": ["cpu"] * 3}, {"mode": "dp", "gpu0_bsz": 2}, {"mode": "single"}]
    for epochs, parallel in enumerate(parts, start=1):
        (tmp_path / "part.yaml").write_text(dump_config(ranks_of(tiny, epochs, **parallel)))
        resume = ["--resume", "run"] if epochs > 1 else ["--run", "run"]
        done = segapp("train", "--config", "part.yaml", *resume, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=1e-5)


@pytest.mark.slow
def test_uneven_ranks_resume_bit_for_bit(tiny: dict[str, Any], tmp_path: Path) -> None:
    for name, stages in (("whole", (3,)), ("parts", (1, 3))):
        for epochs in stages:
            config = ranks_of(tiny, epochs, gpu0_bsz=1).model_copy(update={"schedule": small(tiny).schedule})
            (tmp_path / "ddp.yaml").write_text(dump_config(config))
            resume = ["--resume", name] if (tmp_path / name).exists() else ["--run", name]
            words = ["schedule.name=constant", "schedule.warmup_steps=0"]
            assert segapp("train", "--config", "ddp.yaml", *resume, *words, cwd=tmp_path).returncode == 0
    states = [torch.load(tmp_path / name / "checkpoints" / "last.pt", weights_only=True) for name in ("whole", "parts")]
    found = [path for path in differing(*states) if not path.startswith(("/best", "/memory"))]
    assert found == []
