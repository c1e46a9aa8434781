"""`gpu0_bsz: auto`: choose the next split from the measured peaks. Pure, and no torch here.

A split that was in force is rated by its measured peaks, any other by the linear fit (`segapp.run.memory_fit`). A move
must free more than `MARGIN_FRAC` of the memory of the fullest device, and no split is rated better than it was
measured. So the moves end, whatever the noise of the measurements.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segapp.parallel.chunks import check_split
from segapp.run.memory_fit import fit_lines, fit_memory
from segapp.run.verdict import SplitFacts, format_split

MARGIN_FRAC = 0.02
"""Share of its memory that a move must free on the fullest device."""

ASSUMED_FRACS = (1.0, 0.75, 0.5, 0.25)
"""While no slope is known: shares of a peak that are assumed to grow with the samples, tried in this order."""


@dataclass(frozen=True)
class SplitMove:
    """A change of the split that `auto` makes."""

    gpu0_bsz: int
    split: tuple[int, ...]
    predicted_mib: tuple[float, ...]
    reason: str


def plan_move(facts: SplitFacts, *, margin_frac: float = MARGIN_FRAC) -> SplitMove | None:
    """Return the move from the split in force to the one whose fullest device is least full; None to stay.

    Args:
        facts: What is known about the run. Without measured peaks of the split in force, or the memory of each device,
            there is no move.
        margin_frac: Least share of the fullest device's memory that a move must free.

    Example:
        >>> observed = {(6, 1, 1): (700.0, 200.0, 200.0)}
        >>> facts = SplitFacts(
        ...     8, 3, current=(6, 1, 1), usable_mib=[1000.0] * 3, observed=observed, planned_slope_mib=100.0
        ... )
        >>> plan_move(facts).split
        (2, 3, 3)
    """
    current = facts.current
    totals = [mib for mib in facts.usable_mib if mib]
    peaks = None if current is None else facts.observed.get(current)
    if current is None or peaks is None or None in peaks or len(totals) < len(current):
        return None
    candidates = _candidates(facts, current)
    for assumed_frac in ASSUMED_FRACS if facts.planned_slope_mib is None else (1.0,):
        predict = _Predictor(facts.observed, current, facts.planned_slope_mib, assumed_frac)
        now = _fullest(predict(current), totals)
        split = min(candidates, key=lambda split: _fullest(predict(split), totals), default=current)
        then = _fullest(predict(split), totals)
        if then <= now - margin_frac:
            device = max(range(len(current)), key=lambda i: predict(current)[i] / totals[i])
            reason = (
                f"auto: device {device} is the fullest, {100 * now:.0f} % at split {format_split(current)}; "
                f"{format_split(split)} is expected to bring the fullest to {100 * then:.0f} % ({predict.source})"
            )
            return SplitMove(candidates[split], split, predict(split), reason)
        if predict.is_proven:
            break
    return None


def _candidates(facts: SplitFacts, current: tuple[int, ...]) -> dict[tuple[int, ...], int]:
    """Return the splits that may be tried, with the smallest `gpu0_bsz` that gives each."""
    splits: dict[tuple[int, ...], int] = {}
    for gpu0_bsz in range(facts.batch_size + 1):
        split = check_split(facts.batch_size, len(current), gpu0_bsz, smallest_chunk=facts.smallest_chunk).split
        if split is None or split == current or split in facts.failed:
            continue
        if facts.needs_samples is not None and 0 in split:
            continue
        if facts.ceiling is None or split[0] < facts.ceiling:
            splits.setdefault(split, gpu0_bsz)
    return splits


class _Predictor:
    """Peaks under any split: measured where the split was in force, else from the fit or an assumed slope.

    Observations of a device without samples are left out of its fit if there are others: without samples it holds no
    replica either.
    """

    def __init__(
        self,
        observed: Mapping[tuple[int, ...], Sequence[float | None]],
        current: tuple[int, ...],
        planned_slope_mib: float | None,
        assumed_frac: float,
    ) -> None:
        self._observed = observed
        was_busy = [any(split[i] for split in observed) for i in range(len(current))]
        fit = fit_memory(
            (split, [mib if split[i] or not was_busy[i] else None for i, mib in enumerate(peaks)])
            for split, peaks in observed.items()
        )
        self.fixed, self.slope = [mib or 0.0 for mib in fit.fixed_mib], fit.slope_mib
        self.source, self.is_proven = "fitted to what was measured", fit.is_proven
        if not fit.is_proven:
            points = [[(n, mib)] for n, mib in zip(current, observed[current], strict=True) if mib is not None]
            # Without any known slope: a share of the largest slope that the peaks allow, which is reached where nothing
            # is fixed. A move based on it goes in the right direction, and its measurement shows the slope.
            largest = min((mib / n for [(n, mib)] in points if n), default=0.0)
            self.slope = assumed_frac * largest if planned_slope_mib is None else planned_slope_mib
            self.fixed = [max(0.0, mib or 0.0) for mib in fit_lines(points, self.slope).fixed]
            self.source = "no other split was measured yet" if planned_slope_mib is None else "with the plan's slope"
        known = [mib for i, mib in enumerate(self.fixed) if was_busy[i] and i] or self.fixed[:1]
        for i, is_known in enumerate(was_busy):
            if not is_known:  # with samples it will hold a replica, as the other devices do
                self.fixed[i] = max(self.fixed[i], sum(known) / len(known))

    def __call__(self, split: tuple[int, ...]) -> tuple[float, ...]:
        measured = self._observed.get(split)
        if measured is not None and None not in measured:
            return tuple(mib or 0.0 for mib in measured)
        return tuple(fixed + self.slope * n for fixed, n in zip(self.fixed, split, strict=True))


def _fullest(mib: Sequence[float], total_mib: Sequence[float]) -> float:
    return max(need / total for need, total in zip(mib, total_mib, strict=True))
