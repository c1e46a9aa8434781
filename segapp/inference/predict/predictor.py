"""Predictors of class ids and probabilities: a trained model, an exported ONNX file, or the mean of several.

Shapes: N images, B bands, C classes, H x W pixels of an image.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.accelerator import gpu_of
from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError
from segapp.inference.sliding import Inference, without_cudnn_benchmark
from segapp.inference.workspace import HostLimit
from segapp.losses import View

if TYPE_CHECKING:
    from segapp.export import ExportedModel
    from segapp.models import SegmentationModel


class Predictor(Protocol):
    """Class ids and probabilities of a batch of images of one size."""

    scheme: ClassScheme
    pixels: PixelFormat
    device: torch.device
    frame_px: tuple[int, int] | None  # the only accepted height and width
    threshold: float | None  # a class is predicted if its probability is above this; None: one class per pixel

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return class ids (N, H, W), uint8 (uint16 for more than 256 classes), of images (N, H, W, B).

        With several classes per pixel, sets of classes as int32: bit c for class c.
        """

    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return float32 (N, C, H, W) of images (N, H, W, B); their sum over C is 1 without a threshold."""


def id_dtype(num_classes: int) -> type[np.uint8] | type[np.uint16]:
    """Return the smallest dtype that can hold the class ids."""
    return np.uint8 if num_classes <= 256 else np.uint16


def likeliest(probabilities: NDArray[Any], threshold: float | None) -> NDArray[Any]:
    """Return the classes (N, H, W) of probabilities (N, C, H, W), as `Predictor.labels` does."""
    num_classes = probabilities.shape[1]
    if threshold is None:
        return np.asarray(probabilities.argmax(1).astype(id_dtype(num_classes)))
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
        return _infer_labels(self.model, self.inference, images, self.device)

    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """See `Predictor`."""
        probabilities: NDArray[Any] = self.probability_tensor(images).cpu().numpy()
        return probabilities

    @torch.no_grad()
    def probability_tensor(self, images: NDArray[Any]) -> Tensor:
        """Return `probabilities` as a separate tensor on the device."""
        views, size = _views(self.model, self.inference, images, self.device)
        found = self.inference.probabilities(views, size)
        return found[..., : images.shape[1], : images.shape[2]].float()


@without_cudnn_benchmark()
def predict_image(
    model: SegmentationModel,
    inference: Inference,
    image: NDArray[Any],
    device: torch.device,
    host: HostLimit | None = None,
) -> NDArray[Any]:
    """Return the class ids (H, W) of an image (H, W, B), like `Predictor.labels`; in tiles if `host` requires it."""
    height, width = image.shape[:2]
    if host is None or host.fits(height * width, model, inference, device):
        labels: NDArray[Any] = _infer_labels(model, inference, image[None], device)[0]
        return labels
    labels = np.empty((height, width), np.int32 if inference.multilabel else np.uint16)
    for tile in host.tiles((height, width)):
        labels[tile.place] = _infer_labels(model, inference, image[tile.whole][None], device)[0][tile.core]
    return labels


@torch.no_grad()
def _infer_labels(
    model: SegmentationModel, inference: Inference, images: NDArray[Any], device: torch.device
) -> NDArray[Any]:
    views, size = _views(model, inference, images, device)
    labels: NDArray[Any] = inference.labels(views, size)[:, : images.shape[1], : images.shape[2]].cpu().numpy()
    return labels if labels.dtype != np.int64 else labels.astype(np.uint16)


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
        return found.astype(id_dtype(self.scheme.num_classes), copy=False)

    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """See `Predictor`."""
        probabilities: NDArray[Any] = self.probability_tensor(images).numpy()
        return probabilities

    def probability_tensor(self, images: NDArray[Any]) -> Tensor:
        """Return `probabilities` as a separate tensor on the CPU.

        Raises:
            ConfigError: the file gives labels.
        """
        if self.exported.info.output != "logits":
            raise ConfigError(
                f"{self.exported.path} gives class ids and no probabilities: export without --argmax, or leave out "
                "--save probabilities",
                path=self.exported.path,
            )
        logits = torch.from_numpy(self.exported(images))
        return logits.softmax(1) if self.threshold is None else logits.sigmoid()


WEIGHTS_SHARE = 0.5
"""Share of a GPU's free memory that the weights of all networks may use; above it, they are kept on the CPU."""

Member = TrainedPredictor | ExportedPredictor


class EnsemblePredictor:
    """Predictor (see `Predictor`) with the mean of its members' probabilities; each member normalizes its own input.

    The members may differ in architecture, stride, precision and device, but not in their classes, nor in the bands and
    dtype of their images. If a GPU cannot hold all weights, they are kept on the CPU, and each network is moved to the
    GPU for its part of a batch (`is_resident` is False).

    The members are consumed one after the other with their names, so a generator may load them. `budget_bytes` is the
    memory for weights on the first member's device; None: a share of its free memory, no limit on the CPU.

    Raises:
        ConfigError: the classes or images of two networks differ, or they accept different sizes only.
    """

    def __init__(self, members: Iterable[tuple[str, Member]], *, budget_bytes: float | None = None) -> None:
        self.members: list[Member] = []
        self.is_resident = True
        self.frame_px: tuple[int, int] | None = None
        first_name = frame_name = ""
        for name, member in members:
            if not self.members:
                first_name, self.scheme, self.device = name, member.scheme, member.device
                self.threshold, self.pixels = member.threshold, member.pixels
                budget_bytes = _budget_bytes(member) if budget_bytes is None else budget_bytes
            if (member.threshold is None) != (self.threshold is None):
                raise ConfigError(
                    f"only one of {first_name} and {name} has several classes per pixel: they cannot be averaged",
                    path=name,
                )
            check_same_pixels(first_name, self.pixels, name, member.pixels)
            check_same_classes(first_name, self.scheme.names, name, member.scheme.names)
            if member.frame_px is not None and self.frame_px not in (None, member.frame_px):
                ours, theirs = (f"{size[1]}x{size[0]}" for size in (self.frame_px, member.frame_px) if size)
                raise ConfigError(
                    f"{frame_name} accepts images of {ours} px only, and {name} of {theirs} px: export them for one "
                    "size, or predict with the runs",
                    path=name,
                )
            if member.frame_px is not None:
                self.frame_px, frame_name = member.frame_px, name
            self.members.append(member)
            self._park_beyond(budget_bytes)

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        """See `Predictor`."""
        found = self._mean(images)
        if self.threshold is not None:
            return likeliest(found.cpu().numpy(), self.threshold)
        labels: NDArray[Any] = found.argmax(1).cpu().numpy()
        return labels.astype(id_dtype(self.scheme.num_classes))

    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """See `Predictor`."""
        probabilities: NDArray[Any] = self._mean(images).cpu().numpy()
        return probabilities

    @contextlib.contextmanager
    def on_device(self, member: Member) -> Iterator[Member]:
        """Yield a member with its weights on its device."""
        if self.is_resident or not isinstance(member, TrainedPredictor):
            yield member
            return
        member.model.to(member.device)
        try:
            yield member
        finally:
            member.model.to("cpu")

    @torch.no_grad()
    def _mean(self, images: NDArray[Any]) -> Tensor:
        """Return the mean probabilities, float32 (N, C, H, W) on the device of the first member."""
        total: Tensor | None = None
        for member in self.members:
            with self.on_device(member):
                found = member.probability_tensor(images).to(self.device)
            total = found if total is None else total.add_(found)
            del found
        assert total is not None
        return total.div_(len(self.members))

    def _park_beyond(self, budget_bytes: float | None) -> None:
        """Move all weights to the CPU if those on the ensemble's device exceed the budget."""
        trained = [member for member in self.members if isinstance(member, TrainedPredictor)]
        used = sum(_weight_bytes(member) for member in trained if member.device == self.device)
        if self.is_resident and (budget_bytes is None or used <= budget_bytes):
            return
        self.is_resident = False
        for member in trained:
            member.model.to("cpu")


def check_same_pixels(first: str, pixels: PixelFormat, other: str, found: PixelFormat) -> None:
    """Raise ConfigError if two networks take images with different bands or dtypes."""
    if (pixels.bands, pixels.dtype) != (found.bands, found.dtype):
        raise ConfigError(
            f"{first} takes images of {pixels.layout} {list(pixels.bands or ())}, and {other} of {found.layout} "
            f"{list(found.bands or ())}: average models with the same data.bands and data.dtype",
            path=other,
        )


def check_same_classes(first: str, names: tuple[str, ...], other: str, other_names: tuple[str, ...]) -> None:
    """Raise ConfigError unless two networks have the same classes in the same order."""
    if names == other_names:
        return
    pairs = enumerate(itertools.zip_longest(names, other_names))
    differing = [f"class {i} is {a or 'missing'!r} and {b or 'missing'!r}" for i, (a, b) in pairs if a != b]
    more = f", and {len(differing) - 3} more differ" if len(differing) > 3 else ""
    raise ConfigError(
        f"{first} and {other} have different classes: {', '.join(differing[:3])}{more}: only models with the same "
        "classes in the same order can be averaged",
        path=other,
    )


def _budget_bytes(member: Member) -> float | None:
    """Return the memory for weights on the device of the first member, which is already loaded there."""
    gpu = gpu_of(member.device)
    if gpu is None:
        return None
    own = _weight_bytes(member) if isinstance(member, TrainedPredictor) else 0
    return WEIGHTS_SHARE * (gpu.free_and_total_bytes(member.device)[0] + own)


def _weight_bytes(member: TrainedPredictor) -> int:
    tensors = itertools.chain(member.model.parameters(), member.model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
