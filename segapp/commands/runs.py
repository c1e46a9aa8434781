"""`segapp ls`, `status`, `ckpt`, `ctl` and `attach`: runs as lines or JSON, and commands to a run. No torch here."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from segapp.errors import CheckpointError, CommandError, ConfigError, DistributedError, RunError
from segapp.run.checkpoints import CheckpointFolder, CheckpointStatus
from segapp.run.commands import Command, SetCommand, format_command, parse_command, send_command
from segapp.run.events import CommandAnswer, EventReader
from segapp.run.folder import RunFolder, find_run, is_sweep, run_folders
from segapp.run.state import read_tail
from segapp.run.words import aligned, dots, duration, printable
from segapp.scores import FOREGROUND, NOT_FINITE, loss_text, of_classes, score_text, with_count
from segapp.training.signals import EXIT_STOPPED_AND_SAVED
from segapp.view.runs import Ranking, RunSummary, list_runs, looked_at_twice, run_state, summarize
from segapp.view.source import fold_file
from segapp.view.view import View
from segapp.waiting import lines_while

APPLIED, NOT_APPLIED = 0, 1
MAX_REASON_CHARS = 100
"""Maximum length of a reason in `segapp ls`; `segapp status RUN` shows all of it."""

_POLL_S = 0.1
_NUM_LOOKED_AT = 20
"""Number of the newest runs whose events are checked, because the lock of another machine's run may not be visible."""
_OVER = ("finished", "stopped", "failed", "crashed")


def print_runs(root: Path, *, as_json: bool) -> None:
    """Print one line per run in a folder or a sweep, which may be named, the last started or resumed first."""
    summaries = looked_at_twice(list_runs(Path("runs") / root if is_sweep(Path("runs") / root) else root))
    if as_json:
        print(json.dumps([summary.as_json() for summary in summaries], indent=2))
        return
    if not summaries:
        print(f"no runs in {printable(str(root))}: segapp train starts one")
        return
    header = ("RUN", "STATE", "EPOCH", "STEP", "EPOCH LOSS", "MIOU", "BEST", "AGE", "")
    print("\n".join(aligned([header, *map(_row, summaries)])))


def _row(summary: RunSummary) -> tuple[str, ...]:
    facts = summary.as_json()
    reason = (facts["reason"] or "") if summary.state == "failed" else ""
    ranking = Ranking([facts])
    best, score = ranking.text(facts, score_text(ranking.value(facts))), ranking.score
    return (
        facts["name"],
        summary.word,
        summary.progress,
        "-" if facts["step"] is None else f"{facts['step']}/{facts['steps']}" if facts["steps"] else str(facts["step"]),
        loss_text(facts["loss"], is_known=facts["loss_epoch"] is not None),
        with_count(score_text(facts["miou"]), facts["num_scored"], facts["num_classes"]),
        best if score.name == "miou" or best == "-" else f"{best} {printable(score.title)}",
        duration(facts["age_s"]),
        reason if len(reason) <= MAX_REASON_CHARS else f"{reason[: MAX_REASON_CHARS - 3]}...",
    )


def print_status(run: str, *, as_json: bool) -> None:
    (summary,) = looked_at_twice([summarize(find_run(run).path)])
    facts = summary.as_json()
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    known = {**facts, "state": summary.word}
    for key, epoch in (("loss", "loss_epoch"), ("val_loss", "val_epoch")):
        if facts[key] is None and facts[epoch] is not None:
            known[key] = NOT_FINITE
    # These are part of other lines.
    within = ("loss_epoch", "num_scored", "num_scored_foreground", "best_num_scored", "best_over")
    shown = {key: value for key, value in known.items() if value not in (None, [], {}) and key not in within}
    devices = shown.pop("devices", [])
    scores = shown.pop("scores", {})
    oom = shown.pop("last_oom", None)
    rows = [(key, _text(key, value) + _made_of(key, facts)) for key, value in shown.items()]
    more = {key: value for key, value in scores.items() if value is not None and key not in facts}
    rows += [(key, _text(key, value) + _made_of(key, facts)) for key, value in more.items()]
    if oom is not None:
        rows.append(("last_oom", f"{oom['device']} in {oom['phase']} after step {oom['step']}: {oom['action']}"))
        rows.append(("report", str(oom["path"] or "-")))
    print("\n".join(aligned([*rows, *(("device" if i == 0 else "", _device(d)) for i, d in enumerate(devices))])))


def _made_of(key: str, facts: Mapping[str, Any]) -> str:
    """Return the source of a score in `segapp status`; empty for other values."""
    if key == "loss":
        return f" (training, mean of epoch {facts['loss_epoch']})"
    if key in FOREGROUND:
        return f" over {of_classes(facts['num_scored_foreground'], facts['num_classes'] - 1, 'foreground classes')}"
    num_scored = {"miou": facts["num_scored"], "best_miou": facts["best_num_scored"]}.get(key)
    return "" if num_scored is None else f" over {of_classes(num_scored, facts['num_classes'] or num_scored)}"


def _device(facts: Mapping[str, Any]) -> str:
    """Return one line: `node1 cuda:0  14.1 of 22.0 GiB used, peak 15.2, in forward, 96 % busy, 71 degrees`."""
    used, total = (None if facts[key] is None else facts[key] / 1024 for key in ("used_mib", "total_mib"))
    words = ["n/a used" if used is None else f"{used:.1f}{'' if total is None else f' of {total:.1f}'} GiB used"]
    if facts["peak_mib"] is not None:
        words.append(f"peak {facts['peak_mib'] / 1024:.1f}{' in ' + facts['phase'] if facts['phase'] else ''}")
    if facts["utilization"] is not None:
        words.append(f"{facts['utilization']:.0%} busy")
    if facts["temperature"] is not None:
        words.append(f"{facts['temperature']:.0f} degrees")
    # The machine gave this name itself, so it may hold control characters.
    where = f"{printable(facts['machine'])} " if facts["machine"] else ""
    return f"{where}{facts['device'] or facts['uuid'] or '?'}  {', '.join(words)}"


def print_checkpoints(run: str, *, as_json: bool, hashes: bool) -> int:
    """Print the committed checkpoints, newest first; return 4 if one is damaged; `hashes` reads every byte."""
    rows = CheckpointFolder(find_run(run).checkpoints).verify(hashes=hashes)
    if as_json:
        facts = [
            {
                **row.entry.model_dump(),
                "epoch": row.entry.last_epoch,
                "next_epoch": row.entry.epoch,
                "names": list(row.names),
                "problem": row.problem,
            }
            for row in rows
        ]
        print(json.dumps(facts, indent=2))
    elif not rows:
        print("no committed checkpoint")
    else:
        header = ("NAMES", "EPOCH", "STEP", "METRIC", "MIB", "STATE")
        print("\n".join(aligned([header, *map(_checkpoint_row, rows)])))
    return CheckpointError.exit_code if any(row.problem for row in rows) else 0


def _checkpoint_row(row: CheckpointStatus) -> tuple[str, ...]:
    entry = row.entry
    size_mib = f"{entry.size_bytes / 2**20:.1f}"
    names = " ".join(row.names) or f"objects/{entry.object}"
    return (names, str(entry.last_epoch), str(entry.step), score_text(entry.metric), size_mib, row.problem or "ok")


def _text(key: str, value: Any) -> str:
    if key == "began_s":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if key.endswith("_s") and isinstance(value, (int, float)) and not key.endswith("per_s"):
        return duration(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def print_requeue_code(run: str, code: int) -> int:
    """Print on stderr whether the job of a run should start again, and return the matching exit code.

    `code` is the exit code of the training or its launcher.
    """
    events, saved_step = list[dict[str, Any]](), None
    try:
        folder = find_run(run)
        events = [raw for raw in read_tail(folder.events) if raw["type"] in ("run_start", "run_end")]
        manifest = CheckpointFolder(folder.checkpoints).read_manifest()
        saved_step = manifest.entries[0].step if manifest.entries else None
    except ConfigError:
        pass  # the job failed before it made the folder
    code, why = requeue_code(events, code, saved_step)
    verb = "requeue" if code == EXIT_STOPPED_AND_SAVED else "no requeue"
    print(f"{verb}, exit code {code}: {printable(why)}", file=sys.stderr, flush=True)
    return code


def requeue_code(events: Sequence[Mapping[str, Any]], code: int, saved_step: int | None = None) -> tuple[int, str]:
    """Return the exit code for a scheduler, and the reason for it.

    75: a signal stopped the training, and it has a checkpoint to resume from, so the job should start again. 0: it has
        finished, as its events say, or a person or a program stopped it. Any other code belongs to a failure.

    Args:
        events: the last `run_start` and `run_end` events of the run.
        code: exit code of the training or its launcher.
        saved_step: step of the newest checkpoint.
    """
    last = events[-1] if events else {}
    if code == 0 and last.get("exit_code") != 0:
        code = int(last.get("exit_code") or DistributedError.exit_code)
        if code != EXIT_STOPPED_AND_SAVED:  # torchrun's 0 may stand for it
            return code, "the launcher ended with 0, but the events of the run do not say that it has finished"
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


def control_run(
    run: str,
    words: list[str],
    *,
    after_epoch: bool = False,
    force: bool = False,
    wait: bool = False,
    timeout_s: float = 0.0,
) -> int:
    """Send a command to a run as it is typed, such as `set lr_factor=0.5` or `stop`, and print its answers.

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
    # Opened before the command is sent, so that no answer is missed.
    reader = EventReader(folder.events, last_bytes=0)
    command_id = send_command(folder.path, command)
    print(f"sent {command_id}: {format_command(command)}", flush=True)
    if not wait:
        return APPLIED
    holder = folder.read_holder()
    process = f", process {holder.pid} on {holder.host}" if holder else ""
    with lines_while(lambda: f"waiting for run {folder.name}{process}: it is {run_state(folder.path)}"):
        return _wait(folder, reader, command_id, timeout_s)


def split_problem(command: Command, folder: RunFolder) -> str | None:
    """Return why a requested split is not sent: the trainer's check, made with the facts in the run's events."""
    if not isinstance(command, SetCommand) or command.split is None:
        return None
    view = View()
    fold_file(view, folder.events)
    # The trainer has not written its facts yet, and checks the split itself.
    if view.start is None:
        return None
    checked = view.split_checker.check(command.split)
    problem = checked.rejection(force=command.force)
    if problem is None and checked.split is not None and command.split != "auto":
        print(f"split {dots(checked.split)} of {view.split_checker.batch_size}")
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
