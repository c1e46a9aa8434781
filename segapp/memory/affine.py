"""From a few simulations to every split: a device's peak in a phase is affine in what it holds. No torch here.

`peak = fixed + per_sample * its samples + per_batch * all samples`. `per_batch` is what gathering costs; with the
parallel criterion it is 0. Device 0 without samples is a case of its own: nothing of a replica is there.

Not affine, and off by some 20 MiB: chunks whose upsampled logits are so small that the loss makes them whole (8 MiB).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segapp.memory.jobs import PHASES, Mode, PhasePeak, SimulationResult

Numbers = dict[str, float]
"""Phase, or phase/kind -> MiB."""

SMALL, LARGE = 2, 4
"""Samples per device in the simulations; no less than 2, because a plain BatchNorm may need 2."""


@dataclass(frozen=True)
class Line:
    """MiB as a function of the samples on a device, and of all samples."""

    fixed: float = 0.0
    per_sample: float = 0.0
    per_batch: float = 0.0

    def at(self, samples: int, batch: int) -> float:
        """Never less than 0."""
        return max(0.0, self.fixed + self.per_sample * samples + self.per_batch * batch)


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
    first: Mapping[str, Line]
    others: tuple[Mapping[str, Line], ...] = ()
    idle: Mapping[str, Line] | None = None

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
            lines = (self.first, *self.others)[device]
            return {key: line.at(batch, batch) for key, line in lines.items()}
        if device == 0 or self.mode == "ddp":
            lines = self.first if samples else (self.idle or {})
        else:
            lines = self.others[0] if samples and self.others else {}
        return {key: line.at(samples, batch) for key, line in lines.items()}


def splits_to_simulate(mode: Mode, num_devices: int) -> list[tuple[int, ...]]:
    """The few splits that tell all others; two devices stand for any number of them."""
    if mode == "dp" and num_devices > 1:
        return [(SMALL, SMALL), (LARGE, SMALL), (SMALL, LARGE), (0, LARGE)]
    rest = (0,) * (num_devices - 1) if mode == "model" else ()
    return [(SMALL, *rest), (LARGE, *rest)]


def fit_model(mode: Mode, results: Sequence[SimulationResult]) -> MemoryModel:
    """The affine model through simulations.

    Args:
        mode: of the simulations.
        results: of `splits_to_simulate`, in that order.
    """
    tables = [[_flat(phases) for phases in result.devices] for result in results]
    if len(results) == 2:
        small, large = tables
        lines = [_through(small[i], large[i]) for i in range(len(small))]
        return MemoryModel(mode, lines[0], tuple(lines[1:]))
    both_small, first_large, second_large, without = tables
    first = {}
    for key in _keys(both_small[0], first_large[0], second_large[0]):
        here, more, elsewhere = (table[0].get(key, 0.0) for table in (both_small, first_large, second_large))
        per_batch = (elsewhere - here) / (LARGE - SMALL)
        per_sample = (more - elsewhere) / (LARGE - SMALL)
        first[key] = Line(here - SMALL * per_sample - 2 * SMALL * per_batch, per_sample, per_batch)
    idle = {}
    for key, mib in without[0].items():
        per_batch = first[key].per_batch if key in first else 0.0
        idle[key] = Line(mib - LARGE * per_batch, 0.0, per_batch)
    return MemoryModel(mode, first, (_through(both_small[1], second_large[1]),), idle)


def _through(small: Numbers, large: Numbers) -> dict[str, Line]:
    lines = {}
    for key in _keys(small, large):
        low, high = small.get(key, 0.0), large.get(key, 0.0)
        slope = (high - low) / (LARGE - SMALL)
        lines[key] = Line(low - SMALL * slope, slope)
    return lines


def _flat(phases: Mapping[str, PhasePeak]) -> Numbers:
    found: Numbers = {}
    for phase, peak in phases.items():
        found[phase] = peak.mib
        found.update({f"{phase}/{kind}": mib for kind, mib in peak.by_kind.items()})
    return found


def _keys(*tables: Numbers) -> list[str]:
    return list(dict.fromkeys(key for table in tables for key in table))
