"""The criterion of a `loss` section, its class weights by hand, and the invalidation of their cache."""

import inspect
import math
import os
import pkgutil
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from segapp.assembly.optimizer import build_criterion
from segapp.config import LossConfig, LossTerm
from segapp.config.options import BUILT_INS, LOSSES
from segapp.datasets.targets import ClassFrequencies, cached_frequencies, class_weights
from segapp.errors import ConfigError
from segapp.losses import CriterionDice, CriterionMaskClassification, CriterionSum
from segapp.optim import Plateau
from tests.support.loss_cases import draw


def no_rule(rule: str) -> list[float]:
    raise AssertionError(rule)


@pytest.mark.parametrize(
    ("section", "name"), [(section, name) for section, table in BUILT_INS.items() for name in table]
)
def test_factory_takes_its_options_with_the_same_defaults(section: str, name: str) -> None:
    built_in = BUILT_INS[section][name]
    parameters = inspect.signature(pkgutil.resolve_name(built_in.factory)).parameters
    if name == "plateau":
        parameters = inspect.signature(Plateau).parameters
    for key, field in built_in.options.model_fields.items():
        default = parameters[key].default
        expected = tuple(field.default) if isinstance(field.default, list) else field.default
        assert default in (inspect.Parameter.empty, expected), key


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"mask_classification"}))
def test_every_name_builds_its_criterion(name: str) -> None:
    """It also takes logits of squashed images, as an evaluation with `data.resize_px` has them."""
    assert type(build_criterion(LossConfig(name=name), 3, 255, no_rule)) is pkgutil.resolve_name(LOSSES[name].factory)
    terms = [LossTerm(name="ohem", weight=0.25), LossTerm(name="lovasz", weight=3.0)]
    criterion = build_criterion(LossConfig(name=name, align_corners=True, plus=terms), 3, 255, no_rule)
    logits, target = draw(2, 3, (12, 5), (17, 23), ignored=0.2)
    resized = F.interpolate(logits, (17, 23), mode="bilinear", align_corners=True)
    for squashed in (logits, (logits,)):
        torch.testing.assert_close(criterion(squashed, target), criterion(resized, target), rtol=1e-6, atol=0)


def test_weight_of_mask_classification_multiplies_its_terms() -> None:
    section = LossConfig(name="mask_classification", weight=0.5, align_corners=False)
    total = build_criterion(section, 2, 255, no_rule, num_queries=7)
    assert isinstance(total, CriterionSum)
    assert total.factors == (0.5,)
    criterion = total.criteria[0]
    assert isinstance(criterion, CriterionMaskClassification)
    assert criterion.num_queries == 7
    assert (criterion.class_factor, criterion.bce_factor, criterion.dice_factor) == (2.0, 5.0, 5.0)


def test_terms_are_summed_with_their_options_and_weights() -> None:
    section = LossConfig(class_weights=[1.0, 2.0], plus=[LossTerm(name="dice", weight=0.5, options={"smooth": 3.0})])
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


#: 100 valid pixels in two images of 50: class 0 in both, class 1 in one, class 2 in none.
COUNTS = ClassFrequencies((80, 20, 0), (2, 1, 0), (100, 50, 0), 7, 2, ((0, 1), (0,)))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("inverse", [1.25 / 3.125, 5 / 3.125, 0.0]),  # one over the share, with mean one
        ("enet", [1 / math.log(1.82), 1 / math.log(1.22), 0.0]),
        ("median-frequency", [0.75, 1.5, 0.0]),  # frequencies 80/100 and 20/50 in the images that have it, median 0.6
    ],
)
def test_weights_of_a_rule_by_hand(rule: str, expected: list[float]) -> None:
    assert class_weights(rule, COUNTS) == pytest.approx(expected)


def test_masks_without_valid_pixels_and_unknown_rule_are_refused() -> None:
    with pytest.raises(ValueError, match="no valid pixel"):
        class_weights("enet", ClassFrequencies((0,), (0,), (0,), 9, 1, ((),)))


def test_class_counts_are_cached_until_a_mask_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    mask = tmp_path / "m.png"
    mask.write_bytes(b"one")
    calls: list[int] = []

    def count() -> ClassFrequencies:
        calls.append(1)
        return COUNTS

    for _ in range(2):
        assert cached_frequencies([mask], "key", count) == COUNTS
    assert len(calls) == 1
    cached_frequencies([mask], "other key", count)
    assert len(calls) == 2
    mask.write_bytes(b"other")
    os.utime(mask, ns=(1, 1))
    cached_frequencies([mask], "key", count)
    assert len(calls) == 3
    for file in (tmp_path / "cache" / "segapp").iterdir():
        file.write_text("{broken")
    assert cached_frequencies([mask], "key", count) == COUNTS
    assert len(calls) == 4
