"""Predictor that averages the class probabilities of several networks.

Shapes: N images, C classes, H x W pixels of an image.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from segapp.datasets.images.pixel_format import PixelFormat
from segapp.errors import ConfigError
from segapp.inference.predict.predictor import ExportedPredictor, TrainedPredictor, likeliest

WEIGHTS_SHARE = 0.5
"""Share of the free memory of a GPU that the weights of all networks may take; above it they wait on the CPU."""

Member = TrainedPredictor | ExportedPredictor


class EnsemblePredictor:
    """Predictor (see `Predictor`) with the mean of the probabilities of its members, each with its own normalisation.

    The members may differ in architecture, stride, precision and device, but not in their classes, and not in the bands
    and the type of their images. On a GPU that cannot hold all weights, the weights wait on the CPU, and each network
    is moved to the GPU for its part of a batch.

    Args:
        members: name and predictor of each network; two or more. Taken one after the other, so that a generator may
            load them.
        budget_bytes: memory for the weights on the device of the first member; None: a share of what is free there,
            without a limit on the CPU.

    Attributes:
        members: the predictors.
        is_resident: all weights stay on the device.

    Raises:
        ConfigError: the classes or the images of two networks differ, or the only sizes that they accept.
    """

    def __init__(self, members: Iterable[tuple[str, Member]], *, budget_bytes: float | None = None) -> None:
        self.members: list[Member] = []
        self.is_resident = True
        self.frame_px: tuple[int, int] | None = None
        first_name = frame_name = ""
        for name, member in members:
            if not self.members:
                first_name, self.scheme, self.device = name, member.scheme, member.device
                self.threshold = member.threshold
                budget_bytes = _budget_bytes(member) if budget_bytes is None else budget_bytes
                self.pixels = member.pixels
            if (member.threshold is None) != (self.threshold is None):
                raise ConfigError(
                    f"one of {first_name} and {name} knows several classes per pixel, the other one: they cannot be "
                    "averaged"
                )
            check_same_pixels(first_name, self.pixels, name, member.pixels)
            check_same_classes(first_name, self.scheme.names, name, member.scheme.names)
            if member.frame_px is not None and self.frame_px not in (None, member.frame_px):
                raise ConfigError(
                    f"{frame_name} accepts images of {_size(self.frame_px)} px only, and {name} of "
                    f"{_size(member.frame_px)} px: export them for one size, or predict with the runs"
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
        return labels.astype(np.uint8 if self.scheme.num_classes <= 256 else np.uint16)

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
        """Move all weights to the CPU once those on the device of the ensemble take more than the budget."""
        trained = [member for member in self.members if isinstance(member, TrainedPredictor)]
        used = sum(_weight_bytes(member) for member in trained if member.device == self.device)
        if self.is_resident and (budget_bytes is None or used <= budget_bytes):
            return
        self.is_resident = False
        for member in trained:
            member.model.to("cpu")


def check_same_pixels(first: str, pixels: PixelFormat, other: str, found: PixelFormat) -> None:
    """Check that two networks take the same bands and type.

    Raises:
        ConfigError: they do not.
    """
    if (pixels.bands, pixels.dtype) != (found.bands, found.dtype):
        raise ConfigError(
            f"{first} takes images of {pixels.layout} {list(pixels.bands or ())}, and {other} of {found.layout} "
            f"{list(found.bands or ())}: average networks with the same data.bands and data.dtype"
        )


def check_same_classes(first: str, names: tuple[str, ...], other: str, other_names: tuple[str, ...]) -> None:
    """Check that two networks have the same classes in the same order.

    Raises:
        ConfigError: they differ; the message names up to three differing classes.
    """
    if names == other_names:
        return
    pairs = enumerate(itertools.zip_longest(names, other_names))
    differing = [f"class {i} is {a or 'missing'!r} and {b or 'missing'!r}" for i, (a, b) in pairs if a != b]
    more = f", and {len(differing) - 3} more differ" if len(differing) > 3 else ""
    raise ConfigError(
        f"{first} and {other} have different classes: {', '.join(differing[:3])}{more}: only networks with the same "
        "classes in the same order can be averaged"
    )


def _budget_bytes(member: Member) -> float | None:
    """Return the memory for weights on the device of the first member, which holds its own already."""
    if member.device.type != "cuda":
        return None
    own = _weight_bytes(member) if isinstance(member, TrainedPredictor) else 0
    return WEIGHTS_SHARE * (torch.cuda.mem_get_info(member.device)[0] + own)


def _weight_bytes(member: TrainedPredictor) -> int:
    tensors = itertools.chain(member.model.parameters(), member.model.buffers())
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _size(size: tuple[int, int] | None) -> str:
    return "any size" if size is None else f"{size[1]}x{size[0]}"
