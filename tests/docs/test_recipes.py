"""The checklists of `extending` and of the map name places that exist, and what is built in has its pages and cases."""

from __future__ import annotations

import ast
import re
import tomllib
from functools import reduce
from pathlib import Path

import pytest
import typer.main

from segapp.cli import app
from segapp.config.options import LOSSES
from tests.support import ROOT
from tests.support.loss_cases import criteria
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


def test_usual_changes_of_the_map_name_places_that_exist() -> None:
    table = (ROOT / "segapp" / "docs" / "ARCHITECTURE.md").read_text().partition("## Usual changes")[2]
    places = re.findall(r"`((?:[a-z_]+/|cli|commands|models)[a-z_./A-Z]*)`", table)
    assert {"losses/overlap.py", "cli.py", "datasets/layouts/published.toml", "docs/tasks"} <= set(places)
    assert [place for place in places if not (ROOT / "segapp" / place).exists()] == []


def test_each_loss_is_on_its_page_and_among_the_cases() -> None:
    page = (ROOT / "segapp" / "docs" / "tasks" / "choose-loss.md").read_text()
    assert [name for name in LOSSES if f"\n| `{name}` |" not in page] == []
    cases = {type(criterion).__name__ for criterion in criteria().values()} | {"CriterionMaskClassification"}
    assert [name for name, loss in LOSSES.items() if loss.factory.partition(":")[2] not in cases] == []


def test_each_command_is_on_a_page_that_is_written_by_hand() -> None:
    pages = [path for path in PAGE.parent.rglob("*.md") if path.parent.name != "reference"]
    text = " ".join(path.read_text() for path in pages)
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert [name for name in commands if not re.search(rf"segapp\s{name}\b", text)] == []
