"""Sizes of the package's code: lines, modules, function lengths, parameters, fullest folders. Figures, no limits.

    python -m tests.support.code_numbers [ROOT]

prints them for this checkout, or for another one.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import ROOT
from tests.support.import_graph import module_paths, modules_per_folder


def num_parameters(function: ast.FunctionDef) -> int:
    """Return the parameters of a function without `self` or `cls`."""
    arguments = function.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def functions_of(path: Path) -> list[ast.FunctionDef]:
    """Return all functions and methods of a module."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]


def line(name: str, numbers: Sequence[int]) -> str:
    """Return median, 90th percentile and largest of some numbers as a line."""
    ordered = sorted(numbers)
    median, percentile = ordered[len(ordered) // 2], ordered[int(len(ordered) * 0.9)]
    return f"{name:20} median {median:4}  90th percentile {percentile:4}  largest {ordered[-1]:4}"


def main(root: Path) -> None:
    """Print the sizes."""
    paths = list(module_paths(root).values())
    files = [len(path.read_text().splitlines()) for path in paths]
    functions = [function for path in paths for function in functions_of(path)]
    print(f"{len(paths)} modules, {sum(files)} lines, {len(functions)} functions")
    print(line("lines per function", [(f.end_lineno or f.lineno) - f.lineno + 1 for f in functions]))
    print(line("lines per file", files))
    print(line("modules per folder", list(modules_per_folder(root).values())))
    print(line("parameters", [num_parameters(function) for function in functions]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT)
