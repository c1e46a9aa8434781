"""The config reference of the documentation, generated from the docstrings of the sections' fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from segapp.config.sections import LossTerm, ParamGroupConfig, RunConfig, section_of


def config_reference() -> str:
    """Return every key with its default and meaning, as Markdown tables."""
    parts = [_table("", RunConfig), *_sections("", RunConfig)]
    parts.append(f"An entry of `loss.plus` has the keys of `loss` down to `{list(LossTerm.model_fields)[-1]}`.")
    parts += ["An entry of `optim.groups` has:", _table("", ParamGroupConfig)]
    return "\n\n".join(parts)


def _sections(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    for name in model.model_fields:
        section = section_of(model, name)
        if section is not None:
            yield _table(f"{prefix}{name}.", section)
            yield from _sections(f"{prefix}{name}.", section)


def _table(prefix: str, model: type[BaseModel]) -> str:
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if section_of(model, name) is None or field.default is None:
            default = "*required*" if field.is_required() else f"`{_shown(field.default)}`"
            meaning = " ".join((field.description or "").split()).replace("|", chr(92) + "|")
            rows.append(f"| `{prefix}{name}` | {default} | {meaning} |")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
