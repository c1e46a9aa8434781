"""The mutation campaign: `python -m tests.mutation --minutes 30`; see README.md beside this file."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.mutation.campaign import (
    CONTEXTS,
    RESULTS,
    Campaign,
    current,
    find_mutants,
    read_results,
    sampled,
    score_lines,
)
from tests.support import ROOT


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="start no mutant after so long")
    parser.add_argument("--package", action="append", default=[], help="of segapp, such as losses; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--per-package", type=int, default=50, help="mutants of each package")
    parser.add_argument("--limit-s", type=float, default=120.0, help="most time for the tests of one mutant")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of JSON lines; a campaign goes on from it")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the sample, run nothing")
    what.add_argument("--one", metavar="ID", help="run this mutant, again too")
    what.add_argument("--score", action="store_true", help="print the score of the results so far")
    what.add_argument("--record", nargs="+", metavar="PATH", help="record which functions these tests call")
    options = parser.parse_args()
    if options.record:
        return record(options.record)
    mutants = sampled(find_mutants(options.package), options.seed, options.per_package)
    if options.list:
        for mutant in mutants:
            print(f"{mutant.id}  {' '.join(mutant.before.split())[:60]}  ->  {' '.join(mutant.after.split())[:60]}")
        return 0
    campaign = Campaign(options.results, limit_s=options.limit_s)
    if options.one:
        found = [mutant for mutant in find_mutants([options.one.partition("/")[0]]) if mutant.id == options.one]
        if not found:
            parser.error(f"{options.one}: no such mutant; --list prints them")
        result = campaign.run_one(found[0])
        print(f"{result.outcome}: {result.change}")
        return 0
    if not options.score:
        for result in campaign.run(mutants, options.minutes):
            print(f"{result.outcome:9} {result.seconds:6.1f} s  {result.id}  {result.change[:80]}", flush=True)
    print("\n".join(score_lines(current(read_results(options.results)))))
    return 0


def record(paths: list[str]) -> int:
    """Run tests, and add which functions each of them calls to the contexts."""
    from tests.mutation.recording import VARIABLE

    words = ["-m", "pytest", "-n", "0", "-q", "-p", "tests.mutation.recording", *paths]
    env = {**os.environ, VARIABLE: str(CONTEXTS)}
    return subprocess.run([sys.executable, *words], cwd=ROOT, env=env, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
