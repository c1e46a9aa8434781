"""The criterion of a `loss` section."""

from typing import get_args

import pytest
import torch

from segapp.build.criterion import OPTIONS, build_criterion
from segapp.config import LossConfig, LossTerm
from segapp.errors import ConfigError
from segapp.losses import LOSSES, CriterionDice, CriterionSum


def no_rule(rule: str) -> list[float]:
    raise AssertionError(rule)


def test_config_names_are_those_of_the_criteria() -> None:
    named, _own_part = get_args(LossTerm.model_fields["name"].annotation)
    names = set(get_args(named))
    assert names - {"mask_classification"} == set(LOSSES) == set(OPTIONS)


@pytest.mark.parametrize("name", LOSSES)
def test_every_name_builds_its_criterion(name: str) -> None:
    criterion = build_criterion(LossConfig(name=name), 3, 255, no_rule)
    assert type(criterion) is LOSSES[name]
    target = torch.zeros(1, 4, 8, 8, dtype=torch.int32)  # with the distance maps of 3 classes
    loss = criterion(torch.zeros(1, 3, 4, 4), target if criterion.needs_distances else target[:, 0])
    assert loss.isfinite()


def test_terms_are_summed_with_their_options_and_weights() -> None:
    section = LossConfig(class_weights=[1.0, 2.0], plus=[LossTerm(name="dice", weight=0.5, dice_smooth=3.0)])
    criterion = build_criterion(section, 2, 255, no_rule)
    assert isinstance(criterion, CriterionSum)
    assert criterion.factors == (1.0, 0.5)
    ce, dice = criterion.criteria
    assert ce.weight.tolist() == [1.0, 2.0]
    assert isinstance(dice, CriterionDice)
    assert dice.smooth == 3.0


def test_wrong_number_of_class_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="1 values for 2 classes"):
        build_criterion(LossConfig(class_weights=[1.0]), 2, 255, no_rule)
