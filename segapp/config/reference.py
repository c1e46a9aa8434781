"""The config reference of the README, made from the sections' own docstrings."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel

from segapp.config.sections import LossTerm, RunConfig


def config_reference() -> str:
    """Every key with its default and meaning, as Markdown tables."""
    parts = [_table("", RunConfig, {name for name in RunConfig.model_fields if _section(RunConfig, name) is None})]
    for name in RunConfig.model_fields:
        section = _section(RunConfig, name)
        if section is not None:
            parts.append(_table(f"{name}.", section, set(section.model_fields)))
    parts.append(f"An entry of `loss.plus` has the keys of `loss` down to `{list(LossTerm.model_fields)[-1]}`.")
    return "\n\n".join(parts)


def _section(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    annotation = model.model_fields[name].annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _table(prefix: str, model: type[BaseModel], names: set[str]) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if name in names:
            default = "*needed*" if field.is_required() else f"`{_shown(field.default)}`"
            rows.append(f"| `{prefix}{name}` | {default} | {(field.description or '').replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
