"""The loaders of training and evaluation: which samples make a batch, for which rank.

What a batch holds depends on (seed, epoch, position) alone: not on the number of workers, not on timing, not on where
a run was interrupted.
"""

from collections.abc import Iterator
from itertools import groupby

from segapp.datasets.dataset import Sample, SegmentationDataset, image_sizes
from segapp.datasets.pool import Batch, BatchPool
from segapp.datasets.sampling import global_batch, num_batches, sample_order, share_of

__all__ = ["Batch", "EvalLoader", "Sample", "SegmentationDataset", "TrainLoader"]


class TrainLoader:
    """Shuffled, augmented batches of one rank.

    The order of the global batch is the same for any `world_size`; each rank takes a contiguous, even part of it, the
    larger parts first. With more ranks than samples in a short last batch the later ranks get a batch of no images.

    Args:
        dataset: Gives the samples; its transform must bring all to one size.
        batch_size: Images in a batch of all ranks together.
        seed: Of the order.
        workers: Processes that load; 0 loads in this one.
        timeout_s: Longest wait for a batch of the workers; 0 waits for ever.
        pin_memory: Hand out batches in page-locked memory.
        drop_last: Leave out what does not fill a batch; never the only batch of an epoch.
        rank: This process' number of 0..world_size-1.
        world_size: How many processes share each batch.

    Raises:
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        batch_size: int,
        *,
        seed: int = 0,
        workers: int = 0,
        timeout_s: float = 120.0,
        pin_memory: bool = False,
        drop_last: bool = True,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < world_size or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size={batch_size}, rank={rank}, world_size={world_size}: every rank needs a sample"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.seed = seed
        self.rank = rank
        self.world_size = world_size
        self._num_batches = num_batches(len(dataset), batch_size, drop_last=drop_last)
        self._pool = BatchPool(dataset, workers, timeout_s, pin_memory)

    def __len__(self) -> int:
        return self._num_batches

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from `start_batch` (counted from 0) on; those before it are not loaded.

        A new call ends an epoch that is still being read.

        Raises:
            DataError: A file cannot be used.
            WorkerError: A worker died, or gave no batch in `timeout_s`.
        """
        order = sample_order(len(self.dataset), self.seed, epoch)
        batches = (global_batch(order, self.batch_size, batch) for batch in range(start_batch, len(self)))
        shares = (share_of(samples, self.rank, self.world_size) for samples in batches)
        return self._pool.run([[(epoch, index) for index in share] for share in shares])

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


class EvalLoader:
    """Every image of a data set exactly once, in order, each at its own size; of several ranks, each takes a part.

    Args:
        dataset: Gives the samples.
        workers: Processes that load; 0 loads in this one.
        timeout_s: Longest wait for a batch of the workers; 0 waits for ever.
        batch_size: Neighbouring images of equal size may share a batch of at most so many.
        pin_memory: Hand out batches in page-locked memory.
        rank: This process' number of 0..world_size-1.
        world_size: How many processes share the data set.

    Raises:
        DataError: With `batch_size` above 1, an image's header cannot be read.
        ValueError: A number is out of its range.
    """

    def __init__(
        self,
        dataset: SegmentationDataset,
        *,
        workers: int = 0,
        timeout_s: float = 120.0,
        batch_size: int = 1,
        pin_memory: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_size={batch_size}, rank={rank}, world_size={world_size}: out of range")
        self.dataset = dataset
        indices = share_of(list(range(len(dataset))), rank, world_size)
        self._batches = _equal_size_batches(dataset, indices, batch_size)
        self._pool = BatchPool(dataset, workers, timeout_s, pin_memory)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        """All batches; a new call ends one that is still being read.

        Raises:
            DataError: A file cannot be used.
            WorkerError: A worker died, or gave no batch in `timeout_s`.
        """
        return self._pool.run([[(0, index) for index in batch] for batch in self._batches])

    def close(self) -> None:
        """End the workers."""
        self._pool.close()


def _equal_size_batches(dataset: SegmentationDataset, indices: list[int], batch_size: int) -> list[list[int]]:
    """The indices in order, cut into batches of neighbours whose images have one size."""
    if batch_size == 1:
        return [[index] for index in indices]
    sizes = dict(zip(indices, image_sizes([dataset.pairs[index] for index in indices]), strict=True))
    groups = (list(group) for _, group in groupby(indices, key=sizes.__getitem__))
    return [group[at : at + batch_size] for group in groups for at in range(0, len(group), batch_size)]
