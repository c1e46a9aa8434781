"""The cheapest blocks to recompute so that a step fits into a device's memory. No torch here.

A block that is recomputed in the backward pass does not keep its activations from the end of its forward pass to the
start of its backward pass: it frees memory in between, and costs the time of another forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

MOST_STATES, MOST_REPEATED = 4096, 6
"""Limits of `DeviceCourse.cheapest`, which takes a few milliseconds for a hundred blocks."""


@dataclass(frozen=True)
class BlockCall:
    """A call of a block in the forward pass; a block may be called several times."""

    name: str
    kept_mib: float
    """Memory that it keeps for the backward pass, without its output, the next block's input."""
    seconds: float
    """Time of its forward pass."""


@dataclass(frozen=True)
class DeviceCourse:
    """A step of one device as the calls of its blocks, in the order of the forward pass, without recomputation."""

    calls: tuple[BlockCall, ...]
    peaks_mib: tuple[float, ...]
    """Entry k: the most memory at any moment at which the first k calls hold the memory that they keep, and no later
    call holds it for certain. There is one more entry than there are calls."""
    pass_s: float = 0.0
    """Seconds of the forward and backward pass of one micro-batch."""
    update_s: float = 0.0

    @classmethod
    def of_trace(cls, numbers: Mapping[str, float]) -> DeviceCourse:
        """Return the course from the results of `segapp.memory.costs.StepTrace`."""
        keys = sorted(key for key in numbers if key.startswith("kept/"))
        calls = [
            BlockCall(key.split("/", 2)[2], numbers[key], numbers[key.replace("kept/", "seconds/", 1)]) for key in keys
        ]
        peaks = [0.0] * (len(calls) + 1)
        for key, mib in numbers.items():
            if key.startswith("at/"):
                num_held = int(key.split("/")[1])
                peaks[num_held] = max(peaks[num_held], mib)
        return cls(tuple(calls), tuple(peaks), numbers.get("time/pass", 0.0), numbers.get("time/update", 0.0))

    def peak_mib(self, chosen: Collection[str]) -> float:
        """Return the estimated peak if these blocks are recomputed."""
        freed = np.cumsum([0.0, *(call.kept_mib * (call.name in chosen) for call in self.calls)])
        return float(np.max(np.array(self.peaks_mib) - freed))

    def step_s(self, chosen: Collection[str], accumulate: int) -> float:
        """Return the estimated time of a step with this number of micro-batches if these blocks are recomputed."""
        again = sum(call.seconds for call in self.calls if call.name in chosen)
        return accumulate * (self.pass_s + again) + self.update_s

    def cheapest(self, budget_mib: float) -> tuple[str, ...] | None:
        """Return the blocks that take the least time to recompute such that no moment exceeds a budget.

        None if not even all blocks are enough. The result is exact as long as the program over the blocks has at most
        `MOST_STATES` states at a time, which always holds for 12 blocks, and for any number of blocks with equal costs.
        Otherwise the set still fits, but of states within 1 / `MOST_STATES` of the memory only the fastest is kept.
        Blocks with several calls are tried in all combinations, or as one if there are more than `MOST_REPEATED`.
        """
        counts = Counter(call.name for call in self.calls)
        repeated = [name for name, count in counts.items() if count > 1]
        choices: Iterable[tuple[str, ...]] = ((), tuple(repeated))
        if len(repeated) <= MOST_REPEATED:
            choices = (each for size in range(len(repeated) + 1) for each in combinations(repeated, size))
        found: list[tuple[float, tuple[str, ...]]] = []
        for choice in choices:
            chosen = self._cheapest_with(set(repeated), set(choice), budget_mib)
            if chosen is not None:
                found.append((self.step_s(chosen, 1), chosen))
        return min(found, default=(0.0, None))[1]

    def _cheapest_with(self, repeated: set[str], given: set[str], budget_mib: float) -> tuple[str, ...] | None:
        """Return the cheapest set whose repeated blocks are the given ones."""
        freed = np.cumsum([0.0, *(call.kept_mib * (call.name in given) for call in self.calls)])
        wanted = np.array(self.peaks_mib) - budget_mib - freed
        single = [number for number, call in enumerate(self.calls) if call.name not in repeated]
        ends = [*single[1:], len(self.calls)]
        if wanted[: single[0] + 1 if single else None].max() > 0:
            return None
        saved, seconds = np.zeros(1), np.zeros(1)
        steps: list[tuple[Any, Any]] = []  # for each block: the previous state, and whether the block is in it
        for number, end in zip(single, ends, strict=False):
            call, count, enough = self.calls[number], len(saved), max(0.0, wanted[number + 1 :].max())
            saved = np.minimum(np.concatenate([saved, saved + call.kept_mib]), enough)
            seconds = np.concatenate([seconds, seconds + call.seconds])
            order = np.lexsort((-saved, seconds))
            saved, seconds = saved[order], seconds[order]
            most = np.maximum.accumulate(saved)
            is_better = np.concatenate([[True], saved[1:] > most[:-1]]) & (saved >= wanted[number + 1 : end + 1].max())
            keep = np.flatnonzero(is_better)
            if len(keep) > MOST_STATES:
                keep = keep[np.unique((saved[keep] * (MOST_STATES / enough)).astype(int), return_index=True)[1]]
            if not len(keep):
                return None
            saved, seconds = saved[keep], seconds[keep]
            steps.append((order[keep] % count, order[keep] >= count))
        state, chosen = 0, set(given)  # the states are in the order of their time
        for number, (before, is_in) in zip(reversed(single), reversed(steps), strict=True):
            if is_in[state]:
                chosen.add(self.calls[number].name)
            state = int(before[state])
        return tuple(name for name in dict.fromkeys(call.name for call in self.calls) if name in chosen)
