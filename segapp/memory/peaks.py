"""What is known about the peak memory of each device under a split: measured by the run, planned. No torch here.

The peak of a device is close to a line, `peak_i = fixed_i + slope * samples_i`. `PeakModel.peak` is the one answer to
"how much would this split need?", and says on what it is based.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

Split = tuple[int, ...]
"""Samples of a full batch for each device."""

Point = tuple[float, float]
"""(x, y): samples on a device, MiB."""

Basis = Literal["measured", "fitted", "planned", "bound", "unknown"]
"""Where the peak of a device comes from, the surest first. `measured`: the split was in force. `fitted`: a line through
what was measured with other numbers of samples. `planned`: a line through what was measured, with the slope of the
memory plan. `bound`: an upper bound from one number of samples."""


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


class Peak(NamedTuple):
    """The peak of one device under a split."""

    mib: float | None
    """None where it is unknown."""
    basis: Basis


@dataclass(frozen=True)
class PeakModel:
    """The peaks that were measured, and what follows from them for any other split.

    Attributes:
        measured: Highest allocation of each device under each split that was in force, MiB; None where unknown.
        slope_mib: MiB that one sample adds to a device according to the memory plan; None without a plan.
    """

    measured: Mapping[Split, tuple[float | None, ...]] = field(default_factory=dict)
    slope_mib: float | None = None

    def peak(self, split: Sequence[int]) -> tuple[Peak, ...]:
        """Return the peak of each device under a split, MiB, and the basis of each number.

        While no slope is known, the peaks are upper bounds: a peak scales with the samples when they increase, and
        stays when they decrease.

        Example:
            >>> PeakModel({(2, 3): (500.0, 600.0), (1, 4): (400.0, 700.0)}).peak((3, 2))
            (Peak(mib=600.0, basis='fitted'), Peak(mib=500.0, basis='fitted'))
            >>> PeakModel({(4, 4): (800.0, 700.0)}).peak((5, 3))
            (Peak(mib=1000.0, basis='bound'), Peak(mib=700.0, basis='bound'))
        """
        measured = self.measured.get(tuple(split), ())
        return tuple(
            Peak(measured[i], "measured") if i < len(measured) and measured[i] is not None else self._estimate(i, count)
            for i, count in enumerate(split)
        )

    def peak_mib(self, split: Sequence[int]) -> tuple[float | None, ...]:
        """Return the peak of each device under a split, MiB; None where it is unknown."""
        return tuple(peak.mib for peak in self.peak(split))

    def with_measured(self, split: Sequence[int], peaks_mib: Sequence[float | None]) -> PeakModel:
        """Return the model with peaks measured under a split; the highest of each device is kept."""
        known = self.measured.get(tuple(split), (None,) * len(split))
        pairs = zip(known, peaks_mib, strict=False)
        highest = tuple(new if old is None else old if new is None else max(old, new) for old, new in pairs)
        return replace(self, measured={**self.measured, tuple(split): highest})

    @property
    def is_proven(self) -> bool:
        """True if devices were measured with different numbers of samples, so that the slope is known."""
        return self._fit.slope is not None

    @property
    def largest_slope_mib(self) -> float:
        """The largest slope that the measured peaks allow: that of a device for which nothing is fixed."""
        return min((mib / samples for own in self._points for samples, mib in own if samples), default=0.0)

    @cached_property
    def spread_mib(self) -> float:
        """Root mean square distance of the measured peaks from their lines."""
        lines = zip(self._points, self._fixed_mib, strict=True)
        errors = [y - self._slope_mib * x - (fixed or 0.0) for own, fixed in lines for x, y in own]
        return (sum(error * error for error in errors) / len(errors)) ** 0.5 if errors else 0.0

    def _estimate(self, device: int, samples: int) -> Peak:
        fixed = self._fixed_mib[device] if device < len(self._fixed_mib) else None
        if fixed is None:
            return Peak(None, "unknown")
        idle = [mib for count, mib in self._observed[device] if not count]
        if self._basis != "bound":
            mib = max(idle) if idle and not samples else fixed + self._slope_mib * samples
            return Peak(mib, self._basis)
        observed_samples, observed_mib = max(self._points[device])
        if samples <= observed_samples:
            return Peak(max(idle) if idle and not samples else observed_mib, "bound")
        return Peak(observed_mib * samples / observed_samples, "bound") if observed_samples else Peak(None, "unknown")

    @cached_property
    def _observed(self) -> list[list[Point]]:
        """Samples and peaks of each device."""
        devices: list[list[Point]] = [[] for _ in range(max(map(len, self.measured), default=0))]
        for split, peaks in self.measured.items():
            for own, samples, peak in zip(devices, split, peaks, strict=False):
                if peak is not None:
                    own.append((samples, peak))
        return devices

    @cached_property
    def _points(self) -> list[list[Point]]:
        """The points of the lines: those without samples, where a device holds no replica, only if it has no others."""
        return [[point for point in own if point[0]] or own for own in self._observed]

    @cached_property
    def _fit(self) -> LineFit:
        """The lines through what was measured; without a slope from one device, the devices but the first share one."""
        found = fit_lines(self._points)
        if found.slope is None:
            found = fit_lines([[point for own in self._points[1:] for point in own]])
        return found

    @property
    def _basis(self) -> Basis:
        return "fitted" if self.is_proven else "bound" if self.slope_mib is None else "planned"

    @cached_property
    def _slope_mib(self) -> float:
        return max(0.0, self._fit.slope or 0.0) if self.is_proven else self.slope_mib or 0.0

    @cached_property
    def _fixed_mib(self) -> list[float | None]:
        """The constant of each device's line; None for a device that was never measured."""
        fixed = list(fit_lines(self._points, self._slope_mib).fixed)
        if self._basis == "bound":
            return fixed
        was_busy = [any(samples for samples, _ in own) for own in self._points]
        if not self.is_proven:
            fixed = [None if mib is None else max(0.0, mib) for mib in fixed]
        known = [mib for mib, is_busy in zip(fixed[1:], was_busy[1:], strict=True) if is_busy and mib is not None]
        known = known or [mib for mib in fixed[:1] if mib is not None]
        for i, mib in enumerate(fixed):
            if not was_busy[i] and known:  # with samples it will hold a replica, as the other devices do
                fixed[i] = max(mib or 0.0, sum(known) / len(known))
        return fixed

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        measured = [[list(split), list(peaks)] for split, peaks in self.measured.items()]
        return {"measured": measured, "slope_mib": self.slope_mib}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PeakModel:
        """Return the model of `to_json`'s values."""
        return cls({tuple(split): tuple(peaks) for split, peaks in values["measured"]}, values["slope_mib"])
