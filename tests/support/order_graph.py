"""A model of the order in which streams, events and collectives make devices wait, recorded from the engine's own code.

`Recording` runs a step on fake devices, where a tensor has a device but no values, and notes each operator with the
thread that issues it, its devices and what it reads and writes. On CUDA every device has one stream here, and

- an operator on one device waits for what was issued to its stream before;
- a copy between two devices waits for both streams, and both wait for it (torch's `copy_` records two events);
- a collective has a launch on every device, one after the other, and each waits for all the others.

Threads issue in any order that their exchanges and the data allow. Events only ever point to what was issued before, so
without a collective no order has a circle. A collective is one unit whose launches other threads can come between:
`circles` looks for an order in which a launch waits for something that waits for an earlier launch of the same one.

`unordered_reads` finds what is read without waiting for what wrote it: an operator that reads another device's tensor
without a copy, and a read in one thread of a value from another that no exchange, start or end orders after the write.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Action:
    """Something that a thread issues to the streams of devices.

    Attributes:
        thread: name of the issuing thread.
        devices: whose streams it is issued to, in the order of the launches.
        kind: "operator", "copy" or "collective".
        reads: (value, its device) of what it reads.
        writes: values it writes.
        after: numbers of the actions of other threads that the host has waited for.
        what: name, for messages.
    """

    thread: str
    devices: tuple[int, ...]
    kind: str = "operator"
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[int, ...] = ()
    after: frozenset[int] = frozenset()
    what: str = ""


@dataclass
class Order:
    """Actions in an order in which they were issued once, and what the host orders in all runs."""

    actions: Sequence[Action]
    before: list[int] = field(default_factory=list)
    """For each action the set of actions that the host always issues before it, as bits."""

    def __post_init__(self) -> None:
        latest: dict[str, int] = {}
        for number, action in enumerate(self.actions):
            earlier = set(action.after) | ({latest[action.thread]} if action.thread in latest else set())
            bits = 0
            for other in earlier:
                bits |= self.before[other] | 1 << other
            self.before.append(bits)
            latest[action.thread] = number

    def are_concurrent(self, one: int, other: int) -> bool:
        """Return True if threads may issue the two in either order."""
        first, second = min(one, other), max(one, other)
        return not self.before[second] >> first & 1


def circles(actions: Sequence[Action]) -> list[str]:
    """Return the ways in which devices may wait for each other for ever; empty if there is none."""
    order = Order(actions)
    found = []
    joining = [i for i, action in enumerate(actions) if len(set(action.devices)) > 1]
    for number in joining:
        collective = actions[number]
        if collective.kind != "collective":
            continue
        between = [i for i in joining if i != number and order.are_concurrent(i, number)]
        for position in range(1, len(collective.devices)):
            launched, later = set(collective.devices[:position]), set(collective.devices[position:])
            # Issued between two launches, an action waits for the first ones and the later ones wait for it.
            reached = set(launched)
            for other in between:
                if reached & set(actions[other].devices):
                    reached |= set(actions[other].devices)
                if reached & later:
                    devices = f"{sorted(launched)} and {sorted(later)}"
                    amid = f"{actions[other].what} of {actions[other].thread} on {list(actions[other].devices)}"
                    found.append(f"{collective.what} of {collective.thread} on {devices} with {amid} in between")
                    break
    return found


def unordered_reads(actions: Sequence[Action]) -> list[str]:
    """Return the reads that nothing orders after the write; empty if there is none."""
    order, found = Order(actions), []
    writers: dict[int, int] = {}
    for number, action in enumerate(actions):
        for value, device in action.reads:
            if device not in action.devices:
                found.append(f"{action.what} of {action.thread} on {list(action.devices)} reads from device {device}")
            writer = writers.get(value)
            if writer is not None and order.are_concurrent(writer, number):
                found.append(f"{action.what} of {action.thread} reads what {actions[writer].thread} may still issue")
        writers.update(dict.fromkeys(action.writes, number))
    return found


def mismatches(sequences: Iterable[Sequence[str]]) -> list[str]:
    """Return where ranks issue their collectives in different orders: each waits for the same one of the others."""
    return [
        f"collective {i}: {sorted(set(map(str, row)))}"
        for i, row in enumerate(itertools.zip_longest(*sequences))
        if len(set(row)) > 1
    ]
