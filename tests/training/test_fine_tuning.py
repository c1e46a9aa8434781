"""Trainings that thaw a frozen part, end after a number of steps, or lower their rate at a plateau."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import RunConfig
from segapp.memory.plan import SavedMemoryPlan
from tests.support.budgets import use_plan
from tests.support.runs import differing, each_save, events, final_state, losses, merged, resume, train
from tests.training.test_resume import course, stopped_and_resumed

ADAMW = {"name": "adamw", "lr": 0.001, "clip_grad_norm": 1.0}


def saved(folder: Path, name: str) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoints" / name, weights_only=True)
    return state


@pytest.fixture(scope="module")
def frozen(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    folder = tmp_path_factory.mktemp("frozen") / "run"
    freeze = {"freeze": ["backbone"], "freeze_epochs": 2}
    config = merged(base, model=freeze, optim=ADAMW, train={"epochs": 4, "ema": 0.9})
    with each_save():
        assert train(config, folder) == 0
    return config, folder


def test_backbone_is_fixed_until_it_thaws(frozen: tuple[RunConfig, Path]) -> None:
    _, folder = frozen
    second, third, fourth = (saved(folder, f"epoch_{n:04d}.pt") for n in (2, 3, 4))
    encoder = [name for name in second["model"] if name.startswith("encoder.")]
    statistics = [name for name in encoder if "running_var" in name]
    assert all(torch.equal(second["model"][name], torch.ones_like(second["model"][name])) for name in statistics)
    assert not any(torch.equal(third["model"][name], second["model"][name]) for name in statistics)
    assert not any(torch.equal(fourth["model"][n], second["model"][n]) for n in encoder if n.endswith("conv1.weight"))
    counts = [len(state["optimizer"]["state"]) for state in (second, third)]
    parameters = [name for name in second["model"] if "running" not in name and "num_batches" not in name]
    assert counts == [sum(not name.startswith("encoder.") for name in parameters), len(parameters)]
    assert {float(each["step"]) for each in third["optimizer"]["state"].values()} == {2.0, 6.0}
    starts, (run_start,) = events(folder, "epoch_start"), events(folder, "run_start")
    assert ["num_unfrozen" in event for event in starts] == [False, False, True, False]
    assert run_start["num_trainable"] + starts[2]["num_unfrozen"] == run_start["num_params"]
    assert run_start["freeze_epochs"] == 2


@pytest.mark.parametrize(
    "failpoint",
    ["eval.batch=2", *(pytest.param(f"train.step={n}", marks=pytest.mark.slow) for n in (3, 6))],
    ids=["as it thaws", "while frozen", "thawed"],
)
def test_run_with_a_thaw_resumes_bitwise(frozen: tuple[RunConfig, Path], tmp_path: Path, failpoint: str) -> None:
    config, whole = frozen
    stopped_and_resumed(config, tmp_path / "run", failpoint)
    assert course(tmp_path / "run") == course(whole)
    assert differing(final_state(tmp_path / "run"), final_state(whole)) == []
    starts = [events(each, "epoch_start") for each in (tmp_path / "run", whole)]
    interrupted, expected = ([event.get("num_unfrozen") for event in each] for each in starts)
    assert interrupted == expected


@pytest.mark.slow
@pytest.mark.usefixtures("logical_budgets")
def test_auto_split_stays_the_planned_one_while_frozen(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Device 0 has place for more images than it has beside the optimizer's state of the backbone."""
    config = merged(
        base,
        model={"freeze": ["backbone"], "freeze_epochs": 2},
        optim=ADAMW,
        train={"epochs": 3},
        parallel={"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": "auto", "memory_budget_mib": [20.0, 20.0]},
        eval={"every_epochs": 3},
    )
    splits = tuple((k, 4 - k) for k in range(5))
    planned = SavedMemoryPlan(4, 1, 0, (0, 4), splits, tuple((10.0 + k, 18.0 - k) for k in range(5)), 1.0)
    use_plan(monkeypatch, planned)
    with each_save():
        assert train(config, tmp_path / "run") == 0
    assert [tuple(event["split"]) for event in events(tmp_path / "run", "epoch_start")] == [(0, 4)] * 3
    assert not events(tmp_path / "run", "gpu0_bsz")
    measured = {
        tuple(split): peaks for split, peaks in saved(tmp_path / "run", "epoch_0002.pt")["live"]["splits"]["observed"]
    }
    ((split, peaks),) = final_state(tmp_path / "run")["live"]["splits"]["observed"]  # none of the frozen epochs
    num_unfrozen = events(tmp_path / "run", "epoch_start")[2]["num_unfrozen"]
    assert tuple(split) == (0, 4)
    gradient_and_adamw_mib = 3 * 4 * num_unfrozen / 2**20
    assert peaks[0] - measured[0, 4][0] == pytest.approx(gradient_and_adamw_mib, rel=0.05)


@pytest.mark.slow
def test_run_in_steps_ends_and_evaluates_within_an_epoch(base: dict[str, Any], tmp_path: Path) -> None:
    short, long = (
        merged(base, train={"steps": steps, "epochs": 1}, eval={"every_steps": 3}, checkpoint={"every_epochs": None})
        for steps in (5, 7)
    )
    assert train(short, tmp_path / "run") == 0
    assert [event["step"] for event in events(tmp_path / "run", "val")] == [3, 5]
    assert final_state(tmp_path / "run")["position"] == {"epoch": 3, "batch": 1, "step": 5, "is_evaluated": True}
    (start,) = events(tmp_path / "run", "run_start")
    assert (start["steps"], start["epochs"], start["steps_per_epoch"]) == (5, 3, 2)
    assert events(tmp_path / "run", "run_end")[0]["reason"] == "5 steps"
    assert resume(short, tmp_path / "run") == 0  # nothing is left
    assert resume(long, tmp_path / "run") == 0
    assert train(long, tmp_path / "whole") == 0
    assert [event["step"] for event in events(tmp_path / "whole", "val")] == [3, 6, 7]
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert differing(final_state(tmp_path / "run")["model"], final_state(tmp_path / "whole")["model"]) == []


@pytest.mark.slow
def test_plateau_of_evaluations_in_steps_resumes_bitwise(base: dict[str, Any], tmp_path: Path) -> None:
    config = merged(
        base,
        train={"steps": 5},
        eval={"every_steps": 1},
        optim={"lr": 3.0},
        schedule={"name": "plateau", "options": {"patience": 0, "gamma": 0.5}},
        checkpoint={"monitor": "loss"},
    )
    assert train(config, tmp_path / "whole") == 0
    rates = [event["lr"] for event in events(tmp_path / "whole", "step")]
    assert rates[0] > rates[-1] > rates[0] / 2 ** (len(rates) - 1)  # some evaluations are better, some are not
    for failpoint in ("train.step=2", "eval.batch=3"):
        folder = tmp_path / failpoint
        stopped_and_resumed(config, folder, failpoint)
        assert course(folder) == course(tmp_path / "whole")
        assert differing(final_state(folder), final_state(tmp_path / "whole")) == []
