"""Order of samples and their seeds: pure functions of (seed, epoch, index).

No generator outlives a call, so the order depends neither on the number of workers nor on the position of an
interruption. Global generators are not used.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

Item = TypeVar("Item")


class SampleKey(NamedTuple):
    """A sample of an epoch."""

    epoch: int
    image: int  # index in the data set
    draw: int = 0  # how often the epoch has had this image before
    aim: int | None = None  # class that the crop must contain; None: any crop


Order = Callable[[int], list[SampleKey]]
"""The samples of an epoch, a pure function of its number."""


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


def aimed_order(num_samples: int, images_with: Mapping[int, Sequence[int]], share: float, seed: int) -> Order:
    """Return an order in which a share of the crops is chosen to contain a class, all classes equally often.

    The chosen samples are spread evenly over an epoch. Their classes come from one shuffled list after another, and so
    do the images of each class. The other samples are images of the whole data set, each at most once in an epoch.

    Args:
        num_samples: Images in the data set, and samples in an epoch.
        images_with: For each class, the images that contain it; at least one class, and one image per class.
        share: Share of the chosen samples, 0 to 1.
        seed: Seed of the order.
    """

    def order(epoch: int) -> list[SampleKey]:
        generator = np.random.Generator(np.random.PCG64(mix_seed("aims", seed, epoch)))
        others = iter(sample_order(num_samples, seed, epoch))
        classes = _endless(sorted(images_with), generator)
        images = {each: _endless(images_with[each], generator) for each in sorted(images_with)}
        draws: Counter[int] = Counter()
        keys = []
        for position in range(num_samples):
            is_aimed = math.floor((position + 1) * share) > math.floor(position * share)
            aim = next(classes) if is_aimed else None
            index = next(others) if aim is None else next(images[aim])
            keys.append(SampleKey(epoch, index, draws[index], aim))
            draws[index] += 1
        return keys

    return order


def uniform_order(num_samples: int, seed: int) -> Order:
    return lambda epoch: [SampleKey(epoch, index) for index in sample_order(num_samples, seed, epoch)]


def _endless(values: Sequence[int], generator: np.random.Generator) -> Iterator[int]:
    while True:
        yield from (int(values[at]) for at in generator.permutation(len(values)))


def plan_shares(num_samples: int, world_size: int) -> tuple[int, ...]:
    """Return the number of samples of each rank: an even split, the larger shares first.

    >>> plan_shares(7, 3)
    (3, 2, 2)
    """
    base, rest = divmod(num_samples, world_size)
    return tuple(base + (rank < rest) for rank in range(world_size))


def part_of(samples: list[Item], rank: int, sizes: Sequence[int]) -> list[Item]:
    """Return the contiguous part of the samples for one rank; `sizes` has the number of samples per rank.

    >>> [part_of([5, 6, 7, 8, 9], rank, (0, 4, 1)) for rank in range(3)]
    [[], [5, 6, 7, 8], [9]]
    """
    start = sum(sizes[:rank])
    return samples[start : start + sizes[rank]]


def num_batches(num_samples: int, batch_size: int) -> int:
    """Return the number of full batches of an epoch, or 1 if the data set is smaller than a batch.

    >>> num_batches(11, 4), num_batches(3, 4)
    (2, 1)
    """
    return max(1, num_samples // batch_size)
