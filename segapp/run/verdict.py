"""The check of a requested batch split, the same for trainer, `ctl`, screen and planner. Pure, and no torch here.

The verdict has a level: `refused` (no split can honour the request), `no change`, `won't fit` (a device would need more
than 95 % of its memory, or ran out of memory with as many samples before), `tight` (more than 90 %, or the estimate is
an upper bound), `ok`.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from segapp.parallel.chunks import check_split
from segapp.run.memory_fit import MemoryFit, fit_memory

Level = Literal["ok", "tight", "won't fit", "no change", "refused"]

TIGHT_FRAC, FULL_FRAC = 0.90, 0.95
"""Shares of a device's memory above which a split is `tight`, and above which it `won't fit`."""


@dataclass(frozen=True)
class SplitFacts:
    """The facts about a run that decide which splits of its batch are possible and fit.

    Attributes:
        batch_size: Samples of a full batch, over all devices.
        num_devices: Devices that share it.
        mode: Of the training; `dp` and `ddp` have a split that can be chosen.
        smallest_chunk: Samples that a device with samples needs at least (`segapp.parallel.smallest_chunk`).
        needs_samples: Why no device can be left without samples; None if one can.
        current: The split in force.
        usable_mib: Memory of each device for this run (`usable_mib`); None where unknown.
        observed: Measured peak of each device for each split that was in force, MiB.
        ceiling: Samples on device 0 with which it ran out of memory.
        failed: Splits that ran out of memory.
        planned_slope_mib: MiB that one sample adds according to the memory plan.
    """

    batch_size: int
    num_devices: int
    mode: str = "dp"
    smallest_chunk: int = 1
    needs_samples: str | None = None
    current: tuple[int, ...] | None = None
    usable_mib: Sequence[float | None] = ()
    observed: Mapping[tuple[int, ...], Sequence[float | None]] = field(default_factory=dict)
    ceiling: int | None = None
    failed: Collection[tuple[int, ...]] = ()
    planned_slope_mib: float | None = None

    def fit(self) -> MemoryFit:
        """Return the linear fit of the measured peaks."""
        return fit_memory(self.observed.items())


@dataclass(frozen=True)
class SplitVerdict:
    """The result of checking a requested split.

    Attributes:
        split: Samples of a full batch per device; None where the request is refused.
        level: How it fits.
        reason: A sentence for the user, with the next move where there is one; never empty.
        predicted_mib: Peak of each device, None where nothing is known; empty without a split.
    """

    split: tuple[int, ...] | None
    level: Level
    reason: str
    predicted_mib: tuple[float | None, ...] = ()

    @property
    def is_possible(self) -> bool:
        """True if the split can be applied at all, with `force`: every level but `refused`."""
        return self.level != "refused"

    @property
    def is_allowed(self) -> bool:
        """True if the split changes something and needs no `force`: `ok` and `tight`."""
        return self.level in ("ok", "tight")

    def rejection(self, *, force: bool) -> str | None:
        """Return why the request is rejected; None if it is accepted.

        Args:
            force: Accept a split that is not expected to fit.
        """
        if not self.is_possible:
            return self.reason
        return f"won't fit: {self.reason}, or add force" if self.level == "won't fit" and not force else None


def split_verdict(
    facts: SplitFacts,
    gpu0_bsz: int | Literal["auto"] | None,
    shares: Sequence[int] | None = None,
    *,
    predicted_mib: Sequence[float | None] = (),
) -> SplitVerdict:
    """Check a requested split against everything that is known about the run; never raises for a bad request.

    Args:
        facts: What is known about the run.
        gpu0_bsz: Samples of device 0 in a full batch; None for an even split; `auto` to follow the measured memory.
        shares: Samples of every device instead.
        predicted_mib: Peak of each device under the requested split; default: predicted from `facts.observed`.

    Example:
        >>> split_verdict(SplitFacts(8, 3, current=(0, 4, 4)), 2).split
        (2, 3, 3)
        >>> split_verdict(SplitFacts(8, 3), 9).level
        'refused'
        >>> split_verdict(SplitFacts(8, 2, usable_mib=[1000, 1000]), 4, predicted_mib=[980, 500]).level
        "won't fit"
    """
    if facts.mode not in ("dp", "ddp"):
        return SplitVerdict(None, "refused", _nothing_to_split(facts.mode))
    if gpu0_bsz == "auto":
        return _auto_verdict(facts)
    check = check_split(
        facts.batch_size, facts.num_devices, gpu0_bsz, shares=shares, smallest_chunk=facts.smallest_chunk
    )
    if check.split is None:
        return SplitVerdict(None, "refused", check.reasons[0])
    if facts.needs_samples is not None and 0 in check.split:
        reason = f"split {format_split(check.split)} leaves a rank without samples, and {facts.needs_samples}"
        return SplitVerdict(None, "refused", f"{reason}: give every rank one")
    fit = None if predicted_mib else facts.fit()
    predicted = tuple(predicted_mib) if fit is None else fit.predict(check.split)
    if facts.current == check.split:
        return SplitVerdict(check.split, "no change", "this split is in force already", predicted)
    level, reason = _memory_level(facts, check.split, predicted, is_bound=fit is not None and not fit.is_proven)
    if level == "ok" and check.notes:
        reason = f"{reason}; {check.notes[0]}"
    return SplitVerdict(check.split, level, reason, predicted)


def usable_mib(total_mib: float | None, used_mib: float | None, reserved_mib: float | None) -> float | None:
    """Return the memory of a device without what other processes and the driver's context hold, MiB.

    Args:
        total_mib: Of the device.
        used_mib: As the driver reports it, all processes together.
        reserved_mib: Part of it that this run's allocator holds.
    """
    if total_mib is None or used_mib is None or reserved_mib is None:
        return total_mib
    return max(0.0, total_mib - max(0.0, used_mib - reserved_mib))


def format_split(split: Sequence[int] | None) -> str:
    """Return a split as users see it: `2·3·3`; `-` where there is none."""
    return "·".join(map(str, split)) if split else "-"


def _nothing_to_split(mode: str) -> str:
    why = "parallel.mode = model: every device has the whole batch"
    why = why if mode == "model" else "there is one device: it takes the whole batch"
    return f"{why}: gpu0_bsz and shares are for parallel.mode = dp or ddp"


def _auto_verdict(facts: SplitFacts) -> SplitVerdict:
    if facts.usable_mib and None not in facts.usable_mib:
        return SplitVerdict(facts.current, "ok", "the split follows the measured memory")
    reason = (
        "gpu0_bsz=auto needs the memory of each device, which is unknown where devices share one memory: "
        "use a number, or set parallel.memory_budget_mib"
    )
    return SplitVerdict(None, "refused", reason)


def _memory_level(
    facts: SplitFacts, split: Sequence[int], predicted_mib: Sequence[float | None], *, is_bound: bool
) -> tuple[Level, str]:
    """Return the level of the device with the highest share of its memory, and the reason.

    Predictions that are upper bounds (`is_bound`) warn but do not forbid.
    """
    if facts.ceiling is not None and split[0] >= facts.ceiling:
        return "won't fit", f"device 0 ran out of memory with {facts.ceiling} samples: use fewer"
    known = [
        (peak / total, i, peak, total)
        for i, (peak, total) in enumerate(zip(predicted_mib, facts.usable_mib, strict=False))
        if peak is not None and total
    ]
    if not known:
        return "ok", "the memory it needs is not known yet"
    frac, device, peak, total = max(known)
    need = f"device {device} would need about {_amount(peak, total)} ({100 * frac:.0f} %)"
    if is_bound and frac > TIGHT_FRAC:
        return "tight", f"{need} at most: no other split was measured yet"
    if frac > FULL_FRAC:
        return "won't fit", f"{need}: give it fewer samples"
    if frac > TIGHT_FRAC:
        return "tight", f"{need}: little memory is left"
    return "ok", need


def _amount(peak_mib: float, total_mib: float) -> str:
    if total_mib < 4096:
        return f"{peak_mib:.0f} of {total_mib:.0f} MiB"
    return f"{peak_mib / 1024:.1f} of {total_mib / 1024:.1f} GiB"
