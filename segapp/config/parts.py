"""The custom components that a config names: by key, and relative to the config's file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from segapp.config.sections import RunConfig
from segapp.custom.names import beside, is_part
from segapp.custom.trust import NamedCode


def named_code(config: RunConfig) -> dict[str, NamedCode]:
    """Return the custom components of a config with their options, by key: `optim.name`, `data.augment[0]`."""
    sections: dict[str, Any] = {"model": config.model} if config.model.library == "python" else {}
    sections |= {**config.loss.by_key(), "optim": config.optim, "schedule": config.schedule}
    named = {"data.format": (config.data.format, config.data.options)}
    named |= {f"{key}.name": (section.name, section.options) for key, section in sections.items()}
    transforms = [entry for entry in _items(config.data.augment) if is_part(entry[0])]
    named |= {f"data.augment[{i}]": (name, options or {}) for i, (name, options) in enumerate(transforms)}
    return {key: NamedCode(name, options) for key, (name, options) in named.items() if is_part(name)}


def part_names(config: RunConfig) -> dict[str, str]:
    """Return the config's custom components: key, such as `optim.name` -> `package.module:factory`."""
    return {key: code.name for key, code in named_code(config).items()}


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the keys of nested mappings, which are the names of transforms, with their values."""
    if isinstance(value, Mapping):
        yield from value.items()
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _items(inner)


def parts_beside(raw: Any, folder: Path) -> Any:
    """Return nested config values with each `./file.py:factory` as a path from here; `folder` is searched first."""
    if isinstance(raw, Mapping):
        return {parts_beside(key, folder): parts_beside(value, folder) for key, value in raw.items()}
    if isinstance(raw, list):
        return [parts_beside(value, folder) for value in raw]
    return beside(raw, folder) if is_part(raw) else raw
