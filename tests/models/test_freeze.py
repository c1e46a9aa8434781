"""`SegmentationModel.freeze`: which parameters and modules it takes from the training."""

from __future__ import annotations

import copy

import pytest
import torch

from segapp.errors import ConfigError
from segapp.models import SegmentationModel, build_model


@pytest.fixture(scope="module")
def built() -> SegmentationModel:
    torch.manual_seed(0)
    return build_model("torchvision", "lraspp", 3, encoder="mobilenet_v3_small")


@pytest.fixture
def model(built: SegmentationModel) -> SegmentationModel:
    return copy.deepcopy(built)


def test_frozen_backbone_has_no_gradient_and_fixed_statistics(model):
    model.freeze(["backbone"])
    model.train()
    assert model.training
    assert model.classifier.training
    assert not any(module.training for module in model.backbone.modules())
    before = {name: value.clone() for name, value in model.named_buffers()}
    model(torch.rand(2, 3, 64, 64))[0].sum().backward()
    frozen = {name for name, p in model.named_parameters() if p.grad is None}
    assert frozen == {name for name, _ in model.named_parameters() if name.startswith("backbone.")}
    changed = {name for name, value in model.named_buffers() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("classifier.") for name in changed)
    assert sorted(model.unfreeze()) == sorted(frozen)
    model.train()
    assert all(module.training for module in model.modules())
    assert all(p.requires_grad for p in model.parameters())


def test_pattern_of_parameters_leaves_modules_in_training(model):
    model.freeze(["*.bias", "backbone.0"])
    model.train()
    assert {name for name in model.frozen_parameters if not name.endswith(".bias")} == {
        name for name, _ in model.named_parameters() if name.startswith("backbone.0.") and name.endswith(".weight")
    }
    assert model.frozen_modules == ("backbone.0",)
    assert not model.backbone["0"][1].training
    assert model.backbone["1"].training


def test_modules_of_a_glob_stay_in_evaluation_mode(model):
    model.freeze(["backbone.1?"])
    model.train()
    assert [number for number, part in model.backbone.named_children() if not part.training] == ["10", "11", "12"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("clasifier.*", r"model.freeze: 'clasifier.\*' is not .*did you mean classifier"),
        ("*", r"model.freeze = \['\*'\] freezes every parameter of lraspp: leave some to train"),
    ],
)
def test_freeze_that_matches_nothing_or_all_is_an_error(model, pattern, message):
    with pytest.raises(ConfigError, match=message):
        model.freeze([pattern])
