"""The list of runs, and the screen of a training that is starting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from segapp.run.events import EventWriter, RunStart
from segapp.run.folder import RunFolder
from segapp.run.words import announce, last_announced
from segapp.tui import runs_screen
from segapp.tui.app import MonitorApp
from segapp.tui.chart import LossChart
from segapp.tui.runs_screen import name_widths, run_header, run_row
from segapp.view.runs import FollowedRun, RunList, run_state
from segapp.view.source import LiveSource
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import press, run_screen, screen_text, settle


def recorded(root: Path, name: str, epochs: int, end: str | None = None) -> RecordedRun:
    run = RecordedRun(root / name, steps_per_epoch=10, epochs=8)
    for _ in range(epochs):
        run.epoch()
    if end is not None:
        run.end(end)
    run.folder.write_config(f"name: {name}\ndata: {{format: voc, root: x}}\noptim: {{lr: 0.0{epochs}}}\n")
    return run


@pytest.fixture
def runs(tmp_path: Path) -> Any:
    root = tmp_path / "runs"
    found = [
        recorded(root, "alpha", 3, "finished"),
        recorded(root, "beta", 1, "failed"),
        recorded(root, "gamma", 5),
    ]
    for i, run in enumerate(found):
        os.utime(run.folder.run_json, (i, i))
    found[2].shift_to_now()
    found[2].folder.acquire()
    yield found
    found[2].folder.release()


def num_evaluations(run: FollowedRun) -> int:
    found = run.summary.figures["num_evaluations"]
    assert isinstance(found, int)
    return found


def read_on(followed: RunList) -> None:
    followed.look()
    while followed.poll():
        pass


def test_run_list_equals_the_state_of_each_run(runs: list[RecordedRun]) -> None:
    followed = RunList(runs[0].folder.path.parent)
    read_on(followed)
    assert [run.folder.name for run in followed.runs] == ["gamma", "beta", "alpha"]
    for run in followed.runs:
        assert run.summary.state == run_state(run.folder.path)
    assert [num_evaluations(run) for run in followed.runs] == [5, 1, 3]
    runs[2].epoch()
    recorded(runs[0].folder.path.parent, "delta", 2, "stopped")
    read_on(followed)
    found = {run.folder.name: num_evaluations(run) for run in followed.runs}
    assert found == {"gamma": 6, "beta": 1, "alpha": 3, "delta": 2}
    events = runs[0].folder.events
    lines = events.read_bytes().splitlines(keepends=True)
    events.write_bytes(b"".join(lines[: len(lines) // 2]))  # replaced by a shorter one
    for _ in range(2):
        read_on(followed)
        alpha = next(run for run in followed.runs if run.folder.name == "alpha")
        expected = [json.loads(line)["miou"] for line in lines[: len(lines) // 2] if json.loads(line)["type"] == "val"]
        assert (num_evaluations(alpha), alpha.summary.shown["miou"]) == (len(expected), expected[-1])
        assert alpha.summary.progress.endswith("/8")


def test_resumed_run_is_not_over_and_repeats_its_epochs(tmp_path: Path) -> None:
    run = recorded(tmp_path / "runs", "alpha", 3, "failed")
    followed = RunList(tmp_path / "runs", clock=lambda: run.clock.now_s)
    read_on(followed)
    (alpha,) = followed.runs
    first_miou = alpha.summary.shown["best_miou"]
    assert (alpha.summary.state, num_evaluations(alpha), alpha.devices) == ("failed", 3, "4 GPU")
    run.writer = EventWriter(run.folder.events)
    first = json.loads(run.folder.events.read_text().splitlines()[0])
    start = {key: value for key, value in first.items() if key not in ("v", "seq", "t", "type")}
    run.write(RunStart(**{**start, "resumed_from_step": 10, "resumed_from_epoch": 1}), 5.0)
    run.step = 10
    run.folder.acquire()
    run.epoch()
    run.train(1)
    read_on(followed)
    run.folder.release()
    assert (num_evaluations(alpha), alpha.summary.state, alpha.summary.shown["step"]) == (2, "live", 21)
    assert alpha.summary.shown["best_miou"] != first_miou


def test_numbers_of_the_list_end_below_their_titles(runs: list[RecordedRun]) -> None:
    followed = RunList(runs[0].folder.path.parent)
    read_on(followed)
    columns = name_widths(followed.runs)
    titles = run_header(120, columns).plain
    for run in followed.runs:
        row = run_row(run, 120, columns).plain.ljust(120)
        for title in ("EPOCH", "MIOU", "BEST", "IMG/S", "AGE"):
            end = titles.index(title) + len(title)
            assert row[end - 1] != " " == row[end]


def test_list_opens_runs_and_goes_back(runs: list[RecordedRun]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "R")
        text = screen_text(app)
        assert "3 runs in" in text
        assert "1 training" in text
        for wanted in ("gamma", "5/8", "alpha", "finished", "beta", "failed"):
            assert wanted in text, wanted
        await press(app, pilot, "down", "down", "enter")
        assert app.shown.name == "alpha"
        assert "FINISHED" in screen_text(app)
        assert "alpha" in screen_text(app).splitlines()[0]
        await press(app, pilot, "R", "slash", *"bet", "enter")
        assert "gamma" not in screen_text(app)
        await press(app, pilot, "enter")
        assert app.shown.name == "beta"
        await press(app, pilot, "R", "escape")
        assert app.shown.name == "beta"
        assert len(app.screen_stack) == 1

    run_screen(LiveSource(runs[2].folder), act)


def test_list_comes_first_if_wanted(runs: list[RecordedRun]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "3 runs in" in screen_text(app)

    run_screen(LiveSource(runs[2].folder), act, starts_with_list=True)


@pytest.mark.parametrize("num_runs", [40, 80])
def test_only_visible_rows_of_a_long_list_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_runs: int
) -> None:
    for i in range(num_runs):
        run = recorded(tmp_path / "runs", f"run-{i:02}", 1, ("finished", "failed")[i % 2])
        os.utime(run.folder.run_json, (i, i))
    made, row = list[str](), runs_screen.run_row

    def counted(run: FollowedRun, *sizes: Any) -> Any:
        if run.is_read:
            made.append(run.name)
        return row(run, *sizes)

    monkeypatch.setattr(runs_screen, "run_row", counted)
    newest, oldest = f"run-{num_runs - 1}", "run-00"

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        listed = app.screen
        assert isinstance(listed, runs_screen.RunsScreen)
        while listed.runs.poll(budget_s=60.0):
            pass
        listed._tick()
        await pilot.pause()
        text = screen_text(app)
        assert newest in text
        assert oldest not in text
        assert set(made) == {f"run-{num_runs - 1 - i:02}" for i in range(36)}, "as many as the screen has lines"
        made.clear()
        for _ in range(5):
            listed._show()
        assert made == []
        await pilot.press("end")
        await pilot.pause()
        row_of_oldest = next(line for line in screen_text(app).splitlines() if oldest in line)
        assert row_of_oldest.split()[1:3] == ["finished", "1/8"]
        assert "run-01" in made
        assert len(made) <= 36

    run_screen(LiveSource(run.folder), act, starts_with_list=True)


# --- the start of a training -----------------------------------------------------------------------------------------


def test_start_is_shown_before_the_run_has_any_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunFolder.create(path=tmp_path / "run")
    announce("building the model")
    line = capsys.readouterr().out
    assert last_announced([line.strip(), "another line"]) == "building the model"

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "starting: the trainer's process" in text
        assert "CRASHED" not in text
        folder.log.write_text("starting: importing torch\nweights: 182 of 182 tensors\n" + line)
        await settle(app, pilot)
        text = screen_text(app)
        assert "starting: building the model" in text
        assert "weights: 182 of 182 tensors" in text

    run_screen(LiveSource(folder), act, has_trainer_ended=lambda: False)


def test_screen_closes_if_the_trainer_ends_before_it_trains(tmp_path: Path) -> None:
    folder, codes = RunFolder.create(path=tmp_path / "run"), list[int]()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert not app._exit
        codes.append(1)
        app.tick()
        await pilot.pause()
        assert app._exit

    run_screen(LiveSource(folder), act, has_trainer_ended=lambda: bool(codes))


def test_panes_replace_the_start_at_the_first_step(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=10)

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "starting" in screen_text(app)
        run.train(2)
        await settle(app, pilot)
        assert "starting" not in screen_text(app)
        assert "1 Loss" in screen_text(app)
        assert isinstance(app.focused, LossChart)

    run_screen(run, act)


def test_failed_start_shows_the_reason_and_the_log(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=10)
    run.folder.log.write_text("starting: first step\nerror: out of memory\n")
    run.end("failed", "cuda:0 ran out of memory")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "failed: cuda:0 ran out of memory" in text
        assert "error: out of memory" in text

    run_screen(run, act)
