"""Names of older versions on disk: configs, run folders and checkpoints are read with the names of today.

Here belongs every renaming of a key that a file on disk has. What is renamed is said once, on stderr.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from segapp.config.options import BUILT_INS

OPTIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "loss": {
        "implementation": {"ce": "implementation"},
        "ohem_threshold": {"ohem": "threshold"},
        "ohem_min_kept": {"ohem": "min_kept"},
        "focal_gamma": {"focal": "gamma"},
        "bce_pos_weight": {"bce": "pos_weight"},
        "dice_smooth": {"dice": "smooth", "tversky": "smooth"},
        "tversky_alpha": {"tversky": "alpha"},
        "tversky_beta": {"tversky": "beta"},
        "tversky_gamma": {"tversky": "gamma"},
        "mask_class_factor": {"mask_classification": "class_factor"},
        "mask_bce_factor": {"mask_classification": "bce_factor"},
        "mask_dice_factor": {"mask_classification": "dice_factor"},
        "mask_no_object": {"mask_classification": "no_object"},
    },
    "optim": {
        "nesterov": {"sgd": "nesterov"},
        "betas": {"adam": "betas", "adamw": "betas"},
    },
    "schedule": {
        "step_epochs": {"step": "epochs"},
        "step_steps": {"step": "steps"},
        "gamma": {"step": "gamma", "plateau": "gamma"},
        "patience": {"plateau": "patience"},
        "pct_start": {"onecycle": "pct_start"},
        "div_factor": {"onecycle": "div_factor"},
        "final_div_factor": {"onecycle": "final_div_factor"},
    },
}
"""Section -> key of a938a80 -> name of the loss, optimizer or schedule that it was for -> its key in `options`."""

_DEFAULT_NAMES = {"loss": "ce", "optim": "sgd", "schedule": "poly"}

_said: set[str] = set()


@dataclass
class Upgraded:
    """A config with the names of today.

    Attributes:
        raw: the nested values; those given, if nothing had to change.
        notes: what was renamed or left out, one sentence each.
        origins: key path of today -> that in the file, for the places of problems.
    """

    raw: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    origins: dict[tuple[str, ...], tuple[str, ...]] = field(default_factory=dict)


def upgraded(raw: Mapping[str, Any]) -> Upgraded:
    """Return the nested values of a config, of this version or an older one, with the names of today."""
    result = Upgraded(dict(raw) if isinstance(raw, Mapping) else raw)
    for name in OPTIONS:
        for path, section in _sections(result.raw, name):
            changed = _with_options(section, path, name, result)
            if changed is not section:
                result.raw = _replaced(result.raw, path, changed)
    return result


def _sections(raw: Any, name: str) -> Iterator[tuple[tuple[str | int, ...], Mapping[str, Any]]]:
    """Yield the section of a name, and for the loss each further term, with its path."""
    section = raw.get(name) if isinstance(raw, Mapping) else None
    if isinstance(section, Mapping):
        yield (name,), section
        terms = section.get("plus") if name == "loss" else None
        for index, term in enumerate(terms if isinstance(terms, list) else ()):
            if isinstance(term, Mapping):
                yield (name, "plus", index), term


def _with_options(
    section: Mapping[str, Any], path: Sequence[str | int], kind: str, result: Upgraded
) -> Mapping[str, Any]:
    """Return a section whose former keys of one loss, optimizer or schedule stand in `options`."""
    former = {key: section[key] for key in OPTIONS[kind] if key in section}
    given = section.get("options", {})
    if not former or not isinstance(given, Mapping):
        return section
    name, where = section.get("name", _DEFAULT_NAMES[kind]), tuple(map(str, path))
    options = dict(given)
    for key, value in former.items():
        dotted, new = ".".join((*where, key)), OPTIONS[kind][key].get(name)
        if new is None:
            if not _is_default(kind, key, value):
                result.notes.append(f"{dotted} = {value!r} is no option of {name} and is left out")
            continue
        if key == "implementation" and value == "compiled":
            result.notes.append(f"{dotted} = compiled exists no longer: auto is used")
            value = "auto"
        options.setdefault(new, value)
        result.origins[(*where, "options", new)] = (*where, key)
        result.notes.append(f"{dotted} is now {'.'.join((*where, 'options', new))}")
    return {**{key: value for key, value in section.items() if key not in former}, "options": options}


def _is_default(kind: str, key: str, value: Any) -> bool:
    """Return True if a former key has its default, as all of a run's config have that say nothing."""
    for name, new in OPTIONS[kind][key].items():
        default = BUILT_INS[kind][name].options.model_fields[new].default
        if value == (list(default) if isinstance(default, tuple) else default):
            return True
    return False


def _replaced(raw: Any, path: Sequence[str | int], value: Any) -> Any:
    """Return a copy of nested values with another value at a path."""
    if not path:
        return value
    copied: Any = list(raw) if isinstance(raw, list) else dict(raw)
    copied[path[0]] = _replaced(raw[path[0]], path[1:], value)
    return copied


def say(notes: Sequence[str], source: str = "") -> None:
    """Print what has not been said yet, as one line on stderr; of several ranks, the first one does."""
    new = [note for note in notes if note not in _said]
    if new and os.environ.get("RANK", "0") == "0":
        place = f" in {source}" if source else ""
        print(f"note: names of an older version{place}: {'; '.join(new)}", file=sys.stderr)
    _said.update(new)
