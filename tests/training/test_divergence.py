"""A diverged run ends as one, with exit code 5 and no best checkpoint; healthy losses are not taken for it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.errors import NonFiniteError
from segapp.inference.evaluate import EvaluationSettings
from segapp.training.progress import LossWatch, epoch_divergence
from tests.support.runs import events, merged, train

INF = math.inf


@pytest.mark.parametrize(
    ("first", "losses", "has_diverged"),
    [
        (2.4, [3364.0, 11502.0], True),
        (2.4, [9.0, 9.0, 2.3], None),  # one step below: it may fall yet
        (2.4, [2.5, 2.6, 2.5], None),  # noise of the first epoch
        (2.4, [4.0, 4.5], None),
        (0.05, [0.4, 0.5], None),  # a fine-tuned network
        (0.05, [6.0, 7.0], None),  # up to three guesses, ln 11 = 2.4
        (0.05, [7.5, 8.0], True),
        (120.0, [200.0, 220.0], None),  # a sum of many terms
        (120.0, [400.0, 500.0], True),
        (2.4, [INF, 1e6], None),  # one finite step is no epoch
        (2.4, [INF, 1e6, 1e6], True),
        (math.nan, [9.0, 9.0], None),
        (2.4, [], None),
        (-3.0, [-1.0, -0.5], None),
    ],
)
def test_verdict_on_an_epoch(first: float, losses: list[float], has_diverged: bool | None) -> None:
    found = epoch_divergence(first, losses, 11)
    assert (found is not None) == bool(has_diverged)


def test_only_whole_epochs_are_judged() -> None:
    watch = LossWatch(11)
    for loss in (2.4, 4.5, 4.5):
        watch.add(torch.tensor(loss))
    assert watch.end_epoch(3) is None
    watch.add(torch.tensor(900.0))
    assert watch.end_epoch(3) is None, "the rest of an epoch, after a resume"
    for _ in range(3):
        watch.add(torch.tensor(900.0))
    assert watch.end_epoch(3) is not None


def test_a_diverged_run_ends_with_5_and_has_no_best(tiny: dict[str, Any], tmp_path: Path) -> None:
    config = merged(tiny, optim={"name": "sgd", "lr": 1000}, schedule={"warmup_steps": 0}, train={"ema": None})
    with pytest.raises(NonFiniteError, match=r"the training has diverged: .* lower optim\.lr = 1000") as raised:
        train(config, tmp_path / "run")
    assert raised.value.exit_code == 5
    assert [each["exit_code"] for each in events(tmp_path / "run", "run_end")] == [5]
    (alert,) = [each for each in events(tmp_path / "run", "alert") if each["kind"] == "diverged"]
    assert alert["message"] in str(raised.value)
    assert not (tmp_path / "run" / "checkpoints" / "best.pt").exists()
    assert not [each for each in events(tmp_path / "run", "checkpoint") if each["is_best"]]


def test_a_validation_loss_that_is_not_finite_ends_the_run(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EvaluationSettings, "finalize", lambda *_: None)
    with pytest.raises(NonFiniteError, match="the validation loss is not finite after step 5"):
        train(merged(tiny, schedule={"warmup_steps": 0}), tmp_path / "run")
    assert [each["step"] for each in events(tmp_path / "run", "val")] == [5]
    told = [each["type"] for each in events(tmp_path / "run") if each["type"] in ("val", "checkpoint")]
    assert told == ["checkpoint", "val"], "saved before the first evaluation, and not after it"
