"""The end of a split under which a rank other than the main one ran out of memory, told when the ranks start again."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from segapp.memory.judge import format_split
from segapp.older import EVENT_KEYS, renamed
from segapp.run.events import CommandAnswer, EventLog, EventReader, Gpu0Bsz, read_answers
from segapp.run.folder import RunFolder
from segapp.training.recovery.fallbacks import MemoryFallbacks


def report_reverted_split(folder: RunFolder, event_log: EventLog) -> None:
    """Emit that the newest change of the split was reverted, and reject its command, if a rank has reported so.

    That rank could not: only the main rank writes events. To be called before the inbox is read, so that the command
    is not carried out again.
    """
    rare = [raw for raw in EventReader(folder.events).read_skimmed() if isinstance(raw, dict)]
    change = next((raw for raw in reversed(rare) if raw["type"] == "gpu0_bsz"), None)
    if change is None or change["status"] not in ("pending", "applied") or not change.get("split"):
        return
    problem = _problem_under(folder, tuple(change["split"]), after_s=change["t"])
    if problem is None:
        return
    reason = f"out of memory: split {format_split(change['split'])} does not fit: back to the one before ({problem})"
    event_log.emit(
        Gpu0Bsz(
            status="reverted",
            old=change.get("old"),
            new=change.get("new"),
            epoch=change.get("epoch"),
            id=change.get("id"),
            is_auto=change.get("is_auto"),
            reason=reason,
            reason_code="out_of_memory",
        )
    )
    asked = next((raw for raw in rare if raw["type"] == "command" and raw.get("id") == change.get("id")), None)
    if asked is not None and asked["id"] not in read_answers(rare):
        step = asked.get("step")
        event_log.emit(
            CommandAnswer(
                id=asked["id"], command=asked["command"], by=asked["by"], status="rejected", reason=reason, step=step
            )
        )


def _problem_under(folder: RunFolder, split: tuple[int, ...], after_s: float) -> str | None:
    """Return the error of a rank that reported this split as failed after a time (Unix seconds); None: none did."""
    for path in folder.reports.glob("rank_*.json"):
        with contextlib.suppress(OSError, ValueError):
            raw: dict[str, Any] = renamed(json.loads(path.read_text()), EVENT_KEYS["oom"])
            failed = MemoryFallbacks.from_json(raw.get("fallbacks") or {}).failed_splits
            if split in failed and path.stat().st_mtime >= after_s:
                return str(raw.get("problem") or raw.get("message") or "a rank ran out of memory")
    return None
