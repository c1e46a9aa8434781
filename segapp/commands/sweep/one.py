"""One run of a sweep, for schedulers: `--dry-run` lists the runs, `--only` trains one of them in this process."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Sequence

from segapp.commands.sweep.plan import SweepPlan, plan_sweep
from segapp.commands.sweep.runner import start_of
from segapp.errors import ConfigError, RunBusyError, SegappError
from segapp.run.sweep import SweepFolder, SweepRun
from segapp.run.words import aligned, first_line, printable
from segapp.training.request import plan_request

_LOCKED_S = 60.0
"""Maximum wait for other tasks; each holds the sweep's lock while it plans the sweep."""


def print_runs(words: Sequence[str], configs: Sequence[str], only: int | None, *, as_json: bool) -> None:
    """Print the runs of a sweep, or the folder of one of them; nothing is written.

    In JSON, `words` are the arguments of the `segapp` command that trains only this run, on one machine or several.
    """
    plan = plan_sweep(words, configs)
    runs = plan.runs if only is None else [_chosen(plan, only)]
    states = {run.name: plan.folder.state_of(run) for run in runs}
    folders = {run.name: str(plan.folder.path / run.name) for run in runs}
    if as_json:
        facts = [
            {
                "index": plan.runs.index(run),
                "name": run.name,
                "folder": folders[run.name],
                "state": states[run.name],
                "settings": run.settings,
                "words": ["train", *plan.train_words(run.name), "--run", folders[run.name], "--resume", "auto"],
            }
            for run in runs
        ]
        print(json.dumps({"name": plan.folder.name, "path": str(plan.folder.path), "runs": facts}, indent=2))
    elif only is not None:
        print(printable(folders[runs[0].name]))
    else:
        rows = [(str(at), folders[run.name], states[run.name]) for at, run in enumerate(runs)]
        print("\n".join(aligned([("INDEX", "RUN", "STATE"), *rows])))


def train_one(words: Sequence[str], configs: Sequence[str], only: int) -> int:
    """Train a run of a sweep in this process, new or resumed, and return its exit code.

    Raises:
        ConfigError: the sweep cannot be planned, has no such run, or this process is one of several ranks.
        RunBusyError: another trainer holds the run, or other tasks have held the sweep for a minute.
    """
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError(
            "--only trains a run in one process, and this is one of several ranks: start segapp launch with the "
            "arguments that segapp sweep --dry-run --json prints for the run"
        )
    plan = plan_sweep(words, configs)
    if plan.configs:
        with _locked(plan.folder):
            plan = plan_sweep(words, configs)  # again: another task may have written the runs
            plan.save()
    run = _chosen(plan, only)
    plan.check_parts()
    if plan.folder.state_of(run) == "finished":
        print(f"{printable(run.name)} has finished")
        return 0
    config, resume = start_of(plan.folder, run)
    folder = plan.folder.folder_of(run.name)
    chosen = [("--config", config), ("--run", str(folder.path) if resume is None else None), ("--resume", resume)]
    arguments = ["train", "--plain", *(word for name, value in chosen if value is not None for word in (name, value))]
    from segapp.training.session import run_session

    try:
        request = plan_request(config, [], folder.path if resume is None else None, resume)
        code = run_session(request, arguments)
    except RunBusyError:
        raise
    except SegappError as error:
        _note_end(plan.folder, run, error.exit_code, first_line(error))
        raise
    if run.exit_code is not None:
        _note_end(plan.folder, run, None, None)
    return code


def _chosen(plan: SweepPlan, only: int) -> SweepRun:
    if not 0 <= only < len(plan.runs):
        raise ConfigError(f"--only {only}: the sweep has the runs 0 to {len(plan.runs) - 1}: see --dry-run")
    return plan.runs[only]


def _note_end(sweep: SweepFolder, run: SweepRun, exit_code: int | None, reason: str | None) -> None:
    """Record how a run ended; skip it if the sweep stays locked, because runs also have their own events."""
    with contextlib.suppress(RunBusyError), _locked(sweep):
        sweep.note_end(run.name, exit_code, reason)


@contextlib.contextmanager
def _locked(sweep: SweepFolder) -> Iterator[None]:
    """Hold the lock of a sweep; wait while other processes plan it or record something."""
    deadline_s = time.monotonic() + _LOCKED_S
    while True:
        try:
            sweep.acquire()
            break
        except RunBusyError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.1)
    try:
        yield
    finally:
        sweep.release()
