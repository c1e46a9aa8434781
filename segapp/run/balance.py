"""`gpu0_bsz: auto`: from the peaks that were measured to the next split, or to none. Pure, and no torch here.

The peaks of a device are affine in its samples (`segapp.run.verdict.fit_memory`). A split that was tried is judged by
what was measured, any other by the fit. A move must promise the fullest device a gain of more than `MARGIN_FRAC` of its
memory, and no split is promised to be better than it was measured to be: so `auto` comes to rest, whatever the noise.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from segapp.parallel.chunks import check_split
from segapp.run.verdict import MemoryObservation, fit_memory

MARGIN_FRAC = 0.02
"""Share of a device's memory that a move must free on the fullest device; for less the split stays as it is."""


@dataclass(frozen=True)
class SplitMove:
    """A change that `auto` makes.

    Attributes:
        gpu0_bsz: from now on.
        split: that it leads to.
        predicted_mib: peak of each device then.
        reason: a sentence with the numbers.
    """

    gpu0_bsz: int
    split: tuple[int, ...]
    predicted_mib: tuple[float, ...]
    reason: str


def plan_move(
    num_samples: int,
    current: Sequence[int],
    observed: Mapping[tuple[int, ...], Sequence[float | None]],
    total_mib: Sequence[float | None],
    *,
    assumed_slope_mib: float | None = None,
    failed: Collection[tuple[int, ...]] = (),
    ceiling: int | None = None,
    smallest_chunk: int = 1,
    margin_frac: float = MARGIN_FRAC,
) -> SplitMove | None:
    """The split to go to from the present one; None to stay.

    Args:
        num_samples: samples of a full batch.
        current: the split in force, measured.
        observed: split -> peak of each device under it, MiB.
        total_mib: what each device has.
        assumed_slope_mib: what a sample adds, where measurements do not tell it yet: a plan's.
        failed: splits that ran out of memory.
        ceiling: samples on device 0 at which it ran out of memory.
        smallest_chunk: samples that a busy device needs.
        margin_frac: the least gain.

    Example:
        >>> observed = {(6, 1, 1): (700.0, 200.0, 200.0)}
        >>> plan_move(8, (6, 1, 1), observed, [1000.0] * 3, assumed_slope_mib=100.0).split
        (2, 3, 3)
    """
    current = tuple(current)
    totals = [mib for mib in total_mib if mib]
    peaks = observed.get(current)
    if peaks is None or None in peaks or len(totals) < len(current):
        return None
    splits: dict[tuple[int, ...], int] = {}
    for gpu0_bsz in range(num_samples + 1):
        split = check_split(num_samples, len(current), gpu0_bsz, smallest_chunk=smallest_chunk).split
        if split is not None and split != current and split not in failed and (ceiling is None or split[0] < ceiling):
            splits.setdefault(split, gpu0_bsz)
    for assumed_frac in (1.0, 0.75, 0.5, 0.25) if assumed_slope_mib is None else (1.0,):
        predict = _Predictor(observed, current, assumed_slope_mib, assumed_frac)
        now = _fullest(predict(current), totals)
        split = min(splits, key=lambda split: _fullest(predict(split), totals), default=current)
        full = _fullest(predict(split), totals)
        if full <= now - margin_frac:
            device = max(range(len(current)), key=lambda i: predict(current)[i] / totals[i])
            reason = (
                f"auto: device {device} is the fullest, {100 * now:.0f} % at split {_shown(current)}; {_shown(split)} "
                f"should bring the fullest to {100 * full:.0f} % ({predict.source})"
            )
            return SplitMove(splits[split], split, predict(split), reason)
        if predict.is_proven:
            break
    return None


class _Predictor:
    """Peaks under any split: those that were measured, else the fit, or what may be assumed as long as there is none.

    Points without samples are left out of the fit where there are others: an idle device holds no replica either.
    """

    def __init__(
        self,
        observed: Mapping[tuple[int, ...], Sequence[float | None]],
        current: tuple[int, ...],
        assumed_slope_mib: float | None,
        assumed_frac: float,
    ) -> None:
        self._observed = observed
        was_busy = [any(split[i] for split in observed) for i in range(len(current))]
        fit = fit_memory(
            MemoryObservation(
                split,
                tuple(mib if split[i] or not was_busy[i] else None for i, mib in enumerate(peaks)),
            )
            for split, peaks in observed.items()
        )
        self.fixed, self.slope = [mib or 0.0 for mib in fit.fixed_mib], fit.slope_mib
        self.source, self.is_proven = "fitted to what was measured", fit.is_proven
        if not fit.is_proven:
            pairs = [(mib, n) for mib, n in zip(observed[current], current, strict=True) if mib is not None]
            # Without a slope from anywhere: a part of the most that a sample can add, which is all if nothing is fixed.
            # Any move that it suggests goes the right way, and shows the slope.
            most = min((mib / n for mib, n in pairs if n), default=0.0)
            self.slope = assumed_frac * most if assumed_slope_mib is None else assumed_slope_mib
            self.fixed = [max(0.0, mib - self.slope * n) for mib, n in pairs]
            self.source = "no other split was tried yet" if assumed_slope_mib is None else "with the plan's slope"
        known = [fixed for i, fixed in enumerate(self.fixed) if was_busy[i] and i] or self.fixed[:1]
        for i, is_known in enumerate(was_busy):
            if not is_known:  # with samples it will hold a replica, as the others do
                self.fixed[i] = max(self.fixed[i], sum(known) / len(known))

    def __call__(self, split: tuple[int, ...]) -> tuple[float, ...]:
        known = self._observed.get(split)
        if known is not None and None not in known:
            return tuple(mib or 0.0 for mib in known)
        return tuple(fixed + self.slope * n for fixed, n in zip(self.fixed, split, strict=True))


def _fullest(mib: Sequence[float], total_mib: Sequence[float]) -> float:
    return max(need / total for need, total in zip(mib, total_mib, strict=True))


def _shown(split: Sequence[int]) -> str:
    return "·".join(map(str, split))
