"""Trainings that thaw a frozen part, end after a number of steps, or lower their rate at a plateau."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.config import RunConfig, dump_config
from segapp.memory.plan import SavedMemoryPlan
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training import signals
from tests.support.runs import differing, each_save, events, merged, segapp, train


@pytest.fixture(scope="module")
def base(tiny_root: Path) -> dict[str, Any]:
    """Four images, two steps an epoch."""
    return {
        "name": "tiny",
        "seed": 3,
        "data": {
            "format": "folder",
            "root": str(tiny_root),
            "classes": ["ground", "box", "disc"],
            "crop_px": [48, 64],
            "workers": 0,
        },
        "model": {"library": "smp", "name": "Linknet", "encoder": "tu-test_resnet", "options": {"encoder_depth": 3}},
        "optim": {"name": "adamw", "lr": 0.001, "clip_grad_norm": 1.0},
        "schedule": {"name": "constant"},
        "train": {"epochs": 4, "batch_size": 4, "ema": 0.9},
        "log": {"every_steps": 1, "tensorboard": False},
    }


def saved(folder: Path, name: str = "last.pt") -> dict[str, Any]:
    state: dict[str, Any] = torch.load(folder / "checkpoints" / name, weights_only=True)
    return state


def course(folder: Path) -> list[tuple[Any, ...]]:
    steps = [(e["step"], e["epoch"], e["loss"], e["lr"], e["grad_norm"]) for e in events(folder, "step")]
    return steps + [(e["step"], e["epoch"], e["loss"], e["miou"]) for e in events(folder, "val")]


def stopped_and_resumed(config: RunConfig, folder: Path, visit: int) -> None:
    """Train, stop by SIGTERM at the n-th look at the stop flag, and resume."""
    looks = iter(range(1, 10_000))

    def is_set(self: signals.StopSignals) -> bool:
        if next(looks) == visit:
            os.kill(os.getpid(), signal.SIGTERM)
        return self.count > 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals.StopSignals, "is_set", property(is_set))
        assert train(config, folder) == signals.EXIT_STOPPED_AND_SAVED
    assert run_session(TrainRequest(config, RunFolder(folder))) == 0


@pytest.fixture(scope="module")
def frozen(base: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    folder = tmp_path_factory.mktemp("frozen") / "run"
    config = merged(base, model={"freeze": ["backbone"], "freeze_epochs": 2})
    with each_save():
        assert train(config, folder) == 0
    return config, folder


def test_backbone_is_fixed_until_it_thaws(frozen: tuple[RunConfig, Path]) -> None:
    _, folder = frozen
    second, third, fourth = (saved(folder, f"epoch_{n:04d}.pt") for n in (2, 3, 4))
    encoder = [name for name in second["model"] if name.startswith("encoder.")]
    statistics = [name for name in encoder if "running_var" in name]
    untrained = saved(folder, "epoch_0002.pt")["model"]
    assert all(torch.equal(untrained[name], torch.ones_like(untrained[name])) for name in statistics)
    assert not any(torch.equal(third["model"][name], second["model"][name]) for name in statistics)
    assert not any(torch.equal(fourth["model"][n], second["model"][n]) for n in encoder if n.endswith("conv1.weight"))
    counts = [len(state["optimizer"]["state"]) for state in (second, third)]
    parameters = [name for name in second["model"] if "running" not in name and "num_batches" not in name]
    assert counts == [sum(not name.startswith("encoder.") for name in parameters), len(parameters)]
    assert {float(each["step"]) for each in third["optimizer"]["state"].values()} == {2.0, 6.0}
    starts, (run_start,) = events(folder, "epoch_start"), events(folder, "run_start")
    assert ["num_thawed" in event for event in starts] == [False, False, True, False]
    assert run_start["num_trainable"] + starts[2]["num_thawed"] == run_start["num_params"]
    assert run_start["freeze_epochs"] == 2


@pytest.mark.sampled(3)
@pytest.mark.parametrize("visit", [3, 6, 9])
def test_run_with_a_thaw_resumes_bitwise(frozen: tuple[RunConfig, Path], tmp_path: Path, visit: int) -> None:
    config, whole = frozen
    stopped_and_resumed(config, tmp_path / "run", visit)
    assert course(tmp_path / "run") == course(whole)
    assert differing(saved(tmp_path / "run"), saved(whole)) == []
    thawed = [[event.get("num_thawed") for event in events(each, "epoch_start")] for each in (tmp_path / "run", whole)]
    assert thawed[0] == thawed[1]


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_dp_thaws_as_one_device(base: dict[str, Any], tmp_path: Path, precision: str) -> None:
    losses = []
    for parallel in ({"mode": "single"}, {"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 1}):
        config = merged(
            base,
            model={"freeze": ["encoder.model.layer*", "encoder.model.conv1"], "freeze_epochs": 1},
            train={"epochs": 2, "precision": precision},
            data={"crop_px": [32, 32]},
            optim={"name": "sgd"},
            parallel=parallel,
        )
        folder = tmp_path / parallel["mode"]
        assert train(config, folder) == 0
        losses.append([event["loss"] for event in events(folder, "step")])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-6 if precision == "fp32" else 2e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("logical_budgets")
def test_auto_split_stays_the_planned_one_while_frozen(base: dict[str, Any], tmp_path: Path) -> None:
    """Device 0 has place for more images than it has beside the optimizer's state of the backbone."""
    config = merged(
        base,
        model={"freeze": ["backbone"], "freeze_epochs": 2},
        train={"epochs": 3, "batch_size": 4, "ema": None},
        parallel={"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": "auto", "memory_budget_mib": [20.0, 20.0]},
        eval={"every_epochs": 3},
    )
    folder = RunFolder.create(path=tmp_path / "run")
    splits = tuple((k, 4 - k) for k in range(5))
    planned = SavedMemoryPlan(4, 1, 0, (0, 4), splits, tuple((10.0 + k, 18.0 - k) for k in range(5)), 1.0)
    planned.write(folder.saved_plan)
    with each_save():
        assert train(config, tmp_path / "run") == 0
    taken = [tuple(event["split"]) for event in events(tmp_path / "run", "epoch_start")]
    assert taken == [(0, 4)] * 3
    assert not events(tmp_path / "run", "gpu0_bsz")
    measured = {tuple(split): peaks for split, peaks in saved(tmp_path / "run", "epoch_0002.pt")["memory"]["observed"]}
    ((split, peaks),) = saved(tmp_path / "run")["memory"]["observed"]  # none of the frozen epochs
    num_thawed = events(tmp_path / "run", "epoch_start")[2]["num_thawed"]
    assert tuple(split) == (0, 4)
    gradient_and_adamw_mib = 3 * 4 * num_thawed / 2**20
    assert peaks[0] - measured[0, 4][0] == pytest.approx(gradient_and_adamw_mib, rel=0.05)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ranks_thaw_as_one_device_and_resume_there(frozen: tuple[RunConfig, Path], tmp_path: Path) -> None:
    config, whole = frozen
    ranks = merged(
        config.model_dump(mode="json"), parallel={"mode": "ddp", "devices": ["cpu", "cpu"]}, train={"epochs": 3}
    )
    (tmp_path / "ddp.yaml").write_text(dump_config(ranks))
    result = segapp("train", "--config", "ddp.yaml", "--run", "run", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert run_session(TrainRequest(config, RunFolder(tmp_path / "run"))) == 0
    losses = [[event["loss"] for event in events(each, "step")] for each in (tmp_path / "run", whole)]
    assert len(losses[0]) == 8
    # AdamW divides by the root of small second moments, which enlarges the rounding of another order of sums.
    assert losses[0] == pytest.approx(losses[1], rel=2e-5)


@pytest.mark.slow
def test_run_in_steps_ends_and_evaluates_within_an_epoch(base: dict[str, Any], tmp_path: Path) -> None:
    short, long = (
        merged(base, train={"steps": steps, "epochs": 1}, eval={"every_steps": 3}, checkpoint={"every_epochs": None})
        for steps in (5, 7)
    )
    assert train(short, tmp_path / "run") == 0
    assert [event["step"] for event in events(tmp_path / "run", "val")] == [3, 5]
    assert saved(tmp_path / "run")["position"] == {"epoch": 3, "batch": 1, "step": 5, "is_evaluated": True}
    (start,) = events(tmp_path / "run", "run_start")
    assert (start["steps"], start["epochs"], start["steps_per_epoch"]) == (5, 3, 2)
    assert events(tmp_path / "run", "run_end")[0]["reason"] == "5 steps"
    assert run_session(TrainRequest(short, RunFolder(tmp_path / "run"))) == 0  # nothing is left
    assert run_session(TrainRequest(long, RunFolder(tmp_path / "run"))) == 0
    assert train(long, tmp_path / "whole") == 0
    assert [event["step"] for event in events(tmp_path / "whole", "val")] == [3, 6, 7]
    longer, whole = (events(tmp_path / name, "step") for name in ("run", "whole"))
    assert [event["loss"] for event in longer] == [event["loss"] for event in whole]
    assert differing(saved(tmp_path / "run")["model"], saved(tmp_path / "whole")["model"]) == []


@pytest.mark.slow
def test_run_stopped_at_evaluations_in_steps_resumes_bitwise(base: dict[str, Any], tmp_path: Path) -> None:
    config = merged(
        base,
        train={"steps": 5, "ema": None},
        eval={"every_steps": 1},
        optim={"name": "sgd", "lr": 3.0, "clip_grad_norm": None},
        schedule={"name": "plateau", "options": {"patience": 0, "gamma": 0.5}},
        checkpoint={"monitor": "loss"},
    )
    assert train(config, tmp_path / "whole") == 0
    rates = [event["lr"] for event in events(tmp_path / "whole", "step")]
    expected, best = [3.0], math.inf
    for event in events(tmp_path / "whole", "val")[:-1]:
        expected.append(expected[-1] * (1.0 if event["loss"] < best else 0.5))
        best = min(best, event["loss"])
    assert rates == pytest.approx(expected)
    assert rates[0] > rates[-1] > rates[0] / 2 ** (len(rates) - 1)  # some evaluations are better, some are not
    for visit in (6, 10, 14):
        folder = tmp_path / f"run{visit}"
        stopped_and_resumed(config, folder, visit)
        assert course(folder) == course(tmp_path / "whole")
        assert differing(saved(folder), saved(tmp_path / "whole")) == []
