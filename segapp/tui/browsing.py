"""The keys that look at a run: panes, chart, classes, events, alerts. They send nothing to the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TypeVar

from textual import events
from textual.app import SystemCommand
from textual.screen import Screen
from textual.widgets import Input, OptionList

from segapp.docs.pages import find_page
from segapp.run.events import Alert, Event, Oom, RunEnd
from segapp.run.words import printable
from segapp.tui import keys, themes
from segapp.tui.dialogs import EventScreen, HelpScreen, TrainerLogScreen
from segapp.tui.event_log import GROUPS, EventsPane
from segapp.tui.panes import header
from segapp.tui.panes.chart import AUTO, X_AXES, LossChart
from segapp.tui.panes.classes import SORTS
from segapp.tui.panes.pictures import PictureView
from segapp.tui.panes.viewport import Viewport
from segapp.tui.run_screen import Monitor
from segapp.tui.runs_screen import RunsScreen
from segapp.tui.seen import save_seen
from segapp.tui.widgets import ClassesPane
from segapp.view.details import Detail, details_text, event_details
from segapp.view.history import SMOOTHINGS
from segapp.view.metrics import CLASS, metric_names, metric_title
from segapp.view.wording import LogLine

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


class BrowsingApp(Monitor):
    """The screen with the keys that only look."""

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
        from segapp.tui.manual.viewer import DocsScreen  # Textual's Markdown takes a while

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


def _richest(alert: Alert, logged: Sequence[Event]) -> Event:
    """Return the report of an out-of-memory error in place of its alert: it has the advice."""
    reports = [event for event in logged if isinstance(event, Oom) and abs(event.t - alert.t) < 60]
    return reports[-1] if alert.kind == "oom" and reports else alert


def next_choice(choices: tuple[Choice, ...], current: Choice) -> Choice:
    """Return the choice after the current one; the first after the last."""
    index = choices.index(current) if current in choices else -1
    return choices[(index + 1) % len(choices)]
