"""The panes in two columns: the visible ones for a size of the terminal, their titles and documentation pages."""

import time
from dataclasses import dataclass

from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.geometry import Size
from textual.widget import Widget

from segapp.tui import header
from segapp.tui.chart import LossChart
from segapp.tui.classes import ClassesPane, classes_title, first_evaluation
from segapp.tui.devices import gpu0_content, gpu_content, gpu_legend, why_no_split
from segapp.tui.events import EventsPane
from segapp.tui.pictures import PictureView
from segapp.tui.shown_run import ShownRun
from segapp.tui.widgets import LiteralText, set_title
from segapp.view.plot import chart_title, step_field
from segapp.view.source import Status, newest_pictures

WIDE, SMALL_WIDTH = 100, 160
PANES = ("loss", "gpu", "classes", "events", "pictures")
"""Panes in the order of their keys 1 to 5."""

FOCUS_OF = {"classes": "class-lines", "events": "event-lines"}
"""Pane -> id of the child that takes the focus, if it is not the pane itself."""
_LEFT = frozenset({"loss", "pictures", "events"})
_TABS = ("1 Loss", "2 Memory", "3 Classes", "4 Events", "5 Images")


@dataclass(frozen=True)
class ScreenLayout:
    """The visible parts of the TUI."""

    panes: frozenset[str]
    """Names of `PANES`, and `gpu0`; empty if only a notice fits."""
    right_width: int = 0
    has_throughput: bool = False
    has_small: bool = False
    """True if there is room for small charts of other metrics."""

    @property
    def is_notice(self) -> bool:
        return not self.panes

    @property
    def has_left(self) -> bool:
        return bool(self.panes & _LEFT)


def plan_layout(width: int, height: int, pane: str = "loss", *, is_zoomed: bool = False) -> ScreenLayout:
    if width < header.MIN_WIDTH or height < header.MIN_HEIGHT:
        return ScreenLayout(frozenset())
    # Narrow terminals show one pane, and the two small ones that belong together.
    if width < WIDE or is_zoomed:
        shown = {"gpu", "gpu0"} if pane == "gpu" else {pane}
        return ScreenLayout(frozenset(shown), width, has_throughput=height >= 20 and bool(shown & _LEFT))
    left = {"pictures"} if pane == "pictures" else {"loss"}
    if height >= 30:
        left.add("events")
    elif pane == "events":
        left = {"events"}
    right_width = min(68, 48 + max(0, width - 100) // 4)
    has_small = width >= SMALL_WIDTH and height >= 30 and "loss" in left
    return ScreenLayout(frozenset(left | {"gpu", "gpu0", "classes"}), right_width, height >= 22, has_small)


class Columns(Horizontal):
    """Left: the chart or the images, the throughput and the events. Right: the devices, gpu0_bsz and the classes."""

    def __init__(self, *, has_color: bool) -> None:
        self._layout = ScreenLayout(frozenset())
        self._drawn: tuple[object, ...] = ()
        self.chart = LossChart(id="loss", classes="pane")
        self._small = [LossChart(classes="pane") for _ in range(3)]
        for chart in self._small:
            chart.can_focus = False
        self.pictures = PictureView(has_color=has_color, id="pictures", classes="pane")
        self.events, self.table = EventsPane(), ClassesPane()
        self._device_lines = LiteralText(classes="lines")
        self.devices = VerticalScroll(self._device_lines, id="gpu", classes="pane -scroll")  # for many devices
        self.devices.can_focus = True
        self.gpu0 = LiteralText(id="gpu0", classes="pane lines")
        self._throughput = LiteralText(id="throughput", classes="lines")
        self._small_column = Vertical(*self._small, id="small")
        self._charts = Horizontal(self.chart, self._small_column, id="charts")
        self._left = Vertical(self._charts, self.pictures, self._throughput, self.events, id="left")
        self._right = Vertical(self.devices, self.gpu0, self.table, id="right")
        super().__init__(self._left, self._right, id="main")

    def select(self, plan: ScreenLayout) -> None:
        self._layout = plan
        for name in (*PANES, "gpu0"):
            self.query_one(f"#{name}").display = name in plan.panes
        self._left.display, self._right.display = plan.has_left, bool(plan.panes - _LEFT)
        self._charts.display, self._small_column.display = "loss" in plan.panes, plan.has_small
        self._throughput.display = plan.has_throughput
        self._right.styles.width = plan.right_width if plan.has_left else "1fr"
        self.devices.set_class("classes" not in plan.panes, "-tall")
        self.events.set_class(not plan.panes & {"loss", "pictures"}, "-tall")

    def show(self, run: ShownRun, *, is_readonly: bool) -> None:
        view, plan, status = run.view, self._layout, run.source.status()
        if "loss" in plan.panes:
            self._show_charts(run)
        if "pictures" in plan.panes:
            self.pictures.show(newest_pictures(run.source.folder.samples), view)
            self._set_title(self.pictures, Content.styled("5 Images", "bold"))
        if plan.has_throughput:
            width = max(1, self._throughput.size.width - 2)
            self._throughput.show(header.throughput_line(view, status, width))
        if "events" in plan.panes:
            self._set_title(self.events, self.events.show(view))
        if "gpu" in plan.panes:
            self._show_devices(run, status)
        self.gpu0.display = "gpu0" in plan.panes and why_no_split(view) is None
        if self.gpu0.display:
            width = max(1, self.gpu0.content_size.width)
            can_edit = not (is_readonly or status.is_over)
            self.gpu0.show(gpu0_content(view, status, width, can_edit=can_edit))
            set_title(self.gpu0, Content.styled("gpu0_bsz", "bold"))
        if "classes" in plan.panes:
            self.table.show(view, first_evaluation(view, run.source.status(), run.settings()))
            room = self.table.size.width - (4 if plan.has_left else 44)
            self._set_title(self.table, classes_title(view, self.table.search.text, room))

    def _show_charts(self, run: ShownRun) -> None:
        """Show the chart, and the small ones if something else than the steps has changed, or every ten seconds."""
        metric, has_small = self.chart.metric, self._layout.has_small
        names = [metric, *(name for name in ("loss", "miou", "lr", "images_per_s") if name != metric)]
        drawn = id(run.view), metric, has_small, time.monotonic() // 10
        for chart, name in zip((self.chart, *self._small) if has_small else (self.chart,), names, strict=False):
            field = step_field(name)
            series = None if field is None else run.source.series(field)
            if chart is self.chart or drawn != self._drawn:
                chart.metric = name
                chart.show(run.view, series)
                title = Content.styled(chart_title(name), "bold")
                if chart is self.chart:
                    self._set_title(chart, Content.styled("1 ", "bold") + title)
                else:
                    set_title(chart, title)
        self._drawn = drawn

    def _show_devices(self, run: ShownRun, status: Status) -> None:
        """Show the devices; they scroll if the classes and gpu0_bsz leave too little room."""
        view, room, predicted_mib = run.view, self._right.size.height, run.predicted_mib()
        most = max(int(0.4 * room), room - len(view.classes) - 8) - 2  # gpu0_bsz has five rows, with its border
        is_shared = "classes" in self._layout.panes
        self.devices.styles.max_height = most + 2 if is_shared else "100%"
        num_rows = most if is_shared else self.devices.size.height
        size = Size(max(1, self.devices.scrollable_content_region.width), num_rows)
        self._device_lines.show(header.dimmed(gpu_content(view, predicted_mib, size), status))
        last = "last  " if status.has_old_numbers else ""
        title = Content.assemble(("2 Memory  ", "bold"), last, gpu_legend(predicted_mib))
        self._set_title(self.devices, title)

    def _set_title(self, pane: Widget, title: Content) -> None:
        """Set a pane's title; in one column, between the names of the other panes."""
        is_alone = len(self._layout.panes - {"gpu0"}) == 1
        at, names = PANES.index(pane.id or ""), _TABS if is_alone else ()
        before, after = (header.LinePart(1, "  ".join(part), "$text-muted") for part in (names[:at], names[at + 1 :]))
        set_title(pane, header.fit_parts([before, header.LinePart(0, title), after], pane.size.width - 4))
