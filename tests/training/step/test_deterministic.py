"""Networks under `train.deterministic`: what CUDA cannot repeat is replaced, or named with its module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.build.devices import numerics
from segapp.build.network import build_network
from segapp.config import ModelConfig, validate_config
from segapp.models.inspection import nondeterministic_parts, refusal
from segapp.models.surgery import replace_adaptive_pooling
from tests.training.step.test_launches import CPU, config_of

PSP = {"library": "smp", "name": "PSPNet", "encoder": "resnet18"}
UPERNET = {"library": "smp", "name": "UPerNet", "encoder": "resnet18"}


def example() -> Tensor:
    return torch.empty(2, 3, 96, 96, device="meta")


def network(model: dict[str, Any]) -> nn.Module:
    return build_network(ModelConfig(**model), 5, with_weights=False)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pad = nn.ReflectionPad2d(1)
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))

    def forward(self, images: Tensor) -> tuple[Tensor, ...]:
        return (F.adaptive_max_pool2d(self.body(self.pad(images)), 4),)


def test_parts_without_deterministic_form_are_named() -> None:
    model = Odd()
    assert nondeterministic_parts(model, example()) == [("pad", "reflection_pad2d"), ("", "adaptive_max_pool2d")]
    assert int(model.body[1].num_batches_tracked) == 0
    assert not model.pad._forward_hooks
    problem = refusal(model, example())
    assert problem is not None
    assert "pad (reflection_pad2d)" in problem
    assert "the model (adaptive_max_pool2d)" in problem


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [PSP, UPERNET], ids=["psp", "upernet"])
def test_pyramid_pooling_is_replaced_by_the_same_function(model: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = network(model).double().eval()
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    with torch.no_grad():
        expected = ours(images)[0]
    assert "_adaptive_avg_pool2d" in {operator for _, operator in nondeterministic_parts(ours, example().double())}
    keys = list(ours.state_dict())
    replace_adaptive_pooling(ours)
    assert refusal(ours, example().double()) is None
    assert list(ours.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(ours(images)[0], expected, rtol=1e-10, atol=1e-12)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    with numerics(deterministic=True, tf32=True):
        yield


@pytest.mark.usefixtures("_deterministic")
def test_steps_on_the_cpu_run_under_the_switch() -> None:
    from segapp.build.pairs import build_scheme
    from segapp.build.step import StepLayout
    from segapp.training.planning.trial import blank_batch, build_trial_engine

    config = config_of({**PSP}, deterministic=True)
    engine = build_trial_engine(config, StepLayout("single", (CPU,)))
    engine.network.train()
    result = engine.step([blank_batch(build_scheme(config.data), 2, (64, 64))])
    assert float(result.is_bad) == 0.0
    assert validate_config(config.model_dump(mode="json")).train.deterministic
