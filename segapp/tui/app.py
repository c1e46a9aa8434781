"""The screen of a run: looks at the run folder twice a second, and sends what the keyboard wishes to its inbox."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
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
from segapp.tui import header, keys, layout, themes
from segapp.tui.chart import WINDOWS, X_AXES, LossChart
from segapp.tui.classes import SORTS, classes_content, classes_title
from segapp.tui.devices import Draft, begin_draft, edit_draft, gpu0_content, gpu_content
from segapp.tui.glyphs import ASCII, UNICODE
from segapp.tui.history import SMOOTHINGS
from segapp.tui.pictures import PictureView
from segapp.tui.screens import HelpScreen, StopChoice, StopScreen
from segapp.tui.settings import UiSettings, load_settings, save_settings, settings_path
from segapp.tui.source import LiveSource, ReplaySource, Source, newest_pictures
from segapp.tui.terminal import check_terminal, is_ascii_only, is_hung_up
from segapp.tui.widgets import ClassesPane, EventsPane, Gpu0Pane, Lines, Pane, set_title

Choice = TypeVar("Choice")
TICK_S = 0.5
_SMOOTHING_CYCLE = (SMOOTHINGS[-1], 0.0, *SMOOTHINGS[:-1])


def run_ui(
    run: Path | str,
    *,
    readonly: bool = False,
    replay: float | None = None,
    theme: str | None = None,
    ascii_only: bool = False,
) -> int:
    """Shows a run until the viewer leaves; the training does not notice.

    Args:
        run: its name, or a path to its folder.
        readonly: hide and disable every key that asks the trainer for something.
        replay: play the run's events again, so many times as fast as they came.
        theme: one of `themes.NAMES`, or `dark`, `light`; what was used last when None.
        ascii_only: draw without Unicode; also where the locale has none.

    Returns:
        0.

    Raises:
        ConfigError: there is no such run or theme, the speed is not positive, or there is no terminal.
        RunError: there is nothing to replay, or the screen failed.
    """
    folder = find_run(run)
    if replay is not None and not 0 < replay < 1e9:
        raise ConfigError(f"replay={replay}: a speed is a number above 0, such as 20")
    file = settings_path()
    settings = load_settings(file)
    if theme is not None:
        settings.theme = themes.find_theme(theme)
    check_terminal()
    source: Source = LiveSource(folder) if replay is None else ReplaySource(folder, replay)
    app = MonitorApp(
        source, readonly=readonly, settings=settings, settings_file=file, ascii_only=ascii_only or is_ascii_only()
    )
    app.run(mouse=True)
    if app.return_code:
        raise RunError("the screen failed; the training is not touched: `segapp status` and `segapp ctl` still work")
    if not is_hung_up():
        name = folder.name if str(run) == folder.name else str(run)
        with contextlib.suppress(OSError):
            print(f"left {printable(folder.name)}; the training goes on by itself: segapp attach {printable(name)}")
    return 0


class MonitorApp(App[None]):
    """The screen.

    Args:
        source: what it shows.
        readonly: no key asks the trainer for anything.
        settings: how it is shown; changed by keys.
        settings_file: where they are kept; None keeps them nowhere.
        ascii_only: draw without Unicode.
    """

    TITLE = "segapp"
    CSS_PATH = "app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings()]
    ALLOW_SELECT = False

    def __init__(
        self,
        source: Source,
        *,
        readonly: bool = False,
        settings: UiSettings | None = None,
        settings_file: Path | None = None,
        ascii_only: bool = False,
    ) -> None:
        super().__init__()
        self.source = source
        self.readonly = readonly
        self.settings = settings or UiSettings()
        self.glyphs = ASCII if ascii_only else UNICODE
        self.draft: Draft | None = None
        self._settings_file = settings_file
        self._is_ascii = ascii_only
        self._run_name = printable(source.folder.name)
        self._pane = "loss"
        self._is_zoomed = False
        self._wanted = ""
        self._sent: dict[str, str] = {}
        self._seen_alert_s = 0.0
        self._pictures_read = -1
        self._layout: layout.Layout | None = None
        for own in themes.OWN:
            self.register_theme(own)
        self.theme = self.settings.theme if self.settings.theme in themes.NAMES else themes.NAMES[0]

    # --- life ------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """The panes; which of them are shown is `plan_layout`'s matter."""
        has_colour = not self._is_ascii and "NO_COLOR" not in os.environ
        yield Lines(id="head", classes="lines")
        yield Lines(id="progress", classes="lines")
        yield Lines(id="banner", classes="lines")
        with Horizontal(id="main"):
            with Vertical(id="left"):
                yield LossChart(self.glyphs, id="loss", classes="pane")
                yield PictureView(has_colour=has_colour, id="pictures", classes="pane")
                yield Lines(id="throughput", classes="lines")
                yield EventsPane(id="events")
            with Vertical(id="right"):
                yield Pane(id="gpu")
                yield Gpu0Pane(id="gpu0", classes="pane lines")
                yield ClassesPane(id="classes")
        yield Lines(id="summary", classes="lines")
        yield Lines(id="keys", classes="lines")
        yield Lines(id="notice")

    def on_mount(self) -> None:
        """Begins to look."""
        self.set_class(self._is_ascii, "-ascii")
        if self.settings.keymap:
            self.set_keymap(self.settings.keymap)
        chart = self.query_one(LossChart)
        options = {name: getattr(self.settings, name) for name in ("smoothing", "is_log", "window", "x_axis")}
        chart.options = replace(chart.options, **options)
        chart.focus()
        if not self.is_headless:
            for number in (signal.SIGHUP, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self.exit)
        self._apply_layout()
        self.call_after_refresh(self._tick)
        self.set_interval(TICK_S, self._tick)

    def on_unmount(self) -> None:
        """Remembers how the screen was."""
        if self._settings_file is not None:
            save_settings(self._settings_file, self.settings)

    def on_resize(self, event: events.Resize) -> None:
        """Chooses the panes for the new size."""
        self._apply_layout()

    def _tick(self) -> None:
        if not self.is_headless and is_hung_up():
            self.exit()
            return
        if self.source.poll():
            self.set_timer(0.01, self._read_on)
        self._note_answers()
        self.show_view()

    def _read_on(self) -> None:
        """Reads a long history in slices, so that keys are answered meanwhile; panes follow with the ticks."""
        if self.source.poll():
            self.set_timer(0.01, self._read_on)
        else:
            self.show_view()

    # --- what is on the screen -------------------------------------------------------------------------------------

    def _apply_layout(self) -> None:
        width, height = self.size
        plan = layout.plan_layout(
            width, height, self._pane, is_zoomed=self._is_zoomed, is_editing=self.draft is not None
        )
        if plan != self._layout:
            self._layout = plan
            for name in (*layout.PANES, "gpu0"):
                self.query_one(f"#{name}").display = name in plan.panes
            for name in ("head", "progress", "main", "keys"):
                self.query_one(f"#{name}").display = not plan.is_notice
            self.query_one("#notice").display = plan.is_notice
            self.query_one("#left").display = plan.has_left
            self.query_one("#right").display = plan.has_right
            is_alone = plan.has_right and not (plan.panes & {"loss", "events", "pictures"})
            self.query_one("#left").styles.height = 1 if is_alone else "1fr"
            self.query_one("#right").styles.width = plan.right_width if plan.is_wide and not is_alone else "1fr"
            self.query_one("#left").display = plan.has_left and not is_alone
            self.query_one("#throughput").display = plan.has_throughput
            self.query_one("#summary").display = plan.num_summary_rows > 0
            self.query_one("#gpu").set_class("classes" not in plan.panes, "-tall")
            self.query_one("#events").set_class("loss" not in plan.panes and "pictures" not in plan.panes, "-tall")
        self.call_after_refresh(self.show_view)

    def show_view(self) -> None:
        """Brings every visible line up to date."""
        view, status, plan = self.source.view, self.source.status(), self._layout
        if plan is None or not self.is_running:
            return
        width, glyphs = self.size.width, self.glyphs
        if plan.is_notice:
            self._lines("notice").show(header.notice(view, status, self._run_name, width, self.size.height, glyphs))
            return
        line = width - 2
        self._lines("head").show(header.header(view, status, self._run_name, line, glyphs, is_readonly=self.readonly))
        self._lines("progress").show(header.progress_line(view, status, line, glyphs))
        found = header.banner(view, status, self._run_name, self._seen_alert_s)
        self.query_one("#banner").display = found is not None
        if found is not None:
            self._lines("banner").show(found.truncate(line, ellipsis=True))
        if plan.num_summary_rows:
            self._lines("summary").show(header.small_summary(view, line, plan.num_summary_rows, glyphs))
        self._show_left(plan)
        self._show_right(plan)
        labels = {"toggle_pause": "Resume" if view.is_paused else "Pause"}
        shown = keys.available(self.readonly or status.is_over)
        self._lines("keys").show(keys.key_bar(shown, self.settings.keymap, labels, width))

    def _show_left(self, plan: layout.Layout) -> None:
        view = self.source.view
        if "loss" in plan.panes:
            chart = self.query_one(LossChart)
            set_title(chart, header.loss_title(view, chart.options.smoothing, chart.size.width - 2, self.glyphs))
            chart.show(view)
        if "pictures" in plan.panes:
            self._show_pictures()
        if plan.has_throughput:
            line = self._lines("throughput")
            line.show(header.throughput_line(view, max(1, line.size.width - 2), self.glyphs))
        if "events" in plan.panes:
            self.query_one(EventsPane).show_log(view, Content.styled("4 Events", "bold"))

    def _show_right(self, plan: layout.Layout) -> None:
        view, glyphs = self.source.view, self.glyphs
        if "gpu" in plan.panes:
            pane = self.query_one("#gpu", Pane)
            title = Content.assemble(("2 GPU", "bold"), ("  used/total GiB  peak", "$text-muted"))
            pane.show(gpu_content(view, pane.inner_width, glyphs), title)
        if "gpu0" in plan.panes:
            editor = self.query_one(Gpu0Pane)
            width = max(1, editor.content_size.width)
            can_edit = not self.readonly
            editor.show(gpu0_content(view, self.source.status(), self.draft, width, glyphs, can_edit=can_edit))
            set_title(editor, Content.styled("gpu0_bsz", "bold"))
        if "classes" in plan.panes:
            table = self.query_one(ClassesPane)
            title = classes_title(view, self.settings.sort, self._wanted, table.size.width - 2, glyphs)
            table.show(classes_content(view, self.settings.sort, self._wanted, table.inner_width, glyphs), title)

    def _show_pictures(self) -> None:
        """Looks for new pictures when there was an evaluation since the last look."""
        pictures = self.query_one(PictureView)
        if self._pictures_read != len(self.source.view.vals):
            self._pictures_read = len(self.source.view.vals)
            pictures.show(newest_pictures(self.source.folder.samples))
        set_title(pictures, Content.styled("5 Pictures", "bold"))

    def _lines(self, name: str) -> Lines:
        return self.query_one(f"#{name}", Lines)

    # --- wishes ----------------------------------------------------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Takes the controlling keys away from a read-only view."""
        return not (self.readonly and keys.is_control(action))

    def send(self, command: Command) -> None:
        """Puts a wish into the run's inbox, unless nobody is there to grant it."""
        status, text = self.source.status(), format_command(command)
        if self.readonly:
            self.say(f"{text}: this view is read-only", "warning")
        elif status.is_over:
            why = "this is a replay" if status.is_replay else f"the run is {header.state_word(status)}"
            self.say(f"{text}: {why}, nobody would act on it", "warning")
        else:
            try:
                self._sent[send_command(self.source.folder.path, command)] = text
            except CommandError as error:
                self.say(str(error), "error")
            else:
                waits = "" if status.state in ("live", "busy") else f"; the trainer is {status.state}, it may take long"
                self.say(f"sent: {text}{waits}")

    def _note_answers(self) -> None:
        """Says what became of the wishes that were sent from here."""
        for command_id, text in list(self._sent.items()):
            answer = self.source.view.answers.get(command_id)
            if answer is not None:
                del self._sent[command_id]
                self._say_answer(answer, text)

    def _say_answer(self, answer: CommandAnswer, text: str) -> None:
        reason = f": {answer.reason}" if answer.reason else ""
        self.say(f"{text} {answer.status}{reason}", "error" if answer.status == "rejected" else "information")

    def say(self, message: str, severity: str = "information") -> None:
        """Shows a message for some seconds, literally."""
        self.notify(printable(message), severity=severity, markup=False, timeout=8)  # type: ignore[arg-type]

    def action_detach(self) -> None:
        """Leaves; the training goes on."""
        self.exit()

    async def action_quit(self) -> None:
        """Textual's own way out."""
        self.exit()

    def action_help_quit(self) -> None:
        """What ctrl+c says: it ends nothing here."""
        self.say("q detaches, the training goes on; S stops it")

    def action_toggle_pause(self) -> None:
        """Pauses, or goes on."""
        self.send(ResumeCommand() if self.source.view.is_paused else PauseCommand())

    def action_checkpoint(self) -> None:
        """Asks for a checkpoint."""
        self.send(CheckpointCommand())

    def action_stop(self) -> None:
        """Asks what kind of stop is meant."""
        status = self.source.status()
        if status.is_over:
            self.say(f"stop: the run is {header.state_word(status)} already", "warning")
            return

        def decided(choice: StopChoice | None) -> None:
            if choice is not None:
                self.send(StopCommand(when=choice))

        self.push_screen(StopScreen(status.pid), decided)

    def action_edit_gpu0(self) -> None:
        """Opens the editor of gpu0_bsz."""
        view = self.source.view
        if view.num_devices < 2:
            self.say("gpu0_bsz: the run has one device, there is nothing to split")
            return
        self.draft = begin_draft(view)
        self._apply_layout()
        self.query_one(Gpu0Pane).focus()

    def action_undo_gpu0(self) -> None:
        """Takes a pending change back, or wishes for the value before."""
        gpu0 = self.source.view.gpu0
        waiting = [i for i, answer in self.source.view.pending.items() if answer.command.startswith("set gpu0_bsz")]
        if gpu0.pending is not None or waiting:
            found = gpu0.pending.id if gpu0.pending is not None else waiting[-1]
            self.send(CancelCommand(id=found))
        elif gpu0.previous:
            self.send(SetCommand(gpu0_bsz=gpu0.previous[-1]))
        else:
            self.say("gpu0_bsz was not changed yet: nothing to undo")

    def on_key(self, event: events.Key) -> None:
        """Gives the keys to the editor while it is open."""
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
            self._apply_layout()
        if is_sent:
            self.send(SetCommand(gpu0_bsz=value))
        self.show_view()

    # --- looking around --------------------------------------------------------------------------------------------

    def action_pane(self, name: str) -> None:
        """Chooses a pane."""
        self._pane = name
        self._apply_layout()
        if name == "classes":
            self.query_one(ClassesPane).focus_table()
        else:
            self.query_one(f"#{name}").focus()

    def action_pictures(self) -> None:
        """Shows the sample pictures in the place of the curve, and the curve again."""
        self.action_pane("loss" if self._pane == "pictures" else "pictures")

    def action_zoom(self) -> None:
        """Shows the chosen pane alone, and the others again."""
        self._is_zoomed = not self._is_zoomed
        self._apply_layout()

    def action_toggle_log(self) -> None:
        """Switches the loss axis."""
        self.settings.is_log = not self.settings.is_log
        self.query_one(LossChart).change(is_log=self.settings.is_log)

    def action_smooth(self) -> None:
        """Goes to the next smoothing."""
        self.settings.smoothing = _next(_SMOOTHING_CYCLE, self.settings.smoothing)
        self.query_one(LossChart).change(smoothing=self.settings.smoothing)
        self.show_view()

    def action_x_axis(self) -> None:
        """Goes to the next horizontal axis."""
        self.settings.x_axis = _next(X_AXES, self.settings.x_axis)
        self.query_one(LossChart).change(x_axis=self.settings.x_axis)

    def action_window(self, by: int) -> None:
        """Shows more (1) or less (-1) of the curve."""
        index = min(max(WINDOWS.index(self.settings.window) - by, 0), len(WINDOWS) - 1)
        self.settings.window = WINDOWS[index]
        self.query_one(LossChart).change(window=self.settings.window)

    def action_cursor(self, by: int) -> None:
        """Moves the reading line of the curve, or goes to another picture."""
        if self._pane == "pictures":
            self.query_one(PictureView).move(by)
        else:
            self.query_one(LossChart).move_cursor(by)

    def action_sort(self) -> None:
        """Sorts the classes another way."""
        self.settings.sort = _next(SORTS, self.settings.sort)
        self.show_view()

    def action_filter(self) -> None:
        """Opens the line to filter the classes with."""
        self.action_pane("classes")
        field = self.query_one("#filter", Input)
        field.add_class("-open")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filters while a person types."""
        self._wanted = printable(event.value)
        self.show_view()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keeps the filter and gives the keys back."""
        event.input.remove_class("-open")
        self.query_one(ClassesPane).focus_table()

    def action_theme(self) -> None:
        """Goes to the next theme."""
        self.set_ui_theme(_next(themes.NAMES, self.theme))

    def set_ui_theme(self, name: str) -> None:
        """Uses a theme, now and the next time."""
        self.theme = self.settings.theme = name
        self.say(f"theme {name}")

    def action_help(self) -> None:
        """Shows the keys."""
        found = keys.help_lines(keys.available(self.readonly), self.settings.keymap, is_ascii=self._is_ascii)
        self.push_screen(HelpScreen(found))

    def action_escape(self) -> None:
        """Puts away what is nearest: the filter, the cursor, the zoom, the alert."""
        chart, field = self.query_one(LossChart), self.query_one("#filter", Input)
        if field.has_class("-open") or self._wanted:
            field.value = ""
            field.remove_class("-open")
            self.query_one(ClassesPane).focus_table()
        elif chart.options.cursor is not None:
            chart.change(cursor=None)
        elif self._is_zoomed:
            self.action_zoom()
        elif self.source.view.alert is not None:
            self._seen_alert_s = self.source.view.alert.t
        self.show_view()

    def action_redraw(self) -> None:
        """Draws everything again."""
        self.refresh(layout=True)

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """What the palette offers: every key by its name, and every theme."""
        del screen
        for key in keys.available(self.readonly):
            name = keys.shown_key(key, self.settings.keymap, is_ascii=self._is_ascii)

            async def act(action: str = key.action) -> None:
                await self.run_action(action)

            yield SystemCommand(key.help, f"key {name}" + (f", ctl {key.ctl}" if key.ctl else ""), act)
        for name in themes.NAMES:
            yield SystemCommand(f"theme {name}", "colours", lambda name=name: self.set_ui_theme(name))


def _next(choices: tuple[Choice, ...], current: Choice) -> Choice:
    index = choices.index(current) if current in choices else -1
    return choices[(index + 1) % len(choices)]
