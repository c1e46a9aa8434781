"""Values in annotations by name: a number, a text, a list, an outline; any other value is an error that names it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import shown

Corners = NDArray[np.float64]
"""The corners (x, y) of an outline, in order, (V, 2)."""

_MAX = 2**53  # up to it, floats have every whole number
_MAX_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Field:
    """A value in an annotation with its name, such as `points[2][0]`. Numbers may be text, as all are in XML.

    Each method raises ValueError, in words with the name and the value, if the value is not of its kind.
    """

    value: Any
    name: str = ""

    def error(self, wanted: str) -> ValueError:
        """Return the error for a value that is not what is wanted."""
        kinds = {dict: "an object", list: f"a list of {len(self.value) if isinstance(self.value, list) else 0}"}
        said = kinds.get(type(self.value)) or shown(json.dumps(self.value))[:_MAX_SHOWN]
        return ValueError(f"{self.name or 'it'} is {said}, not {wanted}")

    def mapping(self) -> Mapping[str, Any]:
        """Return an object with its fields."""
        if not isinstance(self.value, Mapping):
            raise self.error("an object")
        return self.value

    def get(self, key: str) -> Field:
        """Return a field of an object; its value is None if it is missing."""
        point = "." if self.name and self.name[-1] != " " else ""
        return Field(self.mapping().get(key), f"{self.name}{point}{key}")

    def __getitem__(self, key: str) -> Field:
        """Return a field of an object that may not be missing or null."""
        found = self.get(key)
        if found.value is None:
            raise ValueError(f"{found.name} is missing")
        return found

    def items(self, least: int = 0, most: float = math.inf) -> list[Field]:
        """Return the values of a list with this many values."""
        if not isinstance(self.value, list) or not least <= len(self.value) <= most:
            many = f"a list of {least}" + (" or more" if most > least else "")
            raise self.error(many if least else "a list")
        return [Field(value, f"{self.name}[{number}]") for number, value in enumerate(self.value)]

    def text(self) -> str:
        """Return a text that is not empty; a whole number counts as one."""
        said = str(self.value) if type(self.value) in (str, int) else ""
        if not said.strip():
            raise self.error("text")
        return said

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
        """Return a whole number."""
        number = self.number()
        if number != int(number):
            raise self.error("a whole number")
        return int(number)

    def numbers(self, least: int = 0, most: float = math.inf) -> NDArray[np.float64]:
        """Return the numbers of a list, (N,)."""
        fields = self.items(least, most)
        plain = _plain(self.value)
        return np.array([one.number() for one in fields]) if plain is None else plain

    def wholes(self, least: int = 0, most: float = math.inf) -> NDArray[np.int64]:
        """Return the whole numbers of a list, (N,)."""
        numbers = self.numbers(least, most)
        if (numbers == np.trunc(numbers)).all():
            return numbers.astype(np.int64)
        return np.array([one.whole() for one in self.items()])

    def corners(self, least: int = 3, most: float = math.inf) -> Corners:
        """Return the corners of an outline: a list of [x, y], whose further numbers are ignored, or of x, y, x, y."""
        rows = self.value if isinstance(self.value, list) else []
        if rows and isinstance(rows[0], list):
            self.items(least, most)
            flat = _plain([*chain.from_iterable(row[:2] for row in rows if isinstance(row, list))])
            if flat is None or len(flat) != 2 * len(rows):
                flat = np.concatenate([row.numbers(2)[:2] for row in self.items()])
        elif len(flat := self.numbers(2 * least, 2 * most)) % 2:
            raise self.error("pairs of x and y")
        return flat.reshape(-1, 2)


def _plain(values: list[Any]) -> NDArray[np.float64] | None:
    """Return the numbers of a list, (N,); None if they include another value, which is then found one by one."""
    try:
        is_plain = {*map(type, values)} <= {int, float} or {*map(type, values)} == {str}
        numbers = np.array(values if is_plain else [math.nan], np.float64)
    except (ValueError, OverflowError):
        return None
    return numbers if (np.abs(numbers) <= _MAX).all() else None
