"""What a wished split would do, decided once for trainer, `ctl` and screen: the shares, the memory, and one word.

The word is about a full batch: `refused` (no split can honour the wish), `no change`, `won't fit` (some device would
need more than 95 % of what it has, or the value ran out of memory before), `tight` (more than 90 %, or the estimate
is not proven), `ok`.

Memory is taken as affine in a device's samples, `peak_i = fixed_i + slope * samples_i`, and fitted to what the run
itself has shown: device 0 holds more than the others, so every device has its own `fixed_i`, and the slope is common.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from segapp.parallel.chunks import check_split

Level = Literal["ok", "tight", "won't fit", "no change", "refused"]

TIGHT_FRAC, FULL_FRAC = 0.90, 0.95
"""Shares of a device's memory above which a split is tight, and above which it is not to be tried."""


@dataclass(frozen=True)
class SplitVerdict:
    """What would become of a wish.

    Attributes:
        split: samples of a full batch per device; None where the wish is refused.
        level: how the split fits.
        reason: a sentence for a person, with the next move where there is one; never empty.
        is_allowed: whether to do it without being told twice: `ok` and `tight`.
        predicted_mib: peak of each device, None where nothing is known; empty without a split.
    """

    split: tuple[int, ...] | None
    level: Level
    reason: str
    is_allowed: bool
    predicted_mib: tuple[float | None, ...] = ()

    @property
    def is_possible(self) -> bool:
        """Whether it can be done at all, if somebody insists: everything but `refused`."""
        return self.level != "refused"


class MemoryObservation(NamedTuple):
    """The peaks that one split was seen to have."""

    split: tuple[int, ...]
    """Samples of a full batch per device."""
    peak_mib: tuple[float | None, ...]
    """Highest allocation of each device while it held; None where unknown."""


@dataclass(frozen=True)
class MemoryFit:
    """`peak_i = fixed_mib[i] + slope_mib * samples_i`.

    Attributes:
        fixed_mib: what each device needs without samples; None for a device that was never observed.
        slope_mib: what one sample adds.
        spread_mib: how far observations lie from the fit (root mean square).
        is_proven: whether different numbers of samples were seen; otherwise `predict` gives upper bounds.
        observed: samples and peak of each device in its largest observation, what the bounds start from.
    """

    fixed_mib: tuple[float | None, ...]
    slope_mib: float
    spread_mib: float
    is_proven: bool
    observed: tuple[tuple[int, float] | None, ...] = ()

    def predict(self, split: Sequence[int]) -> tuple[float | None, ...]:
        """The peak of each device under a split, MiB; None for a device without an observation.

        Without proof of a slope it is a bound: all of the observed peak grows with the samples, none of it shrinks.
        """
        return tuple(self._predict_device(i, samples) for i, samples in enumerate(split))

    def _predict_device(self, index: int, samples: int) -> float | None:
        fixed = self.fixed_mib[index] if index < len(self.fixed_mib) else None
        if fixed is None:
            return None
        seen = self.observed[index] if index < len(self.observed) else None
        if self.is_proven or seen is None:
            return fixed + self.slope_mib * samples
        seen_samples, seen_mib = seen
        if samples <= seen_samples:
            return seen_mib
        return seen_mib * samples / seen_samples if seen_samples else None


def split_verdict(
    num_samples: int,
    num_devices: int,
    gpu0_bsz: int | None,
    *,
    shares: Sequence[int] | None = None,
    current: Sequence[int] | None = None,
    predicted_mib: Sequence[float | None] = (),
    total_mib: Sequence[float | None] = (),
    fit: MemoryFit | None = None,
    ceiling: int | None = None,
    sync_bn: bool = True,
    smallest_chunk: int = 1,
) -> SplitVerdict:
    """Judges a wished split; never raises for a bad wish.

    Args:
        num_samples: samples of a full batch, over all devices.
        num_devices: devices that share it.
        gpu0_bsz: device 0's part of a full batch; None for an even split.
        shares: every device's part instead.
        current: the split in force.
        predicted_mib: peak of each device under the wished split, where somebody else has planned it.
        total_mib: what each device has for this run (`usable_mib`); None where unknown.
        fit: predicts the peaks where `predicted_mib` does not give them.
        ceiling: samples on device 0 at which it ran out of memory before.
        sync_bn: whether BatchNorm sees the whole batch; then any chunk is large enough.
        smallest_chunk: samples that a busy device needs where it does not (`segapp.parallel.smallest_chunk`).

    Returns:
        The verdict.

    Example:
        >>> split_verdict(8, 3, 2, current=(0, 4, 4)).split
        (2, 3, 3)
        >>> split_verdict(8, 3, 9).level
        'refused'
        >>> split_verdict(8, 2, 4, predicted_mib=[980, 500], total_mib=[1000, 1000]).level
        "won't fit"
    """
    check = check_split(
        num_samples, num_devices, gpu0_bsz, shares=shares, smallest_chunk=1 if sync_bn else smallest_chunk
    )
    if check.split is None:
        return SplitVerdict(None, "refused", check.reasons[0], is_allowed=False)
    predicted = tuple(predicted_mib) or (fit.predict(check.split) if fit is not None else ())
    if current is not None and tuple(current) == check.split:
        return SplitVerdict(check.split, "no change", "this split is in force already", False, predicted)
    word, reason = _judge_memory(check.split, predicted, total_mib, fit if not predicted_mib else None, ceiling)
    if word == "ok" and check.notes:
        reason = f"{reason}; {check.notes[0]}"
    return SplitVerdict(check.split, word, reason, word in ("ok", "tight"), predicted)


def usable_mib(total_mib: float | None, used_mib: float | None, reserved_mib: float | None) -> float | None:
    """What a device has for this run: its memory without what others, and the driver's own context, hold of it.

    Args:
        total_mib: of the device.
        used_mib: as the driver reports it, all processes together.
        reserved_mib: what this run's allocator holds of that.
    """
    if total_mib is None or used_mib is None or reserved_mib is None:
        return total_mib
    return max(0.0, total_mib - max(0.0, used_mib - reserved_mib))


def fit_memory(observations: Iterable[MemoryObservation | tuple[Sequence[int], Sequence[float | None]]]) -> MemoryFit:
    """Least squares over what was observed: one slope for all devices, one constant for each.

    The slope comes from devices that were seen with different numbers of samples; where there is none, from the
    devices beside device 0 as if they were alike; where those do not differ either, it is not proven.

    Args:
        observations: (split, peaks in MiB), at least one.

    Returns:
        The fit; with nothing to go by, one that predicts None everywhere.

    Example:
        >>> fit = fit_memory([((2, 3), (500.0, 600.0)), ((1, 4), (400.0, 700.0))])
        >>> fit.slope_mib, fit.fixed_mib, fit.predict((3, 2))
        (100.0, (300.0, 300.0), (600.0, 500.0))
    """
    points: dict[int, list[tuple[int, float]]] = {}
    num_devices = 0
    for split, peaks in observations:
        num_devices = max(num_devices, len(split))
        for i, (samples, peak) in enumerate(zip(split, peaks, strict=False)):
            if peak is not None:
                points.setdefault(i, []).append((samples, peak))
    slope = _common_slope(list(points.values()))
    if slope is None:
        slope = _common_slope([[point for i, own in points.items() if i for point in own]])
    common = slope or 0.0
    fixed = {i: sum(y - common * x for x, y in own) / len(own) for i, own in points.items()}
    errors = [y - common * x - fixed[i] for i, own in points.items() for x, y in own]
    return MemoryFit(
        fixed_mib=tuple(fixed.get(i) for i in range(num_devices)),
        slope_mib=common,
        spread_mib=(sum(e * e for e in errors) / len(errors)) ** 0.5 if errors else 0.0,
        is_proven=slope is not None,
        observed=tuple(max(points[i]) if i in points else None for i in range(num_devices)),
    )


def _judge_memory(
    split: Sequence[int],
    predicted_mib: Sequence[float | None],
    total_mib: Sequence[float | None],
    fit: MemoryFit | None,
    ceiling: int | None,
) -> tuple[Level, str]:
    if ceiling is not None and split[0] >= ceiling:
        return "won't fit", f"device 0 ran out of memory at {ceiling} samples: use less than that"
    fracs = _fractions(predicted_mib, total_mib)
    if not fracs:
        return "ok", "nothing is known about its memory yet"
    frac, device = max(fracs)
    peak, total = predicted_mib[device], total_mib[device]
    assert peak is not None
    assert total is not None
    about = f"device {device} would need about {_amount(peak, total)} ({100 * frac:.0f} %)"
    is_bound = fit is not None and not fit.is_proven
    if is_bound and frac > TIGHT_FRAC:
        return "tight", f"{about} at most: no other split was tried yet"
    if frac > FULL_FRAC:
        return "won't fit", f"{about}: give it fewer samples"
    if frac > TIGHT_FRAC:
        return "tight", f"{about}: little room is left"
    return "ok", about


def _amount(peak_mib: float, total_mib: float) -> str:
    if total_mib < 4096:
        return f"{peak_mib:.0f} of {total_mib:.0f} MiB"
    return f"{peak_mib / 1024:.1f} of {total_mib / 1024:.1f} GiB"


def _fractions(mib: Sequence[float | None], total_mib: Sequence[float | None]) -> list[tuple[float, int]]:
    """How full each device would be, with its index, where both numbers are known."""
    pairs = enumerate(zip(mib, total_mib, strict=False))
    return [(need / total, i) for i, (need, total) in pairs if need is not None and total]


def _common_slope(groups: Iterable[Sequence[tuple[int, float]]]) -> float | None:
    """The least-squares slope that groups of points share, each with a constant of its own; None if x never varies."""
    num, den = 0.0, 0.0
    for points in groups:
        if not points:
            continue
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        num += sum((x - mean_x) * (y - mean_y) for x, y in points)
        den += sum((x - mean_x) ** 2 for x, _ in points)
    return max(0.0, num / den) if den > 0 else None
