"""Parameter groups: factors of backbone and head, layer-wise decay, patterns, and groups added later."""

from __future__ import annotations

import re

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from segapp.assembly.optimizer import (
    build_optimizer,
    build_parameter_groups,
    group_settings,
    layer_depths,
)
from segapp.config import OptimConfig
from segapp.errors import ConfigError
from segapp.models import SegmentationModel, build_model
from segapp.optim import add_groups, set_lr
from segapp.precision import Precision

FP32 = Precision("fp32", torch.device("cpu"))


def small(name: str = "FPN", encoder: str = "resnet18", **options: object) -> SegmentationModel:
    with torch.device("cpu" if encoder.startswith("mit") else "meta"):  # smp's SegFormer reads values
        return build_model("smp", name, 3, encoder=encoder, options=options)


def fcn() -> SegmentationModel:
    with torch.device("meta"):
        return build_model("torchvision", "fcn", 3, encoder="resnet18", aux=False)


def settings_of(model: SegmentationModel, **section: object) -> dict[str, tuple[float, float]]:
    found = group_settings(OptimConfig.model_validate(section), model)
    return {name: (each.lr_factor, each.weight_decay) for name, each in found.items()}


def test_groups_hold_every_parameter_once_with_its_factor() -> None:
    model = fcn()
    section = OptimConfig(head_lr_factor=20.0, weight_decay=0.1, decay_norm_and_bias=False, lr=0.1)
    groups = build_parameter_groups(section, model, FP32)
    assert [(g["lr_factor"], g["weight_decay"]) for g in groups] == [(1.0, 0.1), (1.0, 0.0), (20.0, 0.1), (20.0, 0.0)]
    names = {id(p): name for name, p in model.named_parameters()}
    found = [[names[id(p)] for p in group["params"]] for group in groups]
    assert sorted(name for group in found for name in group) == sorted(names.values())
    assert found[0][0] == "backbone.conv1.weight"
    assert "backbone.bn1.weight" in found[1]
    assert found[2] == ["classifier.0.weight", "classifier.4.weight"]
    assert found[3] == ["classifier.1.weight", "classifier.1.bias", "classifier.4.bias"]
    optimizer = build_optimizer(section, groups)
    set_lr(optimizer, 0.25)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.25, 5.0, 5.0]


@pytest.mark.parametrize(
    "name", ["vit_tiny_patch16_224", "convnext_atto", "swin_tiny_patch4_window7_224", "vit_small_patch16_dinov3"]
)
def test_layer_depths_give_the_factors_of_timm(name: str) -> None:
    with torch.device("meta"):
        model = timm.create_model(name, pretrained=False, num_classes=5)
    named = dict(model.named_parameters())
    backbone = [key for key in named if not key.startswith(("head", "fc_norm"))]
    found = layer_depths(backbone)
    assert not isinstance(found, str)
    depths, end = found
    names = {id(p): key for key, p in named.items()}
    for group in param_groups_layer_decay(model, layer_decay=0.75):
        for parameter in group["params"]:
            key = names[id(parameter)]
            if key in depths:
                assert 0.75 ** (end - depths[key]) == pytest.approx(group["lr_scale"], rel=1e-12), key


@pytest.mark.parametrize(
    ("name", "encoder", "num_blocks"),
    [("DPT", "tu-vit_tiny_patch16_224", 12), ("FPN", "tu-pvt_v2_b0", 8), ("Segformer", "mit_b0", 8)],
)
def test_layer_decay_falls_from_head_to_stem(name: str, encoder: str, num_blocks: int) -> None:
    model = small(name, encoder)
    factors = {key: factor for key, (factor, _) in settings_of(model, layer_decay=0.5, head_lr_factor=3.0).items()}
    of_blocks = [
        factor for key, factor in factors.items() if re.search(r"blocks?\d*\.\d+\.", key) and key.startswith("encoder")
    ]
    assert sorted(set(of_blocks)) == [0.5**k for k in range(num_blocks, 0, -1)]
    stem = next(key for key in factors if re.search(r"patch_embed1?\.proj|stem_0", key))
    assert factors[stem] == 0.5 ** (num_blocks + 1)
    assert {factor for key, factor in factors.items() if not key.startswith("encoder.")} == {3.0}
    if encoder == "mit_b0":  # ends and starts of stages belong to their blocks
        assert factors["encoder.norm2.weight"] == factors["encoder.block2.1.norm1.weight"]
        assert factors["encoder.patch_embed2.proj.weight"] == factors["encoder.block2.0.norm1.weight"]


def test_layer_decay_of_an_unknown_backbone_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optim.layer_decay = 0.75: the depth of encoder.conv1.weight .*resnet18"):
        settings_of(small(), layer_decay=0.75)


def test_first_matching_pattern_replaces_factor_and_decay() -> None:
    groups = [
        {"pattern": "encoder.layer4.1.*", "lr_factor": 7},
        {"pattern": "backbone", "weight_decay": 0},
        {"pattern": "decoder.*", "lr_factor": 5, "weight_decay": 0.25},
    ]
    found = settings_of(small(), groups=groups, head_lr_factor=2, weight_decay=0.5, decay_norm_and_bias=False)
    assert found["encoder.layer4.1.conv1.weight"] == (7, 0.5)
    assert found["encoder.layer4.0.conv1.weight"] == (1, 0)
    assert {found[name] for name in found if name.startswith("decoder.")} == {(5, 0.25)}
    assert found["segmentation_head.0.weight"] == (2, 0.5)
    assert found["segmentation_head.0.bias"] == (2, 0)


def test_pattern_without_a_match_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"optim.groups\[0\].pattern: 'decodr' is not .*did you mean decoder"):
        settings_of(small(), groups=[{"pattern": "decodr"}])


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_added_group_steps_as_an_optimizer_of_its_own(name: str) -> None:
    section = OptimConfig(name=name, lr=0.1)
    early, late, alone = (nn.Parameter(torch.ones(3)) for _ in range(3))
    optimizer = build_optimizer(section, [{"params": [early], "lr_factor": 2.0, "weight_decay": 0.0}])
    early.grad = torch.ones(3)
    set_lr(optimizer, 0.1)
    optimizer.step()
    add_groups(optimizer, [{"params": [late], "lr_factor": 1.0, "weight_decay": 0.01}])
    other = build_optimizer(section, [{"params": [alone], "lr_factor": 1.0, "weight_decay": 0.01}])
    for _ in range(3):
        for parameter in (early, late, alone):
            parameter.grad = torch.full((3,), 0.5)
        optimizer.step()
        other.step()
    assert optimizer.param_groups[1]["lr"] == pytest.approx(0.1)
    torch.testing.assert_close(late, alone, rtol=0, atol=0)
