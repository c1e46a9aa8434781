"""The own parts that a config names: by key, and relative to its file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from segapp.config.sections import RunConfig
from segapp.custom import is_part
from segapp.custom.names import beside


def part_sections(config: RunConfig) -> dict[str, Mapping[str, Any]]:
    """Return the keys that can name an own part, each with the options beside it."""
    terms = {f"loss.plus.{i}.name": term.options for i, term in enumerate(config.loss.plus)}
    return {
        "data.format": config.data.options,
        "model.name": config.model.options,
        "loss.name": config.loss.options,
        **terms,
        "optim.name": config.optim.options,
        "schedule.name": config.schedule.options,
    }


def part_names(config: RunConfig) -> dict[str, str]:
    """Return the config's own parts: key -> `package.module:factory`.

    >>> from segapp.config import validate_config
    >>> raw = {"name": "x", "data": {"format": "voc", "root": "."}, "optim": {"name": "torch.optim:RMSprop"}}
    >>> part_names(validate_config(raw))
    {'optim.name': 'torch.optim:RMSprop'}
    """
    names: dict[str, Any] = {
        "data.format": config.data.format,
        "model.name": config.model.name if config.model.library == "python" else None,
        "loss.name": config.loss.name,
        **{f"loss.plus.{i}.name": term.name for i, term in enumerate(config.loss.plus)},
        "optim.name": config.optim.name,
        "schedule.name": config.schedule.name,
    }
    found = {key: name for key, name in names.items() if is_part(name)}
    transforms = [name for name in _keys(config.data.augment) if is_part(name)]
    return {**found, **{f"data.augment[{i}]": name for i, name in enumerate(transforms)}}


def _keys(value: Any) -> Iterator[Any]:
    """Yield the keys of nested mappings: the names of transforms."""
    if isinstance(value, Mapping):
        yield from value
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        yield from _keys(inner)


def parts_beside(raw: Any, folder: Path) -> Any:
    """Return nested config values in which `./file.py:factory` is a path from the current folder.

    Args:
        raw: mappings, lists and plain values.
        folder: of the config file, where the file is looked for first.
    """
    if isinstance(raw, Mapping):
        return {parts_beside(key, folder): parts_beside(value, folder) for key, value in raw.items()}
    if isinstance(raw, list):
        return [parts_beside(value, folder) for value in raw]
    return beside(raw, folder) if is_part(raw) else raw
