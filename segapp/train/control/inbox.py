"""The trainer's end of the inbox: commands come out once, each is answered for good once, over crashes too."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from segapp.failpoints import failpoint
from segapp.run.commands import ReceivedCommand, drain_commands, parse_command, remove_answered, remove_command
from segapp.run.events import CommandAnswer, EventReader, read_answers
from segapp.run.folder import RunFolder
from segapp.train.telemetry.event_log import EventLog

POLL_S = 0.25

FinalStatus = Literal["applied", "rejected", "cancelled"]


class Inbox:
    """Commands of one run, for the process that holds it.

    A command's file goes when its final answer is in the events; a process that begins with a file left over by an
    answered command removes it, and takes up what was never answered.

    Args:
        folder: the run; None for a rank that decides nothing.
        event_log: takes the answers.
    """

    def __init__(self, folder: RunFolder | None, event_log: EventLog) -> None:
        self._path = None if folder is None else folder.path
        self._event_log = event_log
        self._handled: set[str] = set()
        self._looked_s = -POLL_S
        self._found: list[ReceivedCommand] = []
        if self._path is not None and folder is not None:
            self._handled = set(read_answers(_read_rare(folder.events)))
            remove_answered(self._path, self._handled)

    def has_commands(self) -> bool:
        """Whether commands wait; looks at the disk at most four times a second."""
        now_s = time.monotonic()
        if self._path is not None and now_s - self._looked_s >= POLL_S:
            self._looked_s = now_s
            self._found = drain_commands(self._path, self._handled)
        return bool(self._found)

    def take(self, *, is_last: bool = False) -> list[ReceivedCommand]:
        """The commands that wait, in the order in which they were sent; none is given twice.

        Args:
            is_last: look again now.
        """
        if is_last:
            self._looked_s = -POLL_S
        self.has_commands()
        found, self._found = self._found, []
        self._handled.update(received.id for received in found)
        return found

    def accept(self, received: ReceivedCommand, reason: str, step: int | None) -> None:
        """Says that a command will be done later."""
        self._emit(received, "accepted", reason, step)

    def answer(self, received: ReceivedCommand, status: FinalStatus, reason: str | None, step: int | None) -> None:
        """Answers a command for good."""
        self._emit(received, status, reason, step)
        failpoint("command.answered")
        writer = self._event_log.writer
        if writer is None or writer.num_pending == 0:
            remove_command(received)  # otherwise the answer is not on disk yet, and the file is what is left of it

    def _emit(
        self, received: ReceivedCommand, status: Literal["accepted"] | FinalStatus, reason: str | None, step: int | None
    ) -> None:
        self._event_log.emit(
            CommandAnswer(
                id=received.id,
                command=received.text,
                by=received.by,
                status=status,
                reason=reason,
                step=step,
            )
        )


def applied_after(events: Path, step: int) -> list[tuple[int, dict[str, Any]]]:
    """Settings that were applied at or after a step, for a training that goes back to it.

    Args:
        events: of the run.
        step: of the checkpoint.

    Returns:
        The step from which each held, and its settings, in order, moves of `auto` among them; those that were taken
        back are left out.
    """
    applied: dict[str, tuple[int, dict[str, Any]]] = {}
    for raw in _read_rare(events):
        command_id = str(raw.get("id") or f"auto at {raw.get('epoch')}")
        if raw["type"] == "gpu0_bsz":
            if raw.get("status") == "reverted" and command_id in applied:
                changes = applied[command_id][1]
                changes.pop("gpu0_bsz", None)
                changes.pop("shares", None)
            is_move = raw.get("status") == "applied" and raw.get("id") is None
            if is_move and (raw.get("step") or 0) >= step:
                applied[command_id] = int(raw.get("step") or 0), {"gpu0_bsz": raw.get("new"), "gpu0_bsz_auto": True}
        is_set = raw["type"] == "command" and raw.get("status") == "applied" and raw["command"].startswith("set ")
        if is_set and (raw.get("step") or 0) >= step:
            changes = getattr(parse_command(raw["command"]), "changes", {})
            if changes.get("gpu0_bsz") == "auto":
                changes = {"gpu0_bsz_auto": True, **{n: v for n, v in changes.items() if n != "gpu0_bsz"}}
            applied[command_id] = (int(raw.get("step") or 0), dict(changes))
    return [(at, changes) for at, changes in applied.values() if changes]


def _read_rare(events: Path) -> Iterator[dict[str, Any]]:
    """All events but most steps, which a long run has a million of."""
    return (item for item in EventReader(events).read_skimmed() if isinstance(item, dict))
