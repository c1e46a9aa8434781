"""Networks under `train.deterministic`: adaptive pooling, which CUDA cannot repeat, is replaced."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from segapp.assembly.devices import numerics
from segapp.assembly.network import build_network
from segapp.compat.torch import TorchDispatchMode, operator_name
from segapp.config import ModelConfig, validate_config
from segapp.models.surgery import replace_adaptive_pooling
from tests.training.step.test_launches import CPU, config_of

PSP = {"library": "smp", "name": "PSPNet", "encoder": "resnet18"}
UPERNET = {"library": "smp", "name": "UPerNet", "encoder": "resnet18"}


class Operators(TorchDispatchMode):
    """Notes the names of the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(operator_name(func))
        return func(*args, **(kwargs or {}))


def operators(module: nn.Module) -> set[str]:
    with Operators() as seen, torch.no_grad():
        module(torch.zeros(2, 3, 96, 96, dtype=torch.float64))
    return seen.names


def network(model: dict[str, Any]) -> nn.Module:
    return build_network(ModelConfig(**model), 5, with_weights=False)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", [PSP, UPERNET], ids=["psp", "upernet"])
def test_pyramid_pooling_is_replaced_by_the_same_function(model: dict[str, Any]) -> None:
    torch.manual_seed(0)
    ours = network(model).double().eval()
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64)
    with torch.no_grad():
        expected = ours(images)[0]
    assert "_adaptive_avg_pool2d" in operators(ours)
    keys = list(ours.state_dict())
    replace_adaptive_pooling(ours)
    assert "_adaptive_avg_pool2d" not in operators(ours)
    assert list(ours.state_dict()) == keys
    with torch.no_grad():
        torch.testing.assert_close(ours(images)[0], expected, rtol=1e-10, atol=1e-12)


@pytest.fixture
def _deterministic() -> Iterator[None]:
    with numerics(deterministic=True, tf32=True):
        yield


@pytest.mark.usefixtures("_deterministic")
def test_steps_on_the_cpu_run_under_the_switch() -> None:
    from segapp.assembly.pairs import build_scheme
    from segapp.planning.trial import blank_batch, build_trial_engine
    from segapp.training.step.assembler import StepLayout

    config = config_of({**PSP}, deterministic=True)
    engine = build_trial_engine(config, StepLayout("single", (CPU,)))
    engine.network.module.train()
    result = engine.step([blank_batch(build_scheme(config.data), 2, (64, 64))])
    assert float(result.is_bad) == 0.0
    assert validate_config(config.model_dump(mode="json")).train.deterministic
