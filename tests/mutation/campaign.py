"""A campaign: which mutants, which tests see each, one run per mutant in a process of its own, and the score."""

from __future__ import annotations

import ast
import contextlib
import datetime
import functools
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.operators import Mutant, mutants_of
from tests.support import ROOT

SEGAPP = ROOT / "segapp"
FOLDER = ROOT / ".pytest_cache" / "mutation"
RESULTS, CONTEXTS = FOLDER / "results.jsonl", FOLDER / "contexts.json"

NOTICED = ("killed", "timeout")
"""Outcomes of a mutant that the tests notice; `survived` is the other. All else (`not run: ...`) has no score."""

_HOOK = Path(__file__).parent / "hook"
_PYTEST = ("-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider")


@dataclass(frozen=True)
class Result:
    """What became of one mutant.

    Attributes:
        id: Of the mutant.
        package: Of the mutant.
        change: Before and after.
        outcome: `killed`, `timeout`, `survived`, or `not run: ` and why.
        seconds: Of the tests.
        source: Hash of the file that was mutated; with another one the mutant is run again.
        commit: Of the repository.
        date: Of the run.
    """

    id: str
    package: str
    change: str
    outcome: str
    seconds: float
    source: str
    commit: str
    date: str


# --- which mutants ----------------------------------------------------------------------------------------------------


def find_mutants(packages: Sequence[str] = (), root: Path = SEGAPP) -> list[Mutant]:
    """Return the mutants of some packages, or of all."""
    found = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not packages or name.partition("/")[0].removesuffix(".py") in packages:
            found += mutants_of(name, path.read_bytes())
    return found


def sampled(mutants: Iterable[Mutant], seed: int, per_package: int) -> list[Mutant]:
    """Return so many mutants of each package, drawn with a seed, one package after the other in turn."""
    by_package: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_package.setdefault(mutant.package, []).append(mutant)
    for package, found in by_package.items():
        random.Random(f"{seed} {package}").shuffle(found)
    return [found[i] for i in range(per_package) for found in by_package.values() if i < len(found)]


def source_hash(path: str, root: Path = SEGAPP) -> str:
    """Return the hash of a file below segapp."""
    return hashlib.sha256((root / path).read_bytes()).hexdigest()[:16]


# --- which tests ------------------------------------------------------------------------------------------------------


def module_of(path: str) -> str:
    """Return the module of a file below segapp.

    >>> module_of("losses/__init__.py"), module_of("errors.py")
    ('segapp.losses', 'segapp.errors')
    """
    return ".".join(("segapp", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


def tests_of(mutant: Mutant) -> list[str]:
    """Return the tests that call the mutated function, as recorded; else the files that import its module."""
    recorded = _contexts().get(mutant.path, {}).get(str(mutant.function_line), [])
    return recorded or files_that_import(module_of(mutant.path))


def files_that_import(module: str) -> list[str]:
    """Return the test files that import a module; if none does, those that import from the package it is in."""
    while "." in module:
        found = [path for path, names in _imports().items() if module in names]
        if found:
            return found
        module = module.rpartition(".")[0]
    return []


@functools.cache
def _contexts() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = json.loads(CONTEXTS.read_text()) if CONTEXTS.exists() else {}
    return found


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


# --- one run ----------------------------------------------------------------------------------------------------------


def run_tests(tests: Sequence[str], timeout_s: float, folder: Path | None = None, root: Path = ROOT) -> int | None:
    """Run tests and return pytest's exit code; None after the timeout, when all their processes are killed.

    Args:
        tests: Files, or names of tests.
        timeout_s: The limit.
        folder: With `module` and `source.py` of a mutant; None: the sources as they are.
        root: Where pytest runs.
    """
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    if folder is not None:
        env["SEGAPP_MUTANT"] = str(folder)
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_HOOK), env.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, *_PYTEST, *tests],
        cwd=root,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcome_of(mutant: Mutant, tests: Sequence[str], timeout_s: float, root: Path = ROOT) -> str:
    """Run the tests of a mutant; the working tree stays as it is. Return the outcome."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = (root / "segapp" / mutant.path).read_bytes()
        (folder / "source.py").write_bytes(mutant.applied_to(source))
        (folder / "module").write_text(module_of(mutant.path))
        code = run_tests(tests, timeout_s, folder, root)
        if not (folder / "loaded").exists():
            return "not run: no test imports the module"
    if code is None:
        return "timeout"
    return {0: "survived", 5: "not run: all tests were deselected"}.get(code, "killed")


class Campaign:
    """Runs mutants and adds each result to a file, so that a later campaign goes on from there.

    Args:
        results: The file of JSON lines.
        limit_s: Most time for the tests of one mutant.
    """

    def __init__(self, results: Path = RESULTS, *, limit_s: float = 120.0) -> None:
        self._results, self._limit_s = results, limit_s
        self._healthy_s: dict[tuple[str, ...], float | None] = {}
        self._commit = _git("rev-parse", "--short", "HEAD")

    def run(self, mutants: Sequence[Mutant], minutes: float) -> Iterator[Result]:
        """Run the mutants without a result until the time is over; yield each result."""
        known = {(each.id, each.source) for each in read_results(self._results)}
        end_s = time.monotonic() + 60 * minutes
        for mutant in mutants:
            if time.monotonic() > end_s:
                return
            if (mutant.id, source_hash(mutant.path)) not in known:
                yield self.run_one(mutant)

    def run_one(self, mutant: Mutant) -> Result:
        """Run one mutant, and add its result to the file."""
        began_s = time.monotonic()
        outcome = self._outcome(mutant)
        change = f"{mutant.before} -> {mutant.after}"
        result = Result(
            id=mutant.id,
            package=mutant.package,
            change=" ".join(change.split())[:200],
            outcome=outcome,
            seconds=round(time.monotonic() - began_s, 1),
            source=source_hash(mutant.path),
            commit=self._commit,
            date=str(datetime.date.today()),
        )
        self._results.parent.mkdir(parents=True, exist_ok=True)
        with self._results.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        return result

    def _outcome(self, mutant: Mutant) -> str:
        tests = tests_of(mutant)
        if not tests:
            return "not run: no test imports the module or its package"
        healthy_s = self._time_of(tuple(tests))
        if healthy_s is None:
            return "not run: its tests fail, or take too long, without the mutation"
        return outcome_of(mutant, tests, min(self._limit_s, 3 * healthy_s + 10))

    def _time_of(self, tests: tuple[str, ...]) -> float | None:
        """Return how long tests take on the sources as they are; None if they fail or exceed the limit."""
        if tests not in self._healthy_s:
            began_s = time.monotonic()
            code = run_tests(tests, self._limit_s)
            self._healthy_s[tests] = time.monotonic() - began_s if code == 0 else None
        return self._healthy_s[tests]


# --- the score --------------------------------------------------------------------------------------------------------


def read_results(path: Path = RESULTS) -> list[Result]:
    """Return the last result of each mutant of a file as it was; a line that a kill has cut is left out."""
    found: dict[tuple[str, str], Result] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            result = Result(**json.loads(line))
            found[result.id, result.source] = result
    return list(found.values())


def current(results: Iterable[Result]) -> list[Result]:
    """Return the results of files that are as they were."""
    return [each for each in results if _is_current(each)]


def _is_current(result: Result) -> bool:
    path = result.id.partition(":")[0]
    return (SEGAPP / path).exists() and source_hash(path) == result.source


def score_lines(results: Iterable[Result]) -> list[str]:
    """Return a Markdown table of the score of each package, and the survivors."""
    by_package: dict[str, list[Result]] = {}
    for each in results:
        by_package.setdefault(each.package, []).append(each)
    lines = ["| package | mutants | noticed | survived | not run | score |", "|---|---:|---:|---:|---:|---:|"]
    rows = [*sorted(by_package.items()), ("all", [each for found in by_package.values() for each in found])]
    for package, found in rows:
        noticed = sum(each.outcome in NOTICED for each in found)
        survived = sum(each.outcome == "survived" for each in found)
        score = f"{100 * noticed / (noticed + survived):.0f} %" if noticed + survived else "-"
        left = len(found) - noticed - survived
        lines.append(f"| {package} | {len(found)} | {noticed} | {survived} | {left} | {score} |")
    survivors = [each for found in by_package.values() for each in found if each.outcome == "survived"]
    return [*lines, "", *(f"- `{each.id}`: `{each.change}`" for each in sorted(survivors, key=lambda each: each.id))]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
