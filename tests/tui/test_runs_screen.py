"""The list of runs, and the screen of a training that is starting."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from segapp.run.folder import RunFolder
from segapp.tui.app import MonitorApp
from segapp.tui.chart import LossChart, RunsChart
from segapp.tui.runs_screen import RunsScreen, columns_of, run_row
from segapp.view.runs import FollowedRun, RunList, run_state
from segapp.view.source import LiveSource
from tests.support.recorded_runs import Clock, RecordedRun
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
    found = [recorded(root, "alpha", 3, "finished"), recorded(root, "beta", 1, "failed"), recorded(root, "gamma", 5)]
    for i, run in enumerate(found):
        os.utime(run.folder.run_json, (i, i))
    found[2].shift_to_now()
    found[2].hold()
    yield found
    found[2].folder.release()


def num_evaluations(run: FollowedRun) -> Any:
    return run.summary.figures["num_evaluations"]


def read_on(followed: RunList) -> None:
    followed.look()
    while followed.poll():
        pass


def test_run_list_equals_the_state_of_each_run(runs: list[RecordedRun]) -> None:
    clock = Clock(time.time())
    followed = RunList(runs[0].folder.path.parent, clock)
    read_on(followed)
    assert [run.folder.name for run in followed.runs] == ["gamma", "beta", "alpha"]
    columns = columns_of(followed.runs)
    titles = run_row(None, 150, columns).plain
    for run in followed.runs:
        assert run.summary.state == run_state(run.folder.path)
        row = run_row(run, 150, columns).plain.ljust(150)
        for title in ("EPOCH", "BEST", "MIOU", "LOSS", "ETA", "IMG/S", "AGE"):
            end = titles.index(title) + len(title)
            assert row[end - 1] != " " == row[end], "numbers end below their titles"
    ages, ended_s = [], runs[0].clock.now_s
    for seconds in (0, 1, 59, 60, 61, 299):
        clock.now_s = ended_s + seconds
        ages.append(followed.runs[2].age_s)
    assert ages[:4] == pytest.approx([0, 1, 59, 60], abs=1e-3)
    assert all(seconds - 60 <= age_s <= seconds + 1e-3 for seconds, age_s in zip((61, 299), ages[4:], strict=True))
    clock.now_s = time.time() + 100.0
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


def test_list_is_sorted_and_filtered_by_state(runs: list[RecordedRun]) -> None:
    root = runs[0].folder.path.parent
    for name, epochs in (("failed-once", 0), ("zeta", 7)):
        recorded(root, name, epochs, "stopped")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        screen = await list_with_all_runs(app, pilot)

        def names() -> list[str]:
            return [run.name for run in screen._shown]

        assert names()[2:] == ["gamma", "beta", "alpha"], "last started first"
        await press(app, pilot, "s")
        assert "by best" in screen_text(app)
        assert names() == ["zeta", "gamma", "alpha", "beta", "failed-once"], "the one without a score is last"
        await press(app, pilot, "down", "s")
        assert names() == ["alpha", "beta", "failed-once", "gamma", "zeta"]
        assert screen._selected is not None
        assert screen._selected.name == "gamma", "the selection follows its run"
        await press(app, pilot, "slash", *"failed", "enter")
        assert names() == ["beta", "failed-once"], "a state, or a part of the name"
        await press(app, pilot, "slash", *" bet", "enter")
        assert names() == ["beta"]
        await press(app, pilot, "escape", "s")
        assert names()[2:] == ["gamma", "beta", "alpha"]

    run_screen(LiveSource(runs[2].folder), act, starts_with_list=True)


def differing(root: Path, name: str, epochs: int, **others: Any) -> RecordedRun:
    """A run of a sweep over learning rate and encoder; its momentum belongs to its optimizer."""
    run = recorded(root, name, epochs, "finished")
    values = {"optim.name": "sgd", "optim.momentum": 0.9, "optim.lr": 0.01, "model.encoder": "resnet50", **others}
    lines = [f"  {key.partition('.')[2]}: {value}" for key, value in values.items()]
    run.folder.write_config("\n".join(["optim:", *lines[:3], "model:", *lines[3:], ""]))
    return run


def test_list_says_which_run_won_and_in_what_it_differs(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    differing(root, "a", 2)
    winner = differing(root, "b", 7, **{"optim.name": "adamw", "optim.momentum": 0.0, "optim.lr": 0.014})
    differing(root, "c", 4, **{"optim.lr": 0.003, "model.encoder": "mit_b2"})
    damaged = recorded(root, "d", 1, "failed")
    damaged.folder.write_config("optim: {lr: [")
    RecordedRun(root / "e", steps_per_epoch=10).end("failed", "no data")
    followed = RunList(root)
    read_on(followed)
    columns = columns_of(followed.runs)
    titles = [column.title for column in columns]
    assert titles[titles.index("LOSS") + 1 : titles.index("ETA")] == ["lr", "optim", "encoder"]  # momentum is optim's
    rows = {run.name: run_row(run, 200, columns).plain.split() for run in followed.runs}
    best = json.loads([line for line in winner.folder.events.read_text().splitlines() if '"val"' in line][-1])["miou"]
    assert rows["b"][3:5] == [f"★{best:.3f}", f"{best:.3f}"]
    assert not any("★" in word for name in "acde" for word in rows[name])
    assert {name: rows[name][6:9] for name in "abcd"} == {
        "a": ["0.01", "sgd", "resnet50"], "b": ["0.014", "adamw", "resnet50"], "c": ["0.003", "sgd", "mit_b2"],
        "d": ["?", "?", "?"],
    }  # fmt: skip
    assert rows["e"][3:6] == ["-", "-", "-"]
    without_result = [run for run in followed.runs if run.name == "e"]
    assert run_row(without_result[0], 200, columns_of(without_result)).plain.split()[3] == "-", "no star"
    narrow = run_row(None, 78, columns).plain.split()
    assert narrow == ["RUN", "STATE", "EPOCH", "BEST", "LOSS", "lr", "optim"]
    with_classes = RecordedRun(root / "f", classes=["x", "y"], steps_per_epoch=10)
    with_classes.epoch()
    with_classes.end()
    read_on(followed)
    rows = {run.name: run_row(run, 200, columns_of(followed.runs)).plain for run in followed.runs}
    assert "★" in rows["f"], "it has other classes, so it competes with no other run"
    assert "(2/2)" in rows["f"]
    assert f"★{best:.3f} (11/11)" in rows["b"]


async def list_with_all_runs(app: MonitorApp, pilot: Pilot[None]) -> RunsScreen:
    """Return the list of runs after it has read and drawn every run."""
    listed = app.screen
    assert isinstance(listed, RunsScreen)
    while listed.runs.poll(budget_s=60.0):
        pass
    listed._show()
    await pilot.pause()
    return listed


def test_list_has_one_timer_however_long_it_reads(runs: list[RecordedRun], monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys would wait behind the rounds of every further chain of timers."""
    set_timer, set_interval = RunsScreen.set_timer, RunsScreen.set_interval
    once, always = list[float](), list[float]()

    def instead(armed: list[float], arm: Any) -> Any:
        def note(screen: RunsScreen, delay_s: float, callback: Any = None, **named: Any) -> Any:
            return armed.append(delay_s) if callback == screen._tick else arm(screen, delay_s, callback, **named)

        return note

    monkeypatch.setattr(RunsScreen, "set_timer", instead(once, set_timer))
    monkeypatch.setattr(RunsScreen, "set_interval", instead(always, set_interval))

    async def act(app: MonitorApp, _: Pilot[None]) -> None:
        listed = app.screen
        assert isinstance(listed, RunsScreen)
        for is_reading in (True, True, False, True):
            monkeypatch.setattr(listed.runs, "poll", lambda is_reading=is_reading: is_reading)
            assert len(once) + len(always) == 1
            once.clear()  # it ends
            listed._tick()
            assert (*once, *always) == (0.01 if is_reading else 1.0,)

    run_screen(LiveSource(runs[0].folder), act, starts_with_list=True)


def test_preview_follows_the_cursor_on_one_scale(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for i, epochs in enumerate((2, 8, 5)):
        run = differing(root, f"run-{i}", epochs, **{"optim.lr": (0.01, 0.02, 0.03)[i]})
        os.utime(run.folder.run_json, (i, i))

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await list_with_all_runs(app, pilot)
        axes = set()
        for i in (2, 1, 0):
            shown = [line[-60:] for line in screen_text(app).splitlines()]
            assert re.search(rf"RUN +run-{i}\b", "\n".join(shown))
            assert re.search(rf"lr +0.0{i + 1}\b", "\n".join(shown))
            assert any("mIoU, with 2 other runs behind" in line for line in shown)
            axes.add(tuple(re.findall(r"0\.\d+ +│", "\n".join(shown))))
            charts = list(app.screen.query(RunsChart))
            assert [len(chart._runs) for chart in charts] == [3, 3]
            assert all(chart._runs[-1].folder.name == f"run-{i}" for chart in charts)
            await press(app, pilot, "down")
        assert len(axes) == 1 <= len(axes.pop()), "the scale does not depend on the selected run"
        await pilot.resize_terminal(120, 36)
        await pilot.pause()
        assert "other runs behind" not in screen_text(app)

    run_screen(LiveSource(run.folder), act, (160, 40), starts_with_list=True)


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


def test_only_visible_rows_of_a_long_list_are_made(tmp_path: Path) -> None:
    for i in range(60):
        run = recorded(tmp_path / "runs", f"run-{i:02}", 1, ("finished", "failed")[i % 2])
        os.utime(run.folder.run_json, (i, i))

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "60 runs in" in screen_text(app)
        listed = await list_with_all_runs(app, pilot)
        text = screen_text(app)
        assert ("run-59" in text, "run-00" in text) == (True, False)
        made = dict(listed._drawn)
        assert set(made) == set(range(36)), "as many as the screen has lines"
        listed._show()
        assert all(listed._drawn[i] is row for i, row in made.items()), "none is made again"
        await pilot.press("end")
        await pilot.pause()
        assert re.search(r"run-00 +finished +1/8", screen_text(app))
        top = int(app.screen.query_one("#run-lines").scroll_offset.y)
        assert top > 20
        compared = {summary.folder.name for summary in app.screen.query(RunsChart).first()._runs}
        assert compared == {f"run-{59 - i:02}" for i in range(top, 60)}, "the curves are those of the visible rows"

    run_screen(LiveSource(run.folder), act, (160, 36), starts_with_list=True)


def test_start_is_shown_before_the_run_has_any_file(tmp_path: Path) -> None:
    folder, codes = RunFolder.create(path=tmp_path / "run"), list[int]()
    folder.acquire()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "starting: the trainer's process" in text
        assert "CRASHED" not in text
        assert not app._exit
        codes.append(1)
        app.tick()
        await pilot.pause()
        assert app._exit, "the trainer has ended before it trained"

    run_screen(LiveSource(folder), act, has_trainer_ended=lambda: bool(codes))


def test_panes_replace_the_start_and_a_failure_is_told_once(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=10)
    run.folder.log.write_text("starting: first step\nTraceback\nerror: cuda:0 ran out of memory\n")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "starting" in screen_text(app)
        run.train(2)
        await settle(app, pilot)
        text = screen_text(app)
        assert ("starting" in text, "1 Loss" in text, isinstance(app.focused, LossChart)) == (False, True, True)

    run_screen(run, act)
    ended = RecordedRun(tmp_path / "ended", steps_per_epoch=10)
    ended.folder.log.write_text(run.folder.log.read_text())
    ended.end("failed", "cuda:0 ran out of memory")

    async def act_of_ended(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "failed: cuda:0 ran out of memory" in text
        assert (text.count("ran out of memory"), "Traceback" in text) == (1, False)

    run_screen(ended, act_of_ended)
