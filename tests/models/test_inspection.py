"""Shapes and types of operators on the meta device are those of torch's own operators on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from segapp.models.inspection import ANSWERS, QuickShapes


class Upsample(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.interpolate(images, (7, 9), mode="bilinear", align_corners=False)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "gelu": nn.GELU,
    "relu in place": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(inplace=True)),
    "hardswish in place": lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Hardswish(inplace=True)),
    "batch norm": lambda: nn.BatchNorm2d(3),
    "batch norm without weights": lambda: nn.BatchNorm2d(3, affine=False),
    "evaluated batch norm": lambda: nn.BatchNorm2d(3).eval(),
    "layer norm": lambda: nn.LayerNorm((4, 5)),
    "layer norm without weights": lambda: nn.LayerNorm(5, elementwise_affine=False),
    "frozen layer norm": lambda: nn.LayerNorm(5).requires_grad_(False),
    "upsampling": Upsample,
}


class Seen(TorchDispatchMode):
    """Notes the first output of each operator that `QuickShapes` answers."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func in ANSWERS:
            first = outputs[0] if isinstance(outputs, tuple) else outputs
            self.outputs.append((func, first.shape, first.dtype, first.stride()))
        return outputs


def ran(module: nn.Module, device: str) -> tuple[list[Any], list[Any]]:
    """The answered operators of both passes with their first outputs, and what the gradients are like."""
    module = copy.deepcopy(module).to(device)
    images = torch.zeros(2, 3, 4, 5, device=device, requires_grad=True)
    with Seen() as seen:
        module(images).sum().backward()
    gradients = [each.grad for each in (images, *module.parameters())]
    return seen.outputs, [None if grad is None else (grad.shape, grad.dtype) for grad in gradients]


@pytest.mark.parametrize("name", MODULES)
def test_shapes_and_gradients_are_those_of_torch_on_the_cpu(name: str) -> None:
    module = MODULES[name]()
    with QuickShapes():
        outputs, gradients = ran(module, "meta")
    assert outputs
    assert (outputs, gradients) == ran(module, "cpu")


def test_layer_norm_over_another_shape_is_refused_as_by_torch() -> None:
    layer, values = nn.LayerNorm(6), torch.zeros(2, 3, 4, 5)
    with pytest.raises(RuntimeError):
        layer(values)
    with QuickShapes(), pytest.raises(ValueError, match=r"over \[6\] got values of shape \[2, 3, 4, 5\]"):
        layer.to("meta")(values.to("meta"))
