"""The custom components that a config names: by key, and relative to the config's file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from segapp.config.sections import RunConfig
from segapp.custom import is_part
from segapp.custom.names import beside


def _named(config: RunConfig) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Return the keys that can name a custom component, each with its value and the options next to it."""
    sections: dict[str, Any] = {"model": config.model, **config.loss.by_key()}
    sections |= {"optim": config.optim, "schedule": config.schedule}
    found = {f"{key}.name": (section.name, section.options) for key, section in sections.items()}
    return {"data.format": (config.data.format, config.data.options), **found}


def part_sections(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    """Return the keys that can name a custom component, each with the options next to it."""
    return {key: options for key, (_, options) in _named(config).items()}


def part_names(config: RunConfig) -> dict[str, str]:
    """Return the config's custom components: key, such as `optim.name` -> `package.module:factory`."""
    found = {key: name for key, (name, _) in _named(config).items() if is_part(name)}
    if config.model.library != "python":
        found.pop("model.name", None)
    transforms = [name for name in _keys(config.data.augment) if is_part(name)]
    return {**found, **{f"data.augment[{i}]": name for i, name in enumerate(transforms)}}


def _keys(value: Any) -> Iterator[Any]:
    """Yield the keys of nested mappings: the names of transforms."""
    if isinstance(value, Mapping):
        yield from value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _keys(inner)


def parts_beside(raw: Any, folder: Path) -> Any:
    """Return nested config values with each `./file.py:factory` as a path from here; `folder` is searched first."""
    if isinstance(raw, Mapping):
        return {parts_beside(key, folder): parts_beside(value, folder) for key, value in raw.items()}
    if isinstance(raw, list):
        return [parts_beside(value, folder) for value in raw]
    return beside(raw, folder) if is_part(raw) else raw
