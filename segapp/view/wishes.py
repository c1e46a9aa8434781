"""The commands of one viewer of a run: from the moment they are held until they are answered, and how to undo them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from segapp.chunks import SPLIT_NAMES
from segapp.errors import CommandError
from segapp.run.commands import (
    CancelCommand,
    Command,
    PauseCommand,
    ResumeCommand,
    SetCommand,
    StopCommand,
    format_command,
)
from segapp.run.events import CommandAnswer
from segapp.run.words import duration
from segapp.view.view import View

_DEFAULTS: Mapping[str, Any] = {"lr_factor": 1.0, "recompute": "config"}
_SHOWN_S = 2.0
"""Time from which a command without an answer is shown as waiting."""


@dataclass(eq=False)
class Wish:
    """A command of this viewer, and what has become of it."""

    command: Command
    before: Mapping[str, Any] = field(default_factory=dict)
    """The values of the settings that it changes, before it."""
    id: str | None = None
    """None while it is held."""
    sent: float = 0.0
    """When it was sent, on the monotonic clock."""
    status: str = "held"
    """held, sent, or the status of the last answer."""
    is_undo: bool = False
    """True if it takes back another one."""
    is_undone: bool = False
    canceled: str = ""
    """The text of the command that it cancels."""

    @property
    def text(self) -> str:
        return f"cancel of {self.canceled}" if self.canceled else format_command(self.command)

    @property
    def is_open(self) -> bool:
        return self.status in ("held", "sent", "accepted")


def in_force(view: View, name: str) -> Any:
    """Return the value of a setting that commands can change; a split that `shares` set is the list of its samples."""
    if name in SPLIT_NAMES:
        by_number = view.live.get("gpu0_bsz")
        return view.live.get("shares") if by_number is None else by_number
    return view.live.get(name, _DEFAULTS[name])


class Wishes:
    """The commands that one viewer has sent to one run, the newest last, and those that it still holds.

    Args:
        send: writes a command to the run, and returns its id.
        clock: a monotonic clock.
    """

    def __init__(self, send: Callable[[Command], str], clock: Callable[[], float] = time.monotonic) -> None:
        self._send, self._clock = send, clock
        self._wishes: list[Wish] = []

    @property
    def held(self) -> list[Wish]:
        return [wish for wish in self._wishes if wish.status == "held"]

    def hold(self, command: Command, view: View, undone: Wish | None = None) -> None:
        names = command.changes if isinstance(command, SetCommand) else ()
        wish = Wish(command, {name: in_force(view, name) for name in names}, is_undo=undone is not None)
        if undone is not None and isinstance(command, CancelCommand):
            wish.canceled = undone.text
        self._wishes.append(wish)

    def drop_held(self, *kinds: type) -> list[Wish]:
        """Take back what is held, or only commands of some kinds; return what that was."""
        gone = [wish for wish in self.held if not kinds or isinstance(wish.command, kinds)]
        self._wishes = [wish for wish in self._wishes if wish not in gone]
        return gone

    @property
    def open_ids(self) -> set[str | None]:
        """The ids of the sent commands without a final answer."""
        return {wish.id for wish in self._wishes if wish.is_open and wish.id is not None}

    def send_held(self, *, is_over: bool = False) -> list[tuple[Wish, str | None]]:
        """Send what is held; return each command with the reason why it could not be sent, None if it was.

        After the end of a training, only the cancellation of a command is sent that the next resume would carry out.
        """
        found: list[tuple[Wish, str | None]] = []
        for wish in self.held:
            is_late = is_over and not (isinstance(wish.command, CancelCommand) and wish.command.id in self.open_ids)
            if is_late:
                self._wishes.remove(wish)
                found.append((wish, f"{wish.text} was not sent: the run has ended"))
                continue
            try:
                wish.id, wish.sent, wish.status = self._send(wish.command), self._clock(), "sent"
                found.append((wish, None))
            except CommandError as error:
                self._wishes.remove(wish)
                found.append((wish, str(error)))
        return found

    def take_answers(self, view: View) -> list[tuple[Wish, CommandAnswer]]:
        """Note the answers that have arrived since the last call, and return them with their commands."""
        found = []
        for wish in self._wishes:
            answer = None if wish.id is None else view.answers.get(wish.id) or view.pending.get(wish.id)
            if answer is not None and wish.is_open and answer.status != wish.status:
                wish.status = answer.status
                wish.is_undone &= answer.status != "applied"  # a cancel that came too late
                found.append((wish, answer))
        return found

    def is_pause_wanted(self, view: View) -> bool:
        """Return True if the run is paused, or will be when the newest wish is fulfilled."""
        kinds = (PauseCommand, ResumeCommand)
        newest = next(
            (wish for wish in reversed(self._wishes) if wish.is_open and isinstance(wish.command, kinds)), None
        )
        return view.is_paused if newest is None else isinstance(newest.command, PauseCommand)

    def waiting(self, view: View, *, is_over: bool = False) -> str:
        """Return the newest command without a final answer in words, empty without one: `pause, 25 s`.

        Without a command of this viewer, it is an accepted one of others.
        """
        wish = next((each for each in reversed(self._wishes) if each.is_open and each.status != "held"), None)
        if wish is None:
            others = [f"{answer.command} by {answer.by}" for answer in view.pending.values()]
            return others[-1] if others else ""
        if (since_s := self._clock() - wish.sent) < _SHOWN_S:
            return ""
        if is_over:
            return f"{wish.text}, for a resume"
        waits_for_epoch = isinstance(wish.command, SetCommand) or wish.command == StopCommand(when="epoch")
        if wish.status == "accepted" and waits_for_epoch:
            reason = ": resume first" if view.is_paused else ""
            return f"{wish.text} after epoch {view.epoch or 1}{reason}"
        return f"{wish.text}, {duration(since_s)}"

    def undo(self, view: View) -> str | None:
        """Hold the command that takes back the last one of this viewer; return the problem if there is none."""
        last = next((wish for wish in reversed(self._wishes) if not wish.is_undo and wish.id is not None), None)
        if last is None:
            return "nothing to take back: this view has sent no command"
        if last.is_undone or last.status in ("rejected", "cancelled"):
            return f"nothing to take back: {last.text} was {'taken back' if last.is_undone else last.status}"
        command, problem = _undoing(last, view)
        if command is None:
            return problem
        last.is_undone = True
        self.hold(command, view, last)
        return None


def _undoing(last: Wish, view: View) -> tuple[Command | None, str]:
    """Return the command that takes back another one; None with the reason if that is impossible."""
    command, is_open = last.command, last.is_open
    if isinstance(command, PauseCommand | ResumeCommand):
        opposite = ResumeCommand() if isinstance(command, PauseCommand) else PauseCommand()
        # Another viewer may have changed it since, and what others want is not taken back.
        is_changed = not is_open and view.is_paused != isinstance(command, PauseCommand)
        return (None, f"{last.text} is not in force any more") if is_changed else (opposite, "")
    if is_open and (isinstance(command, SetCommand) or command == StopCommand(when="epoch")):
        return CancelCommand(id=last.id), ""
    if not isinstance(command, SetCommand):
        return None, f"{last.text} cannot be taken back"
    for name, value in command.changes.items():
        if in_force(view, name) != value:
            kin = SPLIT_NAMES if name in SPLIT_NAMES else {name}
            by = "".join(f" by {answer.by}" for each, answer in view.changes.items() if each in kin)
            return None, f"{name} was changed{by} since: {last.text} is not in force any more"
    # The split before may have been of the other kind.
    kinds = {name: "shares" if isinstance(value, list) else "gpu0_bsz" for name, value in last.before.items()}
    before = {(kinds[name] if name in SPLIT_NAMES else name): value for name, value in last.before.items()}
    return SetCommand.model_validate(before), ""
