"""Whole screens as pictures: every cell, colour and border, against stored SVGs.

After an intended change: `SEGAPP_UPDATE_SNAPSHOTS=1 uv run pytest -n 0 tests/tui/test_pictures_of_the_screen.py`,
and look at the files that changed. (pytest-textual-snapshot would do it, but holds pytest below 9.)
"""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from segapp.run.process import ProcessId
from segapp.tui.app import MonitorApp
from tests.support.recorded_runs import RecordedRun
from tests.tui.test_screen import settled, source_of

SNAPSHOTS = Path(__file__).parent / "snapshots"


def train(run: RecordedRun, num_epochs: int = 6) -> RecordedRun:
    for _ in range(num_epochs):
        run.epoch()
    return run


def finished(path: Path) -> RecordedRun:
    run = train(RecordedRun(path, epochs=6))
    run.end(reason="6 epochs")
    return run


def live(path: Path) -> RecordedRun:
    run = train(RecordedRun(path))
    run.change_gpu0(6, apply=False)
    run.train(20)
    run.folder.acquire()
    return run


def crashed(path: Path) -> RecordedRun:
    run = train(RecordedRun(path), 3)
    run.train(7)
    info = run.folder.run_json
    info.write_text(re.sub(r'("pid"\s*:\s*)\d+', r"\g<1>4194000", info.read_text()))  # no such process
    return run


def eight_gpus(path: Path) -> RecordedRun:
    run = train(RecordedRun(path, num_devices=8, batch_size=64))
    run.end()
    return run


def many_classes(path: Path) -> RecordedRun:
    run = train(RecordedRun(path, classes=[f"class {i:03}" for i in range(150)], num_devices=1), 3)
    run.end()
    return run


def one_class(path: Path) -> RecordedRun:
    run = train(RecordedRun(path, classes=["road"], num_devices=1, device="cpu"), 3)
    run.end()
    return run


def not_finite(path: Path) -> RecordedRun:
    run = train(RecordedRun(path), 2)
    run.train(30, loss=float("nan"))
    run.alert("non_finite", "loss not finite for 30 steps in a row")
    run.end("failed", "loss not finite")
    return run


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the influence of the local time zone and of NO_COLOR."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def picture(run: RecordedRun, size: tuple[int, int]) -> str:
    async def go() -> str:
        source = source_of(run)
        looked = source._look
        of_the_picture = ProcessId(host="trainer-box", pid=23168)  # that of this process has another number each time
        source._look = lambda: replace(looked(), process=of_the_picture)  # type: ignore[method-assign]
        app = MonitorApp(source)
        async with app.run_test(size=size) as pilot:
            await settled(app, pilot)
            return app.export_screenshot(title="segapp")

    with mock.patch("segapp.run.state.time.time", run.clock):
        svg = asyncio.run(go())
    # Textual names its styles after a checksum of its own version's markup.
    return re.sub(r"terminal-\d+", "terminal", svg)


def words(svg: str) -> list[str]:
    """Return the texts of the picture, for a readable difference."""
    return [re.sub(r"<[^>]*>", "", text).replace("&#160;", " ") for text in re.findall(r"<text.*?</text>", svg)]


CASES: list[tuple[Callable[[Path], RecordedRun], tuple[int, int]]] = [
    (finished, (120, 36)),
    (live, (120, 36)),
    (live, (80, 24)),
    (live, (60, 15)),
    (crashed, (120, 36)),
    (eight_gpus, (120, 36)),
    (many_classes, (80, 24)),
    (one_class, (100, 30)),
    (not_finite, (120, 36)),
]


@pytest.mark.parametrize(("make", "size"), CASES, ids=[f"{m.__name__}-{w}x{h}" for m, (w, h) in CASES])
def test_screen_equals_its_stored_snapshot(
    make: Callable[[Path], RecordedRun], size: tuple[int, int], tmp_path: Path
) -> None:
    run = make(tmp_path / "camvid-042")
    try:
        found = picture(run, size)
    finally:
        run.folder.release()
    file = SNAPSHOTS / f"{make.__name__}-{size[0]}x{size[1]}.svg"
    if os.environ.get("SEGAPP_UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(found, encoding="utf-8")
    kept = file.read_text(encoding="utf-8")
    if found != kept:
        now = tmp_path / file.name
        now.write_text(found, encoding="utf-8")
        assert words(found) == words(kept), f"the words differ; see {now}"
        pytest.fail(f"colours or places differ: compare {now} with {file}")
