"""The affine memory model: from a few simulated splits to each device's peak under any split. No torch here.

In each phase `peak = fixed + per_sample * samples of the device + per_batch * samples of the batch`. `per_batch` is
the cost of gathering outputs on device 0; with the parallel criterion it is 0. Device 0 without samples has lines of
its own, because it holds no activations and no gradients of a replica; another device without samples evaluates only.

The peak of a phase may occur at different moments with few and with many samples (with few, loss bands and gradients
weigh more). So there are two regimes of lines, and the higher one holds. The model is off by about 20 MiB for chunks
whose upsampled logits are below 8 MiB, because the loss then computes them whole: there the peak is not affine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segapp.memory.peaks import fit_lines
from segapp.memory.simulated.jobs import PHASES, Mode, PhasePeak, SimulationResult

Numbers = dict[str, float]
"""Phase or phase/kind -> MiB."""

FEW, MANY = (2, 4), (10, 12)
"""Samples per device in the simulations of the two regimes; at least 2, because BatchNorm may need 2."""


@dataclass(frozen=True)
class Line:
    """MiB as an affine function of the samples on a device and of the samples of the batch."""

    fixed: float = 0.0
    per_sample: float = 0.0
    per_batch: float = 0.0

    def at(self, samples: int, batch: int) -> float:
        """Return the value in MiB, at least 0."""
        return max(0.0, self.fixed + self.per_sample * samples + self.per_batch * batch)


Lines = Mapping[str, Line]
"""Phase or phase/kind -> line."""
Regimes = tuple[Lines, ...]
"""Lines for few and for many samples; in every phase the higher one holds."""


@dataclass(frozen=True)
class MemoryModel:
    """Predicted peak of the tensors on every device under any split, MiB.

    Attributes:
        mode: How the devices work together.
        first: Device 0 with samples; in model mode the device of the first stage.
        others: Any other device with samples; in model mode one entry for each further device.
        idle: Device 0 without samples.
    """

    mode: Mode
    first: Regimes
    others: tuple[Regimes, ...] = ()
    idle: Regimes = ()

    def numbers(self, split: Sequence[int]) -> tuple[Numbers, ...]:
        """Return phase -> MiB and phase/kind -> MiB for every device.

        Args:
            split: Samples per device; in model mode the whole batch is the first entry.
        """
        batch = sum(split)
        return tuple(self._numbers_of(i, samples, batch) for i, samples in enumerate(split))

    def phases(self, split: Sequence[int]) -> tuple[Numbers, ...]:
        """Return phase -> MiB for every device."""
        return tuple({p: mib for p, mib in found.items() if p in PHASES} for found in self.numbers(split))

    def peak_mib(self, split: Sequence[int]) -> tuple[float, ...]:
        """Return the highest peak of each device over all phases, MiB."""
        return tuple(max(found.values(), default=0.0) for found in self.phases(split))

    def _numbers_of(self, device: int, samples: int, batch: int) -> Numbers:
        if self.mode == "model":
            return _highest((self.first, *self.others)[device], batch, batch)
        if self.mode == "ddp":  # a rank without samples has weights, gradients and optimizer too
            return _highest(self.first, samples, batch)
        if device == 0:
            return _highest(self.first if samples else self.idle, samples, batch)
        return _highest(self.others[0] if samples else _evaluation(self.others[0]), samples, batch)


def _evaluation(regimes: Regimes) -> Regimes:
    """Return the lines of the evaluation, in which devices without samples take part too."""
    return tuple({key: line for key, line in lines.items() if key.partition("/")[0] == "eval"} for lines in regimes)


def _highest(regimes: Regimes, samples: int, batch: int) -> Numbers:
    found: Numbers = {}
    for phase in PHASES:
        holding = [lines for lines in regimes if phase in lines]
        if holding:
            lines = max(holding, key=lambda candidate: candidate[phase].at(samples, batch))
            own = (key for key in lines if key == phase or key.startswith(f"{phase}/"))
            found.update({key: lines[key].at(samples, batch) for key in own})
    return found


def splits_to_simulate(mode: Mode, num_devices: int, *, is_gathered: bool = False) -> list[tuple[int, ...]]:
    """Return the splits from which `fit_model` predicts all others; in mode dp, two devices represent any number.

    Args:
        mode: How the devices work together.
        num_devices: Number of devices.
        is_gathered: Device 0 gathers the outputs of the others, so its peak also depends on the whole batch.
    """
    if mode == "dp" and num_devices > 1:
        pairs: list[tuple[int, ...]] = [FEW, FEW[::-1], MANY, MANY[::-1], (0, FEW[1])]
        return [*pairs, (FEW[0], FEW[0])] if is_gathered else pairs
    rest = (0,) * (num_devices - 1) if mode == "model" else ()
    return [(samples, *rest) for samples in (*FEW, *MANY)]


def fit_model(mode: Mode, results: Sequence[SimulationResult]) -> MemoryModel:
    """Return the affine model that agrees with the simulated splits.

    Args:
        mode: Of the simulations.
        results: One for each of `splits_to_simulate`, in that order.
    """
    tables = [[_flat(phases) for phases in result.devices] for result in results]
    if len(results) == len((*FEW, *MANY)):
        columns = [
            (_through(FEW, few, more), _through(MANY, many, most))
            for few, more, many, most in zip(*tables, strict=True)
        ]
        return MemoryModel(mode, columns[0], tuple(columns[1:]))
    few, few_turned, many, many_turned, without = tables[:5]
    per_batch: Numbers = {}
    if len(tables) > 5:  # device 0 has as many samples as in `few`, the batch has fewer
        per_batch = {key: (mib - tables[5][0].get(key, 0.0)) / (FEW[1] - FEW[0]) for key, mib in few[0].items()}
    first = (
        _through(FEW, few[0], few_turned[0], per_batch, sum(FEW)),
        _through(MANY, many[0], many_turned[0], per_batch, sum(MANY)),
    )
    others = _through(FEW, few_turned[1], few[1]), _through(MANY, many_turned[1], many[1])
    batch_of_idle = FEW[1]
    idle = {
        key: Line(mib - batch_of_idle * per_batch.get(key, 0.0), 0.0, per_batch.get(key, 0.0))
        for key, mib in without[0].items()
    }
    return MemoryModel(mode, first, (others,), (idle,))


def _through(
    samples: tuple[int, int], low: Numbers, high: Numbers, per_batch: Numbers | None = None, batch: int = 0
) -> dict[str, Line]:
    """Return the lines through two simulations with the same batch, `low` and `high` with `samples` on the device."""
    lines = {}
    for key in dict.fromkeys((*low, *high)):
        line = fit_lines([[(samples[0], low.get(key, 0.0)), (samples[1], high.get(key, 0.0))]])
        gathering = (per_batch or {}).get(key, 0.0)
        lines[key] = Line((line.fixed[0] or 0.0) - batch * gathering, line.slope or 0.0, gathering)
    return lines


def _flat(phases: Mapping[str, PhasePeak]) -> Numbers:
    found: Numbers = {}
    for phase, peak in phases.items():
        found[phase] = peak.mib
        found.update({f"{phase}/{kind}": mib for kind, mib in peak.by_kind.items()})
    return found
