"""The screen with its keys; commands go to the run's inbox, as those of `segapp ctl`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, TypeVar

from textual import events
from textual.app import SystemCommand
from textual.binding import BindingType
from textual.screen import Screen
from textual.widgets import Input

from segapp.errors import CommandError, ConfigError, RunError
from segapp.run.commands import (
    CancelCommand,
    CheckpointCommand,
    Command,
    PauseCommand,
    ResumeCommand,
    SetCommand,
    StopCommand,
    format_command,
    send_command,
)
from segapp.run.events import CommandAnswer
from segapp.run.folder import find_run
from segapp.run.text import printable
from segapp.tui import keys, themes
from segapp.tui.dialogs import HelpScreen, StopChoice, StopScreen
from segapp.tui.panes import header
from segapp.tui.panes.chart import AUTO, WINDOWS, X_AXES, LossChart
from segapp.tui.panes.classes import SORTS
from segapp.tui.panes.devices import begin_draft, edit_draft
from segapp.tui.panes.pictures import PictureView
from segapp.tui.run_screen import Monitor
from segapp.tui.settings import load_settings, settings_path
from segapp.tui.state.history import SMOOTHINGS
from segapp.tui.state.source import LiveSource, ReplaySource, RunSource
from segapp.tui.terminal import check_terminal, is_ascii_only, is_hung_up
from segapp.tui.widgets import ClassesPane, Gpu0Pane

Choice = TypeVar("Choice")
_SMOOTHING_CYCLE = (AUTO, *reversed(SMOOTHINGS), 0.0)


def run_ui(
    run: Path | str,
    *,
    readonly: bool = False,
    replay: float | None = None,
    theme: str | None = None,
    ascii_only: bool = False,
) -> int:
    """Show a run until the user leaves; does not affect the training.

    Args:
        run: Name of the run, or path to its folder.
        readonly: Hide and disable all keys that send commands.
        replay: Replay the events of the run, this many times faster than real time.
        theme: One of `themes.NAMES`, `dark` or `light`; None: the last one used.
        ascii_only: Draw without Unicode; always if the locale has none.

    Returns:
        0.

    Raises:
        ConfigError: There is no such run or theme, the speed is not positive, or there is no terminal.
        RunError: There is nothing to replay, or the screen failed.
    """
    folder = find_run(run)
    if replay is not None and not 0 < replay < 1e9:
        raise ConfigError(f"replay={replay}: the speed must be a number above 0, such as 20")
    file = settings_path()
    settings = load_settings(file)
    if theme is not None:
        settings.theme = themes.find_theme(theme)
    check_terminal()
    source: RunSource = LiveSource(folder) if replay is None else ReplaySource(folder, replay)
    app = MonitorApp(
        source, readonly=readonly, settings=settings, settings_file=file, ascii_only=ascii_only or is_ascii_only()
    )
    _lower_priority()
    app.run(mouse=True)
    if app.return_code:
        what = f"{type(app.failure).__name__}: {app.failure}" if app.failure is not None else "no reason known"
        raise RunError(
            f"the screen failed ({printable(what)[:200]}); the training goes on: `segapp status` and `segapp ctl` work"
        ) from app.failure
    if not is_hung_up():
        status = source.status()
        how = header.state_label(status) if status.is_over else "the training goes on"
        with contextlib.suppress(OSError):
            print(f"left {printable(folder.name)} ({how}); to see it again: segapp attach {printable(folder.argument)}")
    return 0


def _lower_priority() -> None:
    """Use the batch scheduling policy: a screen that wakes up must not preempt a thread of a training step."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has this policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


class MonitorApp(Monitor):
    """The screen with its keys."""

    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings()]

    # --- commands --------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Disable the keys that send commands in a read-only view."""
        return not (self.readonly and keys.is_control(action))

    def send(self, command: Command) -> None:
        """Write a command to the run's inbox, unless there is no trainer to handle it."""
        status, text = self.source.status(), format_command(command)
        if self.readonly:
            self.say(f"{text}: this view is read-only", "warning")
        elif status.is_over:
            why = "this is a replay" if status.is_replay else f"the run is {header.state_label(status)}"
            self.say(f"{text}: {why}, no trainer would act on it", "warning")
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

    def say(self, message: str, severity: str = "information") -> None:
        """Show a literal message for a few seconds."""
        self.notify(printable(message), severity=severity, markup=False, timeout=8)  # type: ignore[arg-type]

    def action_detach(self) -> None:
        """Exit; the training goes on."""
        self.exit()

    async def action_quit(self) -> None:
        """Exit by Textual's own action."""
        self.exit()

    def action_help_quit(self) -> None:
        """Explain on ctrl+c how to leave and how to stop."""
        self.say("q detaches, the training goes on; S stops it")

    def action_toggle_pause(self) -> None:
        """Pause, or resume."""
        self.send(ResumeCommand() if self.source.view.is_paused else PauseCommand())

    def action_checkpoint(self) -> None:
        """Request a checkpoint."""
        self.send(CheckpointCommand())

    def action_stop(self) -> None:
        """Ask how to stop."""
        status = self.source.status()
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
        if view.num_devices < 2:
            self.say("gpu0_bsz: the run has one device, there is nothing to split")
            return
        self.draft = begin_draft(view)
        self.apply_layout()
        self.query_one(Gpu0Pane).focus()

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

    # --- display -------------------------------------------------------------------------------------------------

    def action_pane(self, name: str) -> None:
        """Select a pane."""
        self.pane = name
        self.apply_layout()
        if name == "classes":
            self.query_one(ClassesPane).focus_table()
        else:
            self.query_one(f"#{name}").focus()

    def action_pictures(self) -> None:
        """Show the sample pictures in place of the loss chart, or the chart again."""
        self.action_pane("loss" if self.pane == "pictures" else "pictures")

    def action_zoom(self) -> None:
        """Show the selected pane alone, or all panes again."""
        self.is_zoomed = not self.is_zoomed
        self.apply_layout()

    def action_toggle_log(self) -> None:
        """Switch the loss axis between linear and logarithmic."""
        self.settings.is_log = not self.settings.is_log
        self.query_one(LossChart).change(is_log=self.settings.is_log)

    def action_smooth(self) -> None:
        """Select the next smoothing."""
        self.settings.smoothing = _next(_SMOOTHING_CYCLE, self.settings.smoothing)
        self.query_one(LossChart).change(smoothing=self.settings.smoothing)
        self.show_view()

    def action_x_axis(self) -> None:
        """Select the next horizontal axis."""
        self.settings.x_axis = _next(X_AXES, self.settings.x_axis)
        self.query_one(LossChart).change(x_axis=self.settings.x_axis)

    def action_window(self, by: int) -> None:
        """Show more (1) or less (-1) of the curve."""
        index = min(max(WINDOWS.index(self.settings.window) - by, 0), len(WINDOWS) - 1)
        self.settings.window = WINDOWS[index]
        self.query_one(LossChart).change(window=self.settings.window)

    def action_cursor(self, by: int) -> None:
        """Move the cursor of the chart, or show another picture."""
        if self.pane == "pictures":
            self.query_one(PictureView).move(by)
        else:
            self.query_one(LossChart).move_cursor(by)

    def action_sort(self) -> None:
        """Select the next order of the classes."""
        self.settings.sort = _next(SORTS, self.settings.sort)
        self.show_view()

    def action_filter(self) -> None:
        """Open the input line of the class filter."""
        self.action_pane("classes")
        field = self.query_one("#filter", Input)
        field.add_class("-open")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the filter on each keystroke."""
        self.wanted = printable(event.value)
        self.show_view()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the filter and focus the table."""
        event.input.remove_class("-open")
        self.query_one(ClassesPane).focus_table()

    def action_theme(self) -> None:
        """Select the next theme."""
        self.set_ui_theme(_next(themes.NAMES, self.theme))

    def set_ui_theme(self, name: str) -> None:
        """Set and save the theme."""
        self.theme = self.settings.theme = name
        self.say(f"theme {name}")

    def action_help(self) -> None:
        """Show the help page."""
        found = keys.help_lines(keys.available(self.readonly), self.settings.keymap, is_ascii=self.is_ascii)
        self.push_screen(HelpScreen(found))

    def action_escape(self) -> None:
        """Close the first that is open: the filter, the cursor, the zoom, the alert."""
        chart, field = self.query_one(LossChart), self.query_one("#filter", Input)
        if field.has_class("-open") or self.wanted:
            field.value = ""
            field.remove_class("-open")
            self.query_one(ClassesPane).focus_table()
        elif chart.options.cursor is not None:
            chart.change(cursor=None)
        elif self.is_zoomed:
            self.action_zoom()
        elif self.source.view.alert is not None:
            self.seen_alert_s = self.source.view.alert.t
        self.show_view()

    def action_redraw(self) -> None:
        """Redraw the screen."""
        self.refresh(layout=True)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the commands of the palette: every key's action, and every theme."""
        del screen
        for key in keys.available(self.readonly):
            name = keys.shown_key(key, self.settings.keymap, is_ascii=self.is_ascii)

            async def act(action: str = key.action) -> None:
                await self.run_action(action)

            yield SystemCommand(key.help, f"key {name}" + (f", ctl {key.ctl}" if key.ctl else ""), act)
        for name in themes.NAMES:
            yield SystemCommand(f"theme {name}", "colours", lambda name=name: self.set_ui_theme(name))


def _next(choices: tuple[Choice, ...], current: Choice) -> Choice:
    index = choices.index(current) if current in choices else -1
    return choices[(index + 1) % len(choices)]
