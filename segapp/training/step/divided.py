"""The network of a step, in the three forms in which its mode divides a batch: one device, replicas, ranks."""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from segapp.chunks import SplitRequest
from segapp.datasets.pool import Batch
from segapp.losses import AdditiveCriterion
from segapp.models import SegmentationModel
from segapp.parallel import DataParallelCriterion, DataParallelModel
from segapp.parallel.distributed import Ranks


class TrainedNetwork:
    """A network on one device, or with its stages on several; the base of the forms that divide a batch.

    Args:
        model: the bare model.
        module: contains `model`; takes stored images (N, B, H, W) and, if there are any, keys of dropout masks.
        device: the first device, which holds the weights and on which sums are made.
        ranks: the processes that share every step.
    """

    smallest_chunk = 1
    """Minimum samples of each device that has any; more than 1 if BatchNorm is not synchronized."""
    needs_samples: str | None = None
    """Why the network cannot run without samples, as on a rank with a share of 0; None if it can."""

    def __init__(
        self, model: SegmentationModel, module: nn.Module, device: torch.device, ranks: Ranks | None = None
    ) -> None:
        self.model, self.module, self.device, self.ranks = model, module, device, ranks or Ranks()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Devices of this process, one for each copy of the network; logical devices may be the same."""
        return (self.device,)

    @property
    def further_devices(self) -> tuple[torch.device, ...]:
        """Devices except the first that can share an evaluation, each once."""
        return tuple(dict.fromkeys(self.devices))[1:]

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return the outputs for a micro-batch, and its target where `summed` expects it."""
        target = batch.target.to(self.device, non_blocking=True)
        return self.module(*(each.to(self.device, non_blocking=True) for each in _inputs(batch))), target

    def summed(self, criterion: AdditiveCriterion) -> AdditiveCriterion | DataParallelCriterion:
        """Return the criterion whose `statistics` take the results of `forward` and add the sums of all devices."""
        return criterion

    def divide(self, split: SplitRequest, full_batch: int | None) -> None:
        """Divide the batches of the next steps; ValueError if that is impossible."""

    def split_of(self, num_samples: int) -> list[int]:
        """Return the samples on each device, or on each rank, of a batch of `num_samples`."""
        return [num_samples]

    def can_train_on(self, num_samples: int, num_pieces: int = 1) -> bool:
        """Return True if each of these pieces gives every device enough samples for BatchNorm and for the network."""
        return num_samples >= self.model.min_train_batch

    def num_pieces(self, num_samples: int, most: int) -> int:
        """Return the largest number of pieces of a micro-batch, up to `most`, on which this network can train."""
        fitting = (n for n in range(min(most, num_samples), 1, -1) if self.can_train_on(num_samples // n))
        return next(fitting, 1)

    def sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Return the context of a backward pass, in which gradients are added over ranks if it is the step's last."""
        return contextlib.nullcontext()

    def include_unfrozen(self) -> None:
        """Include parameters that have been frozen in the synchronization."""


class ReplicatedNetwork(TrainedNetwork):
    """A network whose replicas on the devices of this process share each batch.

    Args:
        model: the bare model.
        module: a `DataParallelModel` around the network.
        device: the first device.
    """

    module: DataParallelModel

    @property
    def devices(self) -> tuple[torch.device, ...]:
        return self.module.devices

    def divide(self, split: SplitRequest, full_batch: int | None) -> None:
        self.module.divide(split, full_batch)

    def split_of(self, num_samples: int) -> list[int]:
        return list(self.module.plan(num_samples))

    def forward(self, batch: Batch) -> tuple[Any, Tensor]:
        """Return the outputs on their devices, and the target of the whole micro-batch."""
        return self.module(*_inputs(batch)), batch.target

    def summed(self, criterion: AdditiveCriterion) -> DataParallelCriterion:
        return DataParallelCriterion(criterion)

    def can_train_on(self, num_samples: int, num_pieces: int = 1) -> bool:
        chunks = self.split_of(num_samples) if self.smallest_chunk > 1 else ()
        enough = all(size == 0 or size >= self.smallest_chunk for size in chunks)
        return super().can_train_on(num_samples) and enough


class RankNetwork(TrainedNetwork):
    """The network of one of several ranks, each with its part of every batch.

    Args:
        model: the bare model.
        wrap: returns the network whose backward pass adds the gradients over ranks, as `DistributedDataParallel` does;
            called again when frozen parameters are trained.
        device: the device of this rank.
        ranks: all ranks.
        split: the samples of each rank in a full batch.
        full_batch: samples of a full batch over all ranks.
        has_masters: gradients move to fp32 weights after every micro-batch, so each of them is added over ranks.
    """

    def __init__(
        self,
        model: SegmentationModel,
        wrap: Callable[[], nn.Module],
        device: torch.device,
        ranks: Ranks,
        split: SplitRequest,
        full_batch: int,
        *,
        has_masters: bool = False,
    ) -> None:
        self.ranks = ranks
        self.divide(split, full_batch)
        super().__init__(model, wrap(), device, ranks)
        self._wrap, self._has_masters = wrap, has_masters

    def divide(self, split: SplitRequest, full_batch: int | None) -> None:
        self._full_batch = split.check_devices(self.ranks.world_size, full_batch)
        self._split = split

    def split_of(self, num_samples: int) -> list[int]:
        return list(self._split.plan(num_samples, self.ranks.world_size, self._full_batch))

    def can_train_on(self, num_samples: int, num_pieces: int = 1) -> bool:
        """Return True if pieces of this rank's size are possible on every rank with samples."""
        if not super().can_train_on(num_samples):
            return False
        shares = [share for share in self.split_of(num_samples * num_pieces) if share]
        least = self.smallest_chunk if self.smallest_chunk > 1 else int(self.needs_samples is not None)
        return max(shares) >= num_pieces and min(shares) // num_pieces >= least

    def num_pieces(self, num_samples: int, most: int) -> int:
        """Return `most`: every rank makes equally many pieces, because they meet in each of them."""
        return most

    def sync(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context without an exchange for micro-batches before the last one, unless they have masters."""
        no_sync = getattr(self.module, "no_sync", contextlib.nullcontext)  # simulated ranks exchange nothing
        return contextlib.nullcontext() if is_last or self._has_masters else no_sync()

    def include_unfrozen(self) -> None:
        """Wrap the network anew: buckets only include the parameters that needed a gradient when they were made."""
        self.module = getattr(self.module, "module", self.module)  # frees the old buckets before new ones are made
        self.module = self._wrap()


def _inputs(batch: Batch) -> tuple[Tensor, ...]:
    return (batch.images,) if batch.keys is None else (batch.images, batch.keys)
