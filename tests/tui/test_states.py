"""The screen at a start, a resume, a failure and an end: true words, old numbers as `last`, and the cure."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from textual.pilot import Pilot

from segapp.commands.spawn import TrainerProcess
from segapp.run.events import EventReader, EventWriter, RunEnd
from segapp.run.folder import RunFolder
from segapp.run.state import read_tail
from segapp.tui.app import MonitorApp
from segapp.view.runs import run_state, summarize
from segapp.view.source import LiveSource
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import press, run_screen, screen_text, settle

CAUSE = "loss or gradient not finite for 17 steps in a row, up to step 18 (no bad step changed the weights): lower"
CURE = "optim.lr = 1000000000000.0, add schedule.warmup_steps or optim.clip_grad_norm"


def trained(path: Path) -> RecordedRun:
    """Return a run with a checkpoint at step 20 that was killed at step 27, some minutes ago."""
    run = RecordedRun(path, steps_per_epoch=20, epochs=3, starts_s=time.time() - 400)
    run.epoch()
    run.train(7)
    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize("end", [None, "stopped", "finished"])
def test_run_is_resuming_from_the_lock_to_the_first_step(tmp_path: Path, end: str | None) -> None:
    run = trained(tmp_path / "run")
    if end is not None:
        run.end(end, "asked to stop")
        run.writer = EventWriter(run.folder.events)
    run.folder.acquire()  # by the new process
    run.folder.log.write_text("starting: first step\nstarting: importing torch\n")

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        text = screen_text(app)
        assert "● RESUMING" in text
        assert re.search(r"resuming, last saved at step 20: importing torch, \ds", text)
        assert re.search(r"last  [\d.]+ img/s", text)
        assert "2 Memory  last" in text
        assert not {"ETA", "STALE", "stuck", "asked to stop", "best mIoU"} & set(text.replace("\n", " ").split())
        assert run_state(run.folder.path) == summarize(run.folder.path).state == "busy"
        run.clock.now_s, holder = time.time(), run.folder.read_holder()
        assert holder is not None
        run.acquired_s = holder.acquired_s
        run.write_start(resumed_from_step=20)
        await settle(app, pilot)
        assert "resuming from step 20: " in screen_text(app)
        run.step = 20
        run.beat("train", 0.1)
        await settle(app, pilot)
        assert "RESUMING" in screen_text(app), "no step yet"
        run.step = 21
        run.beat("train", 0.1)
        await settle(app, pilot)
        assert "● LIVE train" in screen_text(app)
        assert "epoch 2/3  step 1/20" in screen_text(app)
        assert (read_tail(run.folder.events)[-1]["type"], summarize(run.folder.path).shown["step"]) == ("heartbeat", 21)

    run_screen(LiveSource(run.folder), act)
    run.folder.release()
    assert summarize(run.folder.path).state == "live"  # the process of this test still runs


def test_failure_wraps_and_its_details_name_the_page(tmp_path: Path) -> None:
    run = trained(tmp_path / "run")
    run.alert("classes", "no pixel of truck")
    run.shift_to_now()
    run.hold()

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        assert "classes: no pixel of truck" in screen_text(app)
        run.write(RunEnd(status="failed", reason=f"{CAUSE} {CURE}", exit_code=5, topic="low-miou#the-loss-is-nan"))
        await settle(app, pilot)
        rows = [row.strip() for row in screen_text(app).splitlines()]
        begin = next(i for i, row in enumerate(rows) if row.startswith("failed: "))
        shown = " ".join(rows[begin : begin + 8])
        assert f"failed: {CAUSE} {CURE}; to continue: `segapp train --resume" in shown
        assert "more: segapp docs low-miou#the-loss-is-nan" in shown
        assert "no pixel of truck  a dismiss" not in shown
        await press(app, pilot, "d")
        text = " ".join(screen_text(app).replace("│", " ").split())
        assert "status: failed" in text
        assert f"{CAUSE} {CURE}" in text
        assert "more: segapp docs low-miou#the-loss-is-nan" in text

    run_screen(LiveSource(run.folder), act, (80, 24))
    run.folder.release()


@pytest.mark.parametrize(
    ("code", "text"), [(3, "importing torch\nerror: no data root /nope\n"), (-9, "importing torch\n")]
)
def test_failed_start_names_the_command_to_repeat(
    tmp_path: Path, code: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = RunFolder.create(path=tmp_path / "run")
    folder.log.write_text(text)
    with subprocess.Popen([sys.executable, "-c", f"import os; os.kill(0, 0); os._exit({code % 256})"]) as process:
        trainer = TrainerProcess(folder, process, 0, EventReader(folder.events))
        process.wait()
    monkeypatch.setattr(sys, "argv", ["/bin/segapp", "train", "--config", "my demo.yaml", "optim.lr=0.1"])
    assert trainer.after_screen() == code % 256
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "to start again: segapp train --config 'my demo.yaml' optim.lr=0.1"
    assert [line.startswith("error: ") for line in lines] == [True, False]
    assert folder.path.exists() is (code == -9), "only the log of a killed start can say more"
