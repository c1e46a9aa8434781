"""The contracts of own parts: what each factory is given, and what it makes.

A factory gets, by keyword, those of the named arguments that it has parameters for, and its `options` of the config.
Classes are factories too. `segapp check-part` tries a part against its contract.

Shapes: N images, B bands, C classes, H x W pixels of an image, h x w of the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor, nn


class ModelFactory(Protocol):
    """Makes the network of `model.name`, with `model.library: python`.

    The network takes normalised images (N, B, H, W) of the type of its weights and returns logits (N, C, h, w); or a
    tuple or dict with them first, and in training auxiliary logits after them. Of its attributes, `size_divisor`,
    `min_size_px` and `fixed_size_px` (H, W) say which H and W it takes; a submodule `backbone` or `encoder` gets the
    backbone's learning rate.
    """

    def __call__(self, *, num_classes: int, in_channels: int, **options: Any) -> nn.Module:
        """Return the network for C = `num_classes` and B = `in_channels`."""


class Loss(Protocol):
    """A plain loss; a `segapp.losses.AdditiveCriterion` may stand in its place."""

    def __call__(self, logits: Tensor, target: Tensor, /) -> Tensor:
        """Return a differentiable scalar: the mean over valid pixels, or the step is exact on one device alone.

        Args:
            logits: (N, C, H, W), float32 or float64, at the target's resolution.
            target: (N, H, W) int64: class ids, and `ignore_index` where a pixel is not valid.
        """


class LossFactory(Protocol):
    """Makes the loss of `loss.name`."""

    def __call__(
        self,
        *,
        num_classes: int,
        ignore_index: int,
        align_corners: bool,
        aux_weight: float,
        weight: Tensor,
        **options: Any,
    ) -> Loss:
        """Return the loss; `weight` (C,) float32 is given with `loss.class_weights` only."""


class DataSource(Protocol):
    """The images and masks of one split; data workers get it by pickle or fork. It may have `name(index) -> str`."""

    def __len__(self) -> int:
        """Return the number of images."""

    def image_and_mask(self, index: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return an image and its mask, the same at every call.

        The image is (H, W, B) of `data.dtype`: uint8 RGB by default. The mask is (H, W) of integers: class ids, those
        of `data.label_map`, and `data.ignore_index`.
        """


class DataFactory(Protocol):
    """Makes the data of `data.format` for a split."""

    def __call__(self, *, root: str, split: str, **options: Any) -> DataSource:
        """Return the images and masks of a split below `data.root`."""


class OptimizerFactory(Protocol):
    """Makes the optimizer of `optim.name`; `step()` reads the learning rate of each group and needs no closure."""

    def __call__(self, groups: Sequence[Mapping[str, Any]], /, *, lr: float, **options: Any) -> torch.optim.Optimizer:
        """Return the optimizer over groups of parameters with their `weight_decay`."""


class Schedule(Protocol):
    """A learning-rate schedule, a function of the step alone."""

    def __call__(self, step: int, /) -> float:
        """Return the factor on `optim.lr`, 0 or more, at a step (optimizer update), counted from 1."""


class ScheduleFactory(Protocol):
    """Makes the schedule of `schedule.name`."""

    def __call__(self, *, total_steps: int, steps_per_epoch: int, **options: Any) -> Schedule:
        """Return the schedule of a run of so many steps."""


class Transform(Protocol):
    """A transform of training samples; one of albumentations, or a list of such, may stand in its place."""

    def __call__(self, image: NDArray[Any], mask: NDArray[Any], seed: int, /) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return image (H, W, B) and mask (H, W) of class ids in their own types, a function of the arguments alone."""


class TransformFactory(Protocol):
    """Makes a transform that `data.augment` names."""

    def __call__(self, *, crop_px: tuple[int, int], ignore_index: int, **options: Any) -> Transform:
        """Return the transform; `crop_px` is height and width of the training crop, in pixels."""


FACTORIES: dict[str, type] = {
    "model": ModelFactory,
    "loss": LossFactory,
    "data": DataFactory,
    "optim": OptimizerFactory,
    "schedule": ScheduleFactory,
    "transform": TransformFactory,
}
"""The contract of the factory of each kind of part; all but `transform` are sections of the config."""


def given_arguments(kind: str) -> tuple[tuple[str, ...], int]:
    """Return the names of the arguments that factories of a kind are given by keyword, and how many by position.

    >>> given_arguments("optim")
    (('lr',), 1)
    """
    parameters = list(inspect.signature(FACTORIES[kind].__call__).parameters.values())[1:]
    names = tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)
    return names, sum(each.kind is each.POSITIONAL_ONLY for each in parameters)
