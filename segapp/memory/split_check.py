"""Check if a batch split is possible and fits, from all facts that decide about it. Pure, and no torch here.

The trainer builds a `SplitChecker`, updates it with measurements, and writes it into its events. The TUI and `ctl` read
it there (`segapp.view.view.View.split_checker`), and the memory plan makes one without a run. So all of them get the
same result from the same facts. The result has a level: `refused` (no split can fulfill the request), `no change`,
`won't fit` (a device would need more than 95 % of its memory, or ran out of memory with as many samples before),
`tight` (more than 90 %, or the estimate is an upper bound), `ok`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from segapp.chunks import Split, SplitRequest, check_split
from segapp.memory.peaks import PeakModel
from segapp.run.words import dots

Level = Literal["ok", "tight", "won't fit", "no change", "refused"]

TIGHT_FRAC, FULL_FRAC = 0.90, 0.95
"""Shares of a device's memory above which a split is `tight`, and above which it `won't fit`."""

PLAIN_FRAC = 0.86
"""`FULL_FRAC` without expandable segments, whose fragments take more (docs: plan-accuracy)."""

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Settings of torch's allocator; the first that is set applies."""

EXPANDABLE_SEGMENTS = "expandable_segments:True"
"""The setting of a training on Linux with CUDA, unless the user has set another."""

MARGIN_FRAC = 0.02
"""Share of its memory that a change by `auto` must free on the fullest device."""

ASSUMED_FRACS = (1.0, 0.75, 0.5, 0.25)
"""If no slope is known: shares of a peak that are assumed to grow with the samples, tried in this order."""


@dataclass(frozen=True)
class CheckedSplit:
    """The result of checking a requested split."""

    split: Split | None
    level: Level
    reason: str
    """A sentence for the user, with the next move if there is one; never empty."""
    predicted_mib: tuple[float | None, ...] = ()
    """Peak of each device; empty without a split."""

    @property
    def is_possible(self) -> bool:
        """True if the split can be applied, possibly with `--force`: every level except `refused`."""
        return self.level != "refused"

    @property
    def is_allowed(self) -> bool:
        """True if the split changes something and needs no `--force`: `ok` and `tight`."""
        return self.level in ("ok", "tight")

    def rejection(self, *, force: bool) -> str | None:
        """Return why the request is rejected; None if it is accepted."""
        if self.is_possible and (force or self.level != "won't fit"):
            return None
        return f"won't fit: {self.reason}, or add --force" if self.is_possible else self.reason


@dataclass(frozen=True)
class SplitChecker:
    """The facts that decide which splits of a batch are possible and fit; `check` applies them to a request."""

    batch_size: int
    """Samples of a full batch, over all devices."""
    num_devices: int
    mode: str = "dp"
    """The parallel mode; only dp and ddp have a split that can be chosen."""
    smallest_chunk: int = 1
    """Minimum number of samples of a device that has any (`segapp.parallel.batchnorm_guard.smallest_chunk`)."""
    needs_samples: str | None = None
    """Why no device can be without samples; None if one can."""
    current: Split | None = None
    usable_mib: Sequence[float | None] = ()
    """Memory of each device for this run (`usable_mib`)."""
    peaks: PeakModel = field(default_factory=PeakModel)
    tensor_frac: float = FULL_FRAC
    """Share of a device's memory for tensors; the rest is for the fragments of torch's allocator. `room` in events."""
    ceiling: int | None = None
    """Number of samples on device 0 with which it ran out of memory."""
    failed: Collection[Split] = ()

    @property
    def why_no_split(self) -> str | None:
        """Why no split can be chosen; None if one can."""
        if self.mode in ("dp", "ddp"):
            return None
        why = "parallel.mode = model: every device has the whole batch"
        why = why if self.mode == "model" else "there is one device: it takes the whole batch"
        return f"{why}: a split is for parallel.mode = dp or ddp"

    def check(self, request: SplitRequest | int | Literal["auto"] | None) -> CheckedSplit:
        """Check a requested split against all known facts; never raises for a bad request.

        A number is for device 0, None is an even split, and `auto` follows the measured memory.

        Example:
            >>> SplitChecker(8, 3, current=(0, 4, 4)).check(2).split
            (2, 3, 3)
            >>> SplitChecker(8, 3).check(9).level
            'refused'
            >>> full = PeakModel({(4, 4): (980.0, 500.0)})
            >>> SplitChecker(8, 2, usable_mib=[1000, 1000], peaks=full).check(4).level
            "won't fit"
        """
        if self.why_no_split is not None:
            return CheckedSplit(None, "refused", self.why_no_split)
        if request == "auto":
            if self.usable_mib and None not in self.usable_mib:
                return CheckedSplit(self.current, "ok", "the split follows the measured memory")
            reason = (
                "auto needs the memory of each device, which is unknown where devices share one memory: use a number"
            )
            return CheckedSplit(None, "refused", reason)
        split, note = self._split_of(request)
        if split is None:
            return CheckedSplit(None, "refused", note)
        predicted = self.peaks.peak_mib(split)
        if self.current == split:
            return CheckedSplit(split, "no change", "this split is already in use", predicted)
        level, reason = self.fit_of(split)
        if level == "ok" and note:
            reason = f"{reason}; {note}"
        return CheckedSplit(split, level, reason, predicted)

    def _split_of(self, request: SplitRequest | int | None) -> tuple[Split | None, str]:
        """Return a split and a note on it, which may be empty; or None and why no split fulfills the request."""
        split, note = check_split(request, self.batch_size, self.num_devices, self.smallest_chunk)
        if split is not None and self.needs_samples is not None and 0 in split:
            reason = f"split {dots(split)} leaves a rank without samples, and {self.needs_samples}"
            return None, f"{reason}: give every rank at least one sample"
        return split, note

    def fit_of(self, split: Sequence[int]) -> tuple[Level, str]:
        """Return the level of the device with the highest share of its memory in use under a split, and the reason.

        Predictions that are upper bounds warn but do not forbid.
        """
        # A failure counts more than any prediction.
        if self.ceiling is not None and split[0] >= self.ceiling:
            return "won't fit", f"device 0 ran out of memory with {self.ceiling} samples: use fewer"
        # A share of such a device's memory would be negative or infinite.
        full = next((i for i, total in enumerate(self.usable_mib) if total is not None and total <= 0), None)
        if full is not None:
            return "won't fit", f"device {full} has less memory than the driver's context and other processes need"
        known = [
            (peak.mib / total, i, peak.mib, total, peak.basis == "bound")
            for i, (peak, total) in enumerate(zip(self.peaks.peak(split), self.usable_mib, strict=False))
            if peak.mib is not None and total is not None
        ]
        if not known:
            return "ok", "the memory it needs is not known yet"
        frac, device, mib, total, is_bound = max(known)
        need = f"device {device} would need about {_amount(mib, total)} ({100 * frac:.0f} %)"
        tight_frac = self.tensor_frac - (FULL_FRAC - TIGHT_FRAC)
        if is_bound and frac > tight_frac:
            return "tight", f"{need} at most: no other split was measured yet"
        if not fits(mib, total, self.tensor_frac):
            return "won't fit", f"{need}: give it fewer samples"
        if frac > tight_frac:
            return "tight", f"{need}: little memory is left"
        return "ok", need

    def best_move(self) -> CheckedSplit | None:
        """Return the change from the current split to the split whose fullest device is least full; None for no change.

        Without measured peaks of the current split, or without the memory of each device, there is no change. A change
        must free more than `MARGIN_FRAC` of the memory of the fullest device, and a split that has been used is rated
        by its measured peaks. So the changes end, whatever the noise of the measurements.

        Example:
            >>> peaks = PeakModel({(6, 1, 1): (700.0, 200.0, 200.0)}, slope_mib=100.0)
            >>> SplitChecker(8, 3, current=(6, 1, 1), usable_mib=[1000.0] * 3, peaks=peaks).best_move().split
            (2, 3, 3)
        """
        current = self.current
        totals = [mib for mib in self.usable_mib if mib]
        measured = None if current is None else self.peaks.measured.get(current)
        if current is None or measured is None or None in measured or len(totals) < len(current):
            return None
        candidates = self._candidates()
        for peaks, source in self._rated_by():
            # The default binds this model, because the function is also called after the loop has moved on.
            def rate(split: Split, peaks: PeakModel = peaks) -> list[float]:
                return [(mib or 0.0) / total for mib, total in zip(peaks.peak_mib(split), totals, strict=True)]

            now = rate(current)
            split = min(candidates, key=lambda split: max(rate(split)), default=current)
            then = max(rate(split))
            if then <= max(now) - MARGIN_FRAC:
                reason = (
                    f"auto: device {now.index(max(now))} is the fullest, {100 * max(now):.0f} % at split "
                    f"{dots(current)}; {dots(split)} is expected to bring the fullest to "
                    f"{100 * then:.0f} % ({source})"
                )
                return CheckedSplit(split, "ok", reason, peaks.peak_mib(split))
        return None

    def _rated_by(self) -> list[tuple[PeakModel, str]]:
        """Return the peak models by which splits are rated, to be tried in order, and their sources.

        Without a known slope, these are shares of the largest slope that the peaks allow. A change based on it goes in
        the right direction, and its measurement gives the slope.
        """
        if self.peaks.is_proven:
            return [(self.peaks, "fitted to what was measured")]
        if self.peaks.slope_mib is not None:
            return [(self.peaks, "with the plan's slope")]
        largest = self.peaks.largest_slope_mib
        source = "no other split was measured yet"
        return [(replace(self.peaks, slope_mib=frac * largest), source) for frac in ASSUMED_FRACS]

    def _candidates(self) -> list[Split]:
        """Return the splits to try, each by another number of samples on device 0."""
        splits = [split for first in range(self.batch_size + 1) if (split := self._split_of(first)[0]) is not None]
        most = self.batch_size if self.ceiling is None else self.ceiling - 1
        return [split for split in splits if split != self.current and split not in self.failed and split[0] <= most]

    def with_failure(self, split: Sequence[int], old: Sequence[int] | None = None) -> SplitChecker:
        """Return the checker after a split ran out of memory and `old` did not; None: the current split."""
        old = self.current if old is None else old
        ceiling = self.ceiling
        if old is not None and split[0] > old[0]:
            ceiling = min(split[0], ceiling or split[0])
        return replace(self, failed=frozenset({*self.failed, tuple(split)}), ceiling=ceiling)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "current": None if self.current is None else list(self.current),
            "usable_mib": list(self.usable_mib),
            "peaks": self.peaks.to_json(),
            "failed": [list(split) for split in sorted(self.failed)],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> SplitChecker:
        """Return the checker of `to_json`'s values; unknown names are ignored.

        Raises:
            ValueError: A value is missing or not of its type.
        """
        try:
            known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
            known["current"] = None if known["current"] is None else tuple(known["current"])
            known["usable_mib"] = tuple(known["usable_mib"])
            known["peaks"] = PeakModel.from_json(known["peaks"])
            known["failed"] = frozenset(tuple(split) for split in known["failed"])
            return cls(**known)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not the facts of a split: {error}") from None


def fits(tensors_mib: float, usable_mib: float, tensor_frac: float) -> bool:
    """Return True if tensors fit into a device of which a share is for the fragments of torch's allocator."""
    return tensors_mib / tensor_frac <= usable_mib


def tensor_frac(environ: Mapping[str, str]) -> float:
    """Return the share of a device's memory for tensors; the rest is for the fragments of torch's allocator."""
    settings = next((environ[name] for name in ALLOCATOR_VARIABLES if name in environ), "")
    is_expandable = EXPANDABLE_SEGMENTS.lower() in settings.replace(" ", "").lower()
    return FULL_FRAC if is_expandable else PLAIN_FRAC


def usable_mib(total_mib: float | None, used_mib: float | None, reserved_mib: float | None) -> float | None:
    """Return the memory of a device minus the memory of other processes and of the driver's context, MiB.

    The driver reports `used_mib` for all processes together; `reserved_mib` of it is held by this run's allocator.
    """
    if total_mib is None or used_mib is None or reserved_mib is None:
        return total_mib
    return max(0.0, total_mib - max(0.0, used_mib - reserved_mib))


def _amount(peak_mib: float, total_mib: float) -> str:
    if total_mib < 4096:
        return f"{peak_mib:.0f} of {total_mib:.0f} MiB"
    return f"{peak_mib / 1024:.1f} of {total_mib / 1024:.1f} GiB"
