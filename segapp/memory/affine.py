"""From a few simulations to every split: a device's peak in a phase is affine in what it holds. No torch here.

`peak = fixed + per_sample * its samples + per_batch * all samples`. `per_batch` is what gathering costs; with the
parallel criterion it is 0. Device 0 without samples is a case of its own: nothing of a replica is there.

The highest moment of a phase can be another one with few samples (where bands of the loss, or gradients, weigh more)
than with many, so there are two regimes, and the higher one holds. Not affine, and off by some 20 MiB: chunks whose
upsampled logits are so small that the loss makes them whole (8 MiB).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segapp.memory.simulation.jobs import PHASES, Mode, PhasePeak, SimulationResult

Numbers = dict[str, float]
"""Phase, or phase/kind -> MiB."""

FEW, MANY = (2, 4), (10, 12)
"""Samples per device in the simulations of either regime; no less than 2, because a plain BatchNorm may need 2."""


@dataclass(frozen=True)
class Line:
    """MiB as a function of the samples on a device, and of all samples."""

    fixed: float = 0.0
    per_sample: float = 0.0
    per_batch: float = 0.0

    def at(self, samples: int, batch: int) -> float:
        """Never less than 0."""
        return max(0.0, self.fixed + self.per_sample * samples + self.per_batch * batch)


Lines = Mapping[str, Line]
"""By phase, and by phase/kind."""
Regimes = tuple[Lines, ...]
"""Lines with few samples, and with many; for every phase the higher one holds."""


@dataclass(frozen=True)
class MemoryModel:
    """The peaks of every device under any split, MiB of tensors.

    Attributes:
        mode: how the devices work together.
        first: device 0 with samples; in model mode the first stage's device.
        others: a device beside device 0 with samples; in model mode one for each further device.
        idle: device 0 without samples.
    """

    mode: Mode
    first: Regimes
    others: tuple[Regimes, ...] = ()
    idle: Regimes = ()

    def numbers(self, split: Sequence[int]) -> tuple[Numbers, ...]:
        """For every device: phase -> MiB and phase/kind -> MiB.

        Args:
            split: samples per device; in model mode all of them stand in the first place.
        """
        batch = sum(split)
        return tuple(self._numbers_of(i, samples, batch) for i, samples in enumerate(split))

    def phases(self, split: Sequence[int]) -> tuple[Numbers, ...]:
        """For every device: phase -> MiB."""
        return tuple({p: mib for p, mib in found.items() if p in PHASES} for found in self.numbers(split))

    def peak_mib(self, split: Sequence[int]) -> tuple[float, ...]:
        """Each device's highest point in any phase."""
        return tuple(max(found.values(), default=0.0) for found in self.phases(split))

    def _numbers_of(self, device: int, samples: int, batch: int) -> Numbers:
        if self.mode == "model":
            return _highest((self.first, *self.others)[device], batch, batch)
        if device == 0 or self.mode == "ddp":
            return _highest(self.first if samples else self.idle, samples, batch)
        return _highest(self.others[0] if samples else (), samples, batch)


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
    """The few splits that tell all others; two devices stand for any number of them.

    Args:
        mode: how the devices work together.
        num_devices: how many there are.
        is_gathered: device 0 gathers the others' outputs, so that its peak depends on the whole batch too.
    """
    if mode == "dp" and num_devices > 1:
        pairs: list[tuple[int, ...]] = [FEW, FEW[::-1], MANY, MANY[::-1], (0, FEW[1])]
        return [*pairs, (FEW[0], FEW[0])] if is_gathered else pairs
    rest = (0,) * (num_devices - 1) if mode == "model" else ()
    return [(samples, *rest) for samples in (*FEW, *MANY)]


def fit_model(mode: Mode, results: Sequence[SimulationResult]) -> MemoryModel:
    """The affine model through simulations.

    Args:
        mode: of the simulations.
        results: of `splits_to_simulate`, in that order.
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
    if len(tables) > 5:  # device 0 has as many samples as in `few`, and all devices together fewer
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
    """Lines through two points of equal batch."""
    lines = {}
    for key in dict.fromkeys((*low, *high)):
        slope = (high.get(key, 0.0) - low.get(key, 0.0)) / (samples[1] - samples[0])
        gathering = (per_batch or {}).get(key, 0.0)
        lines[key] = Line(low.get(key, 0.0) - samples[0] * slope - batch * gathering, slope, gathering)
    return lines


def _flat(phases: Mapping[str, PhasePeak]) -> Numbers:
    found: Numbers = {}
    for phase, peak in phases.items():
        found[phase] = peak.mib
        found.update({f"{phase}/{kind}": mib for kind, mib in peak.by_kind.items()})
    return found
