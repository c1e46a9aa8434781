"""The contracts of custom components: what a factory of each kind gets, and what it returns (page `own-parts`).

Classes are factories too. `segapp check-part` tests a component against its contract. A network takes normalized images
(N, B, H, W) with the dtype of its weights and returns logits (N, C, h, w), or a tuple or dict whose first entry they
are, followed by auxiliary logits in training. Its attributes `size_divisor`, `min_size_px` and `fixed_size_px` (H, W)
restrict H and W; a submodule `backbone` or `encoder` gets the backbone's learning rate.

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
    "optim": (("lr",), 1),  # the parameter groups with their `weight_decay`
    "schedule": (("total_steps", "steps_per_epoch"), 0),
    "transform": (("crop_px", "ignore_index"), 0),
}
"""Arguments of factories in addition to the `options` of the config, by kind: keyword arguments, passed only to a
factory with a parameter of that name, and the number of positional ones. `weight` (C,) is `loss.class_weights`."""


class Loss(Protocol):
    """A plain loss; a `segapp.losses.AdditiveCriterion` can be returned instead."""

    def __call__(self, logits: Tensor, target: Tensor, /) -> Tensor:
        """Return a differentiable scalar: the mean over valid pixels; otherwise the step is exact only on one device.

        Args:
            logits: (N, C, H, W), float32 or float64, at the target's resolution.
            target: (N, H, W) int64: class ids, and `ignore_index` for pixels that are not valid.
        """


class DataSource(Protocol):
    """The images and masks of a split, which data workers get by pickle or fork. It may have `name(index) -> str`."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image_and_mask(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return an image and its mask, the same at every call.

        The image is (H, W, B) with dtype `data.dtype`, by default uint8 RGB. The mask is (H, W) of integers: class ids,
        or keys of `data.label_map`, and `data.ignore_index`.
        """


class Schedule(Protocol):
    """A learning-rate schedule, which depends only on the step."""

    def __call__(self, step: int, /) -> float:
        """Return the factor on `optim.lr`, 0 or more, at a step (optimizer update), counted from 1."""


class Transform(Protocol):
    """A transform of training samples; one from albumentations, or a list of them, can be returned instead."""

    def __call__(self, image: NDArray[Any], mask: NDArray[Any], seed: int, /) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return image (H, W, B) and mask (H, W) of class ids, dtypes unchanged, determined by the arguments."""
