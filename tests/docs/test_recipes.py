"""The recipes of `developing`: each place exists and names the recipe's example, and there are at most five."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import reduce
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.roads import Stop, definition

PAGE = ROOT / "segapp" / "docs" / "developing.md"
RECIPE = re.compile(
    r"^- \*\*(?P<name>[^*]+)\*\* \(`(?P<example>[^`]+)`\): (?P<text>(?:.+?)(?:\n  .+?)*)$", re.MULTILINE
)
PLACE = re.compile(r"`([\w/]+\.(?:py|toml)):([\w.]+)`")


def recipes() -> dict[str, re.Match[str]]:
    """The recipes of the page by their names."""
    section = PAGE.read_text().partition("## Recipes\n")[2].partition("\n## ")[0]
    return {found["name"]: found for found in RECIPE.finditer(section)}


def test_page_has_the_recipes_that_newcomers_ask_for() -> None:
    assert list(recipes()) == [
        "A config key", "An optimizer", "A loss", "A score", "An event field on the screen", "A data layout",
    ]  # fmt: skip


@pytest.mark.parametrize("name", recipes())
def test_every_place_of_a_recipe_names_its_example(name: str) -> None:
    recipe = recipes()[name]
    places = PLACE.findall(recipe["text"])
    assert 2 <= len(places) <= 5
    for file, where in places:
        if file.endswith(".toml"):
            table = tomllib.loads((ROOT / "segapp" / file).read_text())
            assert reduce(lambda found, key: found[key], where.split("."), table), f"segapp/{file} has no {where}"
            assert recipe["example"] in where.split(".")
            continue
        node = definition(Stop(file, where))
        assert node is not None, f"segapp/{file} defines no {where}"
        source = ast.get_source_segment((ROOT / "segapp" / Path(file)).read_text(), node)
        assert re.search(rf"\b{recipe['example']}\b", source or ""), f"{file}:{where} does not name {recipe['example']}"
