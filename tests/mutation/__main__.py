"""The mutation campaign: `python -m tests.mutation --minutes 30`; see README.md beside this file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tests.mutation.campaign import (
    NOTICED,
    RESULTS,
    Campaign,
    current,
    find_mutants,
    read_results,
    run_in_parallel,
    sampled,
    score_lines,
)
from tests.mutation.selection import record


def main() -> int:
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0, help="start no mutant after so long")
    parser.add_argument("--package", action="append", default=[], help="of segapp, such as losses; may be repeated")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--per-package", type=int, default=50, help="mutants of each package")
    parser.add_argument("--jobs", type=int, default=2, help="mutants at the same time")
    parser.add_argument("--budget-s", type=float, default=30.0, help="most time of a mutant's tests, as recorded")
    parser.add_argument("--limit-s", type=float, default=120.0, help="most time for tests without a record")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of JSON lines; a campaign goes on from it")
    parser.add_argument("--again", action="store_true", help="run those that survived or did not run, no others")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the sample, run nothing")
    what.add_argument("--one", metavar="ID", help="run this mutant, again too")
    what.add_argument("--score", action="store_true", help="print the score of the results so far")
    what.add_argument("--record", nargs="+", metavar="PATH", help="record which lines these tests run")
    options = parser.parse_args()
    if options.record:
        return record(options.record)
    if options.list:
        for mutant in sampled(find_mutants(options.package), options.seed, options.per_package):
            print(f"{mutant.id}  {' '.join(mutant.before.split())[:60]}  ->  {' '.join(mutant.after.split())[:60]}")
        return 0
    campaign = Campaign(options.results, budget_s=options.budget_s, limit_s=options.limit_s)
    if options.one:
        found = [mutant for mutant in find_mutants([options.one.partition("/")[0]]) if mutant.id == options.one]
        if not found:
            parser.error(f"{options.one}: no such mutant; --list prints them")
        result = campaign.run_one(found[0])
        print(f"{result.outcome}: {result.change}")
        return 0
    if not options.score:
        mutants = sampled(find_mutants(options.package), options.seed, options.per_package)
        if options.again:
            known = {each.id for each in current(read_results(options.results)) if each.outcome not in NOTICED}
            mutants = [mutant for mutant in find_mutants(options.package) if mutant.id in known]
        run_in_parallel(campaign, mutants, options.minutes, jobs=options.jobs, again=options.again)
    print("\n".join(score_lines(current(read_results(options.results)))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
