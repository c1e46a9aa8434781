"""The list of runs, updated live: state, epoch, mIoU, speed and age; opens one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, OptionList

from segapp.run.folder import RunFolder
from segapp.run.words import age, number, plural, printable
from segapp.scores import with_count
from segapp.tui import keys
from segapp.tui.header import STATE_STYLES, LinePart, fit_parts
from segapp.tui.widgets import LiteralText, SearchLine, drawable
from segapp.view.runs import FollowedRun, RunList
from segapp.view.wording import clip, fit_cells

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
        self._columns = 0, 0
        self._drawn: dict[int, object] = {}
        """What each row was made of."""

    def compose(self) -> ComposeResult:
        yield LiteralText(id="runs-title", classes="lines")
        yield SearchLine("part of the name of a run or sweep", id="run-filter", lines="run-lines")
        yield LiteralText(id="runs-header", classes="lines")
        yield OptionList(id="run-lines", compact=True)
        yield LiteralText(id="runs-keys", classes="lines")

    def on_mount(self) -> None:
        self.watch(self.query_one("#run-lines"), "scroll_y", self._show_rows, init=False)
        self._tick()
        self.set_interval(1.0, self._tick)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._show)

    def _tick(self) -> None:
        if self.runs.poll():
            self.set_timer(0.01, self._tick)
        self._show()

    def _show(self) -> None:
        """Show the title and the visible rows; others are made when they are scrolled into view."""
        wanted = self.query_one(SearchLine).text
        shown = [run for run in self.runs.runs if wanted.casefold() in run.name.casefold()]
        if shown != self._shown:
            self._list(shown)
        self._show_rows()
        live = sum(run.is_followed and run.is_read and run.summary.state in ("live", "busy") for run in self.runs.runs)
        sweeps = len({run.sweep for run in self.runs.runs} - {""})
        of_sweeps = f", {plural(sweeps, 'sweep')}" if sweeps else ""
        where = printable(_shown_path(self.runs.root))
        count = f"{plural(len(self.runs.runs), 'run')} in {where}{of_sweeps}, {live} training"
        found = f"  /{wanted}: {len(shown)}" if wanted else ""
        title = Content.assemble(("segapp  ", "$text-muted"), (count, "bold"), (found, "$text-muted"))
        self.query_one("#runs-title", LiteralText).show(title)
        self.query_one("#runs-header", LiteralText).show(run_header(self._row_cells, self._columns))
        items = (("enter", "Open"), ("esc", "Back"), ("/", "Find"), ("q", "Leave"))  # fmt: skip
        self.query_one("#runs-keys", LiteralText).show(keys.bar(items, self.size.width))

    @property
    def _row_cells(self) -> int:
        return max(20, self.size.width - 3)

    def _list(self, shown: list[FollowedRun]) -> None:
        """List other runs, still as empty rows."""
        listed, selected = self.query_one("#run-lines", OptionList), self._selected
        self._shown, self._columns, self._drawn = shown, name_widths(self.runs.runs), {}
        listed.clear_options()
        listed.add_options([" "] * len(shown))
        if shown:
            listed.highlighted = next((i for i, run in enumerate(shown) if run is selected), 0)

    def _show_rows(self) -> None:
        listed = self.query_one("#run-lines", OptionList)
        top = listed.scroll_offset.y
        for i, run in enumerate(self._shown[top : top + self.size.height], start=top):
            made_of = run.summary, run.is_read, age(run.age_s), self._row_cells
            if self._drawn.get(i) != made_of:
                self._drawn[i] = made_of
                listed.replace_option_prompt_at_index(i, drawable(self, run_row(run, self._row_cells, self._columns)))

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


def _score(facts: Mapping[str, Any], prefix: str = "") -> str:
    score = with_count(number(facts[f"{prefix}miou"]), facts[f"{prefix}num_scored"], facts["num_classes"])
    return score.rjust(_SCORE)


def run_row(run: FollowedRun, width: int, columns: tuple[int, int]) -> Content:
    """Return one line of the list; columns that do not fit are left out."""
    name, facts = fit_cells(printable(run.folder.path.name), columns[0]), run.summary.shown
    state = run.summary.state if run.is_read else "reading"
    speed = number(facts["images_per_s"]) if state in ("live", "busy") else "-"
    parts = [
        LinePart(0, f"  {name}", "bold"),
        LinePart(1, fit_cells(printable(run.sweep), columns[1]), "$text-muted"),
        LinePart(0, state.ljust(9), STATE_STYLES[state]),
        LinePart(1, clip(run.summary.progress, 9).rjust(9)),
        LinePart(2, _score(facts)),
        LinePart(2, _score(facts, "best_")),
        LinePart(5, speed.rjust(7)),
        LinePart(6, run.devices.ljust(7)),
        LinePart(3, age(run.age_s).rjust(12), "$text-muted"),
    ]
    return fit_parts(parts, width)
