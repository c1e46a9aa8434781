"""What the events and reports of a run say about the time after a checkpoint, for a training that continues there."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from segapp.chunks import SPLIT_NAMES, Split
from segapp.config.sections import FALLBACKS, SPLIT_SETTINGS, LiveSettings, automatic
from segapp.errors import CommandError
from segapp.run.commands import SetCommand, parse_command
from segapp.run.events import CommandAnswer, EventLog, EventReader, Gpu0Bsz, read_answers
from segapp.run.files import read_of_run, write_atomic
from segapp.run.folder import RunFolder
from segapp.run.words import dots
from segapp.training.live.changes import Replay


def applied_after(events: Path, step: int) -> list[Replay]:
    """Return the changes of settings that were applied at or after a step, without reverted splits."""
    applied: dict[str, Replay] = {}
    for event in EventReader(events).read_kinds("gpu0_bsz", "command"):
        status, at = event.get("status"), int(event.get("step") or 0)
        # Changes by auto have no id, and there is at most one in an epoch.
        key = str(event.get("id") or f"auto at {event.get('epoch')}")
        if event["type"] == "gpu0_bsz" and status == "reverted" and key in applied:
            applied[key] = applied[key].without(SPLIT_NAMES)
        elif event["type"] == "gpu0_bsz" and status == "applied" and event.get("id") is None and at >= step:
            applied[key] = Replay(at, automatic(event.get("new")))
        elif event["type"] == "command" and status == "applied" and at >= step:
            applied[key] = Replay(at, event.get("changes") or {}, key)
    return [each for each in applied.values() if each.values]


def reverted_splits(events: Path) -> set[tuple[int, str | None]]:
    """Return the epochs in which splits that were reverted began, and the commands that had requested them."""
    changes = EventReader(events).read_kinds("gpu0_bsz")
    return {(int(raw.get("epoch") or 0), raw.get("id")) for raw in changes if raw.get("status") == "reverted"}


class Adopted(NamedTuple):
    """Settings that a rank adopted after an out-of-memory error."""

    step: int
    """Updates made before it."""
    fallbacks: dict[str, Any]
    """By the name of the setting, as `LiveSettings` has them."""
    failed_split: Split | None = None
    """A split to which the run does not return."""


def fallbacks_after(folder: RunFolder, step: int) -> list[Adopted]:
    """Return the settings that any rank adopted at or after a step, in the order of the steps, each only once."""
    adopted: list[Adopted] = []
    for raw in (*EventReader(folder.events).read_kinds("settings"), *(raw for raw, _ in _rank_reports(folder))):
        at, names = int(raw.get("step") or 0), {*(raw.get("fallbacks") or ())} & {*FALLBACKS}
        # JSON has lists for tuples, which would not compare as equal.
        known = LiveSettings.model_validate({name: raw["fallbacks"][name] for name in names})
        failed = raw.get("failed_split") or None
        found = Adopted(at, known.model_dump(include=names), None if failed is None else tuple(failed))
        if at >= step and (names or found.failed_split) and found not in adopted:
            adopted.append(found)
    return sorted(adopted, key=lambda each: each.step)


def _rank_reports(folder: RunFolder) -> Iterator[tuple[dict[str, Any], Path]]:
    """Yield the `settings` of ranks other than the main one, and the file of each."""
    for path in sorted(folder.reports.glob("rank_*.json")):
        with contextlib.suppress(OSError, ValueError):
            yield json.loads(read_of_run(path)), path


def report_reverted_split(folder: RunFolder, event_log: EventLog) -> None:
    """Emit that the newest change of the split was reverted, and answer its command, if a rank has reported this.

    That rank could not emit it, because only the main rank writes events. Call it before the inbox is read, so that the
    command is not carried out again. Its settings other than the split hold from the first step with the split on.
    """
    reports = [(raw, path) for raw, path in _rank_reports(folder) if not raw.get("is_read")]
    for raw, path in reports:  # a later change to the same split is another one, and clocks of machines differ
        with contextlib.suppress(OSError):
            write_atomic(path, json.dumps({**raw, "is_read": True}) + "\n")
    rare = list(EventReader(folder.events).read_kinds("gpu0_bsz", "command", "epoch_start"))
    change = next((raw for raw in reversed(rare) if raw["type"] == "gpu0_bsz"), None)
    if change is None or change["status"] not in ("pending", "applied") or not change.get("split"):
        return
    problem = next((raw.get("reason") for raw, _ in reports if change["split"] == raw.get("failed_split")), None)
    if problem is None:
        return
    reason = f"out of memory: split {dots(change['split'])} does not fit: back to the one before ({problem})"
    asked_for: Any = {name: change.get(name) for name in ("old", "new", "epoch", "id", "is_auto")}
    event_log.emit(Gpu0Bsz(status="reverted", **asked_for, reason=reason))
    asked = next((raw for raw in rare if raw["type"] == "command" and raw.get("id") == change.get("id")), None)
    if asked is not None and asked["id"] not in read_answers(rare):
        begun = [raw for raw in rare if raw["type"] == "epoch_start" and raw.get("epoch") == change.get("epoch")]
        step = (begun or [asked])[-1].get("step")
        rest = _other_settings(asked["command"], rare, step)
        event_log.emit(
            CommandAnswer(
                id=asked["id"],
                command=asked["command"],
                by=asked["by"],
                status="applied" if rest else "rejected",
                reason=reason,
                changes=rest or None,
                step=step,
            )
        )


def _other_settings(command: str, rare: Iterable[dict[str, Any]], step: int | None) -> dict[str, Any]:
    """Return the settings of a `set` next to the split, without those that newer commands have set at that step."""
    with contextlib.suppress(CommandError):  # of a version with other settings
        asked = parse_command(command)
        changes = asked.changes if isinstance(asked, SetCommand) else {}
        newer = {name for raw in rare if raw.get("step") == step for name in raw.get("changes") or ()}
        return {name: value for name, value in changes.items() if name not in SPLIT_SETTINGS | newer}
    return {}
