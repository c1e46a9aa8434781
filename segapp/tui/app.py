"""The screen with its keys; commands go to the run's inbox, as those of `segapp ctl`."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.widgets import Input

from segapp.errors import CommandError, RunError
from segapp.run.commands import (
    CancelCommand,
    CheckpointCommand,
    Command,
    PauseCommand,
    ResumeCommand,
    SetCommand,
    StopCommand,
    format_command,
    parse_command,
    send_command,
)
from segapp.run.events import CommandAnswer
from segapp.run.folder import RunFolder, find_run
from segapp.run.words import dots, learning_rate, printable
from segapp.tui import keys, themes
from segapp.tui.browsing import BrowsingApp
from segapp.tui.dialogs import SettingScreen, StopChoice, StopScreen
from segapp.tui.panes import header
from segapp.tui.panes.chart import LossChart
from segapp.tui.panes.devices import begin_draft, edit_draft
from segapp.tui.run_screen import UserFiles
from segapp.tui.seen import seen_path
from segapp.tui.settings import load_settings, settings_path
from segapp.tui.terminal import check_terminal, is_ascii_only, is_hung_up
from segapp.tui.widgets import Gpu0Pane
from segapp.view.source import LiveSource


def run_ui(
    run: Path | str | RunFolder,
    *,
    readonly: bool = False,
    theme: str | None = None,
    ascii_only: bool = False,
    starts_with_list: bool = False,
    has_trainer_ended: Callable[[], bool] | None = None,
) -> int:
    """Show a run until the user leaves; does not affect the training.

    Args:
        run: Name of the run, path to its folder, or the folder of a run that may not have begun yet.
        readonly: Hide and disable all keys that send commands.
        theme: One of `themes.NAMES`, `dark` or `light`; None: the last one used.
        ascii_only: Draw without Unicode; always if the locale has none.
        starts_with_list: Show the list of the runs first.
        has_trainer_ended: For a trainer that is starting: asked until it trains; the screen closes once it has ended.

    Returns:
        0.

    Raises:
        ConfigError: There is no such run or theme, or there is no terminal.
        RunError: The screen failed.
    """
    folder = run if isinstance(run, RunFolder) else find_run(run)
    file = settings_path()
    settings = load_settings(file)
    if theme is not None:
        settings.theme = themes.find_theme(theme)
    check_terminal()
    app = MonitorApp(
        LiveSource(folder),
        readonly=readonly,
        starts_with_list=starts_with_list,
        settings=settings,
        files=UserFiles(file, seen_path()),
        ascii_only=ascii_only or is_ascii_only(),
    )
    app.has_trainer_ended = has_trainer_ended
    _lower_priority()
    collect_rarely()
    app.run(mouse=True)
    if app.return_code:
        what = f"{type(app.failure).__name__}: {app.failure}" if app.failure is not None else "no reason known"
        raise RunError(
            f"the screen failed ({printable(what)[:200]}); the training goes on: `segapp status` and `segapp ctl` work"
        ) from app.failure
    if not is_hung_up():
        status = app.status()
        how = header.state_label(status) if status.is_over else "the training goes on"
        with contextlib.suppress(OSError):
            again = f"segapp attach {printable(app.source.folder.argument)}"
            print(f"left {app.run_name} ({how}); to see it again: {again}")
    return 0


def collect_rarely() -> None:
    """Leave what is loaded out of garbage collection, and collect the rest rarely: updates make hardly any cycles."""
    gc.freeze()
    gc.set_threshold(20_000)


def _lower_priority() -> None:
    """Use the batch scheduling policy: a screen that wakes up must not preempt a thread of a training step."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has this policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class MonitorApp(BrowsingApp):
    """The screen with all its keys: those that look at the run, and those that send commands to it."""

    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings()]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the keys that the view does not offer."""
        return keys.is_offered(action, is_readonly=self.readonly)

    def send(self, command: Command) -> None:
        """Write a command to the run's inbox, unless there is no trainer to handle it."""
        status, text = self.status(), format_command(command)
        if self.readonly:
            self.say(f"{text}: this view is read-only", "warning")
        elif status.is_over:
            self.say(f"{text} was not sent: the run has ended ({header.state_label(status)})", "warning")
        else:
            try:
                self.unanswered[send_command(self.source.folder.path, command)] = text
            except CommandError as error:
                self.say(str(error), "error")
            else:
                waits = "" if status.state in ("live", "busy") else f"; the trainer is {status.state}, it may take long"
                self.say(f"sent: {text}{waits}")

    def after_poll(self) -> None:
        """Show the answers to the commands that were sent from here."""
        for command_id, text in list(self.unanswered.items()):
            answer = self.source.view.answers.get(command_id)
            if answer is not None:
                del self.unanswered[command_id]
                self._say_answer(answer, text)

    def _say_answer(self, answer: CommandAnswer, text: str) -> None:
        reason = f": {answer.reason}" if answer.reason else ""
        self.say(f"{text} {answer.status}{reason}", "error" if answer.status == "rejected" else "information")

    def action_detach(self) -> None:
        """Exit; the training goes on."""
        self.exit()

    async def action_quit(self) -> None:
        """Exit by Textual's own action."""
        self.exit()

    def action_help_quit(self) -> None:
        """Explain on ctrl+c how to leave and how to stop."""
        over = self.status().is_over
        self.say("q leaves" if over else "q leaves, the training goes on; S stops it")

    def action_toggle_pause(self) -> None:
        """Pause, or resume."""
        self.send(ResumeCommand() if self.source.view.is_paused else PauseCommand())

    def action_checkpoint(self) -> None:
        """Request a checkpoint."""
        self.send(CheckpointCommand())

    def action_stop(self) -> None:
        """Ask how to stop."""
        status = self.status()
        if status.is_over:
            self.say(f"stop: the run is {header.state_label(status)} already", "warning")
            return

        def decided(choice: StopChoice | None) -> None:
            if choice is not None:
                self.send(StopCommand(when=choice))

        self.push_screen(StopScreen(status.pid, status.host), decided)

    def action_edit_gpu0(self) -> None:
        """Open the editor of gpu0_bsz."""
        view = self.source.view
        if not self._can_split("gpu0_bsz"):
            return
        self.draft = begin_draft(view)
        self.apply_layout()
        self.query_one(Gpu0Pane).focus()

    def _can_split(self, setting: str) -> bool:
        """Return True if the run's batch can be split; else say why not."""
        view = self.source.view
        why = "the run has one device, there is nothing to split" if view.num_devices < 2 else view.judge.why_no_split
        if why is not None:
            self.say(f"{setting}: {why}")
        return why is None

    def action_edit_lr_factor(self) -> None:
        """Ask for the factor on the learning rate."""

        def check(text: str) -> tuple[bool, str]:
            command = self._parsed(f"lr_factor={text}")
            if isinstance(command, str):
                return False, command
            lr, before = self.source.view.lr, self.source.view.lr_factor
            now = (
                f": lr {learning_rate(lr)} becomes {learning_rate(lr / before * float(text))}" if lr and before else ""
            )
            return True, f"from the next epoch on{now}"

        title = f"lr_factor is {self.source.view.lr_factor:g}"
        self.push_screen(SettingScreen(title, "a number above 0, such as 0.5", check), self._send_setting("lr_factor"))

    def action_edit_shares(self) -> None:
        """Ask for the images of a batch on each device."""
        view = self.source.view
        if not self._can_split("shares"):
            return

        def check(text: str) -> tuple[bool, str]:
            command = self._parsed(f"shares={text}")
            if isinstance(command, str):
                return False, command
            verdict = view.judge.verdict(None, command.shares)
            return verdict.is_allowed, f"{verdict.level}: {dots(verdict.split)} {verdict.reason}"

        title = f"shares: {dots(view.split)}"
        hint = f"{view.num_devices} numbers separated by commas, with the sum {sum(view.split or (0,))}"
        self.push_screen(SettingScreen(title, hint, check), self._send_setting("shares"))

    def _parsed(self, setting: str) -> SetCommand | str:
        """Return the command of a setting, or why it is not one."""
        try:
            command = parse_command(f"set {setting}")
        except CommandError as error:
            return str(error)
        assert isinstance(command, SetCommand)
        return command

    def _send_setting(self, name: str) -> Callable[[str | None], None]:
        def send(text: str | None) -> None:
            command = self._parsed(f"{name}={text}") if text is not None else None
            if isinstance(command, SetCommand):
                self.send(command)

        return send

    def action_undo_gpu0(self) -> None:
        """Cancel a pending change, or request the value before."""
        gpu0 = self.source.view.gpu0
        if gpu0.pending is not None:
            self.send(CancelCommand(id=gpu0.pending.id))
        elif gpu0.previous:
            self.send(SetCommand(gpu0_bsz=gpu0.previous[-1]))
        else:
            self.say("gpu0_bsz was not changed yet: nothing to undo")

    def on_key(self, event: events.Key) -> None:
        """Pass keys to the editor while it is open."""
        if self.draft is None or isinstance(self.focused, Input) or len(self.screen_stack) > 1:
            return
        if event.key in ("q", "question_mark", "f1", "ctrl+p", "ctrl+q", "ctrl+c"):
            return
        draft, is_sent = edit_draft(self.draft, event.key, event.character, self.source.view)
        value = self.draft.value
        self.draft = draft
        event.stop()
        event.prevent_default()
        if draft is None:
            self.query_one(LossChart).focus()
            self.apply_layout()
        if is_sent:
            self.send(SetCommand(gpu0_bsz=value, force=True) if event.character == "!" else SetCommand(gpu0_bsz=value))
        self.show_view()
