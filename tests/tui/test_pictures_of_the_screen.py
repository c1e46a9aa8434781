"""Whole screens, cell by cell with their colours, against stored ones.

A stored screen is a text: the styles, then each row of the screen above a row of the letters of its styles. After an
intended change: `SEGAPP_UPDATE_SNAPSHOTS=pictures uv run pytest -n 0 tests/tui/test_pictures_of_the_screen.py` writes
the texts, and an SVG of each into the folder `pictures`: look at them. (pytest-textual-snapshot would do it, but holds
pytest below 9, and its SVGs are ten times the size.)
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import string
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
from rich.cells import cell_len
from rich.style import Style

from segapp.run.events import Oom
from segapp.run.folder import RunFolder
from segapp.run.lock import ProcessId
from segapp.tui.app import MonitorApp
from segapp.view.runs import RunList
from segapp.view.source import LiveSource
from tests.support.recorded_runs import Clock, RecordedRun
from tests.support.screens import press, screen_rows, settle, source_of

SNAPSHOTS = Path(__file__).parent / "snapshots"
PICTURES = ("live-120x36",)
"""Screens that are stored as SVG too: the documentation shows them."""

LETTERS = string.ascii_letters + string.digits + string.punctuation


def train(run: RecordedRun, num_epochs: int = 6) -> RecordedRun:
    for _ in range(num_epochs):
        run.epoch()
    return run


def ended(num_epochs: int, path: Path, reason: str = "20 epochs", **keywords: Any) -> RecordedRun:
    run = train(RecordedRun(path, **keywords), num_epochs)
    run.end(reason=reason)
    return run


def live(path: Path) -> RecordedRun:
    run = train(RecordedRun(path))
    run.change_gpu0(6, apply=False)
    run.train(20)
    run.hold()
    return run


def crashed(path: Path) -> RecordedRun:
    run = train(RecordedRun(path), 3)
    run.train(7)
    info = run.folder.run_json
    info.write_text(re.sub(r'("pid"\s*:\s*)\d+', r"\g<1>4194000", info.read_text()))  # no such process
    return run


def not_finite(path: Path) -> RecordedRun:
    run = train(RecordedRun(path), 2)
    run.train(30, loss=float("nan"))
    run.alert("non_finite", "loss not finite for 30 steps in a row")
    run.end("failed", "loss not finite")
    return run


def out_of_memory(path: Path) -> RecordedRun:
    run = train(RecordedRun(path), 3)
    run.write(
        Oom(index=0, step=190, phase="backward", device="cuda:0", requested_mib=512.0,
            action="gpu0_bsz 6 is reverted to 4",
            advice=["gpu0_bsz=3 leaves 1.9 GiB more on cuda:0", "data.crop_px=[640, 640] needs 31 % less"],
            path="reports/oom-000190.json")
    )  # fmt: skip
    run.alert("oom", "cuda:0 is out of memory in backward: gpu0_bsz 6 is reverted to 4")
    run.train(10)
    run.hold()
    return run


def long_run(path: Path) -> RecordedRun:
    """A run of 100,000 steps with spikes, and an evaluation every 1,000 steps."""
    run = RecordedRun(path, steps_per_epoch=1000, epochs=110, num_devices=2)
    rng = np.random.default_rng(0)
    loss = np.abs(2.1 * np.exp(-np.arange(100_000) / 9000) + 0.32 + 0.06 * rng.standard_normal(100_000))
    loss[rng.choice(100_000, 30, replace=False)] = 10.0
    lines, began_s = [], run.clock.now_s
    for step, value in enumerate(loss.tolist(), start=1):
        at = f'"v":1,"seq":{step},"t":{began_s + 0.777 * step:.3f},"epoch":{(step - 1) // 1000 + 1},"step":{step}'
        of_step = '"lr":0.004,"images_per_s":41.2,"data_wait_frac":0.04,"grad_norm":1.8,"split":[4,28]'
        lines.append(f'{{{at},"type":"step","loss":{value:.6f},{of_step}}}')
        if step % 1000 == 0:
            final = np.array([0.9, 0.8, 0.3, 0.93, 0.7, 0.7, 0.3, 0.4])
            iou = (0.9 * final * (1 - math.exp(-step / 15_000))).tolist()
            scores = f'"loss":{value + 0.05},"miou":{np.mean(iou)},"iou":{[*iou, 0.7, 0.4, 0.3]}'
            lines.append(f'{{{at},"type":"val",{scores}}}')
    run.writer.close()
    with run.folder.events.open("a") as file:
        file.write("\n".join(lines) + "\n")
    run.clock.now_s = began_s + 77_700
    run.hold()
    return run


def eight_gpus_with_history(path: Path) -> RecordedRun:
    run = RecordedRun(path, num_devices=8, batch_size=64, steps_per_epoch=300, gpu0_bsz=4)
    run.train(150)
    run.change_gpu0(6)
    run.train(150)
    run.hold()
    return run


def pictures(path: Path) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20)
    for _ in range(3):
        run.epoch()
        run.draw_samples()
    run.hold()
    return run


def several_runs(path: Path) -> RecordedRun:
    for i, name in enumerate(("camvid-lr3e-3", "cityscapes-eomt-vits", "voc-deeplab")):
        other = train(RecordedRun(path.parent / name, steps_per_epoch=20, num_devices=1 + i, epochs=6 + i), 4 + i)
        if i != 1:
            other.end("finished" if i == 0 else "failed", "6 epochs" if i == 0 else "loss not finite")
        other.writer.close()
        os.utime(other.folder.events, (other.clock(), other.clock()))
    return live(path)


@pytest.fixture(autouse=True)
def _same_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remove the influence of the local time zone and of NO_COLOR."""
    monkeypatch.setenv("TZ", "UTC")
    monkeypatch.delenv("NO_COLOR", raising=False)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


class Case(NamedTuple):
    """A screen: of a run, at a size, after keys."""

    name: str
    make: Callable[[Path], RecordedRun]
    size: tuple[int, int]
    keys: tuple[str, ...] = ()
    theme: str = "segapp-dark"


def shoot(app: MonitorApp, size: tuple[int, int], keys: tuple[str, ...], clock: Clock) -> tuple[str, str]:
    """Return the screen of an app after keys, as text and as SVG."""

    async def go() -> tuple[str, str]:
        async with app.run_test(size=size) as pilot:
            await settle(app, pilot)
            await press(app, pilot, *keys)
            await pilot.pause()
            svg = app.export_screenshot(title="segapp: simulated run on four GPUs")
            drawn = [[(text, style or Style()) for text, style, _ in row] for row in screen_rows(app)]
            # Textual names its styles after a checksum of its own version's markup.
            return as_text(drawn), re.sub(r"terminal-\d+", "terminal", svg)

    with mock.patch("segapp.run.state.time.time", clock), mock.patch.object(RunList.__init__, "__defaults__", (clock,)):
        return asyncio.run(go())


def as_text(rows: list[list[tuple[str, Style]]]) -> str:
    """Return the styles, and each row as its text above the letters of its styles."""
    letters: dict[str, str] = {}
    for row in rows:
        for _, style in row:
            letters.setdefault(str(style), LETTERS[len(letters)])
    lines = [f"{letter} {style}" for style, letter in letters.items()]
    for row in rows:
        text = "".join(text for text, _ in row)
        lines += ["", text, "".join(letters[str(style)] * cell_len(text) for text, style in row)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def stored(name: str, text: str, svg: str) -> None:
    """Compare a screen with the stored one, or store it."""
    folder = os.environ.get("SEGAPP_UPDATE_SNAPSHOTS")
    file = SNAPSHOTS / f"{name}.txt"
    if folder:
        file.write_text(text, encoding="utf-8")
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.svg").write_text(svg, encoding="utf-8")
        if name in PICTURES:
            file.with_suffix(".svg").write_text(svg, encoding="utf-8")
    assert text.splitlines() == file.read_text(encoding="utf-8").splitlines()
    if name in PICTURES:
        assert svg == file.with_suffix(".svg").read_text(encoding="utf-8"), "the words and colours are equal"


CLASSES = [f"class {i:03}" for i in range(150)]
CASES = [
    Case("finished", partial(ended, 6, reason="6 epochs", epochs=6), (120, 36)),
    Case("live", live, (120, 36)),
    Case("live", live, (80, 24)),
    Case("live", live, (60, 15)),
    Case("light_theme", live, (120, 36), theme="segapp-light"),
    Case("crashed", crashed, (120, 36)),
    Case("eight_gpus_with_history", eight_gpus_with_history, (200, 60), ("2",)),
    Case("all_classes", partial(ended, 3, classes=CLASSES, num_devices=1), (200, 60), ("3", "f")),
    Case("one_class", partial(ended, 3, classes=["road"], num_devices=1, device="cpu"), (100, 30)),
    Case("not_finite", not_finite, (120, 36)),
    Case("event_detail", out_of_memory, (120, 36), ("d",)),
    Case("long_run", long_run, (120, 36)),
    Case("pictures", pictures, (120, 36), ("i",)),
    Case("runs", several_runs, (120, 36), ("R",)),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.size[0]}x{case.size[1]}")
def test_screen_equals_its_stored_snapshot(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = case.make(tmp_path / "runs" / "camvid-042")
    source = source_of(run)
    looked = source._trainer_facts
    of_the_picture = ProcessId(host="trainer-box", pid=23168)  # that of this process has another number each time
    source._trainer_facts = lambda: replace(looked(), process=of_the_picture)  # type: ignore[method-assign]
    try:
        app = MonitorApp(source)
        app.theme = case.theme
        found = shoot(app, case.size, case.keys, run.clock)
    finally:
        run.folder.release()
    stored(f"{case.name}-{case.size[0]}x{case.size[1]}", *found)


def test_first_second_equals_its_stored_snapshot(tmp_path: Path) -> None:
    folder = RunFolder.create(path=tmp_path / "runs" / "camvid-042")
    folder.log.write_text("starting: importing torch\nstarting: reading 2,975 files\n")
    now_s = 1_760_000_000.0
    os.utime(folder.log, (now_s - 6, now_s - 6))
    with mock.patch("segapp.run.folder.time.time", return_value=now_s - 8):
        folder.acquire()
    app = MonitorApp(LiveSource(folder, clock=lambda: now_s), has_trainer_ended=lambda: False)
    stored("first_second-120x36", *shoot(app, (120, 36), (), Clock(now_s)))
    folder.release()
