"""The screen of a run: its panes, updated twice a second."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from textual import events
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from segapp.failpoints import failpoint
from segapp.memory.plan import SavedMemoryPlan, read_saved_plan
from segapp.run.folder import RunFolder, is_sweep
from segapp.run.words import printable
from segapp.tui import keys, layout, themes
from segapp.tui.announcer import RESTORE_TITLE, SAVE_TITLE, Announcer
from segapp.tui.event_log import EventsPane
from segapp.tui.panes import header
from segapp.tui.panes.chart import ChartOptions, LossChart, Other
from segapp.tui.panes.classes import classes_title
from segapp.tui.panes.devices import Draft, gpu0_content, gpu_content
from segapp.tui.panes.glyphs import ASCII, UNICODE
from segapp.tui.panes.pictures import PictureView
from segapp.tui.panes.viewport import Viewport
from segapp.tui.runs_screen import RunsScreen
from segapp.tui.seen import load_seen
from segapp.tui.settings import UiSettings, save_settings
from segapp.tui.terminal import end_with_terminal, is_hung_up
from segapp.tui.widgets import ClassesPane, Gpu0Pane, LiteralText, Pane, set_title
from segapp.view.metrics import chart_title, step_field
from segapp.view.runs import RunList
from segapp.view.source import LiveSource, Status, newest_pictures
from segapp.view.tail import LogTail
from segapp.view.view import View

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


@dataclass(frozen=True)
class UserFiles:
    """Files that outlive a screen; None: nothing is kept."""

    settings: Path | None = None
    seen: Path | None = None


class Monitor(App[None]):
    """The screen, without its keys."""

    TITLE = "segapp"
    CSS_PATH = "app.tcss"

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
        self.layout_plan: layout.Layout | None = None
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
        self.after_poll()
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

    def after_poll(self) -> None:
        """Hook for subclasses, called after new events were read."""

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
        place, unseen = header.Place(self.run_name, line, glyphs), header.unseen_alerts(view, self.seen_s)
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

    def _show_left(self, plan: layout.Layout) -> None:
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

    def _show_right(self, plan: layout.Layout) -> None:
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

    def _show_pictures(self, plan: layout.Layout) -> None:
        """Show new pictures."""
        pictures = self.query_one(PictureView)
        pictures.show(newest_pictures(self.source.folder.samples), self.source.view)
        self._set_title(pictures, Content.styled("5 Pictures", "bold"), plan)

    def _set_title(self, pane: Widget, title: Content, plan: layout.Layout) -> None:
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
