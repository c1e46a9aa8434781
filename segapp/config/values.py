"""Base class of the config sections, and the types of their values.

The list of transforms in `data.augment` is YAML, or a file that albumentations wrote.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from segapp.config.yaml_reader import MAX_CHARS, parse_yaml
from segapp.custom.names import PART_PATTERN, is_part
from segapp.errors import ConfigError


class Section(BaseModel):
    """A frozen section of the config that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, use_attribute_docstrings=True)


def section_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    """Return the section class of a field, optional or not; None if the field holds a value."""
    annotation = model.model_fields[name].annotation
    members = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    for kind in members:
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def no_bool(value: object) -> object:
    """Return a number's value, or raise for true and false, which pydantic would accept as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number is expected, not true or false")
    return value


OnResume = Field(json_schema_extra={"may_change_on_resume": True})
"""Marks a key that may differ when a run is resumed: it changes neither the order of the data nor the weights."""

PositiveInt = Annotated[int, Field(ge=1), BeforeValidator(no_bool)]
Count = Annotated[int, Field(ge=0), BeforeValidator(no_bool)]
Byte = Annotated[int, Field(ge=0, le=255), BeforeValidator(no_bool)]
Seed = Annotated[int, Field(ge=0, lt=2**31), BeforeValidator(no_bool)]
Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(no_bool)]
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(no_bool)]
NonNegativeFloat = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(no_bool)]
Fraction = Annotated[float, Field(ge=0, le=1), BeforeValidator(no_bool)]
PositiveFraction = Annotated[float, Field(gt=0, le=1), BeforeValidator(no_bool)]
OpenFraction = Annotated[float, Field(gt=0, lt=1), BeforeValidator(no_bool)]
"""A number between 0 and 1, both excluded."""
Decay = Annotated[float, Field(ge=0, lt=1), BeforeValidator(no_bool)]
Text = Annotated[str, Field(min_length=1)]
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
PartName = Annotated[str, Field(pattern=PART_PATTERN)]
"""Name of a custom component: package.module:factory, or file.py:factory."""
HeightWidth = tuple[PositiveInt, PositiveInt]

AUTO_BATCH = 0
"""The value of `train.batch_size: auto` until the training resolves it."""

MAX_BATCH = 2**16
"""Upper limit of `train.batch_size`; a larger value is assumed to be a typing error."""


def _auto_as_number(value: object) -> object:
    if value == "auto":
        return AUTO_BATCH
    if isinstance(value, (int, float)) and not isinstance(value, bool) and not 1 <= value <= MAX_BATCH:
        raise ValueError(f"a whole number from 1 to {MAX_BATCH} is expected, or auto")
    return no_bool(value)


BatchSize = Annotated[
    int,
    BeforeValidator(
        _auto_as_number, json_schema_input_type=Annotated[int, Field(ge=1, le=MAX_BATCH)] | Literal["auto"]
    ),
    PlainSerializer(lambda value: "auto" if value == AUTO_BATCH else value, return_type=int | str),
]


MAX_WORKERS = 512
"""Upper limit of `data.workers`; a larger value is assumed to be a typing error."""


def _check_workers(value: object) -> object:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value != "auto" and not (is_number and value in range(MAX_WORKERS + 1)):
        raise ValueError(f"a whole number from 0 to {MAX_WORKERS} is expected, or auto")
    return value


Workers = Annotated[
    Annotated[int, Field(ge=0, le=MAX_WORKERS)] | Literal["auto"],
    BeforeValidator(_check_workers),
]


_CLASS = "__class_fullname__"
_COMPOSE_OPTIONS = {_CLASS, "p", "transforms", "is_check_shapes", "seed", "strict", "save_applied_params"}
_DEFAULTS_IN_FILES = {"fill_mask": 0, "mask_interpolation": 0}
"""Arguments that albumentations writes with these values if they were not given; segapp has better defaults."""


def parse_transforms(value: object) -> object:
    """Return a list of transforms in one form: {name: {argument: value}}.

    Args:
        value: a list whose entries are names, or names with their arguments; the path of a file with such a list or
            with the result of `A.to_dict`; or the name of a custom transform, `package.module:factory`.

    Raises:
        ValueError: it is none of these.
    """
    if value is None:
        return None
    if isinstance(value, str):
        return [{value: {}}] if is_part(value) else _read_transforms(Path(value))
    if not isinstance(value, list | tuple):
        raise ValueError("a list of transforms is expected, or a file, or package.module:factory")
    return [_entry(each, f"entry {number}") for number, each in enumerate(value)]


def _entry(value: object, place: str) -> dict[str, dict[str, Any]]:
    if isinstance(value, str):
        value = {value: None}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"{place}: a name is expected, or one name with its arguments, e.g. VerticalFlip: {{p: 0.5}}")
    ((name, given),) = value.items()
    if isinstance(given, list | tuple):
        given = {"transforms": given}
    if given is None:
        given = {}
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        raise ValueError(f"{place}: {name}: a mapping of arguments is expected, e.g. {name}: {{p: 0.5}}")
    arguments = dict(given)
    if isinstance(arguments.get("transforms"), list | tuple):
        inner = arguments["transforms"]
        arguments["transforms"] = [_entry(each, f"{place}: {name}[{number}]") for number, each in enumerate(inner)]
    return {str(name): arguments}


def _read_transforms(path: Path) -> list[dict[str, dict[str, Any]]]:
    """Return the transforms in a file of `A.save` or `A.to_dict` (JSON or YAML), or in a file with such a list."""
    try:
        if not path.is_file():
            raise ValueError(f"there is no file {path}: give a list, a file of A.save, or package.module:factory")
        if path.stat().st_size > MAX_CHARS:
            raise ValueError(f"{path} is larger than {MAX_CHARS} bytes: is it a list of transforms?")
        content, _ = parse_yaml(path.read_text(encoding="utf-8"), os.fspath(path), path=path)
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file cannot be read: {error}") from None
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if isinstance(content, list):
        return [_entry(each, f"entry {number}") for number, each in enumerate(content)]
    root = content.get("transform") if isinstance(content, dict) else None
    if not isinstance(root, dict) or _CLASS not in root:
        raise ValueError(f"{path} holds neither a list of transforms nor what A.save writes: save it with A.save")
    if root[_CLASS] == "Compose" and root.get("p", 1) == 1:
        _check_compose(root)
        return _all_from_file(root)
    return [_from_file(root)]


def _from_file(saved: object) -> dict[str, dict[str, Any]]:
    """Return one transform of an albumentations file as an entry of the list."""
    if not isinstance(saved, dict) or not isinstance(saved.get(_CLASS), str):
        raise ValueError(f"a transform without {_CLASS}: save the file with A.save")
    name: str = saved[_CLASS]
    if "." in name:
        raise ValueError(f"{name} is not from albumentations: name a factory that creates it, package.module:name")
    if name == "Compose":
        _check_compose(saved)
        return {"Sequential": {"transforms": _all_from_file(saved), "p": saved.get("p", 1.0)}}
    arguments = {
        key: value
        for key, value in saved.items()
        if key != _CLASS and not (key in _DEFAULTS_IN_FILES and value == _DEFAULTS_IN_FILES[key])
    }
    if "transforms" in arguments:
        arguments["transforms"] = _all_from_file(arguments)
    return {name: arguments}


def _all_from_file(saved: Mapping[str, Any]) -> list[dict[str, dict[str, Any]]]:
    """Return the transforms inside a composition of such a file as entries."""
    inner = saved.get("transforms")
    if not isinstance(inner, list):
        raise ValueError("a composition without a list of transforms: save the file with A.save")
    return [_from_file(each) for each in inner]


def _check_compose(saved: Mapping[str, Any]) -> None:
    extra = [key for key, value in saved.items() if key not in _COMPOSE_OPTIONS and value not in (None, {}, [])]
    if extra:
        raise ValueError(f"Compose with {', '.join(extra)}: only the transforms are used here, save it without")


Transforms = Annotated[
    list[dict[str, dict[str, Any]]] | None,
    BeforeValidator(parse_transforms, json_schema_input_type=list[str | dict[str, Any]] | str | None),
]
