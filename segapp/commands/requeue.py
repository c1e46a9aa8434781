"""`segapp requeue-code`: the exit code by which a scheduler starts a job again, or does not. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from segapp.errors import ConfigError, RunError
from segapp.run.folder import find_run
from segapp.run.state import read_tail
from segapp.run.words import printable
from segapp.training.signals import EXIT_STOPPED_AND_SAVED


def print_requeue_code(run: str, code: int | None) -> int:
    """Print on stderr whether the job of a run should start again, and return the exit code that says so.

    Args:
        run: name or folder of the run.
        code: exit code of the training or its launcher; None: that of the run's last end.
    """
    try:
        events = read_tail(find_run(run).events)
    except ConfigError:  # the job failed before it made the folder
        if code is None:
            raise
        events = []
    ends = [raw for raw in events if raw["type"] == "run_end"]
    is_end_known = bool(ends) and all(raw["type"] != "run_start" for raw in events[events.index(ends[-1]) :])
    code, why = requeue_code(ends if is_end_known else [], code)
    verb = "requeue" if code == EXIT_STOPPED_AND_SAVED else "no requeue"
    print(f"{verb}, exit code {code}: {printable(why)}", file=sys.stderr, flush=True)
    return code


def requeue_code(ends: Sequence[Mapping[str, Any]], code: int | None) -> tuple[int, str]:
    """Return the exit code for a scheduler, and the reason for it.

    75: a signal stopped the training, which has saved, so the job should start again. 0: it has finished, or a person
    or a program stopped it. Other codes are those of a failure.

    Args:
        ends: the last `run_end` events of the run, the newest last; none if the last start has not written one.
        code: exit code of the training or its launcher; None: that of the last end.
    """
    last = ends[-1] if ends else {}
    code = last.get("exit_code") if code is None else code
    if code is None:
        return RunError.exit_code, "the run has not written how it ended"
    if code != EXIT_STOPPED_AND_SAVED:
        return code, str(last.get("reason") or "the training did not stop with a checkpoint")
    if last.get("exit_code") != code or last.get("stopped_by") is None:
        return RunError.exit_code, "the events of the run do not say what stopped it"
    if last["stopped_by"] == "command":
        return 0, str(last.get("reason"))
    steps = [raw.get("step") or 0 for raw in ends[-3:]]
    if len(steps) == 3 and max(steps[1:]) <= steps[0]:
        return RunError.exit_code, (
            "the run was stopped twice without a new step: give the job more time, or the signal less"
        )
    return code, str(last.get("reason"))
