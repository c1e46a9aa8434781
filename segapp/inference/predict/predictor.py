"""Predictors of class ids and probabilities: a trained model or an exported ONNX file.

Shapes: N images, B bands, C classes, H x W pixels of an image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.layouts.formats import ClassScheme
from segapp.errors import ConfigError
from segapp.inference.sliding import Inference
from segapp.inference.workspace import HostLimit
from segapp.losses import View

if TYPE_CHECKING:
    from segapp.export import ExportedModel
    from segapp.models import SegmentationModel


class Predictor(Protocol):
    """Class ids and probabilities of a batch of images of one size.

    Attributes:
        scheme: classes and colours.
        pixels: bands and type of the images.
        device: where it computes.
        frame_px: the only accepted height and width; None: any size.
        threshold: a class is predicted where its probability is above this; None: one class per pixel.
    """

    scheme: ClassScheme
    pixels: PixelFormat
    device: torch.device
    frame_px: tuple[int, int] | None
    threshold: float | None

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return class ids (N, H, W), uint8 (uint16 for more than 256 classes), of images (N, H, W, B).

        With several classes per pixel, sets of classes as int32: bit c for class c.
        """
        ...

    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return float32 (N, C, H, W) of images (N, H, W, B); their sum over C is 1 without a threshold."""
        ...


def likeliest(probabilities: NDArray[Any], threshold: float | None) -> NDArray[Any]:
    """Return the classes (N, H, W) of probabilities (N, C, H, W), as `Predictor.labels` does.

    Args:
        probabilities: of every class.
        threshold: a class is in the set of a pixel where its probability is above this; None: the likeliest class.
    """
    num_classes = probabilities.shape[1]
    if threshold is None:
        return np.asarray(probabilities.argmax(1).astype(np.uint8 if num_classes <= 256 else np.uint16))
    bits = 1 << np.arange(num_classes, dtype=np.int32).reshape(1, -1, 1, 1)
    return np.asarray(((probabilities > threshold) * bits).sum(1, dtype=np.int32))


class TrainedPredictor:
    """Predictor with a trained model."""

    frame_px: tuple[int, int] | None = None  # `inference` feeds windows to a model of one size

    def __init__(
        self,
        model: SegmentationModel,
        inference: Inference,
        scheme: ClassScheme,
        device: torch.device,
        pixels: PixelFormat = RGB8,
    ) -> None:
        self.model, self.inference, self.scheme, self.device = model, inference, scheme, device
        self.threshold = inference.threshold
        self.pixels = pixels

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        """See `Predictor`."""
        return infer_labels(self.model, self.inference, images, self.device)

    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """See `Predictor`."""
        probabilities: NDArray[Any] = self.probability_tensor(images).cpu().numpy()
        return probabilities

    @torch.no_grad()
    def probability_tensor(self, images: NDArray[Any]) -> Tensor:
        """Return `probabilities` on the device, a tensor of its own."""
        views, size = _views(self.model, self.inference, images, self.device)
        found = self.inference.probabilities(views, size)
        return found[..., : images.shape[1], : images.shape[2]].float()


@torch.no_grad()
def infer_labels(
    model: SegmentationModel, inference: Inference, images: NDArray[Any], device: torch.device
) -> NDArray[Any]:
    """Return the class ids of images.

    Args:
        model: in eval mode.
        inference: how logits are computed.
        images: (N, H, W, B), as they are stored.
        device: where the model is.

    Returns:
        uint8 (N, H, W), or uint16 for more than 256 classes; int32 for sets of classes.
    """
    views, size = _views(model, inference, images, device)
    labels: NDArray[Any] = inference.labels(views, size)[:, : images.shape[1], : images.shape[2]].cpu().numpy()
    return labels if labels.dtype != np.int64 else labels.astype(np.uint16)


def predict_image(
    model: SegmentationModel,
    inference: Inference,
    image: NDArray[Any],
    device: torch.device,
    host: HostLimit | None = None,
) -> NDArray[Any]:
    """Return the class ids (H, W) of one image, (H, W, B); see `infer_labels`.

    Larger images than `host` allows are predicted in tiles.
    """
    height, width = image.shape[:2]
    if host is None or host.fits(height * width, model, inference, device):
        labels: NDArray[Any] = infer_labels(model, inference, image[None], device)[0]
        return labels
    labels = np.empty((height, width), np.int32 if inference.multilabel else np.uint16)
    for tile in host.tiles((height, width)):
        labels[tile.place] = infer_labels(model, inference, image[tile.whole][None], device)[0][tile.core]
    return labels


def _views(
    model: SegmentationModel, inference: Inference, images: NDArray[Any], device: torch.device
) -> tuple[Tensor | list[View], tuple[int, int]]:
    planes = torch.from_numpy(np.ascontiguousarray(images.transpose(0, 3, 1, 2))).to(device)
    return inference.views(model, inference.normalizer(planes))


class ExportedPredictor:
    """Predictor with an exported ONNX file."""

    def __init__(self, exported: ExportedModel, device: torch.device) -> None:
        self.exported, self.device = exported, device
        self.scheme, self.pixels = exported.info.scheme, exported.info.pixels
        self.frame_px = exported.info.fixed_size_px
        self.threshold = exported.info.threshold

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        """See `Predictor`."""
        if self.threshold is not None:
            return likeliest(self.probabilities(images), self.threshold)
        found = self.exported(images)
        if self.exported.info.output == "logits":
            found = found.argmax(1)
        return found.astype(np.uint8 if self.scheme.num_classes <= 256 else np.uint16, copy=False)

    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """See `Predictor`.

        Raises:
            ConfigError: the file gives labels.
        """
        probabilities: NDArray[Any] = self.probability_tensor(images).numpy()
        return probabilities

    def probability_tensor(self, images: NDArray[Any]) -> Tensor:
        """Return `probabilities` as a tensor of its own on the CPU.

        Raises:
            ConfigError: the file gives labels.
        """
        if self.exported.info.output != "logits":
            raise ConfigError(
                f"{self.exported.path} gives class ids and no probabilities: export without --argmax, or leave out "
                "--save probabilities"
            )
        logits = torch.from_numpy(self.exported(images))
        return logits.softmax(1) if self.threshold is None else logits.sigmoid()
