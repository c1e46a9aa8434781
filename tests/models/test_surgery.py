"""First convolutions for other bands than RGB against smp's arithmetic; sized poolings against torch's."""

from __future__ import annotations

import hypothesis
import hypothesis.strategies as st
import pytest
import timm
import torch
import torch.nn.functional as F
from hypothesis import given
from segmentation_models_pytorch.encoders._utils import patch_first_conv
from torch import nn

from segapp.errors import CheckpointError
from segapp.models import build_model
from segapp.models.surgery import SizedPooling, adapt_first_conv, replace_adaptive_pooling
from segapp.models.weights import load_weights

pytestmark = pytest.mark.usefixtures("_uninspected")


@pytest.mark.parametrize("num_bands", [1, 2, 4, 7])
def test_adapted_weight_equals_smp(num_bands):
    conv = nn.Conv2d(3, 8, 7)
    weight = conv.weight.detach().clone()
    patch_first_conv(conv, num_bands)
    torch.testing.assert_close(adapt_first_conv(weight, num_bands), conv.weight.detach(), rtol=0, atol=0)
    of_squares = torch.cat([weight, 2 * weight, 5 * weight, 3 * weight], 1)  # 2 x 2 pixels before the convolution
    each = torch.cat([n * conv.weight.detach() for n in (1, 2, 5, 3)], 1)
    torch.testing.assert_close(adapt_first_conv(of_squares, num_bands), each)


@pytest.mark.parametrize(
    ("num_bands", "library", "name", "encoder", "stems"),
    [
        (5, "torchvision", "lraspp", "mobilenet_v3_small", ["backbone.0.0"]),
        (1, "torchvision", "lraspp", "resnet18", ["backbone.conv1"]),
        (1, "segapp", "eomt", "tu-test_vit", ["encoder.patch_embed.proj"]),
        (7, "smp", "PSPNet", "mobilenet_v2", ["encoder.features.0.0"]),
        (2, "smp", "Unet", "tu-test_resnet", ["encoder.model.conv1.0"]),
        (12, "smp", "PSPNet", "tu-repvgg_a0", ["encoder.model.stem.conv_kxk.conv", "encoder.model.stem.conv_1x1.conv"]),
    ],
)
def test_weights_for_rgb_fit_networks_of_any_bands(num_bands, library, name, encoder, stems, tmp_path):
    rgb = build_model(library, name, 3, encoder=encoder)
    torch.save(rgb.state_dict(), tmp_path / "rgb.pt")
    model = build_model(library, name, 3, in_channels=num_bands, encoder=encoder, weights=str(tmp_path / "rgb.pt"))
    assert model.in_channels == num_bands
    state, before = model.state_dict(), rgb.state_dict()
    for stem in stems:
        patch_first_conv(rgb.get_submodule(stem), num_bands)
        assert torch.equal(state.pop(f"{stem}.weight"), rgb.get_submodule(stem).weight)
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    assert f"{stems[0]}.weight" in (said := model.load_reports[0].keys.convention)
    assert said.endswith(f"adapted from RGB to {num_bands} bands")

    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, tmp_path / "own.pt")
    again = build_model(library, name, 3, in_channels=num_bands, encoder=encoder, weights=str(tmp_path / "own.pt"))
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in again.state_dict().items())


@pytest.mark.parametrize("tokens", [{}, {"reg_tokens": 3}, {"reg_tokens": 3, "no_embed_class": True}])
def test_position_embedding_is_resampled_as_timm_does(tokens, tmp_path):
    """Of the tokens before the patches, the embedding has one, four or none."""
    published = timm.create_model("test_vit", **tokens).state_dict()
    torch.save(published, tmp_path / "vit.pt")
    options = {"img_size": [64, 112], "num_blocks": 2, **tokens}
    file = str(tmp_path / "vit.pt")
    model = build_model("segapp", "eomt", 5, encoder="tu-test_vit", options=options, weights_backbone=file)
    overlay = {"state_dict": dict(published)}
    theirs = timm.create_model(
        "test_vit", img_size=(64, 112), pretrained=True, pretrained_cfg_overlay=overlay, **tokens
    )
    assert theirs.pos_embed.shape != published["pos_embed"].shape
    torch.testing.assert_close(model.encoder.pos_embed, theirs.pos_embed, rtol=0, atol=0)
    assert "encoder.pos_embed resampled" in model.load_reports[0].keys.convention
    wrong = published | {"pos_embed": published["pos_embed"][:, :-1]}  # whose tokens are no square
    with pytest.raises(CheckpointError, match=r"such as encoder\.pos_embed \(1x\d+x\d+ there, 1x\d+x\d+ here\)"):
        load_weights(model, wrong, "a.pt", "model.weights_backbone")


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
