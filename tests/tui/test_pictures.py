"""The pictures pane: where the pictures go, the classes in them, and the keys from one to the next."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from textual.pilot import Pilot

from segapp.tui.app import MonitorApp
from segapp.tui.pictures import arrange
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import press, run_screen, screen_text


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=5, epochs=8)
    for _ in range(3):
        run.epoch()
        run.draw_samples()
    return run


@pytest.mark.parametrize(
    ("size", "picture", "columns"),
    [
        ((60, 60), (200, 100), 1),  # 3 x 19 rows below each other: 38 px high; in two columns 29 px wide
        ((64, 20), (320, 240), 2),
        ((120, 14), (320, 240), 3),
        ((80, 40), (100, 400), 3),
    ],
)
def test_pictures_are_arranged_as_large_as_they_fit(
    size: tuple[int, int], picture: tuple[int, int], columns: int
) -> None:
    plan = arrange(size, picture, 14)
    assert plan.columns == columns
    rows = -(-3 // columns)
    assert columns * plan.width + columns - 1 <= size[0]
    assert rows * (plan.height + 1) <= size[1]
    assert min(plan.legend_width, plan.legend_height) > 0
    if columns == 3:  # the legend is below, else in what is free on the right
        assert plan.height + 1 + plan.legend_height <= size[1]
    else:
        assert plan.width + 1 + plan.legend_width <= size[0]
        assert plan.legend_height <= size[1]


def test_without_colour_each_class_has_a_letter(run: RecordedRun) -> None:
    (run.folder.samples / "epoch_0004_[b].png").write_bytes(b"\x89PNG no")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "i")
        assert "cannot be shown" in screen_text(app)
        await press(app, pilot, "left")
        text = screen_text(app)
        assert "AAAAAA" in text
        assert "A road" in text
        assert "left/right Evaluation  up/down Image" in text.splitlines()[-1]
        await press(app, pilot, "i")
        assert "smoothed " in screen_text(app)

    run_screen(run, act, ascii_only=True)


def test_keys_show_other_evaluations_and_other_images(run: RecordedRun) -> None:
    shutil.copy(run.folder.samples / "epoch_0001_2.png", run.folder.samples / "first_batch.png")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "i")
        assert "epoch_0003_0.png  evaluation 3 of 3  image 1 of 3" in screen_text(app)
        await press(app, pilot, "left", "left", "left")
        assert "first_batch.png  the first batch as the model sees it" in screen_text(app)
        assert "target" not in screen_text(app), "it is no row of three"
        await press(app, pilot, "right", "right", "right", "down", "left")
        assert "epoch_0002_1.png  evaluation 2 of 3  image 2 of 3" in screen_text(app)
        run.epoch()
        run.draw_samples()
        await press(app, pilot)
        assert "epoch_0002_1.png  evaluation 2 of 4" in screen_text(app), "a chosen picture stays"
        await press(app, pilot, "right", "right")
        run.epoch()
        run.draw_samples()
        await press(app, pilot)
        assert "epoch_0005_1.png  evaluation 5 of 5  image 2 of 3" in screen_text(app), "the newest is followed"

    run_screen(run, act)


def test_picture_of_a_repeated_evaluation_is_drawn_anew(run: RecordedRun) -> None:
    """A resume from before an evaluation writes its pictures again, under the same names."""
    newest = run.folder.samples / "epoch_0003_0.png"
    written_ns, drawn = newest.stat().st_mtime_ns, newest.read_bytes()
    newest.write_bytes(b"\x89PNG no")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "i")
        assert "cannot be shown" in screen_text(app)
        newest.write_bytes(drawn)
        os.utime(newest, ns=(written_ns, written_ns))
        await press(app, pilot)
        assert "target" in screen_text(app)
        before = screen_text(app)
        shutil.copy(run.folder.samples / "epoch_0001_2.png", newest)
        await press(app, pilot)
        assert screen_text(app) != before
        assert "epoch_0003_0.png  evaluation 3 of 3" in screen_text(app)

    run_screen(run, act, ascii_only=True)
