"""Loaders of training and evaluation batches, divided among the ranks.

A batch depends only on (seed, epoch, position), not on the number of workers, the timing or the position of an
interruption. A file that cannot be used raises DataError; a worker that died or gave no batch within `timeout_s` raises
WorkerError.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby

from segapp.datasets.dataset import LargeBatch, SegmentationDataset
from segapp.datasets.filler import CacheFiller
from segapp.datasets.pool import Batch, BatchPool, LoadOptions
from segapp.datasets.sampling import (
    Order,
    SampleKey,
    global_batch,
    num_batches,
    part_of,
    plan_shares,
    uniform_order,
)

_IN_PROCESS = LoadOptions()


class TrainLoader:
    """Shuffled, augmented batches of one rank.

    The order of the global batch is the same for any `world_size`; each rank gets a contiguous share of it. A rank
    without a share gets an empty batch.

    Args:
        dataset: The samples; its transform must return images of one size.
        batch_size: Images per batch, over all ranks.
        seed: Seed of the order.
        options: How batches are loaded; the default is to load in this process.
        drop_last: Drop a last batch that is not full, unless it is the only batch of an epoch.
        rank: 0 to world_size - 1.
        world_size: Number of ranks, which share each batch.
        order: The samples of an epoch; None: every image once, shuffled.
        divide: Returns the number of samples per rank for a batch of a given size; called when an epoch begins. None:
            even shares.

    Raises:
        ValueError: batch_size, rank or world_size is out of range.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        batch_size: int,
        *,
        seed: int = 0,
        options: LoadOptions = _IN_PROCESS,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
        order: Order | None = None,
        divide: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        if batch_size < world_size or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size={batch_size}, rank={rank}, world_size={world_size}: every rank needs a sample"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self._order = lru_cache(2)(order or uniform_order(len(dataset), seed))  # of this epoch and the next one
        self.rank = rank
        self.world_size = world_size
        self._divide = divide or (lambda num_samples: plan_shares(num_samples, world_size))
        self._num_batches = num_batches(len(dataset), batch_size, drop_last=drop_last)
        self._filler = CacheFiller(dataset, dataset.cache_part)
        self._pool = BatchPool(dataset, options, batch_size // world_size)

    def __len__(self) -> int:
        return self._num_batches

    @property
    def workers(self) -> int:
        """Number of loading processes."""
        return self._pool.options.workers

    def epoch(self, epoch: int, start_batch: int = 0, *, last_epoch: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_batch` (counted from 0) on; earlier ones are not loaded.

        A new call ends an epoch that is still being read. The workers continue with the following epochs up to
        `last_epoch`, as they are divided now; if the next call asks for other batches, it loads those instead.
        """
        self._filler.start()
        batches = list(self._batches(epoch))[start_batch:]
        following = (keys for later in range(epoch + 1, last_epoch + 1) for keys, _ in self._batches(later))
        loaded = self._pool.run([keys for keys, _ in batches], following)
        return (replace(batch, epoch=epoch, first=first) for batch, (_, first) in zip(loaded, batches, strict=True))

    def _batches(self, epoch: int) -> Iterator[tuple[list[SampleKey], int]]:
        """Yield the samples of this rank, and the position of the first in the epoch, for each batch of an epoch."""
        order = self._order(epoch)
        for number in range(len(self)):
            samples = global_batch(order, self.batch_size, number)
            sizes = self._divide(len(samples))
            yield part_of(samples, self.rank, sizes), number * self.batch_size + sum(sizes[: self.rank])

    def close(self) -> None:
        """Stop the workers and the process that fills the cache."""
        self._filler.close()
        self._pool.close()


class EvalLoader:
    """Every image of a data set exactly once, in order, at its own size; several ranks share them.

    Args:
        dataset: The samples.
        options: How batches are loaded; the default is to load in this process.
        batch_size: Largest batch of consecutive images of one size.
        rank: 0 to world_size - 1.
        world_size: Number of ranks, which share the data set.

    Raises:
        DataError: With `batch_size` above 1, an image's header cannot be read.
        ValueError: batch_size, rank or world_size is out of range.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        *,
        options: LoadOptions = _IN_PROCESS,
        batch_size: int = 1,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_size={batch_size}, rank={rank}, world_size={world_size}: out of range")
        self.dataset = dataset
        indices = part_of(list(range(len(dataset))), rank, plan_shares(len(dataset), world_size))
        self._batches = _equal_size_batches(dataset, indices, batch_size)
        self._pool = BatchPool(dataset, options, batch_size)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch | LargeBatch]:
        """Return all batches; large TIFFs are decoded like other images."""
        return self.batches(reads_windows=False)

    def batches(self, *, reads_windows: bool) -> Iterator[Batch | LargeBatch]:
        """Return all batches; with `reads_windows`, a large TIFF is returned undecoded as a `LargeBatch`.

        A new call ends a pass that is still being read.
        """
        large, keys = self._large_and_others(reads_windows)
        others = self._pool.run(keys)
        return (self.dataset.large_batch(batch[0]) if batch[0] in large else next(others) for batch in self._batches)

    def prepare(self, *, reads_windows: bool) -> None:
        """Let the workers load the first batches of the next pass."""
        self._pool.prepare(self._large_and_others(reads_windows)[1])

    def _large_and_others(self, reads_windows: bool) -> tuple[set[int], list[list[SampleKey]]]:
        """Return the images that are returned undecoded, and the batches of the others."""
        alone = [batch[0] for batch in self._batches if reads_windows and len(batch) == 1]
        large = {index for index in alone if self.dataset.is_large(index)}
        others = [batch for batch in self._batches if batch[0] not in large]
        return large, [[SampleKey(0, index) for index in batch] for batch in others]

    def close(self) -> None:
        """Stop the workers."""
        self._pool.close()


def _equal_size_batches(dataset: SegmentationDataset, indices: list[int], batch_size: int) -> list[list[int]]:
    """Return the indices in order, cut into batches of consecutive images of one size."""
    if batch_size == 1:
        return [[index] for index in indices]
    sizes = dict(zip(indices, dataset.sizes(indices), strict=True))
    groups = (list(group) for _, group in groupby(indices, key=sizes.__getitem__))
    return [group[at : at + batch_size] for group in groups for at in range(0, len(group), batch_size)]
