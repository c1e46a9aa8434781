"""Would the campaign notice a resume that forgets something? Builds that do, one component each (R05)."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp import failpoints
from segapp.config import RunConfig
from segapp.run.commands import parse_command, send_command
from segapp.run.folder import RunFolder
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training.trainer import Trainer
from tests.support.fault_runs import case, tiny_config
from tests.support.runs import differing, events, train

State = dict[str, Any]

STOPPED_AFTER = 8
EVENTFUL = "train.gradient=2:inf*1;train.backward=5:oom*2"
"""One skipped step, one that is made in pieces: what is to be remembered is not what a new training begins with."""


def without_second_moments(state: State) -> State:
    state = copy.deepcopy(state)
    for moments in state["optimizer"]["state"].values():
        moments["exp_avg_sq"].zero_()
    return state


def model_of(state: State, fresh: State, part: str) -> State:
    """The state with the weights, or the statistics, that a new training begins with."""
    is_other = {name: ("running_" in name) == (part == "statistics") for name in state["model"]}
    return {**state, "model": {n: fresh["model"][n] if is_other[n] else value for n, value in state["model"].items()}}


WHOLE = ("ema", "optimizer", "precision", "bad_steps", "position", "best", "settings", "fallbacks", "rng")
FORGETFUL: dict[str | None, Callable[[State, State], State]] = {
    None: lambda state, fresh: state,
    "weights": lambda state, fresh: model_of(state, fresh, "weights"),
    "BatchNorm statistics": lambda state, fresh: model_of(state, fresh, "statistics"),
    "second moments": lambda state, fresh: without_second_moments(state),
    **{name: lambda state, fresh, name=name: {**state, name: fresh[name]} for name in WHOLE},  # type: ignore[misc]
}


@pytest.fixture(autouse=True)
def _disarmed() -> Iterator[None]:
    yield
    failpoints.arm("")


def trained(config: RunConfig, folder: Path, points: str) -> int:
    RunFolder.create(path=folder)
    send_command(folder, parse_command("set lr_factor=0.5"))
    failpoints.arm(points)
    return train(config, folder)


def differs(folder: Path, reference: Path) -> bool:
    def found_in(folder: Path) -> tuple[list[tuple[Any, ...]], State]:
        course = [(e["step"], e["epoch"], e["loss"], e["lr"], e["grad_norm"]) for e in events(folder, "step")]
        course += [(e["step"], e["epoch"], e["loss"], e["miou"]) for e in events(folder, "val")]
        return course, torch.load(folder / "checkpoints" / "last.pt", weights_only=True)

    (course, state), (expected, last) = found_in(folder), found_in(reference)
    return course != expected or bool(differing(state, last))


@pytest.fixture(scope="module")
def parts(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path, Path]:
    """A config, its whole run, and one that was stopped."""
    folder = tmp_path_factory.mktemp("forgetful")
    config = tiny_config(tiny_root, train={"precision": "amp-fp16", "batch_size": 2})
    assert trained(config, folder / "whole", EVENTFUL) == 0
    assert trained(config, folder / "stopped", f"{EVENTFUL};train.step={STOPPED_AFTER + 1}:term") == 75
    return config, folder / "whole", folder / "stopped"


@case(
    "R05", how="resumes that forget one of 12 components", passes="each is noticed; the one that forgets none is exact"
)
@pytest.mark.faults_long
@pytest.mark.parametrize("component", FORGETFUL)
def test_resume_that_forgets_a_component_is_detected(
    parts: tuple[RunConfig, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, component: str | None
) -> None:
    config, reference, stopped = parts
    folder = tmp_path / "run"
    shutil.copytree(stopped, folder)
    load = Trainer.load_state_dict

    def forgetful(self: Trainer, state: Mapping[str, Any]) -> None:
        fresh = copy.deepcopy(self.state_dict())
        load(self, FORGETFUL[component](dict(state), fresh))

    monkeypatch.setattr(Trainer, "load_state_dict", forgetful)
    failpoints.arm("")
    assert run_session(TrainRequest(config, RunFolder(folder))) == 0
    assert differs(folder, reference) == (component is not None)
