"""A network of the user's own code: its backbone, its sizes, and its outputs in training and evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from segapp.models.by_name import PythonModel


class Net(nn.Module):
    """Logits of two heads; the first has as many channels as asked."""

    def __init__(self, part: str | None = None, channels: int = 2) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, channels, 1)
        if part is not None:
            setattr(self, part, nn.Conv2d(3, 3, 1))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(images), images


def build(network: nn.Module) -> PythonModel:
    return PythonModel(network, name="own:Net", num_classes=2, in_channels=3)


@pytest.mark.parametrize("part", [None, "encoder", "backbone"])
def test_backbone_is_the_part_of_that_name_or_the_whole(part):
    model = build(Net(part))
    assert model.backbone_module is (model.network if part is None else getattr(model.network, part))
    assert model.backbone_prefix == ("network." if part is None else f"network.{part}.")
    names = {name for name, _ in model.named_parameters() if name.startswith(model.backbone_prefix)}
    assert names == {f"{model.backbone_prefix}{name}" for name, _ in model.backbone_module.named_parameters()}


def test_sizes_are_the_networks_own():
    assert build(Net()).suitable_size(1, 33) == (1, 33)
    network = Net()
    network.size_divisor, network.min_size_px = 8, 20
    assert build(network).suitable_size(9, 33) == (24, 40)


def test_further_heads_are_left_out_in_an_evaluation():
    model, images = build(Net()), torch.rand(1, 3, 4, 5)
    assert [tuple(head.shape) for head in model(images)] == [(1, 2, 4, 5), (1, 3, 4, 5)]
    assert [tuple(head.shape) for head in model.eval()(images)] == [(1, 2, 4, 5)]
    assert model.compute_with_features(images)[1] is None


def test_logits_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"the logits have the shape \(1, 4, 4, 5\): return \(1, 2, h, w\)"):
        build(Net(channels=4))(torch.rand(1, 3, 4, 5))
