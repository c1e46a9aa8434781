"""Which tests see a mutant: those that ran its line when they were recorded, else the files that import its module.

The record is coverage.py's, with the test as its context, and pytest's JUnit file for the times and what passed. Lines
that ran in other processes than the test's own are not in it.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import coverage

from tests.mutation.operators import Mutant
from tests.support import ROOT

FOLDER = ROOT / ".pytest_cache" / "mutation"
_LINES, _TIMES = FOLDER / "coverage", FOLDER / "times.xml"


def record(paths: Sequence[str], folder: Path = FOLDER) -> int:
    """Run tests and record which lines each of them runs, in place of an earlier record; return pytest's exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    options = folder / "options.ini"  # coverage.py would erase a `coverage.*` beside its data
    options.write_text(f"[run]\nsource = segapp\ndata_file = {folder / _LINES.name}\n")
    words = ["--cov=segapp", "--cov-context=test", f"--cov-config={options}", "--cov-report="]
    times = [f"--junitxml={folder / _TIMES.name}", "-o", "junit_family=xunit1"]
    return subprocess.run([sys.executable, "-m", "pytest", *words, *times, *paths], cwd=ROOT, check=False).returncode


FILES_FACTOR = 4
"""Test files that are chosen whole may take so much longer than tests that are known to run the line."""


def tests_of(mutant: Mutant, budget_s: float) -> list[str]:
    """Return tests for a mutant, at most so many seconds of them: of its module and package first, quick ones first."""
    seconds = recorded_seconds()
    found = [test for test in _that_ran(mutant) if test in seconds]
    if found:
        return _first(sorted(found, key=lambda test: (_distance(mutant, test), seconds[test], test)), seconds, budget_s)
    # Its lines run at import, or in other processes.
    module, seconds = module_of(mutant.path), _seconds_of_files()
    imports = set(files_that_import(module))
    found = [path for path in seconds if path in imports or _distance(mutant, path) < (True, True)]
    found.sort(key=lambda path: (_distance(mutant, path), path not in imports, seconds[path], path))
    return _first(found, seconds, FILES_FACTOR * budget_s)


def _distance(mutant: Mutant, test: str) -> tuple[bool, bool]:
    path = test.partition("::")[0]
    is_of_package = path.startswith((f"tests/{mutant.package}/", f"tests/test_{mutant.package}"))
    return not (is_of_package and Path(mutant.path).stem in Path(path).stem), not is_of_package


def _first(tests: Sequence[str], seconds: Mapping[str, float], budget_s: float) -> list[str]:
    total_s, chosen = 0.0, []
    for test in tests:
        total_s += seconds[test]
        if chosen and total_s > budget_s:
            break
        chosen.append(test)
    return chosen


@functools.cache
def recorded_seconds() -> dict[str, float]:
    """Return the seconds of each test that passed when it was recorded."""
    if not _TIMES.exists():
        return {}
    cases = ElementTree.parse(_TIMES).getroot().iter("testcase")
    return {
        f"{case.attrib['file']}::{case.attrib['name']}": float(case.attrib["time"]) for case in cases if not len(case)
    }


@functools.cache
def _seconds_of_files() -> dict[str, float]:
    """Return the seconds of each test file of which a test was recorded; all files with 0 where there is no record."""
    seconds = dict.fromkeys(_imports(), 0.0) if not recorded_seconds() else {}
    for test, test_s in recorded_seconds().items():
        path = test.partition("::")[0]
        seconds[path] = seconds.get(path, 0.0) + test_s
    return seconds


def _that_ran(mutant: Mutant) -> set[str]:
    contexts = _contexts_of(mutant.path)
    lines: Iterable[int] = range(mutant.line, mutant.line + mutant.before.count("\n") + 1)
    if mutant.function_line == 0:  # recorded for the test that happens to import the module first: any that runs it
        lines = contexts
    return {context.rpartition("|")[0] for line in lines for context in contexts.get(line, ()) if context}


@functools.cache
def _contexts_of(path: str) -> dict[int, list[str]]:
    return _recorded().contexts_by_lineno(str(ROOT / "segapp" / path)) if _LINES.exists() else {}


@functools.cache
def _recorded() -> coverage.CoverageData:
    data = coverage.CoverageData(str(_LINES))
    data.read()
    return data


def module_of(path: str) -> str:
    """Return the module of a file below segapp.

    >>> module_of("losses/__init__.py"), module_of("errors.py")
    ('segapp.losses', 'segapp.errors')
    """
    return ".".join(("segapp", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


def files_that_import(module: str) -> list[str]:
    """Return the test files that import a module; if none does, those that import from the package it is in."""
    while "." in module:
        found = [path for path, names in _imports().items() if module in names]
        if found:
            return found
        module = module.rpartition(".")[0]
    return []


@functools.cache
def _imports() -> dict[str, set[str]]:
    """Return the modules of segapp that each test file imports, `from package import name` as both."""
    return {str(path.relative_to(ROOT)): set(_imported(path)) for path in sorted((ROOT / "tests").rglob("test_*.py"))}


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
