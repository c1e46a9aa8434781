"""The shown run: its events, the alerts that the user has seen, its log, its plan, and the commands sent to it."""

import contextlib
import hashlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from textual.content import Content

from segapp.errors import without_secrets
from segapp.memory.plan import SavedMemoryPlan, read_saved_plan
from segapp.places import own_folder
from segapp.run.commands import send_command
from segapp.run.events import Alert, CommandAnswer, Event, Oom
from segapp.run.files import read_of_run
from segapp.run.folder import RunFolder
from segapp.run.state import OVER
from segapp.run.words import duration, last_announced, printable
from segapp.view.runs import read_settings
from segapp.view.source import LiveSource, LogTail, Status
from segapp.view.view import FACT_ALERTS, Raised, View
from segapp.view.wishes import Wish, Wishes
from segapp.view.wording import finished_line

Severity = Literal["information", "warning", "error"]
Message = tuple[str, Severity]
"""A message to the user."""


class DismissedAlerts:
    """The alerts of a run that this user has dismissed, here or in another TUI, as marks in a file of the user."""

    def __init__(self, folder: RunFolder) -> None:
        info = folder.read_info()
        self._run = str(folder.path) if info is None else info.id
        self._marks = set[str]()
        with contextlib.suppress(OSError):
            self._marks.update(_dismissed().read_text(errors="replace").split())

    def _mark(self, alert: Alert) -> str:
        when = "" if alert.kind in FACT_ALERTS else alert.t  # a fact stays dismissed after a resume
        return hashlib.sha256(f"{self._run}\0{alert.kind}\0{alert.message}\0{when}".encode()).hexdigest()[:24]

    def __contains__(self, alert: Alert) -> bool:
        return self._mark(alert) in self._marks

    def add(self, alert: Alert) -> None:
        self._marks.add(self._mark(alert))
        with contextlib.suppress(OSError), open(_dismissed(), "a") as file:  # else it is dismissed in this TUI only
            file.write(f"{self._mark(alert)}\n")


def _dismissed() -> Path:
    return own_folder("XDG_STATE_HOME") / "dismissed"


class ShownRun:
    """The shown run; for `has_trainer_ended` see `run_ui`."""

    def __init__(self, source: LiveSource, has_trainer_ended: Callable[[], bool] | None = None) -> None:
        self.source = source
        self.name = printable(source.folder.name)
        self._dismissed = DismissedAlerts(source.folder)
        self._trainer_ended, self._opened_s = has_trainer_ended, time.time()
        self._log_tail, self._log_lines = LogTail(source.folder.log), list[str]()
        self._settings_of, self._settings = 0, dict[str, Any]()
        self.wishes = Wishes(lambda command: send_command(source.folder.path, command))
        self.is_writable = not source.folder.commands.is_dir() or os.access(source.folder.commands, os.W_OK | os.X_OK)
        """False if this user may not send commands to the run."""

    @property
    def view(self) -> View:
        return self.source.view

    def has_trainer_ended(self) -> bool:
        """Return True if the trainer that was started with this TUI has ended before it has trained."""
        return self._trainer_ended is not None and not self._has_begun(self._opened_s) and self._trainer_ended()

    def _has_begun(self, since_s: float) -> bool:
        return self.view.start is not None and self.view.start.t >= since_s

    @property
    def argument(self) -> str:
        """The word that names the run on a command line."""
        return shlex.quote(printable(self.source.folder.argument))

    def again(self) -> str:
        """Return how to continue the training, or how to start it again if it has never begun."""
        command = None if self.view.start is not None else self.source.folder.train_command()
        return f"to start again: `{command}`" if command else f"to continue: `segapp train --resume {self.argument}`"

    def doing(self, status: Status) -> str:
        """Return the step of the start at which a trainer is, and for how long."""
        since_s, lines = status.starting_s or status.now_s, self.log_lines()
        has_begun, has_log = self._has_begun(since_s), self._log_tail.written_s > since_s - 1
        what = (last_announced(lines) if has_log else None) or ("first step" if has_begun else "the trainer's process")
        if has_log and not has_begun:
            since_s = self._log_tail.written_s
        return f"{what}, {duration(status.now_s - since_s)}"

    def cause(self) -> str:
        """Return the last line of the run's log, for a process that has ended without an event."""
        line = next((line for line in reversed(self.log_lines()) if line.strip()), None)
        if line is None:
            return "it left no trace, as after kill -9 or if the memory was full"
        return f"the last line of {printable(self.source.folder.log.name)} is: {line.strip()}"

    def log_lines(self) -> list[str]:
        self._log_lines = [*self._log_lines, *self._log_tail.read()][-200:]
        return self._log_lines

    @cached_property
    def _plan(self) -> SavedMemoryPlan | None:
        return read_saved_plan(self.source.folder.saved_plan)

    def settings(self) -> dict[str, Any]:
        """Return the config as `read_settings` does; read again after a resume."""
        if self._settings_of != self.view.num_starts or not self._settings:
            self._settings_of, self._settings = self.view.num_starts, read_settings(self.source.folder)
        return self._settings

    def config(self) -> Content:
        """Return the config of the run as text; settings that commands have changed since are marked."""
        try:
            text = without_secrets(read_of_run(self.source.folder.config_yaml).decode(errors="backslashreplace"))
        except OSError as error:
            text = f"config.yaml cannot be read: {error.strerror}"
        lines = [Content(printable(line)) for line in text.splitlines()]
        for name, answer in self.view.changes.items():
            now = f"  # now {name}: {self.view.live.get(name)}, by {answer.by} at step {answer.step}"
            note = Content.styled(now, "$text-warning bold")
            # Groups of parameters have an lr_factor, too, further to the right.
            found = (i for i, line in enumerate(lines) if line.plain.startswith(f"  {name}:"))
            at = next(found, len(lines))
            lines[at : at + 1] = [line + note for line in lines[at : at + 1] or [Content("")]]
        return Content("\n").join(lines)

    def predicted_mib(self) -> tuple[float | None, ...]:
        """Return the peaks that the run's plan predicted for the present split; empty without a plan."""
        has_own_blocks = self.view.recomputed is None or self.view.recomputed.recompute == "config"
        if self._plan is None:
            return ()
        return self._plan.predicted_mib(
            self.view.split, has_own_blocks=has_own_blocks, is_shared=self.view.has_logical_devices
        )

    def unseen(self) -> list[Raised]:
        """Return the alerts that the user has not seen, the newest last."""
        return [raised for raised in self.view.alerts.values() if raised.last not in self._dismissed]

    def acknowledge(self) -> bool:
        """Mark the newest unseen alert as seen; return False if there is none."""
        unseen = self.unseen()
        if unseen:
            self._dismissed.add(unseen[-1].last)
        return bool(unseen)

    def notable_event(self) -> Event | None:
        """Return the end of the training, or else the banner's alert, or else the newest event of the log."""
        if self.view.end is not None:
            return self.view.end
        unseen = self.unseen()
        logged = [line.event for line in self.view.log if line.event is not None]
        if not unseen:
            return logged[-1] if logged else None
        alert = unseen[-1].last
        reports = [event for event in logged if isinstance(event, Oom) and abs(event.t - alert.t) < 60]
        return reports[-1] if alert.kind == "oom" and reports else alert  # the report has the advice

    def refusal(self, text: str, *, is_readonly: bool) -> str | None:
        """Return why a command cannot be sent; None if there is a trainer to handle it."""
        status = self.source.status()
        if not self.is_writable:
            return f"{text} was not sent: you may not write to {self.source.folder.commands}"
        if is_readonly:
            return f"{text} was not sent: this view is read-only"
        return f"{text} was not sent: the run has ended ({status.word})" if status.is_over else None

    def leaving(self, sent: Sequence[str]) -> str:
        """Return the line for a user who leaves: the result, or the state, with what was sent and what still waits."""
        status = self.source.status()
        if status.word == "finished":
            return finished_line(self.view.best_words, self.argument)
        parts = [*sent]
        if status.word in (*OVER, "stale", "lost"):
            parts.append(status.word)
        elif not parts:
            parts.append("the training continues")
        if waiting := self.wishes.waiting(self.view, is_over=status.is_over):
            parts.append(f"waiting: {waiting}")
        return f"left {self.name} ({printable('; '.join(parts))}); to see it again: segapp attach {self.argument}"

    def send_held(self) -> list[Message]:
        """Write the held commands to the run's inbox; return what was done with each."""
        status, found = self.source.status(), list[Message]()
        for wish, problem in self.wishes.send_held(is_over=status.is_over):
            is_quick = status.word in ("live", "busy", "paused")
            waits = "" if is_quick else f"; the trainer is {status.word}, so its answer may take long"
            found.append((f"{wish.text} sent{waits}", "information") if problem is None else (problem, "error"))
        return found

    def take_answers(self) -> list[Message]:
        """Return the answers to commands of this view that have arrived since the last call."""
        return [_message(wish, answer) for wish, answer in self.wishes.take_answers(self.view)]


def _message(wish: Wish, answer: CommandAnswer) -> Message:
    reason = f": {answer.reason}" if answer.reason else ""
    return f"{wish.text} {answer.status}{reason}", "error" if answer.status == "rejected" else "information"
