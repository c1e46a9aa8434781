"""The screen of a run: its panes, updated twice a second."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from dataclasses import replace
from pathlib import Path

from textual import events
from textual.app import App, ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from segapp.failpoints import failpoint
from segapp.run.text import printable
from segapp.tui import keys, layout, themes
from segapp.tui.panes import header
from segapp.tui.panes.chart import LossChart
from segapp.tui.panes.classes import classes_content, classes_title
from segapp.tui.panes.devices import Draft, gpu0_content, gpu_content
from segapp.tui.panes.glyphs import ASCII, UNICODE
from segapp.tui.panes.pictures import PictureView
from segapp.tui.settings import UiSettings, save_settings
from segapp.tui.state.source import RunSource, newest_pictures
from segapp.tui.terminal import is_hung_up
from segapp.tui.widgets import ClassesPane, EventsPane, Gpu0Pane, LiteralText, Pane, set_title

TICK_S = 0.5
LEAVE_S = 5.0
_OTHER_PANES = {"loss": "1 Loss", "gpu": "2 GPU", "classes": "3 Classes", "events": "4 Events"}


class Monitor(App[None]):
    """The screen, without its keys."""

    TITLE = "segapp"
    CSS_PATH = "app.tcss"
    ALLOW_SELECT = False

    def __init__(
        self,
        source: RunSource,
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
        self.failure: Exception | None = None
        """The error that ended the screen; None if the user left."""
        self._settings_file = settings_file
        self.is_ascii = ascii_only
        self.run_name = printable(source.folder.name)
        self.pane = "loss"
        self.is_zoomed = False
        self.wanted = ""
        self.seen_alert_s = 0.0
        self.unanswered: dict[str, str] = {}
        """Commands that were sent and have no final answer: id -> text."""
        self._layout: layout.Layout | None = None
        self._screen_size: Size | None = None
        self._is_reading = self._was_reading = False
        for own in themes.OWN:
            self.register_theme(own)
        self.theme = self.settings.theme if self.settings.theme in themes.NAMES else themes.NAMES[0]

    # --- life ------------------------------------------------------------------------------------------------------

    def compose(self) -> ComposeResult:
        """Yield all panes; `plan_layout` selects the visible ones."""
        has_colour = not self.is_ascii and "NO_COLOR" not in os.environ
        yield LiteralText(id="head", classes="lines")
        yield LiteralText(id="progress", classes="lines")
        yield LiteralText(id="banner", classes="lines")
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
        options = {name: getattr(self.settings, name) for name in ("smoothing", "is_log", "window", "x_axis")}
        chart.options = replace(chart.options, **options)
        chart.focus()
        if not self.is_headless:
            for number in (signal.SIGHUP, signal.SIGTERM):
                asyncio.get_running_loop().add_signal_handler(number, self._leave)
        self.apply_layout()
        self.call_after_refresh(self._tick)
        self.set_interval(TICK_S, self._tick)

    def on_unmount(self) -> None:
        """Save the settings."""
        if self._settings_file is not None:
            save_settings(self._settings_file, self.settings)

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

    def _tick(self) -> None:
        failpoint("tui.tick")
        if not self.is_headless and is_hung_up():
            self._leave()
            return
        if not self._is_reading:
            self._read_on()
        self.after_poll()
        self.show_view()

    def after_poll(self) -> None:
        """Hook for subclasses, called after new events were read."""

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
        if plan != self._layout:
            self._layout = plan
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
        """Update every visible pane."""
        view, status, plan = self.source.view, self.source.status(), self._layout
        if plan is None or not self.is_running:
            return
        (width, height), glyphs = self._screen_size or self.size, self.glyphs
        if plan.is_notice:
            self._text("notice").show(header.notice(view, status, self.run_name, width, height, glyphs))
            return
        line = width - 2
        self._text("head").show(header.header(view, status, self.run_name, line, glyphs, is_readonly=self.readonly))
        self._text("progress").show(header.progress_line(view, status, line, glyphs))
        found = header.banner(view, status, self.run_name, self.seen_alert_s)
        self.query_one("#banner").display = found is not None
        if found is not None:
            self._text("banner").show(found.truncate(line, ellipsis=True))
        if plan.num_summary_rows:
            self._text("summary").show(header.small_summary(view, line, plan.num_summary_rows, glyphs))
        self._show_left(plan)
        self._show_right(plan)
        labels = {"toggle_pause": "Resume" if view.is_paused else "Pause"}
        shown = keys.available(self.readonly or status.is_over)
        self._text("keys").show(keys.key_bar(shown, self.settings.keymap, labels, width))

    def _show_left(self, plan: layout.Layout) -> None:
        view = self.source.view
        if "loss" in plan.panes:
            chart = self.query_one(LossChart)
            self._set_title(chart, Content.styled("1 Loss", "bold"), plan)
            chart.show(view)
        if "pictures" in plan.panes:
            self._show_pictures(plan)
        if plan.has_throughput:
            line = self._text("throughput")
            line.show(header.throughput_line(view, max(1, line.size.width - 2), self.glyphs))
        if "events" in plan.panes:
            log = self.query_one(EventsPane)
            log.show_log(view)
            self._set_title(log, Content.styled("4 Events", "bold"), plan)

    def _show_right(self, plan: layout.Layout) -> None:
        view, glyphs = self.source.view, self.glyphs
        if "gpu" in plan.panes:
            pane = self.query_one("#gpu", Pane)
            title = Content.assemble(("2 GPU", "bold"), ("  used/total GiB  peak", "$text-muted"))
            pane.show(gpu_content(view, pane.inner_width, glyphs))
            self._set_title(pane, title, plan)
        if "gpu0" in plan.panes:
            editor = self.query_one(Gpu0Pane)
            room = self.query_one("#right").size.height
            above = min(view.num_devices + 2, int(0.4 * room)) if "gpu" in plan.panes else 0
            size = (max(1, editor.content_size.width), room - above - 2)
            can_edit = not self.readonly
            editor.show(gpu0_content(view, self.source.status(), self.draft, size, glyphs, can_edit=can_edit))
            set_title(editor, Content.styled("gpu0_bsz", "bold"))
        if "classes" in plan.panes:
            table = self.query_one(ClassesPane)
            title = classes_title(
                view, self.settings.sort, self.wanted, table.size.width - (4 if plan.has_left else 34), glyphs
            )
            table.show(classes_content(view, self.settings.sort, self.wanted, table.inner_width, glyphs))
            self._set_title(table, title, plan)

    def _show_pictures(self, plan: layout.Layout) -> None:
        """Show new pictures."""
        pictures = self.query_one(PictureView)
        pictures.show(newest_pictures(self.source.folder.samples))
        self._set_title(pictures, Content.styled("5 Pictures", "bold"), plan)

    def _set_title(self, pane: Widget, title: Content, plan: layout.Layout) -> None:
        """Set a pane's title; in one column, with the names of the other panes."""
        others = _OTHER_PANES if len(plan.panes - {"gpu0"}) == 1 else {}
        text = "  ".join(label for name, label in others.items() if name not in plan.panes)
        set_title(pane, header.with_tabs(title, text, pane.size.width - 4))

    def _text(self, name: str) -> LiteralText:
        return self.query_one(f"#{name}", LiteralText)
