"""The screen of a run: what it shows, updated twice a second, and its keys; commands go to the run's inbox."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from textual import events
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Input, OptionList

from segapp.docs.pages import find_page
from segapp.errors import CommandError, RunError
from segapp.failpoints import failpoint
from segapp.memory.plan import SavedMemoryPlan, read_saved_plan
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
from segapp.run.events import Alert, CommandAnswer, Event, Oom, RunEnd
from segapp.run.folder import RunFolder, find_run, is_sweep
from segapp.run.words import dots, learning_rate, printable
from segapp.tui import keys, layout, themes
from segapp.tui.dialogs import EventScreen, HelpScreen, SettingScreen, StopChoice, StopScreen, TrainerLogScreen
from segapp.tui.glyphs import ASCII, UNICODE
from segapp.tui.panes import header
from segapp.tui.panes.chart import AUTO, X_AXES, ChartOptions, LossChart, Other, Viewport
from segapp.tui.panes.classes import SORTS, classes_title
from segapp.tui.panes.devices import Draft, begin_draft, edit_draft, gpu0_content, gpu_content
from segapp.tui.panes.pictures import PictureView
from segapp.tui.runs_screen import RunsScreen
from segapp.tui.settings import UiSettings, load_seen, load_settings, save_seen, save_settings, seen_path, settings_path
from segapp.tui.terminal import (
    RESTORE_TITLE,
    SAVE_TITLE,
    Announcer,
    check_terminal,
    end_with_terminal,
    is_ascii_only,
    is_hung_up,
)
from segapp.tui.widgets import GROUPS, ClassesPane, EventsPane, Gpu0Pane, LiteralText, Pane, set_title
from segapp.view.history import SMOOTHINGS
from segapp.view.metrics import CLASS, chart_title, metric_names, metric_title, step_field
from segapp.view.runs import RunList
from segapp.view.source import LiveSource, LogTail, Status, newest_pictures
from segapp.view.view import View
from segapp.view.wording import Detail, LogLine, details_text, event_details

TICK_S = 0.5
PANES_EVERY, IDLE_EVERY = 2, 4
"""Ticks between two updates of the panes while events arrive, and while none do; the lines above change every tick."""
GPU0_ROWS = 5
"""Of the pane of gpu0_bsz, with its border, while its editor is closed."""
ROWS_PER_GPU = 5
"""Of the device pane beside others, where there is room: two lines and a graph."""
EDITOR_KEYS = (
    ("0-9", "number"), ("+", "more"), ("-", "less"), ("e", "even"), ("enter", "send"), ("!", "send anyway"),
    ("esc", "close"), ("?", "Help"),
)  # fmt: skip
LEAVE_S = 5.0
_OTHER_PANES = {"loss": "1 Loss", "gpu": "2 GPU", "classes": "3 Classes", "events": "4 Events"}
Choice = TypeVar("Choice")
_SMOOTHING_CYCLE = (AUTO, *reversed(SMOOTHINGS), 0.0)
_PANE_OF = {"loss": "loss", "pictures": "pictures", "gpu": "gpu", "gpu0": "gpu", "classes": "classes",
            "class-lines": "classes", "filter": "classes", "events": "events", "event-lines": "events",
            "search": "events"}  # fmt: skip
"""Id of a widget that can have the focus -> pane."""


_TOPIC_OF = {"loss": "screen#the-chart", "pictures": "screen#the-sample-pictures", "gpu": "screen#the-devices",
             "classes": "screen#the-classes", "events": "screen#the-events"}  # fmt: skip
"""Pane -> page of the documentation, with the heading about it."""
_RUNS_TOPIC = "screen#the-list-of-runs"


@dataclass(frozen=True)
class UserFiles:
    """Files that outlive a screen; None: nothing is kept."""

    settings: Path | None = None
    seen: Path | None = None


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


class MonitorApp(App[None]):
    """The screen of a run, with its keys: those that look at the run, and those that send commands to it."""

    TITLE = "segapp"
    CSS_PATH = "app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings()]

    def __init__(
        self,
        source: LiveSource,
        *,
        readonly: bool = False,
        starts_with_list: bool = False,
        settings: UiSettings | None = None,
        files: UserFiles | None = None,
        ascii_only: bool = False,
    ) -> None:
        super().__init__()
        self.source = source
        self.readonly = readonly
        self.starts_with_list = starts_with_list
        self.marked: set[Path] = set()
        """Paths of the further runs whose curves the chart draws."""
        self._others: dict[Path, LiveSource] = {}
        self.settings = settings or UiSettings()
        self.glyphs = ASCII if ascii_only else UNICODE
        self.draft: Draft | None = None
        self.failure: Exception | None = None
        """The error that ended the screen; None if the user left."""
        self._files = files or UserFiles()
        self.is_ascii = ascii_only
        self.run_name = printable(source.folder.name)
        self.run_id, self.seen_s = self._identify()
        self.pane = "loss"
        self.is_zoomed = False
        self.wanted = ""
        """Part of a class name to show."""
        self.searched, self.event_group = "", "all"
        self.has_trainer_ended: Callable[[], bool] | None = None
        """For a trainer that is starting; see `run_ui`."""
        self.unanswered: dict[str, str] = {}
        """Commands that were sent and have no final answer: id -> text."""
        self.layout_plan: layout.ScreenLayout | None = None
        self._screen_size: Size | None = None
        self._num_ticks, self._num_drawn = IDLE_EVERY, 0
        self._is_reading = self._was_reading = False
        self._is_starting: bool | None = None
        self._plan: tuple[Path, SavedMemoryPlan | None] | None = None
        self._log_tail, self._log_lines = LogTail(source.folder.log), list[str]()
        for own in themes.OWN:
            self.register_theme(own)
        self.theme = self.settings.theme if self.settings.theme in themes.NAMES else themes.NAMES[0]

    @property
    def seen_file(self) -> Path | None:
        """The file of the alerts that were seen."""
        return self._files.seen

    def _identify(self) -> tuple[str, dict[str, float]]:
        """Return the id of the run, and which of its alerts the user has seen."""
        info = self.source.folder.read_info()
        run_id = info.id if info is not None else str(self.source.folder.path)
        return run_id, load_seen(self.seen_file, run_id)

    # --- life ------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Yield all panes; `plan_layout` selects the visible ones."""
        has_colour = not self.is_ascii and "NO_COLOR" not in os.environ
        yield LiteralText(id="head", classes="lines")
        yield LiteralText(id="progress", classes="lines")
        yield LiteralText(id="banner", classes="lines")
        yield LiteralText(id="starting", classes="wrapped")
        with Horizontal(id="main"):
            with Vertical(id="left"):
                yield LossChart(self.glyphs, id="loss", classes="pane")
                yield PictureView(has_colour=has_colour, id="pictures", classes="pane")
                yield LiteralText(id="throughput", classes="lines")
                yield EventsPane(id="events")
            with Vertical(id="right"):
                yield Pane(id="gpu")
                yield Gpu0Pane(id="gpu0", classes="pane lines")
                yield ClassesPane(id="classes")
        yield LiteralText(id="summary", classes="lines")
        yield LiteralText(id="keys", classes="lines")
        yield LiteralText(id="notice")

    def on_mount(self) -> None:
        """Start the timers."""
        self.set_class(self.is_ascii, "-ascii")
        if self.settings.keymap:
            self.set_keymap(self.settings.keymap)
        chart = self.query_one(LossChart)
        chart.options = self._chart_options()
        chart.focus()
        if not self.is_headless:
            for number in (signal.SIGHUP, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._leave)
            end_with_terminal(LEAVE_S)
        self.apply_layout()
        self._announcer = Announcer(self._write_control, self.settings.notify)
        self._write_control(SAVE_TITLE)
        self.call_after_refresh(self.tick)
        if self.starts_with_list:
            self.show_runs()
        self.set_interval(TICK_S, self.tick)

    def on_unmount(self) -> None:
        """Save the settings, and give the terminal its title back."""
        self._write_control(RESTORE_TITLE)
        if self._files.settings is not None:
            save_settings(self._files.settings, self.settings)

    def on_resize(self, event: events.Resize) -> None:
        """Select the panes for the new size, before the app's own `size` is updated."""
        self._screen_size = event.size
        self.apply_layout()

    def _leave(self) -> None:
        """Exit, even if a thread waits for a terminal that is gone: the process must end with its terminal."""
        timer = threading.Timer(LEAVE_S, os._exit, (0,))
        timer.daemon = True
        timer.start()
        self.exit()

    def tick(self) -> None:
        """Read what is new and show it; called twice a second."""
        failpoint("tui.tick")
        if not self.is_headless and is_hung_up():
            self._leave()
            return
        if not self._is_reading:
            self._read_on()
        if self.has_trainer_ended is not None and self.source.view.start is None and self.has_trainer_ended():
            self.exit()
            return
        self._show_answers()
        self._announcer.update(self.source.view, self.status(), self.run_name)
        self._num_ticks += 1
        if self._num_ticks >= (IDLE_EVERY if self.source.view.num_events == self._num_drawn else PANES_EVERY):
            self.show_view()
        else:
            self._show_status()

    def _write_control(self, codes: str) -> None:
        """Write control codes to the terminal, between Textual's own."""
        if self._driver is not None and not self.is_headless:
            self._driver.write(codes)

    def show_runs(self) -> None:
        """Show the list of the runs beside the one on the screen; open the one that the user chooses."""
        beside = self.source.folder.path.parent
        runs = RunList(beside.parent if is_sweep(beside) else beside)
        self.push_screen(RunsScreen(runs, self.marked, self.glyphs), self._open)

    def _open(self, folder: RunFolder | None) -> None:
        if folder is None or folder.path == self.source.folder.path:
            return
        self.source, self.has_trainer_ended = LiveSource(folder), None
        self.run_name = printable(folder.name)
        self.run_id, self.seen_s = self._identify()
        self.draft, self._is_starting = None, None
        self._announcer.restart()
        self._log_tail, self._log_lines = LogTail(folder.log), []
        self.unanswered.clear()
        self.query_one(LossChart).options = self._chart_options(metric="loss", part=Viewport(), cursor=None)
        self.apply_layout()
        self.tick()
        self.show_view()

    def _other_curves(self, metric: str) -> list[Other]:
        """Return the marked runs beside the one on the screen, each read on by a slice."""
        paths = self.marked - {self.source.folder.path}
        self._others = {path: self._others.get(path) or LiveSource(RunFolder(path)) for path in sorted(paths)}
        field = step_field(metric)
        others = []
        for path, source in self._others.items():
            source.poll()
            series = None if field is None else source.series(field)
            others.append(Other(printable(path.name), source.view, series))
        return others

    def status(self) -> Status:
        """Return the status of the run; a trainer that has just been started is not taken for a crashed one."""
        status = self.source.status()
        is_young = self.has_trainer_ended is not None and self.source.view.start is None
        return replace(status, state="busy") if is_young and status.state == "crashed" else status

    def _read_on(self) -> None:
        """Read a long history in slices, so that keys work meanwhile; panes are updated by the timer."""
        self._is_reading = self.source.poll()
        if self._is_reading:
            self.set_timer(0.001, self._read_on)
        elif self._was_reading:
            self.show_view()
        self._was_reading = self._is_reading

    def _handle_exception(self, error: Exception) -> None:
        """End the screen with a one-line error instead of Textual's traceback; tests get the whole traceback."""
        if self.is_headless:
            super()._handle_exception(error)
        else:
            self.failure = self.failure or error
            self.exit(return_code=1)

    # --- drawing ---------------------------------------------------------------------------------------------------

    def apply_layout(self) -> None:
        """Select the panes for the size of the screen and the user's choices."""
        width, height = self._screen_size or self.size
        is_editing = self.draft is not None
        plan = layout.plan_layout(width, height, self.pane, is_zoomed=self.is_zoomed, is_editing=is_editing)
        if plan != self.layout_plan:
            self.layout_plan = plan
            shown = {name: name in plan.panes for name in (*layout.PANES, "gpu0")}
            shown |= dict.fromkeys(("head", "progress", "main", "keys"), not plan.is_notice)
            shown |= {"notice": plan.is_notice, "left": plan.has_left, "right": plan.has_right}
            shown |= {"throughput": plan.has_throughput, "summary": plan.num_summary_rows > 0}
            for name, is_shown in shown.items():
                self.query_one(f"#{name}").display = is_shown
            self.query_one("#right").styles.width = plan.right_width if plan.has_left else "1fr"
            self.query_one("#gpu").set_class("classes" not in plan.panes, "-tall")
            self.query_one("#events").set_class(not plan.panes & {"loss", "pictures"}, "-tall")
        self.call_after_refresh(self.show_view)

    def show_view(self) -> None:
        """Update every visible part of the screen."""
        plan = self.layout_plan
        if not self._show_status() or plan is None:
            return
        view, (width, _) = self.source.view, self._screen_size or self.size
        self._num_ticks, self._num_drawn = 0, view.num_events
        if plan.num_summary_rows:
            summary = header.small_summary(view, width - 2, plan.num_summary_rows, self.glyphs)
            self._text("summary").show(summary)
        self._show_left(plan)
        self._show_right(plan)
        self._show_keys(self.pane, width)

    def _show_status(self) -> bool:
        """Update the lines above the panes; return True if there are panes below them."""
        view, status, plan = self.source.view, self.status(), self.layout_plan
        if plan is None or not self.is_running:
            return False
        (width, height), glyphs = self._screen_size or self.size, self.glyphs
        if plan.is_notice:
            self._text("notice").show(header.notice(view, status, self.run_name, width, height, glyphs))
            return False
        line = width - 2
        place, unseen = header.LinePlace(self.run_name, line, glyphs), header.unseen_alerts(view, self.seen_s)
        self._text("head").show(header.header(view, status, place, is_readonly=self.readonly, num_alerts=len(unseen)))
        self._text("progress").show(header.progress_line(view, status, line, glyphs))
        found = header.banner(view, status, place, unseen)
        self.query_one("#banner").display = found is not None
        if found is not None:
            self._text("banner").show(found)
        is_starting = not view.history.size and status.loaded_frac == 1
        if is_starting != self._is_starting:
            self._is_starting = is_starting
            self.query_one("#main").display = not is_starting
            self.query_one("#starting").display = is_starting
            if not is_starting:
                self.query_one(LossChart).focus()
        if is_starting:
            self._show_start(view, status)
        return not is_starting

    def _show_start(self, view: View, status: Status) -> None:
        """Show what the trainer does before its first step, and the last lines of its log."""
        self._log_lines = [*self._log_lines, *self._log_tail.read()][-200:]
        room = max(3, self.query_one("#starting").size.height - 4)
        self._text("starting").show(header.starting(view, status, self._log_lines, room))
        self._show_keys("starting", self.size.width)

    def _show_keys(self, pane: str, width: int) -> None:
        """Show the keys that act in a pane, or in the editor."""
        if self.draft is not None:
            self._text("keys").show(keys.bar(EDITOR_KEYS, width))
            return
        labels = {"toggle_pause": "Resume" if self.source.view.is_paused else "Pause"}
        is_readonly = self.readonly or self.status().is_over or pane == "starting"  # no trainer can answer yet
        shown = keys.here(keys.available(is_readonly), pane)
        self._text("keys").show(keys.key_bar(shown, self.settings.keymap, labels, width))

    def _show_left(self, plan: layout.ScreenLayout) -> None:
        view = self.source.view
        if "loss" in plan.panes:
            chart = self.query_one(LossChart)
            self._set_title(chart, Content.styled(f"1 {chart_title(chart.options.metric)}", "bold"), plan)
            field = step_field(chart.options.metric)
            series = None if field is None else self.source.series(field)
            chart.show(view, series, self._other_curves(chart.options.metric))
        if "pictures" in plan.panes:
            self._show_pictures(plan)
        if plan.has_throughput:
            line = self._text("throughput")
            line.show(header.throughput_line(view, max(1, line.size.width - 2), self.glyphs))
        if "events" in plan.panes:
            log = self.query_one(EventsPane)
            log.show_log(view, self.event_group, self.searched)
            chosen = self.event_group if self.event_group != "all" else ""
            if self.searched:
                chosen += f" /{self.searched} {log.num_shown} of {len(view.log)}"
            self._set_title(log, Content.assemble(("4 Events ", "bold"), (chosen, "$text-warning")), plan)

    def _show_right(self, plan: layout.ScreenLayout) -> None:
        view, glyphs = self.source.view, self.glyphs
        if "gpu" in plan.panes:
            pane = self.query_one("#gpu", Pane)
            title = Content.assemble(("2 GPU", "bold"), ("  used/total GiB  peak", "$text-muted"))
            room, other_rows = self.query_one("#right").size.height, len(view.classes) + 3 + GPU0_ROWS
            free = min(room - other_rows, ROWS_PER_GPU * len(view.devices) + 2) if self.draft is None else 0
            most = max(int(0.4 * room), free) - 2
            pane.styles.max_height = most + 2 if "classes" in plan.panes else "100%"
            size = Size(pane.inner_width, pane.size.height if "classes" not in plan.panes else most)
            pane.show(gpu_content(view, self._predicted_mib(), size, glyphs))
            self._set_title(pane, title, plan)
        if "gpu0" in plan.panes:
            editor = self.query_one(Gpu0Pane)
            room = self.query_one("#right").size.height
            above = min(view.num_devices + 2, int(0.4 * room)) if "gpu" in plan.panes else 0
            size = Size(max(1, editor.content_size.width), room - above - 2)
            status = self.source.status()
            can_edit = not (self.readonly or status.is_over)
            editor.show(gpu0_content(view, status, self.draft, size, glyphs, can_edit=can_edit))
            set_title(editor, Content.styled("gpu0_bsz", "bold"))
        if "classes" in plan.panes:
            table = self.query_one(ClassesPane)
            sort, room = self.settings.sort, table.size.width - (4 if plan.has_left else 34)
            title = classes_title(view, sort, self.wanted, room, glyphs)
            table.show_view(view, sort, self.wanted, glyphs)
            self._set_title(table, title, plan)

    def _predicted_mib(self) -> tuple[float | None, ...]:
        """Return the peaks that the plan of the run predicted for the present split; empty without a plan."""
        path = self.source.folder.saved_plan
        if self._plan is None or self._plan[0] != path:
            self._plan = (path, read_saved_plan(path))
        plan = self._plan[1]
        return plan.predicted_mib(self.source.view.split) if plan is not None else ()

    def _show_pictures(self, plan: layout.ScreenLayout) -> None:
        """Show new pictures."""
        pictures = self.query_one(PictureView)
        pictures.show(newest_pictures(self.source.folder.samples), self.source.view)
        self._set_title(pictures, Content.styled("5 Pictures", "bold"), plan)

    def _set_title(self, pane: Widget, title: Content, plan: layout.ScreenLayout) -> None:
        """Set a pane's title; in one column, with the names of the other panes."""
        others = _OTHER_PANES if len(plan.panes - {"gpu0"}) == 1 else {}
        text = "  ".join(label for name, label in others.items() if name not in plan.panes)
        set_title(pane, header.with_tabs(title, text, pane.size.width - 4))

    def _chart_options(self, **changes: Any) -> ChartOptions:
        """Return the chart's options with the settings that are kept, and changes."""
        kept = {name: getattr(self.settings, name) for name in ("smoothing", "is_log", "x_axis")}
        return replace(self.query_one(LossChart).options, **kept, **changes)

    def _text(self, name: str) -> LiteralText:
        return self.query_one(f"#{name}", LiteralText)

    def say(self, message: str, severity: str = "information") -> None:
        """Show a literal message for a few seconds."""
        self.notify(printable(message), severity=severity, markup=False, timeout=8)  # type: ignore[arg-type]

    # --- panes ---------------------------------------------------------------------------------------------------

    def action_pane(self, name: str) -> None:
        """Select a pane."""
        self.pane = name
        self.apply_layout()
        if name == "classes":
            self.query_one(ClassesPane).focus_table()
        elif name == "events":
            self.query_one(EventsPane).focus_lines()
        else:
            self.query_one(f"#{name}").focus()

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        """Select the pane that was focused by Tab or by a click: its keys act on it."""
        pane = _PANE_OF.get(event.widget.id or "")
        if pane is not None and pane != self.pane:
            self.pane = pane
            self.apply_layout()

    def action_pictures(self) -> None:
        """Show the sample pictures in place of the chart, or the chart again."""
        self.action_pane("loss" if self.pane == "pictures" else "pictures")

    def action_zoom(self) -> None:
        """Show the selected pane alone, or all panes again."""
        self.is_zoomed = not self.is_zoomed
        self.apply_layout()

    def action_runs(self) -> None:
        """Show the list of runs."""
        self.show_runs()

    def action_redraw(self) -> None:
        """Redraw the screen."""
        self.refresh(layout=True)

    # --- chart and pictures --------------------------------------------------------------------------------------

    def action_metric(self, by: int) -> None:
        """Show the next metric in the chart, or the one before."""
        names = metric_names(self.source.view)
        chart = self.query_one(LossChart)
        at = names.index(chart.options.metric) if chart.options.metric in names else -1
        self.show_metric(names[(at + by) % len(names)])

    def show_metric(self, name: str) -> None:
        """Show a metric in the chart."""
        self.query_one(LossChart).options = self._chart_options(metric=name, cursor=None)
        if self.pane == "pictures" or (self.is_zoomed and self.pane != "loss"):
            self.action_pane("loss")
        self.show_view()

    def action_toggle_log(self) -> None:
        """Switch the vertical axis between linear and logarithmic."""
        self.settings.is_log = not self.settings.is_log
        self.query_one(LossChart).change(is_log=self.settings.is_log)

    def action_smooth(self) -> None:
        """Select the next smoothing."""
        self.settings.smoothing = next_choice(_SMOOTHING_CYCLE, self.settings.smoothing)
        self.query_one(LossChart).change(smoothing=self.settings.smoothing)
        self.show_view()

    def action_x_axis(self) -> None:
        """Select the next horizontal axis."""
        self.settings.x_axis = next_choice(X_AXES, self.settings.x_axis)
        self.query_one(LossChart).change(x_axis=self.settings.x_axis)

    def action_window(self, by: int) -> None:
        """Show a longer (1) or a shorter (-1) part of the curve."""
        self.query_one(LossChart).zoom(2.0**by)

    def action_pan(self, by: int) -> None:
        """Move the visible part of the curve to earlier (-1) or later (1) steps."""
        self.query_one(LossChart).pan(0.5 * by)

    def action_jump(self, end: int) -> None:
        """Move the visible part of the curve to the first (0) or to the newest (1) steps."""
        self.query_one(LossChart).jump(to_end=bool(end))

    def action_cursor(self, by: int) -> None:
        """Move the cursor of the chart, or show another picture."""
        if self.pane == "pictures":
            self.query_one(PictureView).move(by)
        else:
            self.query_one(LossChart).move_cursor(by)

    # --- classes -------------------------------------------------------------------------------------------------

    def action_sort(self) -> None:
        """Select the next order of the classes."""
        self.settings.sort = next_choice(SORTS, self.settings.sort)
        self.show_view()

    def on_classes_pane_chosen(self, event: ClassesPane.Chosen) -> None:
        """Show the IoU of a class in the chart."""
        self.show_metric(CLASS + event.name)

    def on_classes_pane_moved(self) -> None:
        """Draw the cursor of the table."""
        self.show_view()

    # --- events and alerts ---------------------------------------------------------------------------------------

    def action_kind(self) -> None:
        """Select the next kind of events to show."""
        self.event_group = next_choice(tuple(GROUPS), self.event_group)
        self.action_pane("events")
        self.show_view()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Show the whole event under the cursor."""
        line = self.query_one(EventsPane).selected
        if event.option_list.id == "event-lines" and line is not None:
            self._show_line(line)

    def action_details(self) -> None:
        """Show the whole event of the banner, else the one under the cursor of the log, else the newest."""
        unseen = header.unseen_alerts(self.source.view, self.seen_s)
        selected = self.query_one(EventsPane).selected if self.pane == "events" else None
        logged = [line.event for line in self.source.view.log if line.event is not None]
        if selected is not None:
            self._show_line(selected)
        elif unseen:
            self._show_event(_richest(unseen[-1].last, logged))
        elif isinstance(self.source.view.end, RunEnd):
            self._show_event(self.source.view.end)
        elif logged:
            self._show_event(logged[-1])

    def _show_line(self, line: LogLine) -> None:
        if line.event is not None:
            self._show_event(line.event)
        else:
            self.push_screen(EventScreen([Detail(line.kind, line.text)]))

    def _show_event(self, event: Event) -> None:
        self.push_screen(EventScreen(event_details(event, self.run_name)))

    def action_seen(self) -> None:
        """Acknowledge the alert in the banner; the one before it is shown next."""
        unseen = header.unseen_alerts(self.source.view, self.seen_s)
        if unseen:
            last = unseen[-1].last
            self.seen_s[last.kind] = last.t
            save_seen(self.seen_file, self.run_id, self.seen_s)
            self.show_view()

    def action_trainer_log(self) -> None:
        """Show the end of trainer.log."""
        self.push_screen(TrainerLogScreen(self.source.folder.log))

    def action_copy(self) -> None:
        """Copy the selected text, else the event that `d` shows, to the clipboard (OSC 52)."""
        text = self.screen.get_selected_text()
        line = self.query_one(EventsPane).selected
        if not text and line is not None and line.event is not None:
            text = details_text(event_details(line.event, self.run_name))
        if text:
            self.copy_to_clipboard(text)
            self.say("copied")
        else:
            self.say("nothing to copy: drag over a text first, or select an event")

    # --- input lines ---------------------------------------------------------------------------------------------

    def action_filter(self) -> None:
        """Open the input line of the events' search if they are selected, else of the class filter."""
        is_events = self.pane == "events"
        if not is_events:
            self.action_pane("classes")
        field = self.query_one("#search" if is_events else "#filter", Input)
        field.add_class("-open")
        field.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Apply the text on each keystroke."""
        if event.input.id == "search":
            self.searched = printable(event.value)
        else:
            self.wanted = printable(event.value)
        self.show_view()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Keep the text and focus the lines."""
        self._close_input(event.input)

    def _close_input(self, field: Input) -> None:
        field.remove_class("-open")
        if field.id == "search":
            self.query_one(EventsPane).focus_lines()
        else:
            self.query_one(ClassesPane).focus_table()

    def action_escape(self) -> None:
        """Close the first that is open: a search or filter, the cursor, the zoom, the alert."""
        chart = self.query_one(LossChart)
        search, filter_ = self.query_one("#search", Input), self.query_one("#filter", Input)
        opened = search if search.has_class("-open") or self.searched else filter_
        if opened.has_class("-open") or self.searched or self.wanted:
            opened.value = ""
            self._close_input(opened)
        elif chart.options.cursor is not None:
            chart.change(cursor=None)
        elif self.is_zoomed:
            self.action_zoom()
        elif chart.options.part != Viewport():
            chart.change(part=Viewport())
        else:
            self.action_seen()
        self.show_view()

    # --- help and looks ------------------------------------------------------------------------------------------

    def action_theme(self) -> None:
        """Select the next theme."""
        self.set_ui_theme(next_choice(themes.NAMES, self.theme))

    def set_ui_theme(self, name: str) -> None:
        """Set and save the theme."""
        self.theme = self.settings.theme = name
        self.say(f"theme {name}")

    def action_help(self) -> None:
        """Show the help page."""
        found = keys.help_lines(keys.available(self.readonly), self.settings.keymap, glyphs=self.glyphs)
        self.push_screen(HelpScreen(found))

    def action_manual(self) -> None:
        """Show the page of the documentation about the selected pane, or about the list of runs."""
        from segapp.tui.manual import DocsScreen  # Textual's Markdown takes a while

        topic = _RUNS_TOPIC if isinstance(self.screen, RunsScreen) else _TOPIC_OF[self.pane]
        self.push_screen(DocsScreen(*find_page(topic)))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """Yield the commands of the palette: every key's action, every metric, every theme, and everyday words."""
        for key in keys.available(self.readonly):
            name = keys.shown_key(key, self.settings.keymap, is_ascii=self.is_ascii)

            async def act(action: str = key.action) -> None:
                await self.run_action(action)

            if not key.is_bound:
                continue
            title = f"{key.help} ({key.words})" if key.words else key.help
            yield SystemCommand(title, f"key {name}" + (f", ctl {key.ctl}" if key.ctl else ""), act)
        view = self.source.view
        for metric in (*metric_names(view), *(CLASS + name for name in view.classes)):
            yield SystemCommand(
                f"chart: {metric_title(metric)}", "metric", lambda metric=metric: self.show_metric(metric)
            )
        for theme in themes.NAMES:
            yield SystemCommand(f"theme {theme}", "colours", lambda theme=theme: self.set_ui_theme(theme))
        yield SystemCommand("screenshot", "save this screen as an SVG file", lambda: self._save_screenshot(screen))

    def _save_screenshot(self, screen: Screen[object]) -> None:
        async def save() -> None:
            await asyncio.sleep(0.3)  # the palette must be closed
            try:
                self.say(f"saved {self.save_screenshot(f'segapp-{self.run_name}.svg')}")
            except OSError as error:
                self.say(f"the screenshot cannot be written: {error.strerror}: start segapp in another folder", "error")

        screen.run_worker(save())

    # --- commands to the trainer --------------------------------------------------------------------------------------

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

    def _show_answers(self) -> None:
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


def _richest(alert: Alert, logged: Sequence[Event]) -> Event:
    """Return the report of an out-of-memory error in place of its alert: it has the advice."""
    reports = [event for event in logged if isinstance(event, Oom) and abs(event.t - alert.t) < 60]
    return reports[-1] if alert.kind == "oom" and reports else alert


def next_choice(choices: tuple[Choice, ...], current: Choice) -> Choice:
    """Return the choice after the current one; the first after the last."""
    index = choices.index(current) if current in choices else -1
    return choices[(index + 1) % len(choices)]
