"""Base class of the config sections, and the types of their values."""

import os
from collections.abc import Mapping
from types import UnionType
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from segapp.custom.names import COMPONENT_PATTERN, is_component


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
SHARE_PATTERN = r"^(100|\d{1,2}(\.\d+)?)%$"
Share = Annotated[str, Field(pattern=SHARE_PATTERN)]
"""A share of the run, such as 5%."""
Text = Annotated[str, Field(min_length=1)]
PathText = Annotated[str, AfterValidator(os.path.expanduser)]
"""Path of a file or folder, with its `~` expanded. Environment variables are not: a resumed run has others."""
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
PartName = Annotated[str, Field(pattern=COMPONENT_PATTERN)]
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


def parse_transforms(value: object) -> object:
    """Return a list of transforms in one form: {name: {argument: value}}.

    Args:
        value: a list whose entries are names, or names with their arguments; or the name of a custom transform,
            `package.module:factory`.

    Raises:
        ValueError: it is none of these.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = [value] if is_component(value) else value
    if not isinstance(value, list | tuple):
        raise ValueError("a list of transforms is expected, or package.module:factory")
    return [_entry(each, f"entry {number}") for number, each in enumerate(value)]


def _entry(value: object, place: str) -> dict[str, dict[str, Any]]:
    if isinstance(value, str):
        value = {value: None}
    if not isinstance(value, Mapping) or len(value) != 1:
        raise ValueError(f"{place}: a name is expected, or one name with its arguments, e.g. VerticalFlip: {{p: 0.5}}")
    ((name, given),) = value.items()
    # A composition such as OneOf may be given as the list of its members.
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


Transforms = Annotated[
    list[dict[str, dict[str, Any]]] | None,
    BeforeValidator(parse_transforms, json_schema_input_type=list[str | dict[str, Any]] | str | None),
]


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested settings as one dict with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flat_settings(value, f"{prefix}{key}.")
        else:
            flat[prefix + str(key)] = value
    return flat
