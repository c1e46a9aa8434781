"""First convolutions for other bands than RGB against smp's arithmetic; sized poolings against torch's."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from segmentation_models_pytorch.encoders._utils import patch_first_conv
from torch import nn

from segapp.models import build_model
from segapp.models.surgery import SizedPooling, adapt_first_conv, replace_adaptive_pooling


@pytest.mark.parametrize("num_bands", [1, 2, 4, 7])
def test_adapted_weight_equals_smp(num_bands):
    conv = nn.Conv2d(3, 8, 7)
    weight = conv.weight.detach().clone()
    patch_first_conv(conv, num_bands)
    torch.testing.assert_close(adapt_first_conv(weight, num_bands), conv.weight.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("num_bands", "library", "name", "encoder", "first"),
    [
        (5, "torchvision", "lraspp", "mobilenet_v3_small", "backbone.0.0.weight"),
        (1, "torchvision", "lraspp", "resnet18", "backbone.conv1.weight"),
        (1, "segapp", "eomt", "tu-test_vit", "encoder.patch_embed.proj.weight"),
        (7, "smp", "Unet", "mobilenet_v2", "encoder.features.0.0.weight"),
        (2, "smp", "PSPNet", "tu-test_resnet", "encoder.model.conv1.0.weight"),
    ],
)
def test_weights_for_rgb_fit_networks_of_any_bands(num_bands, library, name, encoder, first, tmp_path):
    rgb = build_model(library, name, 3, encoder=encoder)
    torch.save(rgb.state_dict(), tmp_path / "rgb.pt")
    model = build_model(library, name, 3, in_channels=num_bands, encoder=encoder, weights=str(tmp_path / "rgb.pt"))
    assert model.in_channels == num_bands
    state, before = model.state_dict(), rgb.state_dict()
    torch.testing.assert_close(state.pop(first), adapt_first_conv(before.pop(first), num_bands), rtol=0, atol=0)
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    assert f"adapted from RGB to {num_bands} bands" in model.load_reports[0].keys.convention

    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, tmp_path / "own.pt")
    again = build_model(library, name, 3, in_channels=num_bands, encoder=encoder, weights=str(tmp_path / "own.pt"))
    assert torch.equal(again.state_dict()[first], model.state_dict()[first])


@hypothesis.settings(max_examples=30)
@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 40), st.integers(1, 40))
def test_sized_pooling_matches_torch_adaptive_pooling(rows, columns, height, width):
    features = torch.rand(2, 3, height, width, dtype=torch.float64)
    expected = F.adaptive_avg_pool2d(features, (rows, columns))
    torch.testing.assert_close(SizedPooling((rows, columns))(features), expected)


@pytest.mark.parametrize(
    ("size", "is_replaced"),
    [(1, False), ((1, 1), False), (2, True), ((1, 2), True), ((3, 1), True), ((None, 2), False)],
)
def test_poolings_to_several_values_are_replaced(size, is_replaced):
    module = nn.Sequential(nn.Sequential(nn.AdaptiveAvgPool2d(size)))
    features = torch.rand(1, 2, 5, 7)
    expected = module(features)
    replace_adaptive_pooling(module)
    assert isinstance(module[0][0], SizedPooling) == is_replaced
    torch.testing.assert_close(module(features), expected)
