"""The docstrings of the criteria: each says when to use it and the shapes that it takes, and its example is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re

import pytest

import segapp.losses
import segapp.parallel

CRITERIA = sorted(name for name in dir(segapp.losses) if re.fullmatch(r"Criterion[A-Z]\w+", name))


@pytest.mark.parametrize("name", CRITERIA)
def test_a_criterion_says_when_to_use_it_and_what_it_takes(name: str) -> None:
    kind = getattr(segapp.losses, name)
    text = kind.__doc__ or ""
    assert re.search(r"\bUse it (?:first|when|with|for)\b", text)
    assert re.search(r"It takes (?:logits|outputs|the outputs)|same\s+as for `CriterionDice`", text)
    assert "Example:" in text
    assert all(f"        {option}:" in text for option in kind.__init__.__annotations__ if option != "return")


@pytest.mark.parametrize("package", [segapp.losses, segapp.parallel], ids=["losses", "parallel"])
def test_examples_in_docstrings_are_true(package: object) -> None:
    names = [each.name for each in pkgutil.iter_modules(package.__path__, f"{package.__name__}.")]  # type: ignore[attr-defined]
    results = [doctest.testmod(importlib.import_module(name)) for name in names]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) >= 19
