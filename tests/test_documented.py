"""Each line below `Raises:` and `Attributes:` of a public name has a row here, and holds."""

from __future__ import annotations

import builtins
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import segapp
from segapp import errors, losses, memory, metrics, parallel, precision

PUBLIC = {
    **{
        name: importlib.import_module("segapp.api").__dict__[name]
        for name in segapp.__all__
        if name not in segapp._PACKAGES
    },
    **{
        f"{package.__name__.removeprefix('segapp.')}.{name}": getattr(package, name)
        for package in (losses, memory, metrics, parallel, precision)
        for name in package.__all__
    },
}


def documented(section: str) -> Iterator[tuple[str, str]]:
    """Yield name and first word of each line of a section, of public names, their methods and properties."""
    for name, item in PUBLIC.items():
        own = vars(item).items() if inspect.isclass(item) else ()
        for path, each in [(name, item), *((f"{name}.{key}", value) for key, value in own if key[0] != "_")]:
            text = inspect.cleandoc(getattr(each, "__doc__", None) or "")
            if found := re.search(rf"^{section}:\n((?:    .*\n?|\n)+)", text, re.MULTILINE):
                yield from ((path, word) for word in re.findall(r"^    ([\w, ]+):", found[1], re.MULTILINE))


# Name and error -> a call that raises it, and words of its message.
RAISES: dict[tuple[str, str], tuple[Callable[[], Any], str]] = {}

# Name -> an object, and the expected value of each attribute.
ATTRIBUTES: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {}


@pytest.mark.skip(reason="rows are being written")
def test_each_documented_line_has_a_row() -> None:
    assert sorted(documented("Raises")) == sorted(RAISES)
    attributes = [(name, word) for name, each in ATTRIBUTES.items() for word in each()[1]]
    assert sorted(documented("Attributes")) == sorted(attributes)


@pytest.mark.parametrize(("name", "error"), RAISES)
def test_error_is_raised(name: str, error: str) -> None:
    kind = next(vars(place)[error] for place in (builtins, errors, parallel, losses) if error in vars(place))
    call, words = RAISES[name, error]
    with pytest.raises(kind, match=words):
        call()


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attribute_means_what_it_says(name: str) -> None:
    found, expected = ATTRIBUTES[name]()
    for attribute, value in expected.items():
        own = getattr(found, attribute)
        assert torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value, attribute
