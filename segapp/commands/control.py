"""`segapp ctl`: send a command to a run. Also chooses the default run of `segapp attach`. No torch here."""

from __future__ import annotations

import sys
import time

from segapp.errors import CommandError, RunError
from segapp.memory.judge import format_split
from segapp.run.commands import Command, SetCommand, format_command, parse_command, send_command
from segapp.run.events import CommandAnswer, EventReader
from segapp.run.folder import RunFolder, find_run, run_folders
from segapp.run.state import run_state
from segapp.run.words import printable
from segapp.view.view import View, fold_events

APPLIED, NOT_APPLIED = 0, 1

_POLL_S = 0.1
_NUM_LOOKED_AT = 20
"""Number of the newest runs whose events are checked, because the lock of another machine's run may not be visible."""
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
    """Send a command to a run as it is typed, such as `set gpu0_bsz=3` or `stop`, and print its answers.

    Returns:
        0: applied (without `wait`: sent); 1: rejected, canceled or not answered within `timeout_s` (0: no limit).

    Raises:
        CommandError: The command is not understood.
        RunError: The run has ended.
    """
    if after_epoch and words != ["stop"]:
        raise CommandError(f"--after-epoch belongs to stop, not to {printable(' '.join(words))}")
    command = parse_command(" ".join([*words, "epoch"] if after_epoch else words))
    if force and isinstance(command, SetCommand):
        command = command.model_copy(update={"force": True})
    folder = find_run(run)
    state = run_state(folder.path)
    if state in _OVER:
        raise RunError(
            f"{folder.name} is {state} and takes no commands: segapp train --resume {folder.argument} continues it"
        )
    problem = split_problem(command, folder)
    if problem is not None:
        print(f"rejected: {printable(problem)}", file=sys.stderr)
        return NOT_APPLIED
    reader = EventReader(folder.events, last_bytes=0)
    command_id = send_command(folder.path, command)
    print(f"sent {command_id}: {format_command(command)}", flush=True)
    return _wait(folder, reader, command_id, timeout_s) if wait else APPLIED


def split_problem(command: Command, folder: RunFolder) -> str | None:
    """Return why a requested split is not sent: the trainer's check, made with the facts in the run's events."""
    if not isinstance(command, SetCommand) or not command.asks_for_split:
        return None
    view = View()
    fold_events(view, EventReader(folder.events).read_skimmed())
    if view.start is None:
        return None
    verdict = view.judge.verdict(command.gpu0_bsz, command.shares)
    problem = verdict.rejection(force=command.force)
    if problem is None and verdict.split is not None and command.gpu0_bsz != "auto":
        print(f"split {format_split(verdict.split)} of {view.judge.batch_size}")
    return problem


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
            is_over = run_state(folder.path) in _OVER  # afterwards, read the events once more for an answer at the end
        time.sleep(_POLL_S)
    why = "the run ended without an answer" if is_over else f"no answer within {timeout_s:g} s; the command stays sent"
    print(f"error: {command_id}: {why}", file=sys.stderr)
    return NOT_APPLIED


def show_runs() -> bool:
    """Show the list of runs, if this is a terminal and there are runs; return False if not."""
    from segapp.commands.spawn import is_interactive

    folders = run_folders()
    if not folders or not is_interactive():
        return False
    from segapp.tui.app import run_ui

    run_ui(folders[0], starts_with_list=True)
    return True


def run_to_attach(run: str | None) -> RunFolder:
    """Return the named run; without a name the newest run that is training on any machine, else the newest run."""
    if run is None:
        folders = run_folders(with_sweeps=True)
        live = next((folder for folder in folders if folder.is_locked()), None)
        live = live or next((folder for folder in folders[:_NUM_LOOKED_AT] if run_state(folder.path) == "live"), None)
        if live is not None:
            return RunFolder.open(live.path)
    return find_run(run)
