"""The roads of ARCHITECTURE.md: chains of functions, each of which names the next one.

A road is a line `name: file.py:function -> file.py:function -> ...`; a method is written `Class.method`, a plain name
at the end (`optimizer.step`) stands for itself.
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

MAP = ROOT / "segapp" / "docs" / "ARCHITECTURE.md"
_ROAD = re.compile(r"^- \*\*(?P<name>[^*]+)\*\*: (?P<stops>(?:.+?)(?:\n  .+?)*)$", re.MULTILINE)
_STOP = re.compile(r"`(?P<file>[\w/]+\.py):(?P<name>[\w.]+)`|`(?P<end>[\w.]+)`")


@dataclass(frozen=True)
class Stop:
    """One stop of a road.

    Attributes:
        file: relative to `segapp/`; empty for a name outside.
        name: function, `Class.method`, class or attribute.
    """

    file: str
    name: str


def roads(section: str) -> dict[str, list[Stop]]:
    """Return the roads listed under a heading of ARCHITECTURE.md, by name."""
    text = MAP.read_text().partition(f"### {section}\n")[2].partition("\n#")[0]
    found = {}
    for road in _ROAD.finditer(text):
        stops = [Stop(m["file"] or "", m["name"] or m["end"]) for m in _STOP.finditer(road["stops"])]
        found[road["name"]] = stops
    return found


def hops(stops: list[Stop]) -> int:
    """Return the number of calls along a road."""
    return len(stops) - 1


def broken_links(stops: list[Stop]) -> list[str]:
    """Return the stops that do not exist, or do not name the next one."""
    problems = []
    for here, there in itertools.pairwise(stops):
        node = definition(here)
        if node is None:
            problems.append(f"{here.file} defines no {here.name}")
        elif there.name.rpartition(".")[2] not in _names_in(node):
            problems.append(f"{here.file}:{here.name} does not name {there.name}")
    last = stops[-1]
    if last.file and definition(last) is None:
        problems.append(f"{last.file} defines no {last.name}")
    return problems


def definition(stop: Stop) -> ast.AST | None:
    """Return the syntax tree of what a stop names; None if it does not exist."""
    scope: ast.AST | None = ast.parse((ROOT / "segapp" / Path(stop.file)).read_text())
    for name in stop.name.split("."):
        scope = next((node for node in getattr(scope, "body", []) if name in _defined_by(node)), None)
    return scope


def _defined_by(node: ast.AST) -> set[str]:
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def _names_in(node: ast.AST) -> set[str]:
    """Return the names, attributes and keywords that a definition uses."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name):
            found.add(each.id)
        elif isinstance(each, ast.Attribute):
            found.add(each.attr)
        elif (isinstance(each, ast.keyword) and each.arg) or isinstance(each, ast.arg):
            found.add(each.arg)
    return found
