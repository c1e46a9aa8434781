"""`segapp requeue-code`: the exit code that tells a scheduler whether to start a job again. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from segapp.errors import ConfigError, RunError
from segapp.run.checkpoints import CheckpointFolder
from segapp.run.folder import find_run
from segapp.run.state import read_tail
from segapp.run.words import printable
from segapp.training.signals import EXIT_STOPPED_AND_SAVED


def print_requeue_code(run: str, code: int | None) -> int:
    """Print on stderr whether the job of a run should start again, and return the matching exit code.

    Args:
        run: name or folder of the run.
        code: exit code of the training or its launcher; None: the one in the run's last event.
    """
    events, saved_step = list[dict[str, Any]](), None
    try:
        folder = find_run(run)
        events = [raw for raw in read_tail(folder.events) if raw["type"] in ("run_start", "run_end")]
        manifest = CheckpointFolder(folder.checkpoints).read_manifest()
        saved_step = manifest.entries[0].step if manifest.entries else None
    except ConfigError:  # the job failed before it made the folder
        if code is None:
            raise
    code, why = requeue_code(events, code, saved_step)
    verb = "requeue" if code == EXIT_STOPPED_AND_SAVED else "no requeue"
    print(f"{verb}, exit code {code}: {printable(why)}", file=sys.stderr, flush=True)
    return code


def requeue_code(
    events: Sequence[Mapping[str, Any]], code: int | None, saved_step: int | None = None
) -> tuple[int, str]:
    """Return the exit code for a scheduler, and the reason for it.

    75: a signal stopped the training, and it has a checkpoint to resume from, so the job should start again. 0: it has
        finished, or a person or a program stopped it. Any other code is the exit code of a failure.

    Args:
        events: the last `run_start` and `run_end` events of the run.
        code: exit code of the training or its launcher; None: the one in the run's last event.
        saved_step: step of the newest checkpoint.
    """
    last = events[-1] if events else {}
    code = last.get("exit_code") if code is None else code
    if code is None:
        return RunError.exit_code, "the run has not written how it ended"
    if code != EXIT_STOPPED_AND_SAVED:
        return code, str(last.get("reason") or "the training did not stop with a checkpoint")
    if last.get("type") == "run_start":  # a stop by command writes an end; a kill after the grace time does not
        begun = [raw.get("resumed_from_step") or 0 for raw in events if raw["type"] == "run_start"][-2:]
        if saved_step is None or (len(begun) == 2 and min(begun) >= saved_step):
            return RunError.exit_code, "the training was killed before it had a new checkpoint"
        return code, f"the training was killed before it could save again; it has a checkpoint of step {saved_step}"
    if last.get("exit_code") != code or last.get("stopped_by") is None:
        return RunError.exit_code, "the events of the run do not say what stopped it"
    if last["stopped_by"] == "command":
        return 0, str(last.get("reason"))
    steps = [raw.get("step") or 0 for raw in events if raw.get("exit_code") == code][-3:]
    if len(steps) == 3 and max(steps[1:]) <= steps[0]:
        return RunError.exit_code, (
            "the run was stopped twice without a new step: raise the job's time limit, or send the signal later"
        )
    return code, str(last.get("reason"))
