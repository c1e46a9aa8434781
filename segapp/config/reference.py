"""The config reference of the documentation, generated from the docstrings of the sections' fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from segapp.config.options import BUILT_INS
from segapp.config.sections import LossTerm, ParamGroupConfig, RunConfig
from segapp.config.values import section_of


def config_reference() -> str:
    """Return every key with its default and meaning, as Markdown tables."""
    parts = [_table(_rows("", RunConfig)), *_sections("", RunConfig)]
    parts.append(f"An entry of `loss.plus` has the keys of `loss` down to `{list(LossTerm.model_fields)[-1]}`.")
    parts += ["An entry of `optim.groups` has:", _table(_rows("", ParamGroupConfig))]
    parts.append("Options that belong to one loss, optimizer or schedule:")
    of_one = (
        f"| `{section}.name: {name}` {row}"
        for section, table in BUILT_INS.items()
        for name, built_in in table.items()
        for row in _rows(f"{section}.options.", built_in.options)
    )
    parts.append(_table(of_one, "of"))
    return "\n\n".join(parts)


def _sections(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    for name in model.model_fields:
        section = section_of(model, name)
        if section is not None:
            yield _table(_rows(f"{prefix}{name}.", section))
            yield from _sections(f"{prefix}{name}.", section)


def _table(rows: Iterable[str], *first: str) -> str:
    columns = [*first, "key", "default", "meaning"]
    return "\n".join([f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *rows])


def _rows(prefix: str, model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if section_of(model, name) is None or field.default is None:
            default = "*required*" if field.is_required() else f"`{_shown(field.default)}`"
            meaning = " ".join((field.description or "").split()).replace("|", chr(92) + "|")
            yield f"| `{prefix}{name}` | {default} | {meaning} |"


def _shown(value: Any) -> str:
    return json.dumps(list(value) if isinstance(value, tuple) else value)
