"""The trainer's side of a run's inbox: every command is processed once and answered once, even after a crash."""

import time
from collections.abc import Mapping
from typing import Any, Literal

from segapp.failpoints import failpoint
from segapp.run.commands import ReceivedCommand, drain_commands, remove_answered
from segapp.run.events import CommandAnswer, EventLog, EventReader, read_answers
from segapp.run.folder import RunFolder

POLL_S = 0.25

_SYNCS_PER_POLL = 16

FinalStatus = Literal["applied", "rejected", "cancelled"]


class Inbox:
    """The commands of one run, for the process that holds its lock.

    The file of a command is removed when its final answer is durable in the events; many answers are made durable
    together. At the start, files of answered commands from before a crash are removed; commands without an answer are
    processed again. A rank that handles no commands has no folder.
    """

    def __init__(self, folder: RunFolder | None, event_log: EventLog) -> None:
        self._path = None if folder is None else folder.path
        self._event_log = event_log
        self._handled: set[str] = set()
        self._next_poll_s = 0.0
        self._answered: set[str] = set()
        self._syncs_left = _SYNCS_PER_POLL
        self._has_files = True  # of answered commands
        if self._path is not None and folder is not None:
            self._answered = set(read_answers(EventReader(folder.events).read_kinds("command")))
            self._handled = set(self._answered)
            self.remove_answered(1.0)

    def take(self, *, is_due: bool = False) -> list[ReceivedCommand]:
        """Return the new commands in the order of sending, each once.

        The folder is read at most four times per second, and for at most a third of the time, unless it is due.
        """
        began_s = time.monotonic()
        if self._path is None or not (is_due or began_s >= self._next_poll_s):
            return []
        self.remove_answered()
        commands = drain_commands(self._path, self._handled)
        self._next_poll_s = began_s + max(POLL_S, 3 * (time.monotonic() - began_s))
        if self._is_disk_full():  # only so many answers can wait for it
            commands = [received for received in commands if received.command and received.command.kind != "set"]
        self._handled.update(received.id for received in commands)
        self._syncs_left = _SYNCS_PER_POLL if len(commands) <= _SYNCS_PER_POLL else 0
        return commands

    def answer(
        self,
        received: ReceivedCommand,
        status: Literal["accepted"] | FinalStatus,
        reason: str | None,
        step: int | None,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """Write an answer to a command: its final one, or `accepted`, which means that it will be carried out later."""
        self._event_log.emit(
            CommandAnswer(
                id=received.id,
                command=received.text,
                by=received.by,
                status=status,
                reason=reason,
                changes=None if changes is None else dict(changes),
                step=step,
            )
        )
        if status != "accepted":
            failpoint("command.answered")
            self._answered.add(received.id)
            self._has_files = True
            self._syncs_left -= 1
            if self._syncs_left >= 0:
                self.remove_answered()

    def remove_answered(self, limit_s: float = 0.05) -> None:
        """Remove files of answered commands for a time, unless answers wait for the disk: a crash would need them."""
        if self._path is not None and self._has_files and not self._is_disk_full():
            self._event_log.sync()
            self._has_files = not remove_answered(self._path, self._answered, limit_s)

    def _is_disk_full(self) -> bool:
        return self._event_log.writer is not None and self._event_log.writer.num_pending > 0
