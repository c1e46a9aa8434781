"""What the machines of a job must share, compared before the first step. Pure, and no torch here.

Each machine describes its settings, versions and data as texts by name (`MachineFacts`). Equal facts on all machines
are an agreement; anything else ends the job, or only the machine that joins it late, before a rank has computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

AGREED_VARIABLE = "SEGAPP_MACHINES_AGREE"
"""Set for ranks whose launchers have compared their machines."""
_SHOWN = 5
"""Maximum number of differences in a line."""
SETTINGS_DIFFER, DATA_DIFFER = 2, 3
"""Exit codes of a job whose machines differ; ConfigError and DataError have the same."""


@dataclass(frozen=True)
class MachineFacts:
    """What one machine brings to a job."""

    machine: str
    """Name of the machine in messages."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Key of the config, name of a component or a version -> its value."""
    data: Mapping[str, str] = field(default_factory=dict)
    """What is said of the data, such as "data.root has" -> "72 training images"."""
    others: Mapping[str, str] = field(default_factory=dict)
    """What may differ, but is worth a line, such as the version of numpy."""
    problem: tuple[int, str] | None = None
    """Exit code and message of the error by which this machine cannot train; None if it can."""

    def as_json(self) -> str:
        """Return a text for other machines."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MachineFacts:
        """Return the facts in a text of `as_json`; another version of segapp may have other fields."""
        values = json.loads(text)
        known = {name: values[name] for name in ("machine", "settings", "data", "others") if name in values}
        problem = values.get("problem")
        return cls(**known, problem=None if problem is None else (int(problem[0]), str(problem[1])))


@dataclass(frozen=True)
class Agreement:
    """The result of a comparison."""

    code: int
    """Exit code of the job; 0 if the machines agree."""
    reason: str
    """What differs, and on which machines; empty if nothing does."""
    note: str | None
    """What may differ and does; None if nothing does."""


def compare(machines: Sequence[MachineFacts]) -> Agreement:
    """Compare what the machines of a job bring to it, in the order of their numbers.

    A machine that cannot train decides first, then settings and versions, then data.
    """
    names = _distinct([facts.machine for facts in machines])
    problems = [(name, facts.problem) for name, facts in zip(names, machines, strict=True) if facts.problem is not None]
    if problems:
        return Agreement(problems[0][1][0], "; ".join(f"{name}: {problem[1]}" for name, problem in problems), None)
    note = _differences(names, [facts.others for facts in machines])
    noted = f"the machines have different versions, which may change the results: {note}" if note else None
    if found := _differences(names, [facts.settings for facts in machines]):
        return Agreement(SETTINGS_DIFFER, f"{found}: start all machines with the same settings and versions", noted)
    if found := _differences(names, [facts.data for facts in machines], most=1):  # the others follow from the first
        advice = "copy the data again, or correct data.root"
        return Agreement(DATA_DIFFER, f"{found}: {advice}", noted)
    return Agreement(0, "", noted)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names of the machines; equal ones get the number of the machine."""
    return [f"{name} (machine {i})" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _differences(names: Sequence[str], facts: Sequence[Mapping[str, str]], most: int = _SHOWN) -> str:
    """Return the values that differ with their machines, "optim.lr is 0.5 on node2 and 0.1 on node1"; empty if none."""
    keys = list(dict.fromkeys(key for each in facts for key in each))
    found = [key for key in keys if len({each.get(key) for each in facts}) > 1]
    shown = [f"{key} {' and '.join(_groups(names, [each.get(key) for each in facts]))}" for key in found[:most]]
    more = [f"{len(found) - most} more differ"] if len(found) > most else []
    return "; ".join([*shown, *more])


def _groups(names: Sequence[str], values: Sequence[str | None]) -> Iterator[str]:
    """Yield each value with its machines; first the value of the fewest, which is probably the wrong one."""
    verb = "is "
    for value in sorted(dict.fromkeys(reversed(values)), key=values.count):
        own = [name for name, other in zip(names, values, strict=True) if other == value]
        yield f"{verb}{'not there' if value is None else value} on {', '.join(own)}"
        verb = ""
