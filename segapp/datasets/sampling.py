"""Order of samples and their seeds: pure functions of (seed, epoch, index).

No generator outlives a call, so the order depends neither on the number of workers nor on where a run was interrupted.
Global generators are not used.
"""

import hashlib
from collections.abc import Sequence

import numpy as np


def mix_seed(*parts: int | str) -> int:
    """Return a 63-bit seed from several numbers or names; the same on every machine.

    >>> mix_seed(0, 1) == mix_seed(0, 1), mix_seed(0, 1) == mix_seed(1, 0)
    (True, False)
    """
    digest = hashlib.blake2b(repr(parts).encode("ascii", "backslashreplace"), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sample_order(num_samples: int, seed: int, epoch: int) -> list[int]:
    """Return every index of a data set once, in the order of an epoch."""
    generator = np.random.Generator(np.random.PCG64(mix_seed("order", seed, epoch)))
    return [int(index) for index in generator.permutation(num_samples)]


def plan_shares(num_samples: int, world_size: int) -> tuple[int, ...]:
    """Return the number of samples of each rank: an even split, the larger shares first.

    >>> plan_shares(7, 3)
    (3, 2, 2)
    """
    base, rest = divmod(num_samples, world_size)
    return tuple(base + (rank < rest) for rank in range(world_size))


def share_of(samples: list[int], rank: int, world_size: int) -> list[int]:
    """Return the contiguous share of the samples for one rank.

    >>> [share_of([5, 6, 7, 8, 9], rank, 2) for rank in (0, 1)]
    [[5, 6, 7], [8, 9]]
    """
    return part_of(samples, rank, plan_shares(len(samples), world_size))


def part_of(samples: list[int], rank: int, sizes: Sequence[int]) -> list[int]:
    """Return the contiguous part of the samples for one rank, where the ranks get so many each.

    >>> [part_of([5, 6, 7, 8, 9], rank, (0, 4, 1)) for rank in range(3)]
    [[], [5, 6, 7, 8], [9]]
    """
    start = sum(sizes[:rank])
    return samples[start : start + sizes[rank]]


def num_batches(num_samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of batches of an epoch: at least 1, even if the data set is smaller than a batch.

    >>> num_batches(10, 4, drop_last=True), num_batches(10, 4, drop_last=False), num_batches(3, 4, drop_last=True)
    (2, 3, 1)
    """
    whole = num_samples // batch_size if drop_last else -(-num_samples // batch_size)
    return max(1, whole)


def global_batch(order: list[int], batch_size: int, batch: int) -> list[int]:
    """Return the samples of one batch over all ranks; the last batch may be short."""
    return order[batch * batch_size : (batch + 1) * batch_size]
