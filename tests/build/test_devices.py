"""The mode that `parallel.mode: auto` takes, and the same rule in `segapp plan`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from segapp.build import devices as module
from segapp.build.devices import plan_devices
from segapp.config import ParallelConfig, RunConfig
from segapp.training.planning.plan import choose_mode


@pytest.fixture(autouse=True)
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every name of a CUDA device resolve, and `auto` find three of them and NCCL."""

    def choose(requested: Any) -> tuple[list[torch.device], str]:
        names = ["cuda:0", "cuda:1", "cuda:2"] if requested == "auto" else requested
        return [torch.device(name) for name in names], "as the test says"

    monkeypatch.setattr(module, "choose_devices", choose)
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: True)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("section", "mode", "why"),
    [
        ({}, "ddp", "one process for each GPU"),
        ({"gpu0_bsz": 2}, "dp", "gpu0_bsz or shares"),
        ({"gpu0_bsz": "auto"}, "dp", "gpu0_bsz or shares"),
        ({"shares": [2, 3, 3]}, "dp", "gpu0_bsz or shares"),
        ({"devices": ["cpu", "cpu"]}, "dp", "logical devices"),
        ({"devices": ["cuda:0", "cuda:0"]}, "dp", "logical devices"),
        ({"devices": ["cuda:1"]}, "single", ""),
        ({"mode": "dp"}, "dp", ""),
        ({"mode": "ddp", "gpu0_bsz": 2}, "ddp", ""),
        ({"mode": "model"}, "model", ""),
    ],
)
def test_mode_of_a_section_and_the_reason_for_it(section: dict[str, Any], mode: str, why: str) -> None:
    plan = plan_devices(ParallelConfig(**section), batch_size=8)
    assert plan.mode == mode
    assert why in plan.mode_reason
    assert bool(why) == bool(plan.mode_reason)
    assert f"mode {mode}" in plan.description


def test_auto_takes_dp_where_ranks_are_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_devices(ParallelConfig(), batch_size=2).mode == "dp"
    assert plan_devices(ParallelConfig(), batch_size=3).mode == "ddp"
    assert plan_devices(ParallelConfig(), batch_size=8, is_one_process=True).mode == "dp"
    monkeypatch.setattr(module.dist, "is_nccl_available", lambda: False)
    assert plan_devices(ParallelConfig(), batch_size=8).mode == "dp"


def test_auto_is_ddp_in_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert plan_devices(ParallelConfig(), batch_size=8).mode == "ddp"


@pytest.mark.parametrize("section", [{}, {"gpu0_bsz": 2}, {"shares": [2, 3, 3]}, {"mode": "ddp", "shares": [0, 4, 4]}])
@pytest.mark.parametrize("batch_size", [2, 8])
def test_planned_mode_is_the_mode_of_the_training(section: dict[str, Any], batch_size: int, tiny: Any) -> None:
    if "shares" in section and batch_size == 2:
        pytest.skip("the shares are for a batch of 8")
    parallel = ParallelConfig(**section)
    train = {"epochs": 1, "batch_size": batch_size}
    config = RunConfig(**{**tiny, "parallel": parallel.model_dump(), "train": train})
    assert choose_mode(config, 3) == plan_devices(parallel, batch_size=batch_size).mode
