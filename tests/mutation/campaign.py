"""A campaign: which mutants, which tests see each, one run per mutant in a process of its own, and the score."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import itertools
import json
import multiprocessing
import random
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.mutation.operators import Mutant, compiles, mutants_of
from tests.mutation.running import adopt_orphans, import_libraries, kill_children, run_tests
from tests.mutation.selection import FOLDER, recorded_seconds, tests_of
from tests.support import ROOT

SEGAPP = ROOT / "segapp"
RESULTS = FOLDER / "results.jsonl"
JUDGED = Path(__file__).parent / "judged"

NOTICED = ("killed", "timeout")
"""Outcomes of a mutant that the tests notice; `survived` is the other. All else (`not run: ...`) has no score."""


@dataclass(frozen=True)
class Result:
    """What became of one mutant.

    Attributes:
        id: Of the mutant.
        package: Of the mutant.
        change: Before and after.
        outcome: `killed`, `timeout`, `survived`, or `not run: ` and why.
        test: The one that noticed it, where that is known.
        seconds: Of the tests.
        source: Hash of the file that was mutated; with another one the mutant is run again.
        commit: Of the repository.
        date: Of the run.
    """

    id: str
    package: str
    change: str
    outcome: str
    test: str
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


def sampled(mutants: Iterable[Mutant], seed: int, per_package: int, root: Path = SEGAPP) -> list[Mutant]:
    """Return so many mutants of each package, drawn with a seed, one package after the other in turn."""
    by_package: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_package.setdefault(mutant.package, []).append(mutant)
    drawn: list[list[Mutant]] = []
    for package, found in by_package.items():
        random.Random(f"{seed} {package}").shuffle(found)
        that_compile = (each for each in found if compiles(each, (root / each.path).read_bytes()))
        drawn.append(list(itertools.islice(that_compile, per_package)))
    return [found[i] for i in range(per_package) for found in drawn if i < len(found)]


def source_hash(path: str, root: Path = SEGAPP) -> str:
    """Return the hash of a file below segapp."""
    return hashlib.sha256((root / path).read_bytes()).hexdigest()[:16]


# --- one run ----------------------------------------------------------------------------------------------------------


class Campaign:
    """Runs mutants and adds each result to a file, so that a later campaign goes on from there.

    A test that fails with a mutant counts only if it passes without, then or when it was recorded.

    Args:
        results: The file of JSON lines.
        budget_s: Most time for the tests of one mutant, as recorded.
        limit_s: Most time for tests without a record.
        root: The folder of segapp and its tests.
    """

    def __init__(
        self, results: Path = RESULTS, *, budget_s: float = 30.0, limit_s: float = 120.0, root: Path = ROOT
    ) -> None:
        self._results, self._budget_s, self._limit_s, self._root = results, budget_s, limit_s, root
        self._passes: dict[tuple[str, ...], bool] = {}
        self._commit = _git("rev-parse", "--short", "HEAD")

    def run(self, mutants: Sequence[Mutant], minutes: float, *, again: bool = False) -> Iterator[Result]:
        """Run the mutants without a result until the time is over; yield each result.

        Args:
            mutants: To be run, in this order.
            minutes: No mutant is started after so long.
            again: Run those again that survived or did not run.
        """
        found = read_results(self._results)
        known = {(each.id, each.source) for each in found if not again or each.outcome in NOTICED}
        end_s = time.monotonic() + 60 * minutes
        for mutant in mutants:
            if time.monotonic() > end_s:
                return
            if (mutant.id, source_hash(mutant.path)) not in known:
                yield self.run_one(mutant)

    def run_one(self, mutant: Mutant) -> Result:
        """Run one mutant, and add its result to the file."""
        began_s = time.monotonic()
        outcome, test = self.outcome_of(mutant, tests_of(mutant, self._budget_s))
        change = f"{mutant.before} -> {mutant.after}"
        result = Result(
            id=mutant.id,
            package=mutant.package,
            change=" ".join(change.split())[:200],
            outcome=outcome,
            test=test,
            seconds=round(time.monotonic() - began_s, 1),
            source=source_hash(mutant.path),
            commit=self._commit,
            date=str(datetime.date.today()),
        )
        self._results.parent.mkdir(parents=True, exist_ok=True)
        with self._results.open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
        return result

    def outcome_of(self, mutant: Mutant, tests: Sequence[str]) -> tuple[str, str]:
        """Run the tests of a mutant; the working tree stays as it is. Return the outcome, and the test that noticed."""
        left = [test for test in tests if self._passes.get((test,), True)]
        while left:
            run = run_tests(left, self._limit(left), mutant, self._root)
            if not run.is_loaded:
                return "not run: no test imports the module", ""
            if run.code in (0, 5):
                return "survived" if run.code == 0 else "not run: all tests were deselected", ""
            suspects = left if run.failed is None else [run.failed]
            if self._pass_without(suspects):
                return "timeout" if run.code is None else "killed", run.failed or ""
            if suspects[0] not in left or len(suspects) > 1:
                return f"not run: {suspects[0]} and {len(suspects) - 1} more fail, or take long, without it", ""
            left.remove(suspects[0])
        return "not run: no test of it, or each fails, or takes long, without it", ""

    def _pass_without(self, tests: Sequence[str]) -> bool:
        key = tuple(tests)
        if key not in self._passes:
            self._passes[key] = (
                set(tests) <= recorded_seconds().keys()
                or run_tests(tests, self._limit(tests), root=self._root).code in (0, 5)
            )  # fmt: skip
        return self._passes[key]

    def _limit(self, tests: Sequence[str]) -> float:
        """Return the most time for some tests: they may wait for a busy machine, and import segapp."""
        seconds = recorded_seconds()
        recorded = [seconds[test] for test in tests if test in seconds]
        return 40 + 4 * sum(recorded) if len(recorded) == len(tests) else self._limit_s


def run_in_parallel(
    campaign: Campaign, mutants: Sequence[Mutant], minutes: float, *, jobs: int, again: bool = False
) -> None:
    """Run mutants in several processes; each prints its results as they come."""
    import_libraries()

    def run(share: Sequence[Mutant]) -> None:
        adopt_orphans()
        for result in campaign.run(share, minutes, again=again):
            kill_children()
            print(f"{result.outcome:9} {result.seconds:6.1f} s  {result.id}  {result.change[:80]}", flush=True)

    processes = [multiprocessing.get_context("fork").Process(target=run, args=(mutants[i::jobs],)) for i in range(jobs)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


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


Place = tuple[str, str, str]
"""A file below segapp, one of its lines without indentation, and a change on it."""


def judged(folder: Path = JUDGED) -> dict[Place, str]:
    """Return why a change need not be noticed, of the survivors that somebody has looked at."""
    entries = [each for file in sorted(folder.glob("*.json")) for each in json.loads(file.read_text())]
    return {(each["file"], each["line"], each["change"]): each["why"] for each in entries}


def place_of(result: Result) -> Place:
    """Return where a result is in `judged`; its file must be as it was."""
    path, line = result.id.split(":")[:2]
    return path, (SEGAPP / path).read_text().splitlines()[int(line) - 1].strip(), result.change


def score_lines(results: Iterable[Result], excused: Mapping[Place, str] | None = None) -> list[str]:
    """Return a Markdown table of the score of each package, and the survivors that are not excused."""
    excused = judged() if excused is None else excused
    by_package: dict[str, list[Result]] = {}
    for each in results:
        by_package.setdefault(each.package, []).append(each)
    lines = [
        "| package | mutants | noticed | survived | of these judged | not run | score | without the judged |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [*sorted(by_package.items()), ("all", [each for found in by_package.values() for each in found])]
    for package, found in rows:
        noticed = sum(each.outcome in NOTICED for each in found)
        survivors = [each for each in found if each.outcome == "survived"]
        allowed = sum(place_of(each) in excused for each in survivors)
        left = len(found) - noticed - len(survivors)
        counts = len(found), noticed, len(survivors), allowed, left
        scores = _percent(noticed, len(survivors)), _percent(noticed, len(survivors) - allowed)
        lines.append(f"| {' | '.join((package, *map(str, counts), *scores))} |")
    everything = rows[-1][1]
    shown = [each for each in everything if each.outcome == "survived" and place_of(each) not in excused]
    return [*lines, "", *(f"- `{each.id}`: `{each.change}`" for each in sorted(shown, key=lambda each: each.id))]


def _percent(noticed: int, survived: int) -> str:
    return f"{100 * noticed / (noticed + survived):.0f} %" if noticed + survived else "-"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
