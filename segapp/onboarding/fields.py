"""Values in annotations by name: a number, a text, a list, an outline; any other value is an error that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import shown

Corners = NDArray[np.float64]
"""The corners (x, y) of an outline, in order, (V, 2)."""

NO_NAMES = frozenset({"", "nan", "<na>"})
"""Texts in small letters that spreadsheets and tables have for a missing name."""
_MAX = 2**53  # up to it, floats have every whole number


class FieldError(ValueError):
    """A value is not of its kind; the message names it."""


@dataclass(frozen=True, slots=True)
class Field:
    """A value in an annotation with its name, such as `points[2][0]`. Numbers may be text, as all are in XML.

    Each method raises FieldError, in words with the name and the value, if the value is not of its kind.
    """

    value: Any
    name: str = "it"

    def error(self, wanted: str) -> FieldError:
        if isinstance(self.value, list | Mapping):
            said = f"a list of {len(self.value)}" if isinstance(self.value, list) else "an object"
        else:
            said = shown(json.dumps(self.value))[:40]
        return FieldError(f"{self.name} is {said}, not {wanted}")

    def get(self, key: str) -> Field:
        """Return a field of an object; its value is None if it is missing."""
        if not isinstance(self.value, Mapping):
            raise self.error("an object")
        above = "" if self.name == "it" else self.name if self.name.endswith(" ") else f"{self.name}."
        return Field(self.value.get(key), above + key)

    def __getitem__(self, key: str) -> Field:
        found = self.get(key)
        if found.value is None:
            raise FieldError(f"{found.name} is missing")
        return found

    def items(self, least: int = 0, most: float = math.inf) -> list[Field]:
        if not isinstance(self.value, list) or not least <= len(self.value) <= most:
            raise self.error("a list" + f" of {least}" * (least > 0) + " or more" * (most > least > 0))
        return [Field(value, f"{self.name}[{number}]") for number, value in enumerate(self.value)]

    def text(self) -> str:
        """Return a text that is not empty; a whole number counts as one."""
        if type(self.value) not in (str, int) or not str(self.value).strip():
            raise self.error("text")
        return str(self.value)

    def is_true(self) -> bool:
        """Return a boolean, which may be text or 0 or 1; a missing or empty value is False."""
        said = str(self.value).lower() if self.value else "false"
        if said not in ("true", "false", "1", "0"):
            raise self.error("true or false")
        return said in ("true", "1")

    def name_or(self, other: str, problems: list[str]) -> str:
        """Return a name, which is a text; without one, note the problem and return the other name."""
        try:
            if isinstance(self.value, str) and self.value.strip().lower() in NO_NAMES:
                raise self.error("a name")
            return self.text()
        except ValueError as error:
            problems.append(f"{error}: it is named {other}")
            return other

    def key(self) -> str:
        """Return an id as text: 7, 7.0 and "7" are the same id."""
        return self.text() if isinstance(self.value, str) else str(self.whole())

    def number(self) -> float:
        """Return a number from -2^53 to 2^53."""
        try:
            number = float(self.value) if type(self.value) in (int, float, str) else math.nan
        except (ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= _MAX:
            raise self.error("a number")
        return number

    def whole(self) -> int:
        number = self.number()
        if number != int(number):
            raise self.error("a whole number")
        return int(number)

    def numbers(self, least: int = 0, most: float = math.inf) -> NDArray[np.float64]:
        """Return the numbers of a list, (N,)."""
        values: list[Any] = self.value if isinstance(self.value, list) else [None]
        is_plain = {*map(type, values)} <= {int, float} and all(-_MAX <= value <= _MAX for value in values)
        if is_plain and least <= len(values) <= most:
            return np.array(values, np.float64)  # without a name for each
        return np.array([one.number() for one in self.items(least, most)])

    def wholes(self, least: int = 0, most: float = math.inf) -> NDArray[np.int64]:
        numbers = self.numbers(least, most)
        for at in np.flatnonzero(numbers != np.trunc(numbers)):
            self.items()[at].whole()
        return numbers.astype(np.int64)

    def corners(self, least: int = 3, most: float = math.inf) -> Corners:
        """Return the corners of an outline: a list of [x, y], whose further numbers are ignored, or of x, y, x, y."""
        if isinstance(self.value, list) and self.value and isinstance(self.value[0], list):
            return np.array([corner.numbers(2)[:2] for corner in self.items(least, most)])
        if len(flat := self.numbers(2 * least, 2 * most)) % 2:
            raise self.error("pairs of x and y")
        return flat.reshape(-1, 2)
