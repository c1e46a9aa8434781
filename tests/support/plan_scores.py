"""How good memory plans are: the metrics of xMem (Shi et al., arXiv:2510.21048).

All in MiB. A run is given what its plan asks for and no more; it fails if that is too little.
"""

from collections.abc import Iterable, Sequence
from statistics import fmean, median


def relative_errors(pairs: Iterable[tuple[float, float]]) -> list[float]:
    """Planned over measured peak, less one: negative where the plan asks for too little."""
    return [planned / measured - 1 for planned, measured in pairs]


def median_relative_error(pairs: Iterable[tuple[float, float]]) -> float:
    """The median over (planned, measured) peaks of the error's size, as a share of the measured peak."""
    return median(map(abs, relative_errors(pairs)))


def failure_probability(fails: Sequence[bool]) -> float:
    """Share of plans whose run fails with the memory that the plan asks for ("probability of estimation failure")."""
    return sum(fails) / len(fails)


def memory_conserved(runs: Iterable[tuple[float, float, bool]]) -> float:
    """Mean over (device's memory, memory the plan asks for, the run fails) of what is left to others on the device.

    A plan whose run fails leaves nothing, and what it was given was given in vain ("memory conservation potential").
    """
    return fmean(-allowed if fails else device - allowed for device, allowed, fails in runs)


def memory_unused(allowed_mib: float, measured_mib: float) -> float:
    """Share of what a plan asks for that the run leaves unused; 0 where it takes all or more."""
    return max(0.0, 1 - measured_mib / allowed_mib)
