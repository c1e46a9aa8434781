"""Cases of a row, measured one after the other: python -m tests.gpu.cases MODULE:FUNCTION --results FILE [--device D].

Each result is written as a line of JSON as soon as it is known, so that a stop loses the case that runs and no other.
The first failure ends the process, because an error of CUDA spoils all later calls of a process; `tests.gpu.session`
starts it again for the cases that are left.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
"""Columns of a table and their values: strings, numbers, None."""

DONE_VARIABLE = "SEGAPP_GPU_DONE"
"""A file with the names of the cases that need not run again, one a line."""

RESULTS_VARIABLE = "SEGAPP_GPU_RESULTS"
"""The file that results are added to."""


class NotPossible(Exception):  # noqa: N818 - no error
    """A case cannot be measured on this machine; the message says why."""


@dataclass(frozen=True)
class Case:
    """A measurement.

    Attributes:
        name: of its own in its row; a second start leaves out the names that have a result.
        measure: returns the row of the table, or raises `NotPossible`.
    """

    name: str
    measure: Callable[[], Row]


def rows_of(cases: Sequence[Case]) -> list[Row]:
    """Measure all cases in this process and return their rows."""
    return [case.measure() for case in cases]


def add_line(path: Path, **values: Any) -> None:
    """Add a line of JSON to a file, on the disk when this returns."""
    with path.open("a") as file:
        file.write(json.dumps(values) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of results; a last line that a stop cut off is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def outcomes(path: Path) -> dict[str, dict[str, Any]]:
    """Return the last outcome of each case in a file of results."""
    return {line["case"]: line for line in read_lines(path) if "outcome" in line}


def starts_without_end(path: Path) -> Counter[str]:
    """Return the cases of a file of results that began and have no outcome, and how often each began."""
    begun = Counter(line["case"] for line in read_lines(path) if "began" in line)
    ended = outcomes(path)
    return Counter({name: number for name, number in begun.items() if name not in ended})


def done_names() -> set[str]:
    """Return the names that `DONE_VARIABLE` lists."""
    path = os.environ.get(DONE_VARIABLE)
    return set(Path(path).read_text().splitlines()) if path and Path(path).exists() else set()


def measure_all(cases: Sequence[Case], results: Path) -> int:
    """Measure the cases that have no result yet; return 1 after the first that fails, 0 if none does."""
    done = done_names() | outcomes(results).keys()
    for case in cases:
        if case.name in done:
            continue
        add_line(results, case=case.name, began=time.time())
        start = time.monotonic()
        try:
            row = case.measure()
        except NotPossible as reason:
            add_line(results, case=case.name, outcome="skipped", reason=str(reason))
        except Exception as error:
            reason_text = f"{type(error).__name__}: {error}".partition("\n")[0]
            seconds = time.monotonic() - start
            add_line(results, case=case.name, outcome="failed", reason=reason_text, seconds=seconds)
            raise
        else:
            add_line(results, case=case.name, outcome="passed", row=row, seconds=time.monotonic() - start)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cases that a function returns for a device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function", help="MODULE:FUNCTION, which returns the cases for a device")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args(arguments)
    module, _, name = options.function.partition(":")
    return measure_all(getattr(importlib.import_module(module), name)(options.device), options.results)


if __name__ == "__main__":
    from tests.gpu import cases  # so that `NotPossible` is the class that the modules of the cases raise

    sys.exit(cases.main())
