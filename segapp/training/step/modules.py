"""The modules that a step works with, and its result, as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from segapp.losses import AdditiveCriterion
from segapp.optim.optimizers import WeightAverage
from segapp.parallel import RankSplit

if TYPE_CHECKING:
    from segapp.models import SegmentationModel


@dataclass
class StepResult:
    """The result of a step, as tensors on the device: reading them waits for it."""

    loss: Tensor
    grad_norm: Tensor
    is_bad: Tensor
    split: list[int]
    terms: dict[str, Tensor] = field(default_factory=dict)
    """Parts of the loss that are shown, by name."""


@dataclass(frozen=True)
class Thawing:
    """How a step takes in parameters that were frozen.

    Attributes:
        num_params: size of the frozen parameters.
        build_groups: returns the optimizer's groups of the parameters with the given names.
        wrap: returns the network in its wrapper for the parameters that are trained by then.
    """

    num_params: int
    build_groups: Callable[[Sequence[str]], list[Mapping[str, Any]]]
    wrap: Callable[[], nn.Module]


@dataclass(frozen=True)
class StepModules:
    """The modules of a step.

    Attributes:
        model: the bare model, on its device and cast by the step's `Precision`.
        network: takes uint8 images (N, 3, H, W) and wraps `model`: a `DataParallelModel` (one device or several), a
            `DistributedDataParallel` (one device per rank), or a module whose stages lie on several devices.
        criterion: additive statistics of the network's outputs.
        average: moving average of the weights, or None.
        smallest_chunk: samples that every busy device needs; more than 1 where BatchNorm is not synchronised.
        rank_split: the split of a batch over the ranks; None outside ddp.
        needs_samples: why the network cannot run without samples, as a rank with a share of 0 does; None if it can.
        thawing: how frozen parameters are taken in; None where there is no `freeze`.
    """

    model: SegmentationModel
    network: nn.Module
    criterion: AdditiveCriterion
    average: WeightAverage[SegmentationModel] | None = None
    smallest_chunk: int = 1
    rank_split: RankSplit | None = None
    needs_samples: str | None = None
    thawing: Thawing | None = None
