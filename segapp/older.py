"""Names in files of older versions: configs, run folders and checkpoints are read with the present names.

Add every renaming of a key in a file here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

OPTIONS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "loss": {
        "ce": {"implementation": "implementation"},
        "ohem": {"ohem_threshold": "threshold", "ohem_min_kept": "min_kept"},
        "bce": {"bce_pos_weight": "pos_weight"},
        "dice": {"dice_smooth": "smooth"},
        "tversky": {
            "tversky_alpha": "alpha",
            "tversky_beta": "beta",
            "tversky_gamma": "gamma",
            "dice_smooth": "smooth",
        },
        "focal": {"focal_gamma": "gamma"},
        "mask_classification": {
            "mask_class_factor": "class_factor",
            "mask_bce_factor": "bce_factor",
            "mask_dice_factor": "dice_factor",
            "mask_no_object": "no_object",
        },
    },
    "optim": {"sgd": {"nesterov": "nesterov"}, "adam": {"betas": "betas"}, "adamw": {"betas": "betas"}},
    "schedule": {
        "step": {"step_epochs": "epochs", "step_steps": "steps", "gamma": "gamma"},
        "onecycle": {key: key for key in ("pct_start", "div_factor", "final_div_factor")},
        "plateau": {"gamma": "gamma", "patience": "patience"},
    },
}
"""Section -> name of a loss, optimizer or schedule -> key of the section until a938a80 -> present key in `options`.

Every section had the keys of all of its names; keys of other names had no effect.
"""

CHECKPOINT_KEYS: Mapping[str, str] = {"lessons": "fallbacks"}
"""Key of a training's state until a938a80 -> the present key."""

EVENT_KEYS: Mapping[str, Mapping[str, str]] = {"oom": {"lessons": "fallbacks"}}
"""Type of an event -> name of a field until a938a80 -> the present name."""

REMOVED: Mapping[tuple[str, ...], Any] = {
    ("data", "mix", "cutmix_alpha"): 1.0,
    ("train", "ema_warmup"): True,
}
"""Path of a removed key -> its default value, with which the key is ignored; with another value it is refused."""

_DEFAULT_NAMES = {"loss": "ce", "optim": "sgd", "schedule": "poly"}

_said: set[str] = set()


def upgraded(raw: Any) -> tuple[Any, list[str]]:
    """Return the nested values of a config with the present names, and one sentence per renaming."""
    notes: list[str] = []
    if not isinstance(raw, Mapping):
        return raw, notes
    today = {key: _section(value, key, key, notes) if key in OPTIONS else value for key, value in raw.items()}
    loss = today.get("loss")
    if isinstance(loss, Mapping) and isinstance(loss.get("plus"), list):
        terms = [_section(term, "loss", f"loss.plus.{i}", notes) for i, term in enumerate(loss["plus"])]
        today["loss"] = {**loss, "plus": terms}
    for path, default in REMOVED.items():
        today = _without(today, path, default)
    return today, notes


def _without(value: Any, path: Sequence[str], default: Any) -> Any:
    """Return nested values without the key at a path if it has its default there."""
    first, *rest = path
    if not isinstance(value, Mapping) or first not in value:
        return value
    if rest:
        return {**value, first: _without(value[first], rest, default)}
    return {key: each for key, each in value.items() if key != first or each != default}


def _section(section: Any, kind: str, place: str, notes: list[str]) -> Any:
    """Return a section, or a term of the loss, with its former keys in `options`."""
    former = {key for keys in OPTIONS[kind].values() for key in keys}
    if not isinstance(section, Mapping) or not former & section.keys():
        return section
    renamed = OPTIONS[kind].get(section.get("name", _DEFAULT_NAMES[kind]), {})
    options = {}
    for key, new in renamed.items():
        if key in section:
            options[new] = section[key]
            notes.append(f"{place}.{key} is now {place}.options.{new}")
    if options.get("implementation") == "compiled":
        options["implementation"] = "auto"
        notes.append(f"{place}.implementation = compiled exists no longer: auto is used")
    kept = {key: value for key, value in section.items() if key not in former}
    given = section.get("options", {})
    return {**kept, "options": {**given, **options} if isinstance(given, Mapping) else given}


def renamed(saved: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a state or an event with the present names."""
    return {names.get(key, key): value for key, value in saved.items()} if names.keys() & saved.keys() else saved


def say(notes: Sequence[str], source: object = None) -> None:
    """Print new notes as one line on stderr; with several ranks, only the first one prints."""
    new = [note for note in notes if note not in _said]
    if new and os.environ.get("RANK", "0") == "0":
        place = f" in {source}" if source else ""
        print(f"note: names of an older version{place}: {'; '.join(new)}", file=sys.stderr)
    _said.update(new)
