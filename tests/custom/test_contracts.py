"""The contracts of own parts name the arguments that segapp gives."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from segapp.assembly.own_parts import own_criterion, own_optimizer, own_schedule
from segapp.assembly.pairs import own_data
from segapp.config import DataConfig, LossTerm, OptimConfig, ScheduleConfig
from segapp.custom.loading import ARGUMENTS
from segapp.datasets.augment import TrainTransform
from segapp.errors import ConfigError
from segapp.models import build_model

pytestmark = pytest.mark.usefixtures("trusted_code")

NAME = f"{__name__}:record"
given: dict[str, Any] = {}


def record(
    groups: Any = None, *, num_classes: Any = None, in_channels: Any = None, ignore_index: Any = None,
    align_corners: Any = None, aux_weight: Any = None, weight: Any = None, root: Any = None, split: Any = None,
    lr: Any = None, total_steps: Any = None, steps_per_epoch: Any = None, crop_px: Any = None,
) -> Callable[[int], float]:  # fmt: skip
    """A factory that takes everything and notes what it is given."""
    given.update({name: value for name, value in locals().items() if value is not None})
    return lambda _: 1.0


USES: dict[str, Callable[[], Any]] = {
    "model": lambda: build_model("python", NAME, 3),
    "loss": lambda: own_criterion(LossTerm(name=NAME), 3, 255, torch.ones(3)),
    "data": lambda: own_data(DataConfig(format=NAME, root="there", crop_px=(8, 8)), "train"),
    "optim": lambda: own_optimizer(OptimConfig(name=NAME, lr=0.1), [{"params": []}]),
    "schedule": lambda: own_schedule(ScheduleConfig(name=NAME), total_steps=5, steps_per_epoch=2),
    "transform": lambda: TrainTransform((32, 32), [{NAME: {}}], ignore_index=255),
}


@pytest.mark.parametrize("kind", ARGUMENTS)
def test_contract_names_what_a_factory_is_given(kind: str) -> None:
    given.clear()
    with contextlib.suppress(ConfigError):  # what the factory makes is no network, ...
        USES[kind]()
    names, num_positional = ARGUMENTS[kind]
    assert set(given) - {"groups"} == set(names)
    assert ("groups" in given) == bool(num_positional)
