"""The imports of the package as a graph, and its circles.

Imports for type checking count too: a reader follows them as well.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.support import ROOT

Graph = Mapping[str, frozenset[str]]
"""Module -> the modules of the package that it imports."""


def module_paths(root: Path = ROOT) -> dict[str, Path]:
    """Dotted name of every module of the package -> its file; a package is its `__init__.py`."""
    paths = {}
    for path in sorted((root / "segapp").rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


def import_graph(root: Path = ROOT) -> Graph:
    """The imports between the modules of the package, read from their source."""
    paths = module_paths(root)
    return {name: frozenset(_imported(path, paths) - {name}) for name, path in paths.items()}


def _imported(path: Path, known: Iterable[str]) -> set[str]:
    known, found = set(known), set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom) and node.module:
            full = {f"{node.module}.{alias.name}" for alias in node.names} & known
            found |= full or {node.module} & known
    return found


def circles(graph: Graph) -> list[list[str]]:
    """The strongly connected components of more than one module (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            cut = stack.index(name)
            component = sorted(stack[cut:])
            del stack[cut:]
            if len(component) > 1:
                found.append(component)

    for name in graph:
        if name not in index:
            visit(name)
    return found
