"""The map of what tests cannot tell apart notices elements, picks, pairs, orders and calls in code that it rewrites."""

from __future__ import annotations

import ast
import builtins
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.weak_places import ROOT, Rewrite, Watch

SOURCE = '''
class Sizes:
    """Sides in pixels."""
    def __init__(self, sides): self.sides = sides
    def total(self): return sum(self.sides)
    def first(self): return self.sides[0]
    def is_small(self, limit_px): return self.first() <= limit_px

def area(height: int, width: int, kind: str = "px") -> int:
    """Return the area."""
    return height * width

def doubled(values):
    return [2 * value for value in values]
'''


def told(source: str, *lines: str) -> dict[str, bool]:
    """Run lines after a module, and return by kind and pair of its places whether they told two things apart."""
    watch = Watch(Path("nowhere"))
    watch.is_saving = True  # by no thread
    space: dict[str, Any] = {}
    before = getattr(builtins, "__weak__", None)
    builtins.__weak__ = watch  # type: ignore[attr-defined]
    try:
        tree = ast.fix_missing_locations(Rewrite("m", watch.places).visit(ast.parse(source)))
        exec(compile(tree, "m", "exec"), space)
        exec("\n".join(lines), space)
    finally:
        builtins.__weak__ = before  # type: ignore[attr-defined]
    return {":".join(place.split(":")[3:]): bool(found[1]) for place, found in watch.seen.items()}


@pytest.mark.parametrize(
    ("lines", "noticed"),
    [
        (["assert Sizes([3, 3]).total() == 6"], {"sum:": False, "call total:": False}),
        (["assert Sizes([3, 4]).total() == 7"], {"sum:": True, "call total:": False}),
        (["sizes = Sizes([3, 4])", "assert sizes.total() == sizes.total()"], {"sum:": True, "call total:": True}),
        (["assert Sizes([5]).first() == 5"], {"pick:": False, "call first:": False}),
        (["assert Sizes((5, 6)).first() == 5"], {"pick:": True, "call first:": False}),
        (
            ["assert Sizes([5, 6]).is_small(7)"],
            {"pick:": True, "order:": False, "call first:": False, "call is_small:": False},
        ),
        (
            ["assert Sizes([5, 6]).is_small(5)"],
            {"pick:": True, "order:": True, "call first:": False, "call is_small:": False},
        ),
        (["assert area(2, 2) == 4", "assert area(3, 3) == 9"], {"area:height = width": False}),
        (["assert area(2, 2) == 4", "assert area(3, 4) == 12"], {"area:height = width": True}),
        (["assert doubled([1]) == [2]", "assert doubled([]) == []"], {"for:": False}),
        (["assert doubled([1, 2]) == [2, 4]"], {"for:": True}),
    ],
)
def test_only_what_differs_is_told_apart(lines: list[str], noticed: dict[str, bool]) -> None:
    assert told(SOURCE, *lines) == noticed


def test_each_reason_is_for_a_line_of_the_code() -> None:
    for module, reasons in tomllib.loads((ROOT / "tests" / "weak_places.toml").read_text()).items():
        lines = {line.strip() for line in (ROOT / "segapp" / f"{module}.py").read_text().splitlines()}
        assert reasons.keys() <= lines, module
        assert all(reasons.values()), module
