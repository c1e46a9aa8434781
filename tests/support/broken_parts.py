"""Own parts that each break one rule, as users write them; tests name them `tests.support.broken_parts:...`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import albumentations as A
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.own_parts import FolderData, Net

# --- data sets -----------------------------------------------------------------------------------------------------


class ChannelsFirst(FolderData):
    """Images (3, H, W)."""

    def image_and_mask(self, index: int) -> Any:
        image, mask = super().image_and_mask(index)
        return image.transpose(2, 0, 1), mask


class FloatImages(FolderData):
    """Images of float32 in 0..1."""

    def image_and_mask(self, index: int) -> Any:
        image, mask = super().image_and_mask(index)
        return image.astype(np.float32) / 255, mask


class OtherSizes(FolderData):
    """Masks of half the size of their images."""

    def image_and_mask(self, index: int) -> Any:
        image, mask = super().image_and_mask(index)
        return image, mask[::2, ::2]


class TorchStyle:
    """A data set of torch."""

    def __init__(self, root: str, split: str) -> None:
        self.source = FolderData(root, split)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source.image_and_mask(index)


class StrangeId(FolderData):
    """Masks with an id that is no class."""

    def image_and_mask(self, index: int) -> Any:
        image, mask = super().image_and_mask(index)
        mask[0, 0] = 77
        return image, mask


class FloatMasks(FolderData):
    """Masks of float64."""

    def image_and_mask(self, index: int) -> Any:
        image, mask = super().image_and_mask(index)
        return image, mask.astype(np.float64)


class RandomData(FolderData):
    """Images that are flipped at random at each call."""

    def image_and_mask(self, index: int) -> Any:
        image, mask = super().image_and_mask(index)
        noise = np.random.default_rng().integers(0, 2, image.shape, np.uint8)
        return image ^ noise, mask


class TensorData(FolderData):
    """Tensors (3, H, W), as torchvision makes them."""

    def image_and_mask(self, index: int) -> Any:
        image, mask = super().image_and_mask(index)
        return torch.from_numpy(image).permute(2, 0, 1) / 255, torch.from_numpy(mask)


class OneSplit(FolderData):
    """The training images, whatever split is asked for."""

    def __init__(self, root: str, split: str) -> None:
        super().__init__(root, "train")


# --- models --------------------------------------------------------------------------------------------------------


class SoftmaxNet(Net):
    """Probabilities of a softmax."""

    def forward(self, images: Tensor) -> Any:
        return super().forward(images)["out"].softmax(1)


class SigmoidNet(Net):
    """Probabilities of a sigmoid."""

    def forward(self, images: Tensor) -> Any:
        return super().forward(images)["out"].sigmoid()


class LogSoftmaxNet(Net):
    """Logarithms of probabilities: a second softmax changes nothing."""

    def forward(self, images: Tensor) -> Any:
        return super().forward(images)["out"].log_softmax(1)


class ReluNet(Net):
    """Logits of a last ReLU with small weights: within 0 and 1 for usual images."""

    def forward(self, images: Tensor) -> Any:
        return (super().forward(images)["out"] * 0.01).relu()


class FixedNet(Net):
    """A network with an embedding of positions for images of one size only."""

    def __init__(self, num_classes: int, side: int = 128, is_said: bool = False) -> None:
        super().__init__(num_classes)
        self.position = nn.Parameter(torch.zeros(1, 3, side, side))
        if is_said:
            self.fixed_size_px = (side, side)

    def forward(self, images: Tensor) -> Any:
        return super().forward(images + self.position)


class RaisingNet(Net):
    """A network whose forward fails."""

    def forward(self, images: Tensor) -> Any:
        return super().forward(images)["logits"]


class NothingNet(Net):
    """A network whose forward forgets to return."""

    def forward(self, images: Tensor) -> Any:
        super().forward(images)


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


def selected() -> Callable[[Tensor, Tensor], Tensor]:
    """The mean of the valid pixels, selected by a mask."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        valid = target != 255
        return F.cross_entropy(logits, target, ignore_index=255, reduction="none")[valid].mean()

    return loss


def focal() -> Callable[[Tensor, Tensor], Tensor]:
    """The focal loss, with weights on the logits' device."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        valid = target != 255
        weight = torch.tensor([1.0, 2.0, 0.5], device=logits.device, dtype=logits.dtype)
        pixels = logits.movedim(1, -1)[valid]
        ce = F.cross_entropy(pixels, target[valid], reduction="none")
        return ((1 - (-ce).exp()) ** 2 * ce * weight[target[valid]]).mean()

    return loss


def ohem() -> Callable[[Tensor, Tensor], Tensor]:
    """The mean of the quarter of pixels with the largest loss."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        ce = F.cross_entropy(logits, target, ignore_index=255, reduction="none").flatten()
        num_kept = max(1, int((target != 255).sum().item()) // 4)
        return ce.topk(num_kept)[0].mean()

    return loss


def lovasz() -> Callable[[Tensor, Tensor], Tensor]:
    """The Lovasz extension of the Jaccard loss of the classes present (Berman et al. 2018)."""

    def loss(logits: Tensor, target: Tensor) -> Tensor:
        valid = target != 255
        probabilities, labels = logits.softmax(1).movedim(1, -1)[valid], target[valid]
        losses = []
        for number in labels.unique().tolist():
            foreground = (labels == number).to(probabilities.dtype)
            errors, order = (foreground - probabilities[:, number]).abs().sort(descending=True)
            sorted_foreground = foreground[order]
            jaccard = 1 - (foreground.sum() - sorted_foreground.cumsum(0)) / (
                foreground.sum() + (1 - sorted_foreground).cumsum(0)
            )
            jaccard = torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])
            losses.append(errors @ jaccard)
        return torch.stack(losses).mean() if losses else logits.sum() * 0

    return loss


# --- lists of albumentations' transforms ---------------------------------------------------------------------------


def normalized() -> list[Any]:
    """Normalizes, as segapp does on the device."""
    return [A.Normalize()]


def tensors() -> list[Any]:
    """Makes tensors."""
    return [A.ToTensorV2()]


def turned() -> list[Any]:
    """Exchanges height and width of a crop that is not square."""
    return [A.RandomCrop(64, 48), A.RandomRotate90(p=1)]


def resized() -> list[Any]:
    """Ends with another size than the crop."""
    return [A.Resize(32, 32)]


def smoothed() -> Callable[..., Any]:
    """Mixes class ids."""
    return lambda image, mask, seed: (image, (mask // 2).astype(mask.dtype))


def unseeded() -> Callable[..., Any]:
    """Draws numbers that the seed does not determine."""
    return lambda image, mask, seed: (image ^ np.random.default_rng().integers(0, 2, image.shape, np.uint8), mask)


def wrong_argument() -> list[Any]:
    """A transform with an argument that does not exist."""
    return [A.HorizontalFlip(probability=0.5)]


def no_transform() -> list[Any]:
    """Something else in the list."""
    return [A.HorizontalFlip(), "VerticalFlip"]


def failing() -> Callable[..., Any]:
    """Fails."""
    return lambda image, mask, seed: (image[:, 500], mask[:, 500])
