"""`segapp sweep`: train a grid of settings, one run per combination, and compare the runs on one page.

`grid` parses the words of the command line, `plan` makes runs of them, `runner` trains the runs, and
`segapp.report.compare` writes the page.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from segapp.commands.sweep.overview import Overview
from segapp.commands.sweep.plan import SweepPlan, plan_sweep
from segapp.commands.sweep.runner import SweepRunner, parse_slots
from segapp.errors import ConfigError, RunError
from segapp.run.sweep import SweepFolder, SweepRun
from segapp.run.words import aligned, printable
from segapp.training.signals import EXIT_STOPPED_AND_SAVED

if TYPE_CHECKING:
    from segapp.report.sweep_results import SettingResult, Spread, SweepResults


def run_sweep(
    words: Sequence[str],
    configs: Sequence[str] = (),
    devices: str | None = None,
    *,
    retry: bool = False,
    only_report: bool = False,
    as_json: bool = False,
) -> int:
    """Run a sweep, or the remaining runs of it, and write its page.

    Returns:
        The exit code: 0: every run of the command has finished; 1: some have failed; 75: the sweep was stopped, and the
        same command continues it.

    Raises:
        ConfigError: the runs cannot be planned; nothing is written then.
        RunBusyError: another process is running the sweep.
    """
    plan = plan_sweep(words, configs)
    if only_report:
        if plan.configs:
            raise ConfigError("--report trains nothing: name a sweep that exists, e.g. segapp sweep NAME --report")
        _finish(plan.folder, as_json=as_json)
        return 0
    plan.check_parts()
    slots = parse_slots(devices, os.environ)
    if devices is not None:
        _check_devices(plan)
    plan.folder.acquire()
    try:
        plan.save()
        runs = plan.runs
        states = {run.name: plan.folder.state_of(run) for run in runs}
        failed = [] if retry else [run for run in runs if states[run.name] == "failed"]
        todo = [run for run in runs if states[run.name] != "finished" and run not in failed]
        stream = sys.stderr if as_json else sys.stdout
        overview = Overview(stream, len(runs), len(runs) - len(todo), len(slots))
        overview.line(f"sweep {plan.folder.name}: {len(runs)} runs, {len(todo)} to train; folder {plan.folder.path}")
        for run in failed:
            overview.line(f"{run.name}: failed before ({_failure(plan.folder, run)}); --retry trains it again")
        is_whole = not todo or SweepRunner(plan.folder, slots, overview).carry_out(todo)
    finally:
        plan.folder.release()
    _finish(plan.folder, as_json=as_json)
    if not is_whole:
        return EXIT_STOPPED_AND_SAVED
    last = {run.name: run for run in plan.folder.read().runs}
    final = [plan.folder.state_of(last[run.name]) for run in runs]
    if failed or overview.num_failed or "failed" in final:
        return RunError.exit_code
    return 0 if set(final) <= {"finished"} else EXIT_STOPPED_AND_SAVED


def _check_devices(plan: SweepPlan) -> None:
    """Check that no config chooses devices if --devices is given."""
    for name in sorted(plan.names):
        devices = plan.config_of(name).parallel.devices
        if devices != "auto":
            raise ConfigError(
                f"parallel.devices = {devices} of run {name}: --devices gives each run its own: set the key to auto, "
                "or leave --devices out",
                key="parallel.devices",
                value=devices,
            )


def _failure(sweep: SweepFolder, run: SweepRun) -> str:
    if run.reason is not None:
        return run.reason
    from segapp.view.summary import summarize

    return summarize(sweep.folder_of(run.name).path).reason or "without a reason"


def _finish(sweep: SweepFolder, *, as_json: bool) -> None:
    """Write the page, and print the results."""
    from segapp.report.compare import write_sweep_page
    from segapp.report.sweep_results import read_results

    results = read_results(sweep)
    page = write_sweep_page(sweep, results)
    if as_json:
        print(json.dumps({**results.as_json(), "page": str(page)}, indent=2))
        return
    print("\n".join(result_lines(results)))
    print(f"written: {printable(str(page))}")


def result_lines(results: SweepResults) -> list[str]:
    """Return the table of the settings, the best first."""
    from segapp.report.sweep_results import shown_value

    header = [
        *(results.varying or ["setting"]),
        "RUNS",
        "BEST MIOU",
        "DIFFERENCE",
        "LAST MIOU",
        "VAL LOSS",
        "EPOCH LOSS",
    ]
    rows = [
        [
            *([shown_value(row.settings[key]) for key in results.varying] or ["all runs"]),
            f"{row.num_finished} of {len(row.runs)}",
            _text(row.best_miou, row.best_classes),
            _difference(row),
            _text(row.last_miou, row.last_classes),
            _text(row.val_loss),
            _text(row.loss),
        ]
        for row in results.settings
    ]
    return aligned([header, *rows])


def _difference(row: SettingResult) -> str:
    if row.difference is None:
        return "-"
    return f"{row.difference.mean:+.4f}" + ("" if row.margin is None else f" ± {row.margin:.4f}")


def _text(spread: Spread | None, classes: str = "") -> str:
    """Return a spread as text; for a mean over classes, with the number of classes."""
    if spread is None:
        return "-"
    deviation = "" if spread.deviation is None else f" ± {spread.deviation:.4f}"
    return f"{spread.mean:.4f}{deviation}" + (f" ({classes})" if classes else "")
