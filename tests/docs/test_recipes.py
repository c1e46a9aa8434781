"""The checklists of `extending`: each place exists and names the example of its list, and there are at most five."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import reduce
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.roads import Stop, definition

PAGE = ROOT / "segapp" / "docs" / "extending.md"
CHECKLIST = re.compile(r"^## Add (?P<name>.+)\n\nExample: `(?P<example>[^`]+)`\n\n(?P<text>(?:.+\n)+)", re.MULTILINE)
PLACE = re.compile(r"`([\w/]+\.(?:py|toml)):([\w.]+)`")


def checklists() -> dict[str, re.Match[str]]:
    """Return the checklists of the page by their names."""
    return {found["name"]: found for found in CHECKLIST.finditer(PAGE.read_text())}


def test_page_has_the_checklists_that_newcomers_ask_for() -> None:
    headings = re.findall(r"^## Add (.+)$", PAGE.read_text(), re.MULTILINE)
    assert list(checklists()) == headings
    assert {
        "a config key", "an optimizer or a schedule", "a loss", "a score", "an event", "an event field to the TUI",
        "a command", "a converter of annotations", "a data layout",
    } <= set(headings)  # fmt: skip


@pytest.mark.parametrize("name", checklists())
def test_every_place_of_a_checklist_names_its_example(name: str) -> None:
    recipe = checklists()[name]
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
