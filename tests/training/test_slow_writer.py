"""Saves that are skipped: the best epoch is on disk as soon as one is affordable, and ranks skip the same ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segapp.checkpoint.saver import CheckpointSaver
from segapp.checkpoint.training_state import load_checkpoint
from segapp.config import dump_config
from tests.support.rank_runs import trained_by_ranks
from tests.support.runs import events, merged, train
from tests.training.test_loading_ahead import scored


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
    assert saves == [(1, False), (1, True), (2, True), (4, False), (5, False)], "first, before any evaluation"
    best = load_checkpoint(tmp_path / "run", "best")
    assert (best.facts.last_epoch, best.state["best"]["value"]) == (2, 0.6)


@pytest.mark.slow
def test_ranks_skip_the_same_saves(base: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 decides for all, by its own clock; the other rank writes nothing and knows no duration."""
    ranks = {"mode": "ddp", "devices": ["cpu", "cpu"]}
    config = merged(base, train={"epochs": 9, "batch_size": 10}, checkpoint={"every_steps": 1}, parallel=ranks)
    (tmp_path / "config.yaml").write_text(dump_config(config))
    slow = {"SEGAPP_FAILPOINTS": "ckpt.before_fsync=sleep:2.5"}
    trained_by_ranks("--plain", "--config", "config.yaml", "--run", "run", cwd=tmp_path, **slow)
    scores = [event["miou"] for event in events(tmp_path / "run", "val")]
    first, *between, last = [event["epoch"] for event in events(tmp_path / "run", "checkpoint")]
    assert (first, last, len(scores)) == (1, 9, 9)
    assert len(between) < 8
    assert load_checkpoint(tmp_path / "run", "best").facts.last_epoch == 1 + scores.index(max(scores))
