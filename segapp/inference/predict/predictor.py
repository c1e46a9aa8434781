"""Predictors of class ids and probabilities: a trained model, or the mean of several.

Images that fit into memory are predicted whole, so that networks with global context see the whole image. Others are
predicted in overlapping tiles, of which only the core is kept.

Shapes: N images, B bands, C classes, H x W pixels of an image, R rows of a strip.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.accelerator import accelerator_of, gpu_of
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError
from segapp.inference.sliding import Inference, without_cudnn_benchmark
from segapp.inference.workspace import (
    CPU_TILE_PX,
    HostLimit,
    Workspace,
    host_budget,
    measure_bytes_per_px,
    pixels_within,
    tile_cores,
    tile_frame,
)
from segapp.losses.confusion import View
from segapp.memory.oom import is_out_of_memory

if TYPE_CHECKING:
    from segapp.models import SegmentationModel


def likeliest(probabilities: NDArray[Any], threshold: float | None) -> NDArray[Any]:
    """Return the classes (N, H, W) of probabilities (N, C, H, W), as `TrainedPredictor.labels` does."""
    num_classes = probabilities.shape[1]
    if threshold is None:
        return np.asarray(probabilities.argmax(1).astype(np.uint8 if num_classes <= 256 else np.uint16))
    bits = 1 << np.arange(num_classes, dtype=np.int32).reshape(1, -1, 1, 1)
    return np.asarray(((probabilities > threshold) * bits).sum(1, dtype=np.int32))


class TrainedPredictor:
    """Class ids and probabilities of a batch of images of one size, with a trained model."""

    def __init__(
        self,
        model: SegmentationModel,
        inference: Inference,
        scheme: ClassScheme,
        device: torch.device,
    ) -> None:
        self.model, self.inference, self.scheme, self.device = model, inference, scheme, device
        self.threshold = inference.threshold
        self.pixels = replace(inference.preprocessing.pixels, is_trained=True)
        self.needs_whole, self.align_corners = inference.needs_whole, inference.align_corners

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return class ids (N, H, W), uint8 (uint16 for more than 256 classes), of images (N, H, W, B).

        With several classes per pixel, sets of classes as int32: bit c for class c.
        """
        return _infer_labels(self.model, self.inference, images, self.device)

    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return float32 (N, C, H, W) of images (N, H, W, B); their sum over C is 1 without a threshold."""
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
    """Return the class ids (H, W) of an image (H, W, B), like `TrainedPredictor`; in tiles if `host` requires it."""
    height, width = image.shape[:2]
    if host is None or inference.needs_whole or host.fits(height * width, model, inference, device):
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
    return inference.views(model, planes)


class EnsemblePredictor:
    """The same as `TrainedPredictor`, with the mean of its members' probabilities; each normalizes its own input.

    The members may differ in architecture, stride, precision and device, but not in their classes, nor in the bands and
    dtype of their images. They are consumed one after the other with their names, so a generator may load them.

    Raises:
        ConfigError: the classes or images of two networks differ.
    """

    def __init__(self, members: Iterable[tuple[str, TrainedPredictor]]) -> None:
        self.members: list[TrainedPredictor] = []
        self.needs_whole = self.align_corners = False
        first_name = ""
        for name, member in members:
            if not self.members:
                first_name, self.scheme, self.device = name, member.scheme, member.device
                self.threshold, self.pixels = member.threshold, member.pixels
            if (member.threshold is None) != (self.threshold is None):
                raise ConfigError(
                    f"only one of {first_name} and {name} has several classes per pixel: they cannot be averaged",
                    path=name,
                )
            check_same_pixels(first_name, self.pixels, name, member.pixels)
            check_same_classes(first_name, self.scheme.names, name, member.scheme.names)
            self.members.append(member)
            self.needs_whole |= member.needs_whole
            self.align_corners |= member.align_corners

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return class ids (N, H, W) of images (N, H, W, B), as `TrainedPredictor.labels` does."""
        return likeliest(self.probabilities(images), self.threshold)

    @torch.no_grad()
    def probabilities(self, images: NDArray[Any]) -> NDArray[Any]:
        """Return the mean probabilities, float32 (N, C, H, W), of images (N, H, W, B)."""
        total: Tensor | None = None
        for member in self.members:
            found = member.probability_tensor(images).to(self.device)
            total = found if total is None else total.add_(found)
            del found
        assert total is not None
        mean: NDArray[Any] = total.div_(len(self.members)).cpu().numpy()
        return mean


Predictor = TrainedPredictor | EnsemblePredictor


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


DEVICE_SHARE = 0.8
"""Share of a GPU's free memory that is used."""


def plan_workspace(predictor: Predictor, wanted: Wanted = "labels") -> Workspace:
    """Return the workspace, from the free memory and the memory that a prediction needs per pixel.

    It has no limit if the network sees images of any size at one size.
    """
    if predictor.needs_whole:
        return Workspace(sys.maxsize)
    budget = float(host_budget())
    if gpu := gpu_of(predictor.device):
        budget = DEVICE_SHARE * gpu.free_and_total_bytes(predictor.device)[0]
    # Probabilities at full resolution, and the scores that they are computed from; labels need a few rows of them.
    more = 0 if wanted == "labels" else 2 * 4 * predictor.scheme.num_classes
    tile_px = CPU_TILE_PX if predictor.device.type == "cpu" else sys.maxsize
    return Workspace(pixels_within(budget, _bytes_per_px(predictor) + more), tile_px)


def _bytes_per_px(predictor: Predictor) -> float:
    """Return the peak memory of a prediction per pixel."""
    if isinstance(predictor, TrainedPredictor):
        return measure_bytes_per_px(predictor.model, predictor.inference, predictor.device)
    peaks = map(_bytes_per_px, predictor.members)
    # The sum of the probabilities and one member's probabilities, both float32, while that member computes.
    return max(peaks) + 2 * 4 * predictor.scheme.num_classes


Wanted = Literal["labels", "confidence", "probabilities"]
"""What is kept of a prediction besides the labels: nothing, the largest probability, or all of them."""

STRIP_BYTES = 2**28
"""Limit of what is kept of a strip besides its labels, if an image is predicted in tiles."""


@dataclass(frozen=True)
class Strip:
    """Rows of a prediction over the whole width: class ids (R, W) and, if requested, one of the other two."""

    rows: slice
    labels: NDArray[Any]
    confidence: NDArray[np.float32] | None = None  # (R, W)
    probabilities: NDArray[np.float32] | None = None  # (C, R, W)
    hidden: NDArray[np.bool_] | None = None  # pixels of a GeoTIFF that are nodata in all bands, (R, W)

    @property
    def num_bytes(self) -> int:
        return sum(each.nbytes for each in vars(self).values() if isinstance(each, np.ndarray))

    def divided(self, max_px: int) -> Iterator[Strip]:
        """Yield the rows in strips of at most this number of pixels, or of one row."""
        step = max(1, max_px // self.labels.shape[1])
        for first in range(0, len(self.labels), step):
            rows = slice(self.rows.start + first, min(self.rows.start + first + step, self.rows.stop))
            arrays = {name: values for name, values in vars(self).items() if isinstance(values, np.ndarray)}
            parts: dict[str, Any] = {name: values[..., first : first + step, :] for name, values in arrays.items()}
            yield Strip(rows, **parts)


def kept_of(probabilities: NDArray[np.float32], threshold: float | None, wanted: Wanted) -> dict[str, NDArray[Any]]:
    """Return the labels and the wanted part of probabilities (C, R, W), by field of a `Strip`."""
    kept = {"labels": likeliest(probabilities[None], threshold)[0]}
    return kept | {wanted: probabilities.max(0) if wanted == "confidence" else probabilities}


def predict_strips(
    predictor: Predictor,
    image: NDArray[Any],
    workspace: Workspace,
    *,
    wanted: Wanted = "labels",
    on_tile: Callable[[float], None] = lambda share: None,
) -> Iterator[Strip]:
    """Yield the prediction of an image (H, W, B) from top to bottom, in strips that fit into the workspace.

    The workspace is halved after an out-of-memory error. `on_tile` is called after each tile with the share of the
    image that is predicted, 0 to 1.
    """
    height, width = image.shape[:2]
    num_kept = {"labels": 0, "confidence": 1, "probabilities": predictor.scheme.num_classes}[wanted]
    max_height = STRIP_BYTES // (4 * num_kept * width) if num_kept else height
    done = 0
    while done < height:
        frame = tile_frame((height, width), workspace.max_px, tile_px=workspace.tile_px, max_height=max_height)
        top, core, last = next(rows for rows in tile_cores(height, frame[0]) if rows[2] > done)
        # In a smaller workspace tiles begin at other rows, and rows that were yielded must not come again.
        first = max(core, done)
        kept = dict[str, NDArray[Any]]()
        try:
            for left, start, stop in tile_cores(width, frame[1]):
                tile = image[top : top + frame[0], left : left + frame[1]]
                inner = slice(first - top, last - top), slice(start - left, stop - left)
                if wanted == "labels":
                    found = {"labels": predictor.labels(tile[None])[0][inner]}
                else:
                    found = kept_of(predictor.probabilities(tile[None])[0][:, *inner], predictor.threshold, wanted)
                for name, values in found.items():
                    if stop - start == width:
                        kept[name] = values
                        continue
                    if start == 0:
                        kept[name] = np.empty((*values.shape[:-1], width), values.dtype)
                    kept[name][..., start:stop] = values
                on_tile((first * width + (last - first) * stop) / (height * width))
            yield Strip(slice(first, last), **kept)
        except Exception as error:
            if predictor.needs_whole or not is_out_of_memory(error):
                raise
            # Blocks of the larger tiles that stay in the cache would leave no room for the smaller ones.
            accelerator_of(predictor.device).empty_cache()
            workspace.halve()
            continue
        done = last
