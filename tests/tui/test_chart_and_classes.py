"""The chart's metrics and scale, the class table's cursor and columns, and the memory of the devices."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from textual.geometry import Size
from textual.pilot import Pilot

from segapp.run.events import EventReader, Step
from segapp.run.words import number
from segapp.tui.app import MonitorApp
from segapp.tui.chart import LossChart
from segapp.tui.classes import classes_content
from segapp.view.plot import curve_of, metric_names, step_field
from segapp.view.source import SeriesReader
from tests.support.recorded_runs import RecordedRun, folded
from tests.support.screens import press, run_screen, screen_text, settle


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20, epochs=8)
    for _ in range(3):
        run.epoch()
    return run


def test_every_metric_has_the_values_of_the_events(run: RecordedRun) -> None:
    run.write(
        Step(
            epoch=4, step=61, loss=0.5, lr=0.002, grad_norm=None, images_per_s=40.0, terms={'pi"xel': 0.25, "edge": 1.5}
        )
    )
    raws = EventReader(run.folder.events).read_raw()
    steps = [raw for raw in raws if raw["type"] == "step"]
    vals = [raw for raw in raws if raw["type"] == "val"]
    view = folded(run)
    assert metric_names(view) == ["loss", 'term pi"xel', "term edge", "miou", "pixel_accuracy", "lr", "images_per_s"]
    for field in ("lr", "grad_norm", "images_per_s"):
        reader = SeriesReader(run.folder.events, field)
        reader.poll()
        wanted = [math.nan if raw[field] is None else raw[field] for raw in steps]
        np.testing.assert_array_equal(reader.history.low, wanted)
        assert reader.history.step.tolist() == [raw["step"] for raw in steps]
    terms = SeriesReader(run.folder.events, step_field('term pi"xel') or "")
    terms.poll()
    assert terms.history.low.tolist() == [0.25]
    assert curve_of(view, "miou", None).points.tolist() == [[raw["step"], raw["miou"], raw["epoch"]] for raw in vals]
    of_pole = [[raw["step"], raw["iou"][2], raw["epoch"]] for raw in vals]
    assert curve_of(view, "IoU pole", None).points.tolist() == of_pole
    assert curve_of(view, "IoU unknown", None).points.tolist() == []


def test_series_follows_a_growing_and_a_replaced_file(run: RecordedRun) -> None:
    reader = SeriesReader(run.folder.events, "lr")
    reader.poll()
    assert reader.history.size == 60
    run.train(5)
    reader.poll()
    assert reader.history.size == 65
    run.step = 40
    run.write_start(resumed_from_step=40)
    run.train(3)
    reader.poll()
    assert reader.history.step.tolist() == list(range(1, 44))
    lines = run.folder.events.read_bytes().splitlines(keepends=True)
    run.folder.events.unlink()
    run.folder.events.write_bytes(b"".join(lines[:10]))
    reader.poll()
    reader.poll()
    assert reader.history.size < 10


def test_keys_go_through_the_metrics_and_back(run: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        titles = []
        for key in ("1", "v", "v", "v", "v", "v", "v"):
            await press(app, pilot, key)
            titles.append(re.search(r"1 ([A-Za-z/ ]+?) [─ ]", screen_text(app)).group(1))  # type: ignore[union-attr]
        assert titles == ["Loss", "mIoU", "Pixel accuracy", "Learning rate", "Grad norm", "Images/s", "Loss"]
        await press(app, pilot, "V")
        assert "Images/s" in screen_text(app)

    run_screen(run, act)


def test_metric_of_a_class_is_chosen_in_the_menu_or_its_row(run: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "ctrl+p", *"grad", "enter")
        assert all(f" {name} " in screen_text(app) for name in ("mIoU", "learning rate", "pixel accuracy", "IoU pole"))
        await press(app, pilot, *"IoU po", "enter")
        assert app.query_one(LossChart).metric == "IoU pole"
        await press(app, pilot, "3", "down", "down", "enter")
        assert app.query_one(LossChart).metric == "IoU sign"
        assert "IoU sign" in screen_text(app)

    run_screen(run, act)


def test_wide_screen_has_small_charts_of_the_other_metrics(fresh: RecordedRun) -> None:
    fresh.epoch()
    fresh.epoch()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        charts = list(app.query(LossChart))

        def titles() -> list[str]:
            return [re.sub(r"\[.*?\]|\d ", "", str(chart.border_title)) for chart in charts]

        assert titles() == ["Loss", "mIoU", "Learning rate", "Images/s"]
        drawn = ["".join(strip.text for strip in chart._strips) for chart in charts]
        last, step = app.view.vals[-1], app.view.step
        assert step is not None
        assert f"val {number(last.miou)}" in drawn[1]
        assert f"last {number(step.lr)}" in drawn[2]
        assert f"last {number(step.images_per_s)}" in drawn[3]
        fresh.train(3)
        await settle(app, pilot)
        assert "".join(strip.text for strip in charts[0]._strips) != drawn[0]
        app.columns._drawn = ()  # the small charts are drawn every ten seconds
        await settle(app, pilot)
        assert "".join(strip.text for strip in charts[3]._strips) != drawn[3]
        await press(app, pilot, "v")
        assert titles() == ["mIoU", "Loss", "Learning rate", "Images/s"]
        await press(app, pilot, "i")
        assert "Learning rate" not in screen_text(app)

    run_screen(fresh, act, (160, 40))


def test_chart_draws_steps_evaluations_and_the_best(run: RecordedRun) -> None:
    run.epoch(loss=0.9)

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        chart, view = app.query_one(LossChart), folded(run)
        await press(app, pilot, "escape")
        legend, *rows, _ = ["".join(segment.text for segment in strip)[9:] for strip in chart._strips]
        average = 0.0
        for loss in view.history.low:
            average = 0.6 * average + 0.4 * loss  # from zero, whose weight is none after 80 steps
        wanted = ["mean e4 0.900", f"smoothed {average:.3f} (0.6)", f"◆ val {view.vals[-1].loss:.3f} e4"]
        assert legend.split("  ")[:3] == wanted
        left, right = chart._x_range
        cell_of = {step: int((step - left) / (right - left) * len(rows[0])) for step in (20, 40, 60, 80)}
        shown = {char: sorted(row.index(char) for row in rows if char in row) for char in "◆★"}
        best = view.best.step if view.best is not None else 0
        assert shown["★"] == [cell_of[best]]
        assert {cell_of[step] for step in cell_of if step != best} >= set(shown["◆"]) != set()
        is_drawn = [any("\u2800" < row[x] <= "\u28ff" for row in rows) for x in range(len(rows[0]))]
        assert sum(is_drawn[: cell_of[80]]) > 0.9 * cell_of[80]
        assert not any(is_drawn[cell_of[80] + 1 :])

    run_screen(run, act)


def test_constant_learning_rate_is_a_flat_line(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20)
    for step in range(1, 40):
        run.write(Step(epoch=1, step=step, loss=0.5, lr=0.014), after_s=1.0)

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        for metric in ("loss", "lr"):
            app.action_show_metric(metric)
            await settle(app, pilot)
            rows = [row for row in screen_text(app).splitlines() if re.search("[\u2801-\u28ff]{5}", row)]
            assert len(rows) == 1, metric
            assert ("smoothed" in screen_text(app)) == (metric == "loss"), "a schedule has no noise"

    run_screen(run, act)


def test_legend_has_a_value_with_its_own_epoch(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20)
    run.epoch()
    run.epoch()
    shown = folded(run).vals[-1].loss
    run.write(folded(run).vals[-1].model_copy(update={"epoch": 3, "step": 60, "loss": None}))
    for step in range(41, 61):
        run.write(Step(epoch=3, step=step, loss=None, lr=0.01))

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert f"◆ val {number(shown)} e2" in screen_text(app)
        axis = next(row for row in screen_text(app).splitlines() if "└" in row)
        assert "×" not in axis.split("│")[1]
        assert "40─" in axis, "a mark hides no label"
        assert "×" in screen_text(app)

    run_screen(run, act)


def test_selected_class_is_named_in_full(tmp_path: Path) -> None:
    names = ["road", "class_" + "long_" * 30 + "[red]end", "sky"]
    run = RecordedRun(tmp_path / "run", steps_per_epoch=20, classes=names)
    run.epoch()
    val = folded(run).vals[-1]
    run.write(val.model_copy(update={"epoch": 2, "iou": [0.5, 0.25, 0.75], "precision": [0.1, 0.2, None],
                                     "recall": [0.4, 0.5, 0.6]}))  # fmt: skip

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "3", "down", "d")
        text = screen_text(app).replace("\n", "")
        assert "".join(text.split("│")).replace(" ", "").count("[red]end") == 1
        assert "epoch 2: IoU 0.250, precision 0.200, recall 0.500" in screen_text(app)

    run_screen(run, act)


def test_cursor_of_the_classes_stays_in_view(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", classes=[f"class number {i}" for i in range(99)], steps_per_epoch=5)
    run.epoch()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "3", "f", *["pagedown"] * 6)
        worst = classes_content(folded(run), Size(76, 200)).plain.splitlines()
        name = re.match(r"class number \d+", worst[50]).group()  # type: ignore[union-attr]
        assert f"{name} " in screen_text(app)

    run_screen(run, act, (80, 24))


def test_focus_selects_the_pane_that_keys_act_on(run: RecordedRun) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await pilot.click("#event-lines")
        await settle(app, pilot)
        assert app.pane == "events"
        await press(app, pilot, "f")
        assert "4 Events" in screen_text(app)
        assert "1 Loss" in screen_text(app).splitlines()[2], "the chart is a tab, not a pane"

    run_screen(run, act)
