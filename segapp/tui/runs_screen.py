"""The list of runs, updated live: state, epoch, mIoU, speed and age; opens one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, OptionList

from segapp.run.events import Val
from segapp.run.folder import RunFolder
from segapp.run.words import age, number, plural, printable
from segapp.tui import keys
from segapp.tui.header import STATE_STYLES, LinePart, fit_parts
from segapp.tui.widgets import LiteralText, SearchLine, drawable
from segapp.view.runs import FollowedRun, RunList
from segapp.view.wording import clip, fit_cells, miou

_SCORE = 13
"""Cells of a score with its classes: 0.557 (17/19)."""


class RunsScreen(Screen[RunFolder | None]):
    """The runs in a folder; closes with the run to open, or None."""

    BINDINGS: ClassVar[list[BindingType]] = [
        ("escape,R", "back", "back"),
        ("q", "app.detach", "leave"),
        ("slash", "find", "find"),
    ]
    AUTO_FOCUS = "#run-lines"

    def __init__(self, runs: RunList) -> None:
        super().__init__()
        self.runs = runs
        self._shown: list[FollowedRun] = []

    def compose(self) -> ComposeResult:
        yield LiteralText(id="runs-title", classes="lines")
        yield SearchLine("part of the name of a run or sweep", id="run-filter", lines="run-lines")
        yield LiteralText(id="runs-header", classes="lines")
        yield OptionList(id="run-lines", compact=True)
        yield LiteralText(id="runs-keys", classes="lines")

    def on_mount(self) -> None:
        self._tick()
        self.set_interval(0.5, self._tick)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._show)

    def _tick(self) -> None:
        if self.runs.poll():
            self.set_timer(0.01, self._tick)
        self._show()

    def _show(self) -> None:
        wanted = self.query_one(SearchLine).text
        shown = [run for run in self.runs.runs if wanted.casefold() in run.folder.name.casefold()]
        listed = self.query_one("#run-lines", OptionList)
        width = max(20, self.size.width - 3)
        columns = name_widths(self.runs.runs)
        rows = [drawable(self, run_row(run, width, columns)) for run in shown]
        if [run.folder.path for run in shown] != [run.folder.path for run in self._shown]:
            selected = self._selected
            listed.clear_options()
            listed.add_options(rows)
            if rows:
                listed.highlighted = next((i for i, run in enumerate(shown) if run is selected), 0)
        else:
            for i, row in enumerate(rows):
                if listed.get_option_at_index(i).prompt != row:
                    listed.replace_option_prompt_at_index(i, row)
        self._shown = shown
        live = sum(run.summary.state in ("live", "busy") for run in self.runs.runs)
        sweeps = len({run.sweep for run in self.runs.runs} - {""})
        of_sweeps = f", {plural(sweeps, 'sweep')}" if sweeps else ""
        where = printable(_shown_path(self.runs.root))
        count = f"{plural(len(self.runs.runs), 'run')} in {where}{of_sweeps}, {live} training"
        found = f"  /{wanted}: {len(shown)}" if wanted else ""
        title = Content.assemble(("segapp  ", "$text-muted"), (count, "bold"), (found, "$text-muted"))
        self.query_one("#runs-title", LiteralText).show(title)
        self.query_one("#runs-header", LiteralText).show(run_header(width, columns))
        items = (("enter", "Open"), ("esc", "Back"), ("/", "Find"), ("q", "Leave"))  # fmt: skip
        self.query_one("#runs-keys", LiteralText).show(keys.bar(items, self.size.width))

    @property
    def _selected(self) -> FollowedRun | None:
        at = self.query_one("#run-lines", OptionList).highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if self._selected is not None:
            self.dismiss(self._selected.folder)

    def action_back(self) -> None:
        """Close the search, or else go back to the shown run."""
        if not self.query_one(SearchLine).close():
            self.dismiss(None)

    def action_find(self) -> None:
        self.query_one(SearchLine).open()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._show()


def name_widths(runs: Sequence[FollowedRun]) -> tuple[int, int]:
    """Return the widths, in cells, of the names of runs and of sweeps; 0 if no run belongs to a sweep."""
    names = max([12, *(len(run.folder.path.name) for run in runs)])
    return min(names, 36), min(max([0, *(len(run.sweep) for run in runs)]), 20)


def run_header(width: int, columns: tuple[int, int]) -> Content:
    """Return the titles of the columns of `run_row`."""
    titles = [LinePart(0, f"  {fit_cells('RUN', columns[0])}"), *(
        LinePart(rank, title.ljust(cells) if is_left else title.rjust(cells))
        for rank, title, cells, is_left in (
            (1, "SWEEP"[: columns[1]], columns[1], True),
            (0, "STATE", 9, True), (1, "EPOCH", 9, False), (2, "MIOU", _SCORE, False), (2, "BEST", _SCORE, False),
            (5, "IMG/S", 7, False), (6, "DEVICES", 7, True), (3, "AGE", 12, False),
        )
    )]  # fmt: skip
    return Content.styled(fit_parts(titles, width).plain, "$text-muted")


def _shown_path(path: Path) -> str:
    """Return a path relative to the working directory, if it is below it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _score(val: Val | None) -> str:
    return ("-" if val is None else miou(val)).rjust(_SCORE)


def run_row(run: FollowedRun, width: int, columns: tuple[int, int]) -> Content:
    """Return one line of the list; columns that do not fit are left out."""
    summary = run.summary
    is_live = summary.state in ("live", "busy")
    speed = number(run.view.step.images_per_s) if is_live and run.view.step else "-"
    name = fit_cells(printable(run.folder.path.name), columns[0])
    parts = [
        LinePart(0, f"  {name}", "bold"),
        LinePart(1, fit_cells(printable(run.sweep), columns[1]), "$text-muted"),
        LinePart(0, summary.state.ljust(9), STATE_STYLES[summary.state]),
        LinePart(1, clip(summary.progress, 9).rjust(9)),
        LinePart(2, _score(run.view.vals.last)),
        LinePart(2, _score(run.view.best)),
        LinePart(5, speed.rjust(7)),
        LinePart(6, run.devices.ljust(7)),
        LinePart(3, age(summary.facts.event_age_s).rjust(12), "$text-muted"),
    ]
    return fit_parts(parts, width)
