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
from segapp.inference.evaluate import Evaluation
from tests.support.runs import each_save, events, merged, segapp, train

SCORES = [0.3, 0.1, 0.4, 0.2, 0.7, 0.6, 0.65, 0.5, 0.45, 0.6, 0.3, 0.2, 0.1, 0.2]
"""Of 14 epochs, the fifth is the best one; the first and the third had been before."""

WRITE_S = 4.0


def scored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the evaluations of the next training these scores."""
    left = iter(SCORES)
    monkeypatch.setattr(Evaluation, "monitored", lambda *_: next(left))


def test_fourteen_short_epochs_do_not_wait_for_the_writer(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = merged(tiny, train={"epochs": len(SCORES), "batch_size": 10}, checkpoint={"keep": 20})
    slow, whole = tmp_path / "slow", tmp_path / "whole"
    scored(monkeypatch)
    failpoints.arm(f"ckpt.before_fsync=sleep:{WRITE_S}")
    try:
        assert train(config, slow) == 0
    finally:
        failpoints.arm("")
    scored(monkeypatch)
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


@pytest.mark.parametrize(
    ("scores", "affordable", "saved"),
    [
        ([0.1, 0.9], [True], [(1, True), (2, True)]),  # the last epoch is the best
        ([0.3, 0.6, 0.2, 0.5, 0.4], [True, False, False, True, True], [(1, True), (2, True), (4, False), (5, False)]),
    ],
)
def test_best_epoch_is_saved_as_soon_as_a_save_is_affordable(
    tiny: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    scores: list[float],
    affordable: list[bool],
    saved: list[tuple[int, bool]],
) -> None:
    """No epoch is due, so only best epochs are saved, and the end. The third epoch cannot save the second."""
    left, verdicts = iter(scores), iter(affordable)
    monkeypatch.setattr(Evaluation, "monitored", lambda *_: next(left))
    monkeypatch.setattr(CheckpointSaver, "_is_affordable", lambda _: next(verdicts))
    config = merged(tiny, train={"epochs": len(scores), "batch_size": 10}, checkpoint={"every_epochs": 1000, "keep": 9})
    assert train(config, tmp_path / "run") == 0
    assert [(save["epoch"], save["is_best"]) for save in events(tmp_path / "run", "checkpoint")] == saved
    best_epoch = 1 + scores.index(max(scores))
    assert load_checkpoint(tmp_path / "run", "best").facts.last_epoch == best_epoch


@pytest.mark.slow
def test_ranks_skip_the_same_saves(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Rank 0 decides for all, by its own clock; the other rank writes nothing and knows no duration."""
    config = merged(
        tiny,
        train={"epochs": 9, "batch_size": 10},
        checkpoint={"every_steps": 1, "keep": 20},
        parallel={"mode": "ddp", "devices": ["cpu", "cpu"]},
    )
    (tmp_path / "config.yaml").write_text(dump_config(config))
    arguments = ("train", "--plain", "--config", "config.yaml", "--run", "run")
    result = segapp(*arguments, cwd=tmp_path, SEGAPP_FAILPOINTS=f"ckpt.before_fsync=sleep:{WRITE_S}")
    assert result.returncode == 0, result.stderr
    run = tmp_path / "run"
    scores = [event["miou"] for event in events(run, "val")]
    assert len(scores) == 9
    saved = [event["epoch"] for event in events(run, "checkpoint")]
    assert saved[0] == 1
    assert saved[-1] == 9
    assert len(saved) < 9
    assert load_checkpoint(run, "best").facts.last_epoch == 1 + scores.index(max(scores))
    assert load_checkpoint(run, "last").facts.last_epoch == 9
