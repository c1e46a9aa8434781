"""Loaders of training and evaluation batches, divided among the ranks.

A batch depends only on (seed, epoch, position), not on the number of workers, the timing or the position of an
interruption. A file that cannot be used raises DataError; a worker that died or gave no batch within `timeout_s` raises
WorkerError.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import Literal

from segapp.datasets.dataset import LargeBatch, SegmentationDataset
from segapp.datasets.pool import Batch, BatchPool, LoadOptions, collate
from segapp.datasets.sampling import (
    Order,
    SampleKey,
    num_batches,
    part_of,
    plan_shares,
    uniform_order,
)

_IN_PROCESS = LoadOptions()


class TrainLoader:
    """Shuffled, augmented batches of one rank.

    The order of the global batch is the same for any `world_size`; each rank gets a contiguous share of it. A rank
    without a share gets an empty batch. A last batch that is not full is dropped, unless an epoch has no other.

    Args:
        dataset: The samples; its transform must return images of one size.
        batch_size: Images per batch, over all ranks.
        seed: Seed of the order.
        options: How batches are loaded; the default is to load in this process.
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
        self._num_batches = num_batches(len(dataset), batch_size)
        self.pool = BatchPool(dataset, options, batch_size // world_size, ring_size=batch_size)

    def __len__(self) -> int:
        return self._num_batches

    @property
    def workers(self) -> int:
        return self.pool.options.workers

    def epoch(self, epoch: int, start_batch: int = 0, *, last_epoch: int = 0) -> Iterator[Batch]:
        """Return the batches of an epoch from `start_batch` (counted from 0) on; earlier ones are not loaded.

        A new call ends an epoch that is still being read. The workers continue with the following epochs up to
        `last_epoch`, as they are divided now; if the next call asks for other batches, it loads those instead.

        With workers, a batch is valid until the one after the next is asked for; then its memory gets other samples.
        If the options say that N batches are accumulated, it is valid until N + 1 further ones are asked for.
        """
        batches = list(self._batches(epoch))[start_batch:]
        following = (keys for later in range(epoch + 1, last_epoch + 1) for keys, _ in self._batches(later))
        loaded = self.pool.run([keys for keys, _ in batches], following, epoch)
        return (replace(batch, epoch=epoch, first=first) for batch, (_, first) in zip(loaded, batches, strict=True))

    def _batches(self, epoch: int) -> Iterator[tuple[list[SampleKey], int]]:
        """Yield the samples of this rank, and the position of the first in the epoch, for each batch of an epoch."""
        order = self._order(epoch)
        for first in range(0, len(self) * self.batch_size, self.batch_size):
            samples = order[first : first + self.batch_size]  # of all ranks; the only batch may be short
            sizes = self._divide(len(samples))
            yield part_of(samples, self.rank, sizes), first + sum(sizes[: self.rank])

    def close(self) -> None:
        self.pool.close()


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
        self.pool = BatchPool(dataset, options, batch_size)

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
        others = self.pool.run(keys)
        return (self.dataset.large_batch(batch[0]) if batch[0] in large else next(others) for batch in self._batches)

    def prepare(self, *, reads_windows: bool) -> None:
        """Let the workers load the first batches of the next pass."""
        self.pool.prepare(self._large_and_others(reads_windows)[1])

    def _large_and_others(self, reads_windows: bool) -> tuple[set[int], list[list[SampleKey]]]:
        """Return the images that are returned undecoded, and the batches of the others."""
        alone = [batch[0] for batch in self._batches if reads_windows and len(batch) == 1]
        large = {index for index in alone if self.dataset.is_large(index)}
        others = [batch for batch in self._batches if batch[0] not in large]
        return large, [[SampleKey(0, index) for index in batch] for batch in others]

    def close(self) -> None:
        self.pool.close()


def _equal_size_batches(dataset: SegmentationDataset, indices: list[int], batch_size: int) -> list[list[int]]:
    """Return the indices in order, cut into batches of consecutive images of one size."""
    if batch_size == 1:
        return [[index] for index in indices]
    sizes = dict(zip(indices, dataset.sizes(indices), strict=True))
    groups = (list(group) for _, group in groupby(indices, key=sizes.__getitem__))
    return [group[at : at + batch_size] for group in groups for at in range(0, len(group), batch_size)]


GPU_PX_PER_S, CPU_PX_PER_S = 120e6, 5e6
"""Crop pixels that a device trains on per second, an upper estimate: DeepLabV3-ResNet50 in bf16 takes 2.3 TFLOP for an
image of 768x768, and an H200 processes about 200 per second; on the CPU, a small network on some cores."""

WAITING_FRAC = 0.2
"""Share of the time spent waiting for data from which advice is given; the TUI marks the same share."""

_MARGIN = 1.25


def sample_seconds(dataset: SegmentationDataset, num_samples: int = 3) -> float | None:
    """Return the shortest time in seconds that a worker needs for one of a few samples; None if one cannot be loaded.

    It includes what a worker does to hand over a sample. It is the time of the first epoch, in which a cache is filled:
    the workers are started once, and one that waits in later epochs costs less than a GPU that waits in the first.

    The larger of elapsed time and processor time counts: the storage may be slow, and several threads here may share
    work that a worker does in one thread.
    """
    step = max(1, len(dataset) // num_samples)
    times_s = []
    for index in range(0, len(dataset), step)[:num_samples]:
        began_s, work_s = time.perf_counter(), time.process_time()
        try:
            sample = dataset[0, index]
            collate([Batch(sample.image[None], sample.target[None], (index,))], shared=True)
        except Exception:  # the loader reports the file when it reads it
            return None
        times_s.append(max(time.perf_counter() - began_s, time.process_time() - work_s))
    return min(times_s)


def most_workers(cores: float, batch_bytes: int = 0, shared_bytes: int | None = None) -> int:
    """Return the largest useful number of workers, at least 1.

    Args:
        cores: processors of this rank; one is left to the training thread.
        batch_bytes: bytes of a batch; each worker holds up to two in shared memory.
        shared_bytes: free shared memory of this rank, half of which is used; None: not limited.

    >>> most_workers(16), most_workers(16, 20 * 2**20, 64 * 2**20), most_workers(16, 20 * 2**20, 2**30)
    (15, 1, 12)
    """
    most = math.floor(cores) - 1
    if shared_bytes is not None and batch_bytes:
        most = min(most, shared_bytes // 2 // (2 * batch_bytes))
    return max(1, most)


def plan_workers(sample_s: float | None, crop_px: tuple[int, int], most: int, device_type: str) -> int:
    """Return the number of workers that keep a device busy.

    Args:
        sample_s: time to load a sample in one process, seconds; None: unknown.
        crop_px: height and width of a sample.
        most: upper limit, which is returned if `sample_s` is unknown.
        device_type: `torch.device.type`; every type except "cpu" is a GPU.

    >>> plan_workers(0.053, (768, 768), 15, "cuda"), plan_workers(0.004, (768, 768), 15, "cuda")
    (14, 2)
    >>> plan_workers(0.053, (768, 768), 3, "cuda"), plan_workers(0.053, (768, 768), 1, "cpu")
    (3, 1)
    """
    if sample_s is None:
        return most
    images_per_s = (CPU_PX_PER_S if device_type == "cpu" else GPU_PX_PER_S) / (crop_px[0] * crop_px[1])
    return min(most, max(1, math.ceil(_MARGIN * images_per_s * sample_s)))


def wait_advice(
    wait_frac: float, workers: int, cores: float, cache: Literal["none", "ram", "disk"], *, is_filling: bool = False
) -> str | None:
    """Return a sentence that says that the device waits for data and what to change; None if it rarely waits.

    Workers and processors are counted per rank; `is_filling` means that the cache does not hold every image yet.
    """
    if wait_frac < WAITING_FRAC:
        return None
    moves = []
    if cache == "none":
        moves.append("set data.cache: disk (or ram), which decodes each image once")
    elif is_filling:
        moves.append("the wait should end when data.cache holds every image")
    most = most_workers(cores)
    if workers < most:
        moves.append(f"raise data.workers to {most}")
    if not moves:
        moves.append("use a machine with more processors or a faster disk, or lower data.resize_px or data.crop_px")
    return (
        f"the device waits for data {wait_frac:.0%} of the time ({workers} data workers, {cores:g} processors): "
        + ", or ".join(moves)
    )
