"""What a config names outside of segapp: custom components, and trackers, with the record of those that were named.

The config of a run may come from someone else, and its trackers get metrics and settings. So no other
tracker in a run's own config is used. Each line of `$XDG_STATE_HOME/segapp/trackers` is the override that names a
tracker, such as `log.mlflow="http://box:5000"`.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from segapp.config.sections import LogConfig, RunConfig
from segapp.custom.names import is_component, resolved_near
from segapp.custom.sources import Sources
from segapp.custom.trust import NamedCode
from segapp.errors import without_secrets
from segapp.places import own_folder


def named_code(
    config: RunConfig, uses: Sequence[str] = ("",), copies: Mapping[str, Sources] | None = None
) -> dict[str, NamedCode]:
    """Return the custom components of a config with their options, by key: `optim.name`, `data.augment[0]`.

    `uses` has the beginnings of the keys that count, and `copies` the sources of components that run from copies.
    """
    sections: dict[str, Any] = {"model": config.model} if config.model.library == "python" else {}
    sections |= {**config.loss.by_key(), "optim": config.optim, "schedule": config.schedule}
    named = {"data.format": (config.data.format, config.data.options)}
    named |= {f"{key}.name": (section.name, section.options) for key, section in sections.items()}
    for key, name, options in _transforms(config.data.augment, "data.augment"):
        while key in named:  # by names with dots, or two in one mapping: none may hide another from its check
            key += "+"
        named[key] = (name, options or {})
    return {
        key: NamedCode(name, options, (copies or {}).get(name))
        for key, (name, options) in named.items()
        if is_component(name) and key.startswith(tuple(uses))
    }


def component_names(config: RunConfig) -> dict[str, str]:
    """Return the config's custom components: key, such as `optim.name` -> `package.module:factory`."""
    return {key: code.name for key, code in named_code(config).items()}


def _transforms(value: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the place, the name and the options of each transform in nested lists and mappings."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield key, name, inner
            yield from _transforms(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _transforms(inner, f"{key}[{i}]")


def with_component_paths(raw: Any, folder: Path) -> Any:
    """Return nested config values with each `./file.py:factory` as a path from here; `folder` is searched first."""
    if isinstance(raw, Mapping):
        return {with_component_paths(key, folder): with_component_paths(value, folder) for key, value in raw.items()}
    if isinstance(raw, list):
        return [with_component_paths(value, folder) for value in raw]
    return resolved_near(raw, folder) if is_component(raw) else raw


TRACKERS = {"wandb": "WANDB_PROJECT", "mlflow": "MLFLOW_TRACKING_URI"}
"""Key of `log:` -> the tracker's own environment variable for its value."""

_NAMED = "SEGAPP_TRACKERS"
"""Environment variable with the overrides that name trackers to this process and its children, one per line."""


def name_trackers(log: LogConfig, keys: Iterable[str] = tuple(TRACKERS)) -> None:
    """Accept trackers that the user has named, in this process and its children."""
    if named := _overrides(log, keys).values():
        os.environ[_NAMED] = "\n".join(dict.fromkeys([*os.environ.get(_NAMED, "").split("\n"), *named]))


def unnamed_trackers(log: LogConfig) -> dict[str, str]:
    """Return the keys of the trackers that the user has not named, each with its override; record the others.

    A tracker is named by a config or an override of the user, now or earlier, or by its environment variable.
    """
    in_environment = [
        key for key, name in TRACKERS.items() if without_secrets(os.environ.get(name, "")) == getattr(log, key)
    ]
    named = {*os.environ.get(_NAMED, "").split("\n"), *_overrides(log, in_environment).values()}
    with contextlib.suppress(OSError):
        path = own_folder("XDG_STATE_HOME") / "trackers"
        with open(path, "a+", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.seek(0)
            recorded = file.read(2**20).split("\n")
            file.writelines(f"{each}\n" for each in _overrides(log).values() if each in named and each not in recorded)
        named.update(recorded)
    return {key: override for key, override in _overrides(log).items() if override not in named}


def _overrides(log: LogConfig, keys: Iterable[str] = tuple(TRACKERS)) -> dict[str, str]:
    return {key: f"log.{key}={json.dumps(value)}" for key in keys if (value := getattr(log, key)) is not None}
