"""Commands to the run, which go to its inbox and are answered by its events, and the dialogs that ask for a value."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from segapp.errors import CommandError
from segapp.run.commands import CancelCommand, Command, SetCommand, format_command, parse_command, send_command
from segapp.run.events import CommandAnswer
from segapp.run.words import dots, learning_rate
from segapp.tui.dialogs import SettingScreen
from segapp.tui.panes.header import state_label
from segapp.view.source import LiveSource, Status
from segapp.view.view import Gpu0, View

Severity = Literal["information", "warning", "error"]


class Message(NamedTuple):
    """A message to the user."""

    text: str
    severity: Severity = "information"


class Outbox:
    """Sends commands to one run, unless the view is read-only, and reports their answers."""

    def __init__(self, source: LiveSource, *, is_readonly: bool) -> None:
        self._source, self._is_readonly = source, is_readonly
        self._unanswered: dict[str, str] = {}
        """Commands without a final answer: id -> text."""

    def send(self, command: Command, status: Status) -> Message:
        """Write a command to the run's inbox, unless there is no trainer to handle it; return what was done."""
        text = format_command(command)
        if self._is_readonly:
            return Message(f"{text}: this view is read-only", "warning")
        if status.is_over:
            return Message(f"{text} was not sent: the run has ended ({state_label(status)})", "warning")
        try:
            self._unanswered[send_command(self._source.folder.path, command)] = text
        except CommandError as error:
            return Message(str(error), "error")
        waits = (
            "" if status.state in ("live", "busy") else f"; the trainer is {status.state}, so its answer may take long"
        )
        return Message(f"sent: {text}{waits}")

    def take_answers(self) -> list[Message]:
        """Return the answers that have arrived since the last call."""
        answers = self._source.view.answers
        answered = [command_id for command_id in self._unanswered if command_id in answers]
        return [_answer(answers[command_id], self._unanswered.pop(command_id)) for command_id in answered]


def _answer(answer: CommandAnswer, text: str) -> Message:
    reason = f": {answer.reason}" if answer.reason else ""
    return Message(f"{text} {answer.status}{reason}", "error" if answer.status == "rejected" else "information")


def undo_gpu0(gpu0: Gpu0) -> Command | None:
    """Return the command that cancels the pending change or restores the previous value; None if there is none."""
    if gpu0.pending is not None:
        return CancelCommand(id=gpu0.pending.id)
    return SetCommand(gpu0_bsz=gpu0.previous[-1]) if gpu0.previous else None


def why_no_split(view: View) -> str | None:
    """Return why the run's batch cannot be split; None if it can."""
    return "the run has one device, so there is nothing to split" if view.num_devices < 2 else view.judge.why_no_split


def lr_factor_screen(view: View) -> SettingScreen:
    """Return the dialog that asks for the factor on the learning rate."""

    def explain(command: SetCommand) -> tuple[bool, str]:
        lr, before, factor = view.lr, view.lr_factor, command.lr_factor
        now = (
            f": lr {learning_rate(lr)} becomes {learning_rate(lr / before * factor)}"
            if lr and before and factor
            else ""
        )
        return True, f"from the next epoch on{now}"

    return _dialog("lr_factor", f"lr_factor is {view.lr_factor:g}", "a number above 0, such as 0.5", explain)


def shares_screen(view: View) -> SettingScreen:
    """Return the dialog that asks for the images of a batch on each device."""

    def explain(command: SetCommand) -> tuple[bool, str]:
        verdict = view.judge.verdict(None, command.shares)
        return verdict.is_allowed, f"{verdict.level}: {dots(verdict.split)} {verdict.reason}"

    hint = f"{view.num_devices} numbers separated by commas, with the sum {sum(view.split or (0,))}"
    return _dialog("shares", f"shares: {dots(view.split)}", hint, explain)


def _dialog(name: str, title: str, hint: str, explain: Callable[[SetCommand], tuple[bool, str]]) -> SettingScreen:
    """Return the dialog of a setting; `explain` says if its command may be sent, and its effect."""

    def check(text: str) -> tuple[SetCommand | None, str]:
        try:
            command = parse_command(f"set {name}={text}")
        except CommandError as error:
            return None, str(error)
        assert isinstance(command, SetCommand)
        is_allowed, meaning = explain(command)
        return command if is_allowed else None, meaning

    return SettingScreen(title, hint, check)
