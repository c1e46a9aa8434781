"""Splits of a batch over devices, in integers and without torch, so that viewers and planners can compute them too.

A *split* is the number of samples of each device, in device order. It is given either by `gpu0_bsz` (samples of device
0 in a full batch; the others share the rest evenly) or by `shares` (samples of every device); `gpu0_bsz` is the short
form.
"""

import contextlib
import math
import operator
import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, SupportsIndex, TypeVar

T = TypeVar("T")

Mode = Literal["single", "dp", "ddp", "model"]
"""How the devices of a training work together: `parallel.mode` without auto."""


Split = tuple[int, ...]
"""Samples of each device, in device order, with zeros."""


SPLIT_NAMES = frozenset({"gpu0_bsz", "shares"})
"""The names of a request's values in configs, commands and settings."""


@dataclass(frozen=True)
class SplitRequest:
    """A request to divide batches: by `gpu0_bsz`, by `shares`, or evenly if both are None; see `plan_chunks`.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is negative, all shares are 0, or both are given.
    """

    gpu0_bsz: int | None = None
    shares: Sequence[int] | None = None

    def __post_init__(self) -> None:
        gpu0_bsz, shares = self.gpu0_bsz, self.shares
        if gpu0_bsz is not None:
            gpu0_bsz = check_count("gpu0_bsz", gpu0_bsz, more="None splits evenly")
        if shares is not None:
            given = check_list("shares", shares, "the samples of each device, in device order")
            # Each entry is checked first, so that a wrong one is named by its position.
            shares = tuple(check_count(f"shares[{i}]", share) for i, share in enumerate(given))
            if gpu0_bsz is not None:
                raise ValueError(f"gpu0_bsz={gpu0_bsz} and shares={given} exclude each other: one of them must be None")
            if shares and sum(shares) == 0:
                raise ValueError(f"shares={given} gives every device 0 samples: make at least one share positive")
        vars(self).update(gpu0_bsz=gpu0_bsz, shares=shares)

    def __str__(self) -> str:
        if self.shares is not None:
            return f"shares={list(self.shares)}"
        return "an even split" if self.gpu0_bsz is None else f"gpu0_bsz={self.gpu0_bsz}"

    @property
    def first(self) -> int | None:
        """Samples of device 0 in a full batch; None for an even split."""
        return self.gpu0_bsz if self.shares is None else self.shares[0]

    @property
    def least_batch(self) -> int:
        """The smallest full batch that can be divided so, 0 for an even split."""
        return (self.gpu0_bsz or 0) if self.shares is None else sum(self.shares)

    def check_devices(self, num_devices: int, full_batch: int | None) -> int | None:
        """Return `full_batch` as an integer; ValueError if these devices cannot divide it as requested."""
        if full_batch is not None:
            full_batch = check_count("full_batch", full_batch, least=1)
        if self.gpu0_bsz == 0 and num_devices == 1:
            raise ValueError("gpu0_bsz=0 gives the only device no samples: use None, or add a device")
        if full_batch is not None and self.shares is None and self.least_batch > full_batch:
            raise ValueError(f"{self} is more than the batch of {full_batch}: use 0 to {full_batch}")
        if self.shares is not None and len(self.shares) != num_devices:
            raise ValueError(f"{self} names {len(self.shares)} devices, there are {num_devices}: give one each")
        if self.shares is not None and full_batch not in (None, self.least_batch):
            raise ValueError(f"{self} add up to {self.least_batch}, but the batch is {full_batch}: make them equal")
        return full_batch

    def plan(self, num_samples: int, num_devices: int, full_batch: int | None = None) -> Split:
        """Return the number of samples of each device, in device order; see `plan_chunks`."""
        num_samples = check_count("num_samples", num_samples)
        num_devices = check_count("num_devices", num_devices, least=1)
        full_batch = self.check_devices(num_devices, full_batch)
        if self.shares is not None:
            return _scale_shares(num_samples, self.shares)
        if self.gpu0_bsz is None:
            return _even(num_samples, num_devices)
        if num_devices == 1:
            return (num_samples,)
        own = min(self.gpu0_bsz, num_samples)
        if full_batch is not None and num_samples < full_batch and own:
            own = max(1, self.gpu0_bsz * num_samples // full_batch)
        each, left_over = divmod(num_samples - own, num_devices - 1)
        return (own, *(each + (i < left_over) for i in range(num_devices - 1)))


EVEN = SplitRequest()


def plan_chunks(
    num_samples: int,
    num_devices: int,
    gpu0_bsz: int | None = None,
    *,
    full_batch: int | None = None,
    shares: Sequence[int] | None = None,
) -> Split:
    """Return the number of samples of each device, in device order.

    `gpu0_bsz=None` splits evenly; the remainder goes to device 1 and the following ones, because device 0 also holds
    the optimizer state. If there are fewer samples than devices, device 0 comes first, because it needs no copy of the
    model. `gpu0_bsz=0` leaves device 0 without samples. `gpu0_bsz=k` gives device 0 k samples of a full batch and
    shares the rest evenly; the remainder goes to the first of the other devices. One device gets the whole batch.

    A short batch scales the split down. With `full_batch` (or `shares`, whose sum is the full batch) the scaling is
    proportional and no device gets more than in a full batch; with `gpu0_bsz >= 1` device 0 keeps at least one sample.
    Without `full_batch`, device 0 gets min(k, num_samples).

    Args:
        num_samples: Samples to distribute, >= 0.
        num_devices: Devices, >= 1.
        gpu0_bsz: Samples of device 0 in a full batch, >= 0; None for an even split.
        full_batch: Samples of a full batch, if known.
        shares: Samples of every device in a full batch; excludes `gpu0_bsz`.

    Returns:
        `num_devices` numbers >= 0 whose sum is `num_samples`.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is negative, no device is left to take the samples, or the arguments contradict each other.

    Example:
        >>> from segapp.parallel import plan_chunks
        >>> plan_chunks(8, 3), plan_chunks(8, 3, 2), plan_chunks(8, 3, 0)
        ((2, 3, 3), (2, 3, 3), (0, 4, 4))
        >>> plan_chunks(5, 3, 4), plan_chunks(5, 3, 4, full_batch=8), plan_chunks(4, 3, shares=[2, 3, 3])
        ((4, 1, 0), (2, 2, 1), (1, 2, 1))
    """
    return SplitRequest(gpu0_bsz, shares).plan(num_samples, num_devices, full_batch)


def replan_shares(shares: Sequence[int], old: Sequence[str], new: Sequence[str], num_samples: int) -> Split:
    """Return the samples of each new device, in proportion to the samples that the same devices had before.

    A new device counts as the mean of the old ones. After rounding, no device that had samples before is left without
    any, as long as there are enough.

    Args:
        shares: Samples of each old device.
        old: Names of the old devices; equal names are taken in their order.
        new: Names of the new devices, >= 1.
        num_samples: Samples to distribute.

    Example:
        >>> from segapp.chunks import replan_shares
        >>> replan_shares([4, 2, 2], ["a", "b", "c"], ["a", "c"], 8), replan_shares([6, 2], ["a", "b"], ["b", "d"], 9)
        ((5, 3), (3, 6))
    """
    before: dict[str, list[int]] = {}
    for name, share in zip(old, shares, strict=True):
        before.setdefault(name, []).append(share * len(shares))
    weights = [before[name].pop(0) if before.get(name) else sum(shares) for name in new]
    sizes = list(_scale_shares(num_samples, weights if sum(weights) else [1] * len(new)))
    for i, weight in enumerate(weights):
        if weight and not sizes[i] and max(sizes) > 1:
            sizes[sizes.index(max(sizes))] -= 1
            sizes[i] = 1
    return tuple(sizes)


def check_split(
    request: SplitRequest | int | None, batch_size: int, num_devices: int, smallest_chunk: int = 1
) -> tuple[Split | None, str]:
    """Return the split of a full batch and a note on it, or None and why it is impossible; never raises for a request.

    Args:
        request: A number is a `gpu0_bsz`.
        batch_size: Samples of a full batch.
        num_devices: Devices that share it.
        smallest_chunk: Samples that a device needs if it has any: 2 if a BatchNorm layer over one value per sample is
            not synchronized (see `segapp.parallel.batchnorm_guard.smallest_chunk`), else 1.

    Returns:
        A note names a consequence that the number does not show, such as an idle device; it may be empty. A reason
        contains the next move.

    Example:
        >>> from segapp.chunks import check_split
        >>> check_split(2, 8, 3)
        ((2, 3, 3), '')
        >>> check_split(9, 8, 3)
        (None, 'gpu0_bsz=9 is more than the batch of 8: use 0 to 8')
    """
    try:
        request = request if isinstance(request, SplitRequest) else SplitRequest(request)
        # A full batch of 0 would be refused as a wrong argument; the reason below names the key of the config.
        split = request.plan(batch_size, num_devices, batch_size or None)
    except (TypeError, ValueError) as error:
        return None, str(error)
    if batch_size == 0:
        return None, "batch_size=0 has nothing to split: use 1 or more"
    least = min(size for size in split if size)
    if least < smallest_chunk:
        return None, (
            f"{request} gives a device {least} of {batch_size} samples, BatchNorm needs {smallest_chunk}: "
            f"use sync_bn: true, or a split like {_suggest(batch_size, num_devices)}"
        )
    if 0 in split:
        return split, f"device {split.index(0)} computes nothing"
    has_effect = num_devices > 1 or request.gpu0_bsz is None
    return split, "" if has_effect else f"{request} has no effect on one device"


def _even(num_samples: int, num_devices: int) -> Split:
    each, left_over = divmod(num_samples, num_devices)
    first = 1 if each else 0  # device 0 gets no remainder, unless there are fewer samples than devices
    return tuple(each + (first <= i < first + left_over) for i in range(num_devices))


def _scale_shares(num_samples: int, shares: Sequence[int]) -> Split:
    """Return shares scaled by largest remainders, ties to the first device after 0; none exceeds its full share."""
    full = sum(shares)
    sizes = [share * num_samples // full for share in shares]
    order = sorted(range(len(shares)), key=lambda i: (-(shares[i] * num_samples % full), i == 0, i))
    for i in order[: num_samples - sum(sizes)]:
        sizes[i] += 1
    return tuple(sizes)


def check_count(name: str, value: SupportsIndex, *, least: int | None = 0, more: str = "") -> int:
    """Return the number as an int, whatever type of integer it has; with `least=None` it may be negative."""
    wanted = ", ".join(part for part in ("use an integer" if least is None else f"use {least} or more", more) if part)
    number = None
    with contextlib.suppress(TypeError):
        number = None if isinstance(value, bool) else operator.index(value)
    if number is None:
        raise TypeError(f"{name}={reprlib.repr(value)} is not a whole number: {wanted}")
    if least is not None and number < least:
        raise ValueError(f"{name}={number} is too small: {wanted}")
    return number


def check_positive(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not float(value) > 0:
        raise ValueError(f"{name}={value!r}: give a number above 0")


def check_number(name: str, value: Any, *, least: float = 0.0, most: float = math.inf, above: bool = False) -> float:
    """Return a finite number from `least` to `most`, or above `least`; raise ValueError for anything else."""
    # True would otherwise count as 1, and infinity as a number without a limit.
    is_number = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if is_number and least <= value <= most and not (above and value == least):
        return float(value)
    if math.isinf(most):
        wanted = "finite number" if math.isinf(least) else f"number {'above' if above else 'of at least'} {least:g}"
    else:
        wanted = f"number {f'above {least:g} and up' if above else f'from {least:g}'} to {most:g}"
    raise ValueError(f"{name}={value!r}: give a {wanted}")


def check_flag(name: str, value: object) -> bool:
    """Return True or False; raise TypeError for anything else, such as a word, which Python would take as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={reprlib.repr(value)}: give True or False")
    return value


def check_choice(name: str, value: object, words: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in words:
        raise ValueError(f"{name}={value!r}: give one of {', '.join(words)}")


def check_list(name: str, value: Iterable[T], wanted: str) -> list[T]:
    """Return the elements of an iterable with an order; raise TypeError for anything else."""
    if isinstance(value, str | Mapping | Set) or not isinstance(value, Iterable):
        raise TypeError(f"{name}={reprlib.repr(value)} is not a list: give {wanted}")
    return list(value)


def _suggest(batch_size: int, num_devices: int) -> list[int]:
    """Return a split of the batch over as many devices as can have two samples each."""
    busy = max(1, min(num_devices, batch_size // 2))
    return [*_even(batch_size, busy), *[0] * (num_devices - busy)]
