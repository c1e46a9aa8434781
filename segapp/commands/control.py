"""`segapp ctl` and which run `segapp attach` means: wishes from the command line. No torch here."""

from __future__ import annotations

import sys
import time

from segapp.errors import CommandError, RunError
from segapp.run.commands import Command, SetCommand, format_command, parse_command, send_command
from segapp.run.events import CommandAnswer, EventReader
from segapp.run.folder import RunFolder, find_run, run_folders
from segapp.run.state import RunSummary, run_state, summarize
from segapp.run.text import printable
from segapp.run.verdict import split_verdict, usable_mib

APPLIED, NOT_APPLIED = 0, 1

_POLL_S = 0.1
_OVER = ("finished", "stopped", "failed", "crashed")


def control_run(
    run: str,
    words: list[str],
    *,
    after_epoch: bool = False,
    force: bool = False,
    wait: bool = False,
    timeout_s: float = 0.0,
) -> int:
    """Sends a command to a run.

    Args:
        run: its name or folder.
        words: the command as it is typed: `set gpu0_bsz=3`, `pause`, `stop`.
        after_epoch: a stop waits for the end of the epoch.
        force: send a split that is not expected to fit.
        wait: wait for the final answer.
        timeout_s: at most so long; 0: for as long as the training runs.

    Returns:
        0 applied (or sent, without `wait`), 1 rejected, cancelled, or not answered.

    Raises:
        CommandError: the command is not understood.
        ConfigError: there is no such run.
        RunError: nobody trains there.
    """
    if after_epoch and words != ["stop"]:
        raise CommandError(f"--after-epoch belongs to stop, not to {printable(' '.join(words))}")
    command = parse_command(" ".join([*words, "epoch"] if after_epoch else words))
    if force and isinstance(command, SetCommand):
        command = command.model_copy(update={"force": True})
    folder = find_run(run)
    state = run_state(folder.path)
    if state in _OVER:
        raise RunError(f"{folder.name} is {state}: nobody would act on it: segapp train --resume {folder.name} goes on")
    problem = _foreseen_problem(command, summarize(folder.path), force=force)
    if problem is not None:
        print(f"rejected: {printable(problem)}", file=sys.stderr)
        return NOT_APPLIED
    reader = EventReader(folder.events, from_end=True)
    command_id = send_command(folder.path, command)
    print(f"sent {command_id}: {format_command(command)}", flush=True)
    return _wait(folder, reader, command_id, timeout_s) if wait else APPLIED


def _foreseen_problem(command: Command, run: RunSummary, *, force: bool) -> str | None:
    """Why a wished split need not be sent; the trainer, who knows more, judges all others."""
    if not isinstance(command, SetCommand) or not {"gpu0_bsz", "shares"} & command.changes.keys():
        return None
    if command.gpu0_bsz == "auto" or run.split is None or run.batch_size is None or sum(run.split) != run.batch_size:
        return None
    verdict = split_verdict(
        run.batch_size,
        len(run.split),
        command.gpu0_bsz,
        shares=command.shares,
        total_mib=[
            usable_mib(device.get("total_mib"), device.get("used_mib"), device.get("reserved_mib"))
            for device in run.devices
        ],
    )
    if not verdict.is_possible or (verdict.level == "won't fit" and not force):
        return verdict.reason
    print(f"split {'·'.join(map(str, verdict.split or ()))} of {run.batch_size}")
    return None


def _wait(folder: RunFolder, reader: EventReader, command_id: str, timeout_s: float) -> int:
    deadline_s = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
    next_look_s = time.monotonic() + 1.0
    is_over = False
    while True:
        for event in reader.read():
            if isinstance(event, CommandAnswer) and event.id == command_id:
                reason = f": {printable(event.reason)}" if event.reason else ""
                print(f"{event.status}{reason}", flush=True)
                if event.status != "accepted":
                    return APPLIED if event.status == "applied" else NOT_APPLIED
        if is_over or time.monotonic() >= deadline_s:
            break
        if time.monotonic() >= next_look_s:
            next_look_s = time.monotonic() + 1.0
            is_over = run_state(folder.path) in _OVER  # one more look at the events, then
        time.sleep(_POLL_S)
    why = "the run ended before it answered" if is_over else f"no answer within {timeout_s:g} s; it is still sent"
    print(f"error: {command_id}: {why}", file=sys.stderr)
    return NOT_APPLIED


def run_to_attach(run: str | None) -> RunFolder:
    """The run that is meant: the one named, else the newest that trains, else the newest.

    Raises:
        ConfigError: there is none.
    """
    if run is None:
        live = next((folder for folder in run_folders() if folder.is_locked()), None)
        if live is not None:
            return live
    return find_run(run)
