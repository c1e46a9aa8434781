"""Own parts that tests name as `tests.support.own_parts:...`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segapp.losses import CriterionCE


class FolderData:
    """The files of a `folder` data set, read with OpenCV."""

    def __init__(self, root: str, split: str) -> None:
        self.images = sorted(Path(root, "images", split).iterdir())
        self.masks = Path(root, "masks", split)

    def __len__(self) -> int:
        return len(self.images)

    def image_and_mask(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        path = self.images[index]
        image = cv2.cvtColor(cv2.imread(str(path)), cv2.COLOR_BGR2RGB)
        return image, cv2.imread(str(self.masks / path.name), cv2.IMREAD_UNCHANGED)

    def name(self, index: int) -> str:
        return str(self.images[index])


class BadData(FolderData):
    """Data whose images are float."""

    def image_and_mask(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image, mask = super().image_and_mask(index)
        return image.astype(np.float32), mask


class Net(nn.Module):
    """Two convolutions."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.backbone(images))
        return {"out": logits}


class WrongChannels(Net):
    """A network with logits of one class too many."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes + 1)


class MixingNet(Net):
    """A network that subtracts the mean over the batch."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return super().forward(images - images.mean(0, keepdim=True))


class NoisyNet(Net):
    """A network that adds noise in evaluation too."""

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        return super().forward(images + torch.randn_like(images))


def ce() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a plain loss that is a mean over valid pixels."""
    return lambda logits, target: F.cross_entropy(logits, target, ignore_index=255)


def largest_pixel() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a plain loss that is no mean: the largest loss of a pixel."""
    return lambda logits, target: F.cross_entropy(logits, target, ignore_index=255, reduction="none").max()


def additive_ce(ignore_index: int, align_corners: bool, aux_weight: float) -> CriterionCE:
    """Return segapp's cross-entropy."""
    return CriterionCE(ignore_index=ignore_index, align_corners=align_corners, aux_weight=aux_weight)


class NearlyExact(CriterionCE):
    """A criterion that is wrong by one part in a thousand: the sum of a chunk depends on its number of images."""

    def statistics(self, outputs: Any, target: Tensor) -> tuple[Tensor, ...]:
        loss, count = super().statistics(outputs, target)
        return loss * (1 + 1e-3 * (len(target) < 4)), count


class GradientOfNothing(CriterionCE):
    """A criterion whose gradient is not 0 without a valid pixel, although its loss is."""

    def forward(self, outputs: Any, target: Tensor) -> Tensor:
        difference = (outputs[0] - outputs[0].detach()).mean()
        return super().forward(outputs, target) + difference * (target == self.ignore_index).all()


def falling(total_steps: int, end: float = 0.5) -> Callable[[int], float]:
    """Return a line from 1 at the first step towards `end`."""
    return lambda step: 1 - (1 - end) * (step - 1) / total_steps


def negative() -> Callable[[int], float]:
    """Return a schedule that is not allowed."""
    return lambda step: -1.0


def counting() -> Callable[[int], float]:
    """Return a schedule that counts its calls."""
    calls: list[int] = []
    return lambda step: float(calls.append(step) or len(calls))


def still(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return an optimizer that never moves."""
    return torch.optim.SGD(groups, lr=0.0)


def attack(path: str, **_: Any) -> nn.Module:
    """Leave a trace that the code ran."""
    Path(path).write_text(str(os.getpid()))
    return Net(3)


class ColorNet(nn.Module):
    """A network that knows the colors of the drawn scenes as their files hold them; its parameter is a scale."""

    COLORS = ((60, 110, 70), (80, 90, 150), (190, 80, 60))

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        colors = torch.tensor(self.COLORS[:num_classes]) / 255
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        self.register_buffer("colors", (colors - mean) / std)
        self.scale = nn.Parameter(torch.tensor(5.0))

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        smooth = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, 1)
        colors: Any = self.colors
        return {"out": -self.scale * (smooth[:, None] - colors[None, :, :, None, None]).square().sum(2)}
