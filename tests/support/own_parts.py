"""Own parts that tests name as `tests.support.own_parts:...`: sound ones, and ones that break one rule each."""

from __future__ import annotations

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


class Net(nn.Module):
    """Two convolutions."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.head = nn.Conv2d(width, num_classes, 1)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.backbone(images))
        return {"out": logits}


class PaddedNet(nn.Module):
    """Adds an enlarged coarse map to a fine one, which takes multiples of 8."""

    def __init__(self, num_classes: int, in_channels: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(in_channels, 8, 5, 4, 2), nn.BatchNorm2d(8), nn.ReLU())
        self.coarse = nn.Conv2d(8, 8, 3, 2, 1)
        self.head = nn.Conv2d(8, num_classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.backbone(images)
        return self.head(features + F.interpolate(self.coarse(features), scale_factor=2))


class NetWithDropout(Net):
    """Two convolutions with BatchNorm and dropout between them."""

    def __init__(self, num_classes: int, width: int = 8) -> None:
        super().__init__(num_classes, width)
        self.backbone.append(nn.Dropout(0.3))


DROPOUT = {"library": "python", "name": "tests.support.own_parts:NetWithDropout"}
"""The section `model` of a config for it."""


class NetThatDraws(NetWithDropout):
    """A network with dropout, which may multiply its logits by a random number in training."""

    def __init__(self, num_classes: int, is_scaled: bool = False) -> None:
        super().__init__(num_classes)
        self.is_scaled = is_scaled

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        logits = super().forward(images)["out"]
        return {"out": logits * torch.rand(()) if self.is_scaled and self.training else logits}


def noisy() -> Callable[[Tensor, Tensor], Tensor]:
    """Return a plain loss that draws random numbers."""
    return lambda logits, target: F.cross_entropy(logits + torch.rand_like(logits), target, ignore_index=255)


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


def sgd_of(change: Callable[[Any, dict[str, Any]], Any]) -> type[torch.optim.SGD]:
    """Return an optimizer that changes its second group before each step."""

    class Changed(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            self.num_steps = getattr(self, "num_steps", 0) + 1
            change(self, self.param_groups[1])
            super().step()

    return Changed


HalfStill = sgd_of(lambda _, group: group.update(lr=0.0))
HalfConstant = sgd_of(lambda _, group: group.update(lr=0.01))
HalfForgetful = sgd_of(lambda own, group: group["params"][0].grad.mul_(own.num_steps))


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


# --- data sets that break a rule -----------------------------------------------------------------------------------


def data_of(change: Callable[[np.ndarray, np.ndarray], Any]) -> type[FolderData]:
    """Return a data set whose images and masks are changed."""

    class Data(FolderData):
        def image_and_mask(self, index: int) -> Any:
            return change(*super().image_and_mask(index))

    return Data


def with_strange_id(image: np.ndarray, mask: np.ndarray) -> Any:
    mask[0, 0] = 77
    return image, mask


ChannelsFirst = data_of(lambda image, mask: (image.transpose(2, 0, 1), mask))
FloatImages = data_of(lambda image, mask: (image.astype(np.float32) / 255, mask))
OtherSizes = data_of(lambda image, mask: (image, mask[::2, ::2]))
StrangeId = data_of(with_strange_id)
FloatMasks = data_of(lambda image, mask: (image, mask.astype(np.float64)))
RandomData = data_of(lambda image, mask: (image ^ np.random.default_rng().integers(0, 2, image.shape, np.uint8), mask))


class TorchStyle:
    """A data set of torch."""

    def __init__(self, root: str, split: str) -> None:
        self.source = FolderData(root, split)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source.image_and_mask(index)


class OneSplit(FolderData):
    """The training images, whatever split is asked for."""

    def __init__(self, root: str, split: str) -> None:
        super().__init__(root, "train")


# --- models --------------------------------------------------------------------------------------------------------


class WrongChannels(Net):
    """A network with logits of one class too many."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes + 1)


def unchanged(value: Any) -> Any:
    return value


def net_of(change: Callable[[dict[str, Tensor]], Any], seen: Callable[[Tensor], Tensor] = unchanged) -> type[Net]:
    """Return a network whose outputs, and images, are changed."""

    class Changed(Net):
        def forward(self, images: Tensor) -> Any:
            return change(super().forward(seen(images)))

    return Changed


MixingNet = net_of(unchanged, lambda images: images - images.mean(0, keepdim=True))
NoisyNet = net_of(unchanged, lambda images: images + torch.randn_like(images))  # in evaluation too
SoftmaxNet = net_of(lambda outputs: outputs["out"].softmax(1))
SigmoidNet = net_of(lambda outputs: outputs["out"].sigmoid())
LogSoftmaxNet = net_of(lambda outputs: outputs["out"].log_softmax(1))  # a second softmax changes nothing
ReluNet = net_of(lambda outputs: (outputs["out"] * 0.01).relu())  # within 0 and 1 for usual images, but logits
RaisingNet = net_of(lambda outputs: outputs["logits"])
NothingNet = net_of(lambda outputs: None)
OneClassNet = net_of(lambda outputs: {"out": outputs["out"] + torch.tensor([99.0, 0.0, 0.0])[:, None, None]})


class FixedNet(Net):
    """A network with an embedding of positions for images of one size only."""

    def __init__(self, num_classes: int, side: int = 128, is_said: bool = False) -> None:
        super().__init__(num_classes)
        self.position = nn.Parameter(torch.zeros(1, 3, side, side))
        if is_said:
            self.fixed_size_px = (side, side)

    def forward(self, images: Tensor) -> Any:
        return super().forward(images + self.position)


# --- losses --------------------------------------------------------------------------------------------------------


def summed() -> nn.Module:
    """A sum over pixels."""
    return nn.CrossEntropyLoss(ignore_index=255, reduction="sum")


def per_pixel() -> nn.Module:
    """One value per pixel."""
    return nn.CrossEntropyLoss(ignore_index=255, reduction="none")


def without_ignore() -> nn.Module:
    """255 is taken for a class."""
    return nn.CrossEntropyLoss(ignore_index=-100)


def negative_log() -> Callable[[Tensor, Tensor], Tensor]:
    """A logarithm of logits, which are negative too."""
    return lambda logits, target: (logits.log().mean(1) * (target != 255)).mean()


# --- correct losses with shapes that depend on values --------------------------------------------------------------


def focal() -> Callable[[Tensor, Tensor], Tensor]:
    """The focal loss of the valid pixels, selected by a mask, with weights on the logits' device."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        valid = target != 255
        weight = torch.tensor([1.0, 2.0, 0.5], device=logits.device, dtype=logits.dtype)
        pixels = logits.movedim(1, -1)[valid]
        ce = F.cross_entropy(pixels, target[valid], reduction="none")
        return ((1 - (-ce).exp()) ** 2 * ce * weight[target[valid]]).mean()

    return loss


def worst_class() -> Callable[[Tensor, Tensor], Tensor]:
    """The largest of the means of the classes present."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        ce = F.cross_entropy(logits, target, ignore_index=255, reduction="none")
        means = [ce[target == number].mean() for number in target.unique().tolist() if number != 255]
        return torch.stack(means).max() if means else logits.sum() * 0

    return loss


# --- lists of albumentations' transforms ---------------------------------------------------------------------------


def transforms() -> Any:
    """Return albumentations, whose import takes seconds."""
    import albumentations

    return albumentations


def normalized() -> list[Any]:
    """Normalizes, as segapp does on the device."""
    return [transforms().Normalize()]


def resized() -> list[Any]:
    """Ends with another size than the crop."""
    return [transforms().Resize(32, 32)]


def smoothed() -> Callable[..., Any]:
    """Mixes class ids."""
    return lambda image, mask, seed: (image, (mask // 2).astype(mask.dtype))


def unseeded() -> Callable[..., Any]:
    """Draws numbers that the seed does not determine."""
    return lambda image, mask, seed: (image ^ np.random.default_rng().integers(0, 2, image.shape, np.uint8), mask)


def wrong_argument() -> list[Any]:
    """A transform with an argument that does not exist."""
    return [transforms().HorizontalFlip(probability=0.5)]


def no_transform() -> list[Any]:
    """Something else in the list."""
    return [transforms().HorizontalFlip(), "VerticalFlip"]


def failing() -> Callable[..., Any]:
    """Fails."""
    return lambda image, mask, seed: (image[:, 5000], mask[:, 5000])


def nothing_back() -> Callable[..., Any]:
    """Changes the image in place."""
    return lambda image, mask, seed: image.sort(0)


def always() -> Callable[..., Any]:
    """Makes every image darker, whatever the seed."""
    return lambda image, mask, seed: (image // 2, mask)
