"""The TUI of a run: its contents, updated twice per second, and its keys; commands go to the run's inbox.

What reaches beyond the screen needs more than a key: stopping and `gpu0_bsz` have a dialog, every command waits for 3 s
in which it can be taken back, and a key that is part of typed text sends nothing.
"""

import asyncio
import contextlib
import gc
import math
import os
import signal
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from time import monotonic
from typing import Any, ClassVar

from textual import events
from textual.app import App, ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.geometry import Size
from textual.markup import MarkupError
from textual.screen import Screen
from textual.widgets import Input, OptionList

from segapp.errors import RunError
from segapp.failpoints import failpoint
from segapp.run.commands import (
    CheckpointCommand,
    Command,
    PauseCommand,
    ResumeCommand,
    StopCommand,
    format_command,
)
from segapp.run.folder import RunFolder, find_run, is_sweep
from segapp.run.words import clock_time, plural, printable
from segapp.tui import header, keys, layout
from segapp.tui.devices import why_no_split
from segapp.tui.dialogs import (
    CHOICES,
    Choice,
    ChoiceScreen,
    HelpScreen,
    LogScreen,
    ScrolledDialog,
    SettingScreen,
    StopScreen,
)
from segapp.tui.runs_screen import RunsScreen
from segapp.tui.shown_run import Severity, ShownRun
from segapp.tui.terminal import check_terminal, end_with_terminal, is_ascii_only, is_hung_up, set_up_themes
from segapp.tui.widgets import LiteralText
from segapp.view.plot import CLASS, metric_names, metric_title
from segapp.view.runs import RunList
from segapp.view.source import LiveSource, Status
from segapp.view.view import View
from segapp.view.wording import LogLine, chosen, event_text, in_full, setup

PANES_EVERY, IDLE_EVERY = 2, 4
"""Ticks between two updates of the panes with and without new events; the lines above change at every tick."""
LEAVE_S = 5.0
HOLD_S = 3.0
"""Time in which a command can be taken back before it is sent."""
TYPING_S = 0.6
"""Keys of text that follow each other faster are typed text: they send nothing, and take back what was not sent yet."""
PASTED_S = 0.03
"""Keys that follow each other faster are pasted."""
_SAID = {"information": ("$foreground", 8.0), "warning": ("$text-warning", 20.0), "error": ("$text-error bold", 20.0)}
"""Style of a message, and the seconds for which it stays."""


class RunScreen(Screen[None]):
    """The screen of a run; its keys act here only, not in the list of runs or in a dialog."""

    KEYS = keys.KEYS
    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings(KEYS)]


class MonitorApp(App[None]):
    """The TUI of a run, with keys that change the display and keys that send commands to the run.

    Its arguments are `run_ui`'s.
    """

    TITLE = "segapp"
    CSS_PATH = "app.tcss"
    ENABLE_COMMAND_PALETTE = False  # Textual's has two lines an entry, in alphabetical order, and draws blocks in ASCII

    def __init__(
        self,
        source: LiveSource,
        *,
        readonly: bool = False,
        starts_with_list: bool = False,
        ascii_only: bool = False,
        has_trainer_ended: Callable[[], bool] | None = None,
    ) -> None:
        super().__init__(ansi_color="NO_COLOR" in os.environ or None)  # then Textual sends no color at all
        self._is_readonly, self.starts_with_list = readonly, starts_with_list
        self.is_ascii = ascii_only
        self.columns = layout.Columns(has_color=not ascii_only and not self.no_color)
        self.chart = self.columns.chart
        self.failure: Exception | None = None
        """The error that ended the TUI; None if the user left."""
        self.shown = ShownRun(source, has_trainer_ended)
        self.pane = "loss"
        self.is_zoomed = False
        self.layout_plan: layout.ScreenLayout | None = None
        self._screen_size: Size | None = None
        self._num_ticks, self._num_drawn = IDLE_EVERY, 0
        self._is_reading = False
        self._is_starting: bool | None = None
        self.sent_on_leaving: list[str] = []
        """What was done with the commands that were still held when the user left."""
        self._send_at_s = self._typed_s = self._said_until_s = 0.0
        self._banner: Content | None = None
        self._was_over = True
        set_up_themes(self)

    def get_default_screen(self) -> Screen[None]:
        return RunScreen(id="_default")

    @property
    def view(self) -> View:
        return self.shown.view

    def status(self) -> Status:
        return self.shown.source.status()

    @property
    def readonly(self) -> bool:
        """True if this view sends no commands."""
        return self._is_readonly or not self.shown.is_writable

    def compose(self) -> ComposeResult:
        """Yield all lines and panes; `plan_layout` selects the visible ones."""
        yield LiteralText(id="head", classes="lines")
        yield LiteralText(id="progress", classes="lines")
        yield LiteralText(id="banner", classes="lines")
        yield LiteralText(id="starting", classes="wrapped")
        yield self.columns
        yield keys.KeyBar(id="keys", classes="lines")
        yield LiteralText(id="notice")
        yield LiteralText(classes="said")

    def on_mount(self) -> None:
        self.app_resume_signal.subscribe(self, lambda _: self.action_redraw())
        self.set_class(self.is_ascii, "-ascii")
        self.chart.focus()
        if not self.is_headless:
            for number in (signal.SIGHUP, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._leave)
            end_with_terminal(LEAVE_S)
        self.apply_layout()
        self.call_after_refresh(self.tick)
        if self.starts_with_list:
            self.action_runs()
        self.set_interval(0.5, self.tick)

    def on_resize(self, event: events.Resize) -> None:
        """Select the panes for the new size, before the app's own `size` is updated."""
        self._screen_size = event.size
        self.apply_layout()

    def _leave(self) -> None:
        """Exit, even if a thread waits for a terminal that is gone, because the process must end with its terminal."""
        timer = threading.Timer(LEAVE_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        self.exit()

    def tick(self) -> None:
        """Read new events and show them; called twice per second."""
        failpoint("tui.tick")
        if not self.is_headless and is_hung_up():
            self._leave()
            return
        if not self._is_reading:
            self._read_on()
        if self.shown.has_trainer_ended():
            self.exit()
            return
        status = self.status()
        if status.word != "reading":  # an old end that is read once more does not ring
            if status.is_over and not self._was_over:
                self.bell()
            self._was_over = status.is_over
        if monotonic() >= self._send_at_s:
            self._send_held()
        for message in self.shown.take_answers():
            self._say_of_run(*message)
        if monotonic() > self._said_until_s:
            self.say("")
        self._num_ticks += 1
        if self._num_ticks >= (IDLE_EVERY if self.view.num_events == self._num_drawn else PANES_EVERY):
            self.show_view()
        else:
            self._show_status()

    def _read_on(self) -> None:
        """Read a long history in slices, so that keys work meanwhile; a timer updates the panes."""
        was_reading, self._is_reading = self._is_reading, self.shown.source.poll()
        if self._is_reading:
            self.set_timer(0.001, self._read_on)
        elif was_reading:
            self.show_view()

    def action_runs(self) -> None:
        parent = self.shown.source.folder.path.parent
        runs = RunList(parent.parent if is_sweep(parent) else parent)
        self.push_screen(RunsScreen(runs), self._open)

    def _open(self, folder: RunFolder | None) -> None:
        if folder is None or folder.path == self.shown.source.folder.path:
            return
        self._send_held()
        source = LiveSource(folder)
        self.shown = ShownRun(source)
        self._is_starting, self._was_over = None, True
        self.chart.metric = "loss"
        self.apply_layout()
        self.tick()
        self.show_view()

    def _handle_exception(self, error: Exception) -> None:
        """End the TUI with a one-line error instead of Textual's traceback; tests get the whole traceback."""
        if self.is_headless:
            super()._handle_exception(error)
        else:
            self.failure = self.failure or error
            self.exit(return_code=1)

    def apply_layout(self) -> None:
        """Select the panes for the size of the screen and the user's choices."""
        width, height = self._screen_size or self.size
        plan = layout.plan_layout(width, height, self.pane, is_zoomed=self.is_zoomed)
        if plan != self.layout_plan:
            self.layout_plan = plan
            shown = dict.fromkeys(("head", "progress", "main", "keys"), not plan.is_notice)
            shown["notice"] = plan.is_notice
            for name, is_shown in shown.items():
                self.query_one(f"#{name}").display = is_shown
            self.columns.select(plan)
        self.call_after_refresh(self.show_view)

    def show_view(self) -> None:
        plan = self.layout_plan
        if not self._show_status() or plan is None:
            return
        self._num_ticks, self._num_drawn = 0, self.view.num_events
        self.columns.show(self.shown, is_readonly=self.readonly)
        self._show_keys(self.pane)

    def _show_status(self) -> bool:
        """Update the lines above the panes; return True if there are panes below them."""
        view, status, plan, name = self.view, self.status(), self.layout_plan, self.shown.name
        if plan is None or not self.is_running:
            return False
        width, height = self._screen_size or self.size
        if plan.is_notice:
            self._text("notice").show(header.notice(view, status, name, width, height))
            return False
        line = width - 2
        unseen = self.shown.unseen()
        about, began = setup(self.shown.settings()), chosen(self.shown.settings())
        waiting = self.shown.wishes.waiting(view, is_over=status.is_over)
        head = header.header(
            view, status, name, line, about=about, began=began, waiting=waiting, is_readonly=self.readonly
        )
        self._text("head").show(head)
        self._text("progress").show(header.progress_line(view, status, line))
        run = self.shown
        again, doing = run.again(), run.doing(status)
        found = header.banner(view, status, line, unseen, run=run.argument, again=again, doing=doing, cause=run.cause())
        self._banner = found
        self.query_one("#banner").display = found is not None
        if found is not None:
            self._text("banner").show(found)
        is_starting = not view.history.size and view.moved_s is None and status.loaded_frac == 1
        if is_starting != self._is_starting:
            self._is_starting = is_starting
            self.query_one("#main").display = not is_starting
            self.query_one("#starting").display = is_starting
            if not is_starting:
                self.chart.focus()
        if is_starting:
            lines = [line for line in self.shown.log_lines() if line.strip()] if view.end is None else []
            text = "\n".join(lines[-max(3, self._text("starting").size.height - 2) :])
            self._text("starting").show(Content.styled(text, "$text-muted"))
            self._show_keys("starting")
        return not is_starting

    def _show_keys(self, pane: str) -> None:
        bar = self.query_one("#keys", keys.KeyBar)
        is_wanted = self.shown.wishes.is_pause_wanted(self.view)
        has_split = self.view.start is None or why_no_split(self.view) is None
        setting = "gpu0_bsz" if has_split else "lr_factor"
        bar.offer(keys.here(self._offered(keys.KEYS), pane), Pause="Resume" if is_wanted else "Pause", gpu0_bsz=setting)

    def _offered(self, table: Iterable[keys.Key]) -> list[keys.Key]:
        """Return the keys of a table that can have an effect: no trainer answers after the end."""
        return keys.available(table, sends=not (self.readonly or self.status().is_over))

    def _text(self, name: str) -> LiteralText:
        return self.query_one(f"#{name}", LiteralText)

    def say(self, text: str, severity: Severity = "information") -> None:
        """Show a literal message above the keys for some seconds, instead of the one before."""
        style, said_s = _SAID[severity]
        self._said_until_s = monotonic() + said_s if text else math.inf
        for line in (line for screen in self.screen_stack for line in screen.query(LiteralText).filter(".said")):
            line.display = bool(text)
            line.show(Content.styled(printable(text), style))

    def _say_of_run(self, text: str, severity: Severity = "information") -> None:
        """Show a message about a command, with the run's name: another run or the list may be shown by now."""
        self.say(f"{self.shown.name}: {text}", severity)

    def notify(self, message: str, *, severity: Severity = "information", markup: bool = True, **_: Any) -> None:
        with contextlib.suppress(MarkupError):
            message = Content.from_markup(message).plain if markup else message
        self.say(message, severity)

    def action_pane(self, name: str) -> None:
        self.pane = name
        self.apply_layout()
        self.query_one(f"#{layout.FOCUS_OF.get(name, name)}").focus()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Select the pane that was focused by Tab or by a click, because keys act on the selected pane."""
        ids = {"gpu" if widget.id == "gpu0" else widget.id for widget in event.widget.ancestors_with_self}
        pane = next((name for name in layout.PANES if name in ids), self.pane)
        if pane != self.pane:
            self.pane = pane
            self.apply_layout()

    def action_pictures(self) -> None:
        self.action_pane("loss" if self.pane == "pictures" else "pictures")

    def action_zoom(self) -> None:
        self.is_zoomed = not self.is_zoomed
        self.apply_layout()

    def action_redraw(self) -> None:
        self.refresh(layout=True)

    def action_metric(self, by: int) -> None:
        names = metric_names(self.view)
        shown = self.chart.metric
        at = names.index(shown) if shown in names else -1
        self.action_show_metric(names[(at + by) % len(names)])

    def action_show_metric(self, name: str) -> None:
        self.chart.metric = name
        if self.pane == "pictures" or (self.is_zoomed and self.pane != "loss"):
            self.action_pane("loss")
        self.show_view()

    def action_toggle_log(self) -> None:
        self.chart.is_log = not self.chart.is_log
        self.show_view()

    def action_filter(self) -> None:
        """Open the search line of the events if they are selected, else the search line of the classes."""
        if self.pane == "events":
            self.columns.events.search.open()
        else:
            self.action_pane("classes")
            self.columns.table.search.open()

    def on_input_changed(self) -> None:
        self.show_view()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        line = self.columns.events.selected
        is_open = event.option_list.screen is not self.screen  # of a double click, the first click has opened it
        if event.option_list.id == "event-lines" and line is not None and not is_open:
            self._show_line(line)

    def action_details(self) -> None:
        """Show the event selected in the log, or else the banner's, or else the newest, in full."""
        selected = self.columns.events.selected if self.pane == "events" else None
        event = self.shown.notable_event()
        if self.pane == "classes" and (of_class := self.columns.table.details()) is not None:
            self.push_screen(ScrolledDialog("Class", of_class, is_wide=True))
        elif selected is not None:
            self._show_line(selected)
        elif self._banner is not None and self.status().word in ("gone", "crashed", "stale", "lost"):
            self.push_screen(ScrolledDialog("State", self._banner, is_wide=True))
        elif event is not None:
            found = (line for line in reversed(self.view.log) if line.event is event)
            self._show_line(next(found, LogLine(event.t, event.type, "", event)))

    def _show_line(self, line: LogLine) -> None:
        """Show a line of the log in full: when it was written, what it says, and the other fields of its event."""
        when = clock_time(line.t, math.inf, far="%d %b %Y %H:%M:%S")
        fields = event_text(line.event) if line.event else ""
        text = Content.assemble((f"{when}\n", "$text-muted"), f"{in_full(line)}\n", (f"\n{fields}", "$text-muted"))
        self.push_screen(ScrolledDialog(f"Event: {line.kind}", text, is_wide=True))

    def action_seen(self) -> None:
        if self.shown.acknowledge():
            self.show_view()

    def action_escape(self) -> None:
        """Close the first open thing of: a search, the zoom."""
        is_closed = any(search.close() for search in (self.columns.events.search, self.columns.table.search))
        if self.is_zoomed and not is_closed:
            self.action_zoom()
        self.show_view()

    def action_config(self) -> None:
        self.push_screen(ScrolledDialog(f"Config of {self.shown.name}", self.shown.config(), is_wide=True))

    def _keys_of_screen(self) -> list[keys.Key]:
        return self._offered(getattr(self.screen, "KEYS", ()))

    def action_help(self) -> None:
        """Show the keys of the open screen, or close them; in a run, those that act in the selected pane."""
        pane = self.pane if isinstance(self.screen, RunScreen) else ""
        found = keys.help_lines(keys.here(self._keys_of_screen(), pane), pane, in_ascii=self.is_ascii)
        if isinstance(self.screen, HelpScreen):
            self.screen.dismiss()
        else:
            self.push_screen(HelpScreen("Keys", found))

    def action_commands(self) -> None:
        """Show the command palette: the actions of the open screen, those on the screen itself last."""
        screen, titled = self.screen, [key for key in self._keys_of_screen() if ": " in key.help]
        choices = [Choice(key.help, key.action, keys.shown_key(key), key.words) for key in titled]
        choices.sort(key=lambda choice: choice.title.startswith("Screen"))
        self._choose("Menu", choices, lambda action: self.run_action(action, default_namespace=screen))

    def _choose(self, title: str, choices: list[Choice], then: Callable[[str], Any]) -> None:
        self.push_screen(ChoiceScreen(title, choices), lambda value: then(value) if value else None)

    def action_metrics(self) -> None:
        names = (*metric_names(self.view), *(CLASS + name for name in self.view.classes))
        choices = [Choice(printable(metric_title(name)), name) for name in names]
        self._choose("Metric or class", choices, self.action_show_metric)

    def action_theme(self) -> None:
        names = sorted(self.available_themes, key=lambda name: (not name.startswith("segapp"), name))
        self._choose("Theme", [Choice(name, name) for name in names], lambda name: setattr(self, "theme", name))

    async def on_event(self, event: events.Event) -> None:
        """Handle an event; a key of typed text sends nothing, and a command is handled before the next key is read."""
        is_text = isinstance(event, events.Key) and (event.is_printable or event.key == "enter")
        if not is_text or event.is_forwarded:
            await super().on_event(event)
        elif not self._is_typed(event.key):  # type: ignore[attr-defined]
            is_command = isinstance(self.screen, RunScreen) and not isinstance(self.focused, Input)
            action = keys.TYPED.get(event.key) if is_command else None  # type: ignore[attr-defined]
            await (super().on_event(event) if action is None else self.run_action(action))

    def _is_typed(self, key: str) -> bool:
        """Return True if a key that reaches beyond the screen came as part of typed text; take back what is held."""
        now_s = monotonic()
        gap_s, self._typed_s = now_s - self._typed_s, now_s
        if isinstance(self.focused, Input):
            return key == "enter" and gap_s < PASTED_S and isinstance(self.screen, SettingScreen)
        if gap_s >= TYPING_S or isinstance(self.screen, ScrolledDialog):
            return False
        if self.shown.wishes.held and key == "q":
            return False  # who leaves types no text
        if self.shown.wishes.held and key != "u":
            self._take_back("typed text follows")
        elif key in (*keys.TYPED, *CHOICES):
            self.say(f"{key} was part of typed text and did nothing: press it again", "warning")
        return key in (*keys.TYPED, *CHOICES)

    def _refuses(self, text: str) -> bool:
        refusal = self.shown.refusal(text, is_readonly=self.readonly)
        if refusal is not None:
            self._say_of_run(refusal, "warning")
        return refusal is not None

    def send(self, command: Command | None) -> None:
        """Send a command in some seconds, unless it is taken back."""
        if command is not None and not self._refuses(format_command(command)):
            self.shown.wishes.hold(command, self.view)
            self._announce()

    def _announce(self) -> None:
        """Begin to wait before what is held is sent."""
        self._send_at_s = monotonic() + HOLD_S
        names = ", ".join(wish.text for wish in self.shown.wishes.held)
        self._say_of_run(f"{names} in {HOLD_S:g} s: u takes it back")

    def _send_held(self) -> list[str]:
        """Send what is held; return what was done with each command."""
        answers = self.shown.send_held()
        for answer in answers:
            self._say_of_run(*answer)
        return [text for text, _ in answers]

    def _take_back(self, why: str, *kinds: type) -> None:
        names = ", ".join(wish.text for wish in self.shown.wishes.drop_held(*kinds))
        self._say_of_run(f"{names}: {why}, not sent", "warning")

    async def action_quit(self) -> None:
        self.action_detach()

    def action_detach(self) -> None:
        self.sent_on_leaving += self._send_held()
        self.exit()

    def action_suspend_process(self) -> None:
        """Stop the process group, as the terminal would, until `fg`; without a shell, nothing could continue it."""
        if os.getpgrp() == os.getsid(0):
            self.say("ctrl+z needs a shell to return to: press q to leave")
        else:
            os.killpg(os.getpgrp(), signal.SIGTSTP)

    def action_help_quit(self) -> None:
        """On ctrl+c, ask how to stop, like `S`; if the screen cannot stop the run, say how to leave."""
        if not isinstance(self.screen, RunScreen) or self.readonly or self.status().is_over:
            self.say(f"press {'q' if self.screen.id else 'esc'} to leave")
        else:
            self.action_stop()

    def copy_to_clipboard(self, text: str) -> None:
        if text:
            super().copy_to_clipboard(text)
            self.say(f"copied {plural(len(text), 'character')}")
        else:
            self.screen.clear_selection()
            self.say("nothing was copied: there is no text in the selection")

    def action_screenshot(self, filename: str | None = None, path: str | None = None) -> None:
        """Save a picture of the screen, in the current folder unless another one is given."""
        try:
            self.say(f"saved {os.path.abspath(self.save_screenshot(filename, path))}")
        except OSError as error:
            self.say(f"no picture was saved in {path or os.getcwd()}: {error.strerror}", "error")

    def action_toggle_pause(self) -> None:
        """Want the opposite of the newest wish: what is held is dropped, and else a command is sent."""
        kinds, wishes = (PauseCommand, ResumeCommand), self.shown.wishes
        if any(isinstance(wish.command, kinds) for wish in wishes.held):
            self._take_back("taken back", *kinds)
        else:
            self.send(ResumeCommand() if wishes.is_pause_wanted(self.view) else PauseCommand())

    def action_checkpoint(self) -> None:
        self.send(CheckpointCommand())

    def action_stop(self) -> None:
        def stop(when: str | None) -> None:
            self.send(StopCommand.model_validate({"when": when}) if when else None)

        if not self._refuses("stop"):
            self.push_screen(StopScreen(self.view, self.status()), stop)

    def action_edit_setting(self) -> None:
        """Ask for the value of a live setting, beginning with the batch split if the run has one."""
        of_split = () if why_no_split(self.view) is not None else ("gpu0_bsz", "shares")
        if self.view.start is None:
            self._say_of_run("the devices of the training are not known yet")
        elif not self._refuses("set"):
            self.push_screen(SettingScreen(self.view, (*of_split, "lr_factor", "recompute")), self.send)

    def action_log(self) -> None:
        self.push_screen(LogScreen(self.shown.source.folder.log))

    def action_undo(self) -> None:
        """Take back what is not sent yet, or else the last command of this view."""
        if self.shown.wishes.held:
            self._take_back("taken back")
        elif not isinstance(self.screen, RunScreen):
            # There the key takes back only what a line announces.
            self._say_of_run("nothing waits to be sent; in the run, u takes back the last command")
        elif self.status().is_over and not self.shown.wishes.open_ids:
            self._say_of_run(f"nothing to take back: the run has ended ({self.status().word})")
        elif problem := self.shown.wishes.undo(self.view):
            self._say_of_run(problem)
        else:
            self._announce()


def run_ui(
    run: Path | str | RunFolder,
    *,
    readonly: bool = False,
    ascii_only: bool | None = None,
    starts_with_list: bool = False,
    has_trainer_ended: Callable[[], bool] | None = None,
) -> int:
    """Show a run until the user leaves; does not affect the training.

    Args:
        run: Name of the run, path to its folder, or the folder of a run that may not have begun yet.
        readonly: Hide and disable all keys that send commands.
        ascii_only: Draw without Unicode; None: if the locale does not support it.
        starts_with_list: Show the list of the runs first.
        has_trainer_ended: For a trainer that is starting: called until it trains; if it returns True, the TUI closes.

    Returns:
        0.

    Raises:
        ConfigError: There is no such run, or there is no terminal.
        RunError: The TUI failed.
    """
    folder = run if isinstance(run, RunFolder) else find_run(run)
    check_terminal()
    app = MonitorApp(
        LiveSource(folder),
        readonly=readonly,
        starts_with_list=starts_with_list,
        ascii_only=is_ascii_only() if ascii_only is None else ascii_only,
        has_trainer_ended=has_trainer_ended,
    )
    _lower_priority()
    collect_rarely()
    app.run(mouse=True)
    if app.return_code:
        what = f"{type(app.failure).__name__}: {app.failure}" if app.failure is not None else "no reason known"
        raise RunError(
            f"the TUI failed ({printable(what)[:200]}); the training continues: `segapp status` and `segapp ctl` work"
        ) from app.failure
    if not is_hung_up() and not app.shown.has_trainer_ended():  # then its error follows, and its folder is removed
        with contextlib.suppress(OSError):
            print(app.shown.leaving(app.sent_on_leaving))
    return 0


def collect_rarely() -> None:
    """Exclude loaded objects from garbage collection, and collect rarely, because updates make hardly any cycles."""
    gc.freeze()
    gc.set_threshold(20_000)


def _lower_priority() -> None:
    """Use the batch scheduling policy, so that the TUI does not preempt a thread of a training step."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has this policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
