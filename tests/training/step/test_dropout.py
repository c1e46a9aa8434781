"""Steps with dropout take one course, however the batch is divided."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from timm.layers import DropPath
from torch import nn

from segapp.assembly.optimizer import build_optimizer
from segapp.config import OptimConfig
from segapp.datasets.pool import Batch
from segapp.inference.sliding import NormalizedInput
from segapp.losses import CriterionCE, CriterionDice
from segapp.models.normalizer import Normalizer
from segapp.parallel import DataParallelModel, SampleMasks, mask_by_sample, set_recompute
from segapp.precision import Precision
from segapp.training.step.engine import StepEngine
from segapp.training.step.network import ReplicatedNetwork, TrainedNetwork
from segapp.training.step.update import WeightUpdate
from tests.training.step.test_engine import CPU, MEAN, STD, TinyNet, batch


def dropping_engine(
    *extra: nn.Module, num_devices: int = 1, mode: Any = "lockstep", criterion: Any = CriterionCE, **split: Any
) -> StepEngine:
    """Return an engine in float64 whose network drops values, channels and samples, some in a recomputed block."""
    torch.manual_seed(0)
    inside = nn.Sequential(nn.Conv2d(6, 6, 1), nn.Dropout(0.3), nn.Tanh())
    model = TinyNet(nn.Dropout2d(0.2), inside, DropPath(0.2), *extra).double()
    mask_by_sample(model)
    set_recompute(model, [("body.2",), (), ("body.2",)][:num_devices])
    inner = NormalizedInput(model, Normalizer(MEAN, STD, torch.float64))  # type: ignore[arg-type]
    network = TrainedNetwork(model, inner, CPU)  # type: ignore[arg-type]
    if num_devices > 1:
        replicas = DataParallelModel(inner, ["cpu"] * num_devices, mode=mode, **split)
        network = ReplicatedNetwork(model, replicas, CPU)  # type: ignore[arg-type]
    groups = [{"params": list(model.parameters()), "lr_factor": 1.0, "weight_decay": 0.0}]
    optimizer = build_optimizer(OptimConfig(lr=0.1, momentum=0.9), groups)
    update = WeightUpdate(model, optimizer, Precision("fp32", CPU))  # type: ignore[arg-type]
    engine = StepEngine(network, criterion().double(), update, masks=SampleMasks(model, 3))
    model.min_train_batch = 1  # type: ignore[assignment]
    engine.network.module.train()
    return engine


def course(engine: StepEngine, micro: int = 8, num_pieces: int = 1) -> list[float]:
    """Return the losses of four steps of eight samples, in micro-batches of so many."""
    losses = []
    for step in range(4):
        whole = batch(8, 0.2, seed=step)
        parts = zip(whole.images.split(micro), whole.target.split(micro), strict=True)
        batches = [
            Batch(images, target, tuple(range(len(images))), 1, 8 * step + micro * i)
            for i, (images, target) in enumerate(parts)
        ]
        losses.append(float(engine.step(batches, num_pieces=num_pieces).loss))
    return losses


DIVISIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "pieces": ({}, {"num_pieces": 3}),
    "micro-batches": ({}, {"micro": 3}),
    "two devices": ({"num_devices": 2}, {}),
    "three uneven devices": ({"num_devices": 3, "shares": [5, 0, 3]}, {}),
    "threads, pieces": ({"num_devices": 3, "mode": "threads"}, {"num_pieces": 2}),
}


@pytest.mark.parametrize("criterion", [CriterionCE, CriterionDice])
def test_losses_with_dropout_are_those_of_one_device(criterion: Any) -> None:
    expected = course(dropping_engine(criterion=criterion))
    assert len(set(expected)) == 4
    for title, (division, options) in DIVISIONS.items():
        engine = dropping_engine(criterion=criterion, **division)
        assert course(engine, **options) == pytest.approx(expected, rel=0, abs=1e-12), title
    assert course(dropping_engine(criterion=criterion)) == expected


def test_generators_decide_nothing_and_are_left_as_they_are() -> None:
    expected = course(dropping_engine())
    engine = dropping_engine()
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert course(engine) == expected
    assert torch.equal(torch.get_rng_state(), state)


def test_retried_step_has_the_masks_of_the_first_try() -> None:
    engine, other = dropping_engine(), dropping_engine()
    parts = [batch(4, seed=1), batch(4, seed=2)]

    def leave() -> None:
        raise KeyError("leave")

    with pytest.raises(KeyError):
        engine.step(parts, leave)
    assert torch.equal(engine.step(parts).loss, other.step(parts).loss)
