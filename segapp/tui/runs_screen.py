"""The list of runs, updated live: state, epoch, mIoU, speed and age; opens one."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Input, OptionList

from segapp.run.folder import RunFolder
from segapp.run.words import age, duration, number, plural, printable
from segapp.tui import keys
from segapp.tui.chart import RunsChart
from segapp.tui.header import STATE_STYLES, LinePart, fit_parts
from segapp.tui.widgets import LiteralText, SearchLine, SelectableList, drawable, set_title
from segapp.view.runs import FollowedRun, Ranking, RunList, differing_settings
from segapp.view.wording import chosen, clip, fit_cells, loss, setup

PREVIEW_WIDTH, SIDE = 140, 60
"""Minimum columns of a terminal with a preview of the selected run, and the columns of the preview."""


class RunsScreen(Screen[RunFolder | None]):
    """The runs in a folder; closes with the run to open, or None."""

    KEYS = (
        keys.LEAVE,
        keys.Key("open", "enter", "Open", "Runs: open the selected one"),
        keys.Key("back", "escape,R", "Back", "Runs: back to the run"),
        keys.Key("find", "slash", "Find", "Runs: find by name or state", words="search filter sweep live crashed"),
        keys.Key("sort", "s", "Sort", "Runs: sort by start, best score or name", words="order"),
        keys.Key("app.undo", "u", "", "Run: take back a command", words="undo cancel"),
        *keys.COMMON,
    )
    BINDINGS: ClassVar[list[BindingType]] = [*keys.bindings(KEYS)]
    AUTO_FOCUS = "#run-lines"

    def __init__(self, runs: RunList) -> None:
        super().__init__()
        self.runs = runs
        self._order = ORDERS[0]
        self._shown: list[FollowedRun] = []
        self._columns, self._columns_of = columns_of([]), list[tuple[Any, Any]]()
        self._drawn: dict[int, object] = {}
        """What each row was made of."""

    def compose(self) -> ComposeResult:
        yield LiteralText(id="runs-title", classes="lines")
        yield SearchLine("part of the name of a run or sweep, or a state", id="run-filter", lines="run-lines")
        yield LiteralText(id="runs-header", classes="lines")
        with Horizontal():
            yield SelectableList(id="run-lines", compact=True)
            with Vertical(id="run-side"):
                yield LiteralText(id="run-preview", classes="lines")
                yield RunsChart(id="run-miou", classes="pane")
                yield RunsChart(id="run-loss", classes="pane")
        yield keys.KeyBar(id="runs-keys", classes="lines")
        yield LiteralText(classes="said")

    def on_mount(self) -> None:
        self.watch(self.query_one("#run-lines"), "scroll_y", self._show_rows, init=False)
        self._tick()

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._show)

    def _tick(self) -> None:
        is_reading = self.runs.poll()
        self._show(is_reading=is_reading)
        self.set_timer(0.01 if is_reading else 1.0, self._tick)

    def _show(self, *, is_reading: bool = False) -> None:
        """Show the title and the visible rows; others are made when they are scrolled into view."""
        wanted = self.query_one(SearchLine).text
        found = [run for run in self.runs.runs if is_wanted(run, wanted)]
        ranking = Ranking(run.summary.shown for run in found)
        shown = in_order(found, self._order, ranking)
        if shown != self._shown:
            self._list(shown)
        made_of = [(run.summary.settings, run.summary.shown["best_score"]) for run in shown]
        if made_of != self._columns_of and not is_reading:
            self._columns, self._columns_of, self._drawn = columns_of(shown), made_of, {}
        self._show_rows()
        self._show_preview()
        live = sum(run.is_followed and run.is_read and run.summary.word in _WITH_TRAINER for run in self.runs.runs)
        sweeps = len({run.sweep for run in self.runs.runs} - {""})
        of_sweeps = f", {plural(sweeps, 'sweep')}" if sweeps else ""
        where = printable(_shown_path(self.runs.root))
        count = f"{plural(len(self.runs.runs), 'run')} in {where}{of_sweeps}, {live} training"
        matching = f"  /{wanted}: {len(shown)}" if wanted else ""
        named = ranking.note or ("" if ranking.score.name == "miou" else f"BEST is {ranking.score.title}")
        by = f"  {printable(named)}" if named else ""
        sorted_by = f"  by {self._order}" if self._order != ORDERS[0] else ""
        title = Content.assemble(
            ("segapp  ", "$text-muted"), (count, "bold"), (matching + sorted_by + by, "$text-muted")
        )
        self.query_one("#runs-title", LiteralText).show(title)
        self.query_one("#runs-header", LiteralText).show(run_row(None, self._row_cells, self._columns))
        self.query_one("#runs-keys", keys.KeyBar).offer(self.KEYS)

    @property
    def _row_cells(self) -> int:
        return max(20, self.size.width - 3 - (SIDE if self.size.width >= PREVIEW_WIDTH else 0))

    def _list(self, shown: list[FollowedRun]) -> None:
        """List other runs, still as empty rows."""
        listed, selected = self.query_one("#run-lines", OptionList), self._selected
        self._shown, self._drawn = shown, {}
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

    def _show_preview(self) -> None:
        """Show the selected run, and its curves in front of the curves of the other visible runs."""
        side, selected = self.query_one("#run-side"), self._selected
        side.display = self.size.width >= PREVIEW_WIDTH and selected is not None
        if selected is None or not side.display:
            return
        self.query_one("#run-preview", LiteralText).show(preview(selected, self._columns))
        top = self.query_one("#run-lines", OptionList).scroll_offset.y
        others = [run.summary for run in self._shown[top : top + self.size.height] if run is not selected]
        for metric, title in (("miou", "mIoU"), ("loss", "Validation loss")):
            chart = self.query_one(f"#run-{metric}", RunsChart)
            set_title(
                chart, Content.assemble((title, "bold"), (f", with {len(others)} other runs behind", "$text-muted"))
            )
            chart.show_runs(metric, [*others, selected.summary])

    def on_option_list_option_highlighted(self) -> None:
        self._show_preview()

    @property
    def _selected(self) -> FollowedRun | None:
        at = self.query_one("#run-lines", OptionList).highlighted
        return self._shown[at] if at is not None and at < len(self._shown) else None

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.action_open()

    def action_open(self) -> None:
        if self._selected is not None and self.is_current:
            self.dismiss(self._selected.folder)

    def action_back(self) -> None:
        if not self.query_one(SearchLine).close():
            self.dismiss(None)

    def action_find(self) -> None:
        self.query_one(SearchLine).open()

    def action_sort(self) -> None:
        self._order = ORDERS[(ORDERS.index(self._order) + 1) % len(ORDERS)]
        self._show()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._show()


ORDERS = ("start", "best", "name")
"""The orders of the list; the first is the one of `RunList`: last started or resumed first."""


def in_order(runs: Sequence[FollowedRun], order: str, ranking: Ranking) -> list[FollowedRun]:
    """Return the runs in one of `ORDERS`; runs without a score come last."""
    if order == "name":
        return sorted(runs, key=lambda run: run.name.casefold())
    if order == "best":
        scores = [ranking.value(run.summary.shown) for run in runs]
        ranks = [(score is None, 0.0 if score is None else ranking.order(score)) for score in scores]
        return [runs[i] for i in sorted(range(len(runs)), key=ranks.__getitem__)]
    return list(runs)


def is_wanted(run: FollowedRun, text: str) -> bool:
    """Return True if each word is a part of the name of a run or its state."""
    return all(word in run.name.casefold() or word == run.summary.word for word in text.casefold().split())


_WITH_TRAINER = ("live", "busy", "paused", "starting", "resuming")


class Column(NamedTuple):
    """A column of the list."""

    title: str
    rank: int
    """Columns with the highest rank are left out first."""
    width: int
    """Cells; negative: flush right; 0: not shown."""
    text: Callable[[FollowedRun], str]
    style: str = ""


def columns_of(runs: Sequence[FollowedRun]) -> list[Column]:
    """Return the columns of runs: name, state, results, and the settings in which the runs differ."""
    shown = [run.summary.shown for run in runs]
    ranking = Ranking(shown)
    ranked = [(facts, value) for facts in shown if (value := ranking.value(facts)) is not None]
    best = {
        num: min((value for facts, value in ranked if facts["num_classes"] == num), key=ranking.order)
        for num in {facts["num_classes"] for facts, _ in ranked}
    }
    has_counts = len({ranking.text(facts, "") for facts, _ in ranked}) > 1

    def best_text(run: FollowedRun) -> str:
        facts = run.summary.shown
        value = ranking.value(facts)
        score = ("★" if value and value == best.get(facts["num_classes"]) else "") + number(value)
        return ranking.text(facts, score) if has_counts else score

    def live(name: str, form: Callable[[float | None], str]) -> Callable[[FollowedRun], str]:
        return lambda run: form(run.summary.shown[name]) if run.summary.word in ("live", "busy") else "-"

    return [
        Column("RUN", 0, min(max([12, *(len(run.folder.path.name) for run in runs)]), 36),
               lambda run: run.folder.path.name, "bold"),
        Column("SWEEP", 1, min(max([0, *(len(run.sweep) for run in runs)]), 20), lambda run: run.sweep, "$text-muted"),
        Column("STATE", 0, 9, lambda run: run.summary.word if run.is_read else "reading"),
        Column("EPOCH", 3, -9, lambda run: run.summary.progress),
        Column("BEST", 1, -14 if has_counts else -6, best_text),
        Column("MIOU", 7, -6, lambda run: number(run.summary.shown["miou"])),
        Column("LOSS", 5, -10, lambda run: loss(run.summary.shown["loss"]) if run.summary.shown["loss_epoch"] else "-"),
        *_setting_columns(runs),
        Column("ETA", 8, -7, live("eta_run_s", duration)),
        Column("IMG/S", 20, -7, live("images_per_s", number)),
        Column("DEVICES", 21, 7, lambda run: run.devices),
        Column("AGE", 9, -12, lambda run: age(run.age_s), "$text-muted"),
    ]  # fmt: skip


def _setting_columns(runs: Sequence[FollowedRun]) -> list[Column]:
    """Return a column for each setting that differs, the most telling first; one for settings that change together."""
    columns: dict[tuple[int, ...], Column] = {}
    for key, values in differing_settings([run.summary.settings for run in runs if run.summary.settings]).items():
        texts = list(map(str, values))
        parent, _, name = key.rpartition(".")
        title = parent.rpartition(".")[2] if name == "name" else name
        rank = (2, 4, 6)[len(columns)] if len(columns) < 3 else 10 + len(columns)
        found = Column(title, rank, min(max(map(len, (title, *texts))), 20),
                       lambda run, key=key: str(run.summary.settings.get(key, "?")))  # type: ignore[misc]  # fmt: skip
        columns.setdefault(tuple(map(texts.index, texts)), found)
    return list(columns.values())


def run_row(run: FollowedRun | None, width: int, columns: Sequence[Column]) -> Content:
    """Return one line of the list, None: the titles; columns that do not fit are left out."""
    parts = []
    for column in columns:
        text = printable(column.text(run)) if run is not None else column.title
        style = "$text-muted" if run is None else STATE_STYLES[text] if column.title == "STATE" else column.style
        fitted = fit_cells(text, column.width) if column.width > 0 else clip(text, -column.width).rjust(-column.width)
        parts.append(LinePart(column.rank, fitted, style))
    return Content("  ") + fit_parts(parts, width - 2)


def preview(run: FollowedRun, columns: Sequence[Column]) -> Content:
    """Return all columns of a run, one below the other, and why it ended."""
    reason = run.summary.times["reason"] if run.summary.facts.end_status else None
    rows = {column.title: column.text(run) for column in columns if column.width} | chosen(run.summary.settings)
    rows |= {"END": reason} if reason else {}
    lines = [Content.assemble((f"{title:<14} ", "$text-muted"), printable(text)) for title, text in rows.items()]
    return Content("\n").join([Content.styled(setup(run.summary.settings), "$text-accent"), *lines])


def _shown_path(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
