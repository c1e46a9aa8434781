"""Calibration of a memory plan by a run: peaks per split, memory other than tensors, and the error of the prediction.

The data are in `events.jsonl`: `memory` events have each device's peak; `run_start`, `epoch_start`, `gpu0_bsz` and
`step` events have the split at that time. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from segapp.errors import ConfigError
from segapp.memory.peaks import PeakModel, PlannedPeaks, Split, measured_scale
from segapp.memory.plan import GpuSpec, OverheadEstimate
from segapp.run.events import EventReader
from segapp.run.folder import RunFolder


@dataclass(frozen=True)
class Measurement:
    """Measured memory of a run."""

    devices: tuple[str, ...]
    total_mib: tuple[float | None, ...]
    peaks_mib: Mapping[Split, tuple[float | None, ...]]
    """The highest peak of each device under each split, since the last unfreezing if there was one."""
    beside_mib: tuple[float | None, ...]
    """Memory in use on each GPU outside the run's allocator (context, other processes); None if unknown."""
    is_frozen: bool = False
    """True if frozen parameters will be unfrozen later, which needs more memory than was measured."""

    def gpus(self) -> tuple[GpuSpec, ...]:
        """Return the run's GPUs.

        Raises:
            ConfigError: the events do not have their memory sizes.
        """
        known_mib = [mib for mib in self.total_mib if mib is not None]
        if not self.devices or len(known_mib) < len(self.devices):
            raise ConfigError("the run's events do not have the memory of its devices: give it with --gpus 3x24220MiB")
        return tuple(GpuSpec(mib, name) for mib, name in zip(known_mib, self.devices, strict=True))


@dataclass(frozen=True)
class PeakError:
    """Measured and predicted peak of one device under one split, MiB of tensors."""

    split: tuple[int, ...]
    device: int
    measured_mib: float
    predicted_mib: float
    calibrated_mib: float

    @property
    def error(self) -> float:
        """Relative error of the uncalibrated prediction; negative if it was too low."""
        return self.predicted_mib / self.measured_mib - 1

    @property
    def calibrated_error(self) -> float:
        """Relative error of the calibrated prediction."""
        return self.calibrated_mib / self.measured_mib - 1


def read_measurement(folder: RunFolder) -> Measurement:
    """Return the measurements in a run's events.

    Raises:
        ConfigError: there are none yet, or the run had no GPUs.
    """
    measurement = collect(EventReader(folder.events).read_raw())
    where = folder.path.name
    if measurement.devices and all(name.startswith("cpu") for name in measurement.devices):
        raise ConfigError(f"{where} trained on the CPU, so it cannot improve a plan for GPUs: leave out --run")
    if not measurement.peaks_mib:
        raise ConfigError(f"{where} has no measured peak yet: let it train for some steps, or leave out --run")
    if measurement.is_frozen:
        raise ConfigError(
            f"{where} still trains with frozen parameters, and a plan is for the epochs after model.freeze_epochs: let "
            "it train further, or leave out --run"
        )
    return measurement


def collect(events: Iterable[dict[str, Any]]) -> Measurement:
    """Return the measurements in raw events; missing numbers are skipped."""
    devices: tuple[str, ...] = ()
    split: tuple[int, ...] | None = None
    total: list[float | None] = []
    peaks = PeakModel()
    beside: list[list[float]] = []
    may_thaw = has_thawed = False
    for event in events:
        kind = event["type"]
        if kind == "run_start":
            may_thaw = event.get("freeze_epochs") is not None
            devices = tuple(d if isinstance(d, str) else str(d.get("device")) for d in event.get("devices") or ())
        if kind == "epoch_start" and event.get("num_thawed") is not None:
            has_thawed = True
            peaks = PeakModel()
        if kind in ("run_start", "epoch_start") or (kind == "gpu0_bsz" and event.get("status") == "applied"):
            split = _split(event) or split
        elif kind == "step" and split is None:
            split = _split(event)
        elif kind == "memory" and split is not None:
            rows = [row if isinstance(row, dict) else {} for row in event.get("devices") or ()]
            if len(rows) != len(split):
                continue
            total = [_number(row.get("total_mib")) for row in rows]
            beside = beside or [[] for _ in rows]
            peaks = peaks.with_measured(split, [_number(row.get("peak_mib")) for row in rows])
            for i, row in enumerate(rows):
                used, reserved = _number(row.get("used_mib")), _number(row.get("reserved_mib"))
                if used is not None and reserved is not None:
                    beside[i].append(max(0.0, used - reserved))
    measured = {split: known for split, known in peaks.measured.items() if any(known)}
    medians = tuple(median(mib) if mib else None for mib in beside)
    return Measurement(devices, tuple(total), measured, medians, may_thaw and not has_thawed)


def calibrated(
    measurement: Measurement, model: PlannedPeaks, assumed: OverheadEstimate
) -> tuple[OverheadEstimate, list[PeakError]]:
    """Return the overhead with measured instead of assumed values, and the errors of the prediction."""
    scale = measured_scale(model, measurement.peaks_mib, len(assumed.context_mib))
    beside_mib = (*measurement.beside_mib, *[None] * len(scale))  # none was measured on GPUs that the run did not have
    context = tuple(
        assumed_mib if mib is None else mib for assumed_mib, mib in zip(assumed.context_mib, beside_mib, strict=False)
    )
    errors = [
        PeakError(split, i, measured, mib, mib * scale[i])
        for split, peaks in measurement.peaks_mib.items()
        for i, (measured, mib) in enumerate(zip(peaks, model.peak_mib(split), strict=True))
        if measured and mib and i < len(scale)
    ]
    return OverheadEstimate(context, assumed.room, scale, "measured"), errors


def _split(event: dict[str, Any]) -> tuple[int, ...] | None:
    split = event.get("split")
    is_split = isinstance(split, list) and split and all(isinstance(part, int) and part >= 0 for part in split)
    return tuple(split) if is_split and isinstance(split, list) else None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
