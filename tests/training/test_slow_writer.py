"""Short epochs beside a slow writer: no epoch waits for it, and the best epoch is on disk at the end."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp import failpoints
from segapp.checkpoint.saver import CheckpointSaver
from segapp.checkpoint.training_state import load_checkpoint
from segapp.config import dump_config
from tests.support.rank_runs import trained_by_ranks
from tests.support.runs import each_save, events, merged, train
from tests.training.test_loading_ahead import scored

SCORES = [0.3, 0.1, 0.4, 0.2, 0.7, 0.6, 0.65, 0.5, 0.45, 0.6, 0.3, 0.2, 0.1, 0.2]
"""Of 14 epochs, the fifth is the best one; the first and the third had been before."""

WRITE_S = 2.5


def test_fourteen_short_epochs_do_not_wait_for_the_writer(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = merged(base, train={"epochs": len(SCORES), "batch_size": 10, "ema": 0.9}, checkpoint={"keep": 20})
    slow, whole = tmp_path / "slow", tmp_path / "whole"
    scored(monkeypatch, SCORES)
    failpoints.arm(f"ckpt.before_fsync=sleep:{WRITE_S}")
    try:
        assert train(config, slow) == 0
    finally:
        failpoints.arm("")
    scored(monkeypatch, SCORES)
    with each_save():
        assert train(config, whole) == 0

    saves, starts = events(slow, "checkpoint"), events(slow, "epoch_start")
    assert len(starts) == len(events(slow, "step")) == 14
    assert [(save["epoch"], save["is_best"]) for save in saves] == [(1, True), (5, True), (14, False)]
    assert all(save["save_s"] >= WRITE_S for save in saves), "each write was slow"
    first_end_s = saves[0]["t"]
    within = [start["epoch"] for start in starts if first_end_s - WRITE_S < start["t"] < first_end_s]
    assert len(within) >= 3, "epochs began while the first checkpoint was written"
    between_s = [after["t"] - before["t"] for before, after in pairwise(starts)]
    assert max(between_s) < WRITE_S, "and none waited for a write"

    best, last = (load_checkpoint(slow, which) for which in ("best", "last"))
    assert (best.facts.last_epoch, last.facts.last_epoch) == (5, 14)
    assert last.state["best"]["value"] == best.state["best"]["value"] == 0.7
    for found, name in ((best, "epoch_0005"), (last, "epoch_0014")):
        expected = load_checkpoint(whole, name)
        assert expected.step == found.step
        for part in ("model", "ema"):
            torch.testing.assert_close(found.state[part], expected.state[part], rtol=0, atol=0)


def test_best_epoch_is_saved_as_soon_as_a_save_is_affordable(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No epoch is due, so only best epochs are saved, and the end. The third epoch cannot save the second."""
    verdicts = iter([True, False, False, True, True])
    scored(monkeypatch, [0.3, 0.6, 0.2, 0.5, 0.4])
    monkeypatch.setattr(CheckpointSaver, "_is_affordable", lambda _: next(verdicts))  # instead of a clock
    config = merged(base, train={"epochs": 5, "batch_size": 10}, checkpoint={"every_epochs": 1000, "keep": 9})
    assert train(config, tmp_path / "run") == 0
    saves = [(save["epoch"], save["is_best"]) for save in events(tmp_path / "run", "checkpoint")]
    assert saves == [(1, True), (2, True), (4, False), (5, False)]
    assert load_checkpoint(tmp_path / "run", "best").facts.last_epoch == 2


@pytest.mark.slow
def test_ranks_skip_the_same_saves(base: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 decides for all, by its own clock; the other rank writes nothing and knows no duration."""
    ranks = {"mode": "ddp", "devices": ["cpu", "cpu"]}
    config = merged(base, train={"epochs": 9, "batch_size": 10}, checkpoint={"every_steps": 1}, parallel=ranks)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    slow = {"SEGAPP_FAILPOINTS": f"ckpt.before_fsync=sleep:{WRITE_S}"}
    trained_by_ranks("--plain", "--config", "config.yaml", "--run", "run", cwd=tmp_path, **slow)
    scores = [event["miou"] for event in events(tmp_path / "run", "val")]
    first, *between, last = [event["epoch"] for event in events(tmp_path / "run", "checkpoint")]
    assert (first, last, len(scores)) == (1, 9, 9)
    assert len(between) < 7
    assert load_checkpoint(tmp_path / "run", "best").facts.last_epoch == 1 + scores.index(max(scores))
