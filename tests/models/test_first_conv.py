"""The first convolution for other bands than RGB, compared with smp's own arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from segmentation_models_pytorch.encoders._utils import patch_first_conv
from torch import nn

from segapp.models import build_model
from segapp.models.first_conv import adapt_first_conv


@pytest.mark.parametrize("num_bands", [1, 2, 4, 7])
def test_adapted_weight_equals_smp(num_bands: int) -> None:
    conv = nn.Conv2d(3, 8, 7)
    weight = conv.weight.detach().clone()
    patch_first_conv(conv, num_bands)
    torch.testing.assert_close(adapt_first_conv(weight, num_bands), conv.weight.detach(), rtol=0, atol=0)


CASES = [
    ("torchvision", "lraspp", "mobilenet_v3_small", "backbone.0.0.weight"),
    ("torchvision", "fcn", "resnet18", "backbone.conv1.weight"),
    ("segapp", "eomt", "tu-test_vit", "encoder.patch_embed.proj.weight"),
    ("smp", "Unet", "resnet18", "encoder.conv1.weight"),
    ("smp", "Unet", "tu-resnet18", "encoder.model.conv1.weight"),
]


ONE_BAND_TOO = ("lraspp", "eomt")  # in every run; all of them in the slow form


@pytest.mark.parametrize(
    ("num_bands", "library", "name", "encoder", "first"),
    [(5, *case) for case in CASES]
    + [pytest.param(1, *case, marks=() if case[1] in ONE_BAND_TOO else pytest.mark.slow) for case in CASES],
)
def test_weights_for_rgb_fit_networks_of_any_bands(
    num_bands: int, library: str, name: str, encoder: str, first: str, tmp_path: Path
) -> None:
    rgb = build_model(library, name, 3, encoder=encoder)
    torch.save(rgb.state_dict(), tmp_path / "rgb.pt")
    model = build_model(library, name, 3, in_channels=num_bands, encoder=encoder, weights=str(tmp_path / "rgb.pt"))
    assert model.in_channels == num_bands
    state, before = model.state_dict(), rgb.state_dict()
    torch.testing.assert_close(state.pop(first), adapt_first_conv(before.pop(first), num_bands), rtol=0, atol=0)
    assert all(torch.equal(value, before[key]) for key, value in state.items())
    assert f"adapted from RGB to {num_bands} bands" in model.load_reports[0].keys.convention
    logits = model.eval()(torch.randn(1, num_bands, 64, 64))[0]
    assert logits.shape[:2] == (1, 3)

    torch.save({f"module.{key}": value for key, value in model.state_dict().items()}, tmp_path / "own.pt")
    again = build_model(library, name, 3, in_channels=num_bands, encoder=encoder, weights=str(tmp_path / "own.pt"))
    assert torch.equal(again.state_dict()[first], model.state_dict()[first])
