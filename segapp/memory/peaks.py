"""The peak memory of each device under a split: planned by simulation, or measured by a run. No torch here.

The peak of a device is close to a line, `peak_i = fixed_i + slope * samples_i`. `PeakModel.peak` is the only prediction
of the memory of a split, and says what it is based on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from segapp.chunks import Mode, Split

EVAL = "eval"
PHASES = ("forward", "loss", "backward", "step", EVAL)
"""The phases of a training, with the names of `memory` events."""

KINDS = (
    "weights", "buffers", "masters", "optimizer", "average", "replicas", "gradients", "buckets", "input",
    "activations", "loss", "temporaries", "evaluation", "workspaces",
)  # fmt: skip
"""Kinds of memory, in the order of the bars in reports."""


BlocksPerDevice = tuple[tuple[str, ...], ...]
"""Names of the recomputed blocks of each device in dp, and of each rank in ddp: `(("layer1.0", "layer1.1"), ())`
recomputes two blocks on device 0 and none on device 1. Other modes have one tuple of names."""


@dataclass(frozen=True)
class SimulationJob:
    """One simulation."""

    mode: Mode
    split: tuple[int, ...]
    """Samples per simulated device; a rank of ddp is one device."""
    accumulate: int = 1
    eval_px: tuple[int, int] | None = None
    """Height and width of the evaluated images; None: no evaluation."""
    recompute: BlocksPerDevice | None = None
    """None: the blocks of the config, and none with `train.recompute: auto`."""
    blas_mib: float = 0.0
    """Workspace that torch's allocator gives to cuBLAS for each thread; 0 on a CPU."""


@dataclass(frozen=True)
class PhasePeak:
    """Memory of live tensors at the peak of a device in a phase, MiB."""

    mib: float
    by_kind: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class SimulationResult:
    """Result of a simulation: the peak of each phase, for each device."""

    devices: tuple[dict[str, PhasePeak], ...]

    def peak_mib(self) -> tuple[float, ...]:
        return tuple(max((peak.mib for peak in phases.values()), default=0.0) for phases in self.devices)


@dataclass(frozen=True)
class NetworkFacts:
    """The network of a config and its images, as far as a plan and its notes need them."""

    blocks: dict[str, int]
    """Number of parameters of each block that can be recomputed, by name, in the order of definition."""
    num_params: int
    smallest_chunk: int
    needs_samples: str | None
    min_train_batch: int
    eval_px: tuple[int, int]
    eval_px_from: str
    """Source of `eval_px`, the height and width of the largest evaluated image."""
    precision: str
    fp32_part: str | None
    """Custom component that asks for float32."""
    loss_note: str | None


Point = tuple[float, float]
"""(x, y): samples on a device, MiB."""

Basis = Literal["measured", "fitted", "planned", "bound", "unknown"]
"""Sources of a device's peak, the most reliable first. `measured`: the split was used. `fitted`: a line through
measurements with other numbers of samples. `planned`: simulated, or a line through measurements with the slope of the
memory plan. `bound`: an upper bound from one number of samples."""


def fit_lines(
    groups: Sequence[Sequence[Point]], slope: float | None = None
) -> tuple[float | None, tuple[float | None, ...]]:
    """Fit `y = fixed[group] + slope * x` by least squares, with one slope for all groups, which may be given.

    The slope is None if it was not given, and no group has points with different x; then the lines have slope 0. The
    constant of a group without points is None.

    Example:
        >>> fit_lines([[(2, 500.0), (4, 700.0)], [(1, 50.0)]])
        (100.0, (300.0, -50.0))
    """
    # Deviations from the means of a group, so that the groups share the slope and not the constant.
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
    return slope, tuple(sum(y - used * x for x, y in points) / len(points) if points else None for points in groups)


FEW, MANY = (2, 4), (10, 12)
"""Samples per device in the simulations of the two regimes; at least 2, because BatchNorm may need 2."""


@dataclass(frozen=True)
class Line:
    """MiB as an affine function of the samples on a device."""

    fixed: float = 0.0
    per_sample: float = 0.0

    @classmethod
    def through(cls, samples: tuple[int, int], values: Sequence[float]) -> Line:
        slope, (fixed,) = fit_lines([list(zip(samples, values, strict=True))])
        return cls(fixed or 0.0, slope or 0.0)

    def at(self, samples: int) -> float:
        return max(0.0, self.fixed + self.per_sample * samples)


@dataclass(frozen=True)
class PhaseLines:
    """Memory at the peak of a device in one phase, and of each kind in it, MiB."""

    total: Line
    by_kind: Mapping[str, Line] = field(default_factory=dict)

    @classmethod
    def through(cls, samples: tuple[int, int], peaks: Sequence[PhasePeak]) -> PhaseLines:
        kinds = dict.fromkeys(kind for peak in peaks for kind in peak.by_kind)
        by_kind = {kind: Line.through(samples, [peak.by_kind.get(kind, 0.0) for peak in peaks]) for kind in kinds}
        return cls(Line.through(samples, [peak.mib for peak in peaks]), by_kind)

    def at(self, samples: int) -> PhasePeak:
        return PhasePeak(self.total.at(samples), {kind: line.at(samples) for kind, line in self.by_kind.items()})


@dataclass(frozen=True)
class DeviceLines:
    """Memory of a device; of the lines for few and for many samples, the higher one applies."""

    phases: Mapping[str, tuple[PhaseLines, ...]] = field(default_factory=dict)

    def phase_mib(self, samples: int) -> dict[str, float]:
        """Return phase -> MiB; a plan needs this for thousands of splits, so the kinds are left out."""
        return {phase: max(each.total.at(samples) for each in lines) for phase, lines in self.phases.items()}

    def peaks(self, samples: int) -> dict[str, PhasePeak]:
        return {
            phase: max((each.at(samples) for each in lines), key=lambda peak: peak.mib)
            for phase, lines in self.phases.items()
        }


@dataclass(frozen=True)
class PlannedPeaks:
    """Peaks of the tensors on every device under any split, from a few simulated ones, MiB.

    In each phase, `peak = fixed + per_sample * samples of the device`. Device 0 without samples has separate lines,
    because it holds no activations and gradients of a replica; another device without samples only evaluates.

    The peak of a phase may occur at different times with few and with many samples (with few, loss bands and
    gradients matter more). So there are two regimes of lines, and the higher one applies. The model is wrong by about
    20 MiB for chunks whose upsampled logits are below 8 MiB, because the loss then computes them whole, so the peak is
    not affine.
    """

    mode: Mode
    first: DeviceLines
    """Device 0 with samples; in mode model, the device of the first stage."""
    others: tuple[DeviceLines, ...] = ()
    """Further devices with samples; the last entry applies to all that follow, and `first` if it is empty."""
    idle: DeviceLines = field(default_factory=DeviceLines)
    """Device 0 without samples."""

    def peaks(self, split: Sequence[int]) -> tuple[dict[str, PhasePeak], ...]:
        return tuple(lines.peaks(samples) for lines, samples in self._devices(split))

    def phase_mib(self, split: Sequence[int]) -> tuple[dict[str, float], ...]:
        return tuple(lines.phase_mib(samples) for lines, samples in self._devices(split))

    def peak_mib(self, split: Sequence[int]) -> tuple[float, ...]:
        return tuple(max(phases.values(), default=0.0) for phases in self.phase_mib(split))

    def _devices(self, split: Sequence[int]) -> Iterator[tuple[DeviceLines, int]]:
        """Return the lines of each device, and its samples."""
        devices = (self.first, *self.others)
        for i, samples in enumerate(split):
            if self.mode == "model":
                yield devices[i], sum(split)
            elif samples or self.mode == "ddp":  # a rank without samples also has weights, gradients and optimizer
                yield devices[min(i, len(self.others))], samples
            else:
                yield self._evaluating if i else self.idle, samples

    @cached_property
    def _evaluating(self) -> DeviceLines:
        """The lines of the evaluation, in which devices without samples also take part."""
        phases = self.others[0].phases if self.others else {}
        return DeviceLines({EVAL: phases[EVAL]} if EVAL in phases else {})


def splits_to_simulate(mode: Mode, num_devices: int) -> list[tuple[int, ...]]:
    """Return the splits from which `fit_model` predicts all others; in mode dp, two devices represent any number."""
    if mode == "dp" and num_devices > 1:
        return [FEW, FEW[::-1], MANY, MANY[::-1], (0, FEW[1])]
    rest = (0,) * (num_devices - 1) if mode == "model" else ()
    return [(samples, *rest) for samples in (*FEW, *MANY)]


def fit_model(mode: Mode, results: Sequence[SimulationResult]) -> PlannedPeaks:
    """Return the affine model that agrees with the results of `splits_to_simulate`, in that order."""
    steps = [result.devices for result in results]
    if len(steps) == len((*FEW, *MANY)):
        first, *others = (_lines_of(*four) for four in zip(*steps, strict=True))
        return PlannedPeaks(mode, first, tuple(others))
    few, few_turned, many, many_turned, without = steps
    first = _lines_of(few[0], few_turned[0], many[0], many_turned[0])
    other = _lines_of(few_turned[1], few[1], many_turned[1], many[1])
    return PlannedPeaks(mode, first, (other,), idle=_lines_of(*[without[0]] * 4))


def _lines_of(*steps: Mapping[str, PhasePeak]) -> DeviceLines:
    """Return the lines of a device through four simulations, with the samples of `FEW` and of `MANY`."""
    phases: dict[str, tuple[PhaseLines, ...]] = {}
    for phase in PHASES:
        peaks = [by_phase.get(phase, PhasePeak(0.0)) for by_phase in steps]
        if any(phase in by_phase for by_phase in steps):
            phases[phase] = PhaseLines.through(FEW, peaks[:2]), PhaseLines.through(MANY, peaks[2:])
    return DeviceLines(phases)


class Peak(NamedTuple):
    """The peak of one device under a split."""

    mib: float | None
    basis: Basis


@dataclass(frozen=True)
class PeakModel:
    """Planned and measured peaks, and the predicted peaks of any split.

    A run has measured peaks and the plan's slope; a memory plan has simulated lines.
    """

    measured: Mapping[Split, tuple[float | None, ...]] = field(default_factory=dict)
    """Highest allocation of each device under each split that was used, MiB."""
    slope_mib: float | None = None
    """MiB that one sample adds to a device according to the memory plan."""
    planned: PlannedPeaks | None = None
    """Simulated lines; if given, they are used for every split. They are not written to JSON."""

    def peak(self, split: Sequence[int]) -> tuple[Peak, ...]:
        """Return the peak of each device under a split, MiB, and the basis of each number.

        While no slope is known, the peaks are upper bounds: a peak scales with the samples if they increase, and stays
        the same if they decrease.

        Example:
            >>> PeakModel({(2, 3): (500.0, 600.0), (1, 4): (400.0, 700.0)}).peak((3, 2))
            (Peak(mib=600.0, basis='fitted'), Peak(mib=500.0, basis='fitted'))
            >>> PeakModel({(4, 4): (800.0, 700.0)}).peak((5, 3))
            (Peak(mib=1000.0, basis='bound'), Peak(mib=700.0, basis='bound'))
        """
        if self.planned is not None:
            return tuple(Peak(mib, "planned") for mib in self.planned.peak_mib(split))
        measured = self.measured.get(tuple(split), ())
        return tuple(
            Peak(measured[i], "measured") if i < len(measured) and measured[i] is not None else self._estimate(i, count)
            for i, count in enumerate(split)
        )

    def peak_mib(self, split: Sequence[int]) -> tuple[float | None, ...]:
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
        return self._fitted_slope_mib is not None

    @property
    def largest_slope_mib(self) -> float:
        """The largest slope that the measured peaks allow: the slope if a device needed no fixed memory."""
        return min((mib / samples for points in self._points for samples, mib in points if samples), default=0.0)

    def _estimate(self, device: int, samples: int) -> Peak:
        fixed = self._fixed_mib[device] if device < len(self._fixed_mib) else None
        if fixed is None:
            return Peak(None, "unknown")
        # Without samples there is no replica on the device, so the line through samples does not hold.
        idle = [mib for count, mib in self._observed[device] if not count]
        if self._basis != "bound":
            mib = max(idle) if idle and not samples else fixed + self._slope_mib * samples
            return Peak(mib, self._basis)
        observed_samples, observed_mib = max(self._points[device])
        # A part of the peak is fixed, so more samples need at most the proportional amount, and fewer at most the peak.
        if samples <= observed_samples:
            return Peak(max(idle) if idle and not samples else observed_mib, "bound")
        return Peak(observed_mib * samples / observed_samples, "bound") if observed_samples else Peak(None, "unknown")

    @cached_property
    def _observed(self) -> list[list[Point]]:
        devices: list[list[Point]] = [[] for _ in range(max(map(len, self.measured), default=0))]
        for split, peaks in self.measured.items():
            for points, samples, peak in zip(devices, split, peaks, strict=False):
                if peak is not None:
                    points.append((samples, peak))
        return devices

    @cached_property
    def _points(self) -> list[list[Point]]:
        """The points of the lines; points without samples (no replica on the device) only if there are no others."""
        return [[point for point in points if point[0]] or points for points in self._observed]

    @cached_property
    def _fitted_slope_mib(self) -> float | None:
        """The slope of the measurements; if no single device gives one, all but the first share one."""
        slope, _ = fit_lines(self._points)
        return fit_lines([[point for points in self._points[1:] for point in points]])[0] if slope is None else slope

    @property
    def _basis(self) -> Basis:
        return "fitted" if self.is_proven else "bound" if self.slope_mib is None else "planned"

    @cached_property
    def _slope_mib(self) -> float:
        return max(0.0, self._fitted_slope_mib or 0.0) if self.is_proven else self.slope_mib or 0.0

    @cached_property
    def _fixed_mib(self) -> list[float | None]:
        """The constant of each device's line; None for a device that was never measured."""
        fixed = list(fit_lines(self._points, self._slope_mib)[1])
        if self._basis == "bound":
            return fixed
        was_busy = [any(samples for samples, _ in points) for points in self._points]
        if not self.is_proven:
            fixed = [None if mib is None else max(0.0, mib) for mib in fixed]
        known = [mib for mib, is_busy in zip(fixed[1:], was_busy[1:], strict=True) if is_busy and mib is not None]
        known = known or [mib for mib in fixed[:1] if mib is not None]
        for i, mib in enumerate(fixed):
            if not was_busy[i] and known:  # with samples it will hold a replica, as the other devices do
                fixed[i] = max(mib or 0.0, sum(known) / len(known))
        return fixed

    def to_json(self) -> dict[str, Any]:
        measured = [[list(split), list(peaks)] for split, peaks in self.measured.items()]
        return {"measured": measured, "slope_mib": self.slope_mib}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> PeakModel:
        return cls({tuple(split): tuple(peaks) for split, peaks in values["measured"]}, values["slope_mib"])
