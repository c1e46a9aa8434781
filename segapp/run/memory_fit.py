"""Linear fits of peak memory over the samples of a device: `peak_i = fixed_i + slope * samples_i`. No torch here.

`fit_lines` is the arithmetic of every fit in the program; `fit_memory` applies it to the peaks that a run has measured.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Point = tuple[float, float]
"""(x, y): samples on a device, MiB."""


class LineFit(NamedTuple):
    """Lines with a common slope."""

    slope: float | None
    """None if it was not given, and no group has points with different x."""
    fixed: tuple[float | None, ...]
    """The constant of each group, for slope 0 where there is none; None for a group without points."""


def fit_lines(groups: Sequence[Sequence[Point]], slope: float | None = None) -> LineFit:
    """Fit `y = fixed[group] + slope * x` by least squares, with one slope for all groups.

    Args:
        groups: Points of each group.
        slope: Fit the constants only, for this slope.

    Example:
        >>> fit_lines([[(2, 500.0), (4, 700.0)], [(1, 50.0)]])
        LineFit(slope=100.0, fixed=(300.0, -50.0))
    """
    if slope is None:
        covariance, variance = 0.0, 0.0
        for points in groups:
            if points:
                mean_x = sum(x for x, _ in points) / len(points)
                mean_y = sum(y for _, y in points) / len(points)
                covariance += sum((x - mean_x) * (y - mean_y) for x, y in points)
                variance += sum((x - mean_x) ** 2 for x, _ in points)
        slope = covariance / variance if variance > 0 else None
    used = slope or 0.0
    return LineFit(slope, tuple(sum(y - used * x for x, y in own) / len(own) if own else None for own in groups))


class MemoryObservation(NamedTuple):
    """The peaks measured under one split."""

    split: tuple[int, ...]
    """Samples of a full batch per device."""
    peak_mib: tuple[float | None, ...]
    """Highest allocation of each device; None where unknown."""


@dataclass(frozen=True)
class MemoryFit:
    """`peak_i = fixed_mib[i] + slope_mib * samples_i`.

    Attributes:
        fixed_mib: MiB of each device without samples; None for a device that was never observed.
        slope_mib: MiB that one sample adds, the same on all devices; at least 0.
        spread_mib: Root mean square distance of the observations from the fit.
        is_proven: True if different numbers of samples were observed; otherwise `predict` returns upper bounds.
        observed: Samples and peak of each device in its largest observation, from which the bounds are scaled.
    """

    fixed_mib: tuple[float | None, ...]
    slope_mib: float
    spread_mib: float
    is_proven: bool
    observed: tuple[tuple[int, float] | None, ...] = ()

    def predict(self, split: Sequence[int]) -> tuple[float | None, ...]:
        """Return the peak of each device under a split, MiB; None for a device without an observation.

        While the slope is not proven, the result is an upper bound: a peak scales with the samples when they increase,
        and stays when they decrease.
        """
        return tuple(self._predict_device(i, samples) for i, samples in enumerate(split))

    def _predict_device(self, index: int, samples: int) -> float | None:
        fixed = self.fixed_mib[index] if index < len(self.fixed_mib) else None
        if fixed is None:
            return None
        observed = self.observed[index] if index < len(self.observed) else None
        if self.is_proven or observed is None:
            return fixed + self.slope_mib * samples
        observed_samples, observed_mib = observed
        if samples <= observed_samples:
            return observed_mib
        return observed_mib * samples / observed_samples if observed_samples else None


def fit_memory(observations: Iterable[tuple[Sequence[int], Sequence[float | None]]]) -> MemoryFit:
    """Fit the measured peaks by least squares: one slope for all devices, one constant for each.

    The slope comes from devices that were observed with different numbers of samples; if there is none, from the
    devices other than device 0, as if they had one constant; if those have equal numbers too, the slope is not proven.

    Returns:
        The fit; without observations, one that predicts None for every device.

    Example:
        >>> fit = fit_memory([((2, 3), (500.0, 600.0)), ((1, 4), (400.0, 700.0))])
        >>> fit.slope_mib, fit.fixed_mib, fit.predict((3, 2))
        (100.0, (300.0, 300.0), (600.0, 500.0))
    """
    devices: list[list[tuple[int, float]]] = []
    for split, peaks in observations:
        devices += [[] for _ in range(len(split) - len(devices))]
        for own, samples, peak in zip(devices, split, peaks, strict=False):
            if peak is not None:
                own.append((samples, peak))
    slope = fit_lines(devices).slope
    if slope is None:
        slope = fit_lines([[point for own in devices[1:] for point in own]]).slope
    slope_mib = max(0.0, slope or 0.0)
    fixed = fit_lines(devices, slope_mib).fixed
    errors = [
        y - slope_mib * x - constant
        for own, constant in zip(devices, fixed, strict=True)
        if constant is not None
        for x, y in own
    ]
    return MemoryFit(
        fixed_mib=fixed,
        slope_mib=slope_mib,
        spread_mib=(sum(e * e for e in errors) / len(errors)) ** 0.5 if errors else 0.0,
        is_proven=slope is not None,
        observed=tuple(max(own) if own else None for own in devices),
    )
