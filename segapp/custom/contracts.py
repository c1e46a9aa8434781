"""The contracts of own parts: what the factory of each kind is given, and what it makes (page `own-parts`).

Classes are factories too. `segapp check-part` tries a part against its contract. A network takes normalized images
(N, B, H, W) of the type of its weights and returns logits (N, C, h, w); or a tuple or dict with them first, and in
training auxiliary logits after them. Its attributes `size_divisor`, `min_size_px` and `fixed_size_px` (H, W) say which
H and W it takes; a submodule `backbone` or `encoder` gets the backbone's learning rate.

Shapes: N images, B bands, C classes, H x W pixels of an image, h x w of the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


ARGUMENTS: dict[str, tuple[tuple[str, ...], int]] = {
    "model": (("num_classes", "in_channels"), 0),
    "loss": (("num_classes", "ignore_index", "align_corners", "aux_weight", "weight"), 0),
    "data": (("root", "split"), 0),
    "optim": (("lr",), 1),  # the groups of parameters with their `weight_decay`
    "schedule": (("total_steps", "steps_per_epoch"), 0),
    "transform": (("crop_px", "ignore_index"), 0),
}
"""Arguments of factories in addition to their `options` of the config, by kind: by keyword, each if there is a
parameter of that name, and the number of those by position. `weight` (C,) stands for `loss.class_weights`."""


class Loss(Protocol):
    """A plain loss; a `segapp.losses.AdditiveCriterion` may replace it."""

    def __call__(self, logits: Tensor, target: Tensor, /) -> Tensor:
        """Return a differentiable scalar: the mean over valid pixels, or the step is exact only on one device.

        Args:
            logits: (N, C, H, W), float32 or float64, at the target's resolution.
            target: (N, H, W) int64: class ids, and `ignore_index` where a pixel is not valid.
        """


class DataSource(Protocol):
    """The images and masks of one split; data workers get it by pickle or fork. It may have `name(index) -> str`."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image_and_mask(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return an image and its mask, the same at every call.

        The image is (H, W, B) of `data.dtype`: uint8 RGB by default. The mask is (H, W) of integers: class ids, those
        of `data.label_map`, and `data.ignore_index`.
        """


class Schedule(Protocol):
    """A learning-rate schedule, a function of only the step."""

    def __call__(self, step: int, /) -> float:
        """Return the factor on `optim.lr`, 0 or more, at a step (optimizer update), counted from 1."""


class Transform(Protocol):
    """A transform of training samples; one of albumentations, or a list of such, may replace it."""

    def __call__(self, image: NDArray[Any], mask: NDArray[Any], seed: int, /) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return image (H, W, B) and mask (H, W) of class ids in their own types, a function of only the arguments."""
