"""The folder of a sweep: its file, its lock, and the progress and summary of its runs, counted by hand."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from segapp.errors import ConfigError, RunBusyError, StorageError
from segapp.run.events import EventWriter, RunEnd, RunStart, Val
from segapp.run.folder import RunFolder
from segapp.run.sweep import SweepFolder, SweepInfo, SweepProgress, SweepRun, find_sweep, sweep_folders
from segapp.view.summary import summarize_runs, summarize_sweep


def add_run(sweep: SweepFolder, name: str, t: float, miou: float | None = None, end: str | None = None) -> RunFolder:
    """Write a run whose events are of the time `t`."""
    folder = RunFolder.create(path=sweep.path / name)
    with folder, EventWriter(folder.events) as writer:
        folder.write_info()
        writer.write(RunStart(classes=["a"], num_params=1, batch_size=1, epochs=1, steps_per_epoch=1, devices=["cpu"]))
        if miou is not None:
            writer.write(Val(epoch=1, step=1, loss=0.1, miou=miou, iou=[miou], pixel_accuracy=1.0))
        if end is not None:
            writer.write(RunEnd(status=end, reason="so", exit_code=0))
    lines = [json.loads(line) | {"t": t} for line in folder.events.read_text().splitlines()]
    folder.events.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return folder


@pytest.fixture
def sweep(tmp_path: Path) -> SweepFolder:
    """A sweep of five runs: two finished, one stopped, one that never began, one whose trainer failed at once."""
    folder = SweepFolder(tmp_path / "lr")
    names = ["one", "two", "three", "four"]
    runs = [SweepRun(name=name, config="base", settings={"optim.lr": 0.1}) for name in names]
    runs.append(SweepRun(name="five", config="base", settings={}, exit_code=3, reason="no data"))
    folder.write(SweepInfo(created_s=12.5, axes={"optim.lr": ["0.1"]}, runs=runs))
    add_run(folder, "one", 1000.0, miou=0.5, end="finished")
    add_run(folder, "two", 3000.0, miou=0.75, end="finished")
    add_run(folder, "three", 2000.0, end="stopped")
    return folder


def test_progress_and_summary_by_hand(sweep: SweepFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segapp.run.state.time.time", lambda: 3600.0)
    assert [sweep.state_of(run) for run in sweep.read().runs] == [*["finished"] * 2, "stopped", "waiting", "failed"]
    assert sweep.progress() == SweepProgress(5, 2, 1, 0, is_active=False)
    assert [run.name for run in summarize_runs(sweep)] == ["lr/one", "lr/two", "lr/three"]
    found = summarize_sweep(sweep)
    assert (found.name, found.path, found.state) == ("lr", str(sweep.path), "stopped")
    assert (found.began_s, found.age_s, found.best_miou) == (12.5, 600.0, 0.75)
    assert found.sweep == {"runs": 5, "finished": 2, "failed": 1, "running": 0}
    with RunFolder(sweep.path / "three") as run, EventWriter(run.events) as writer:
        writer.write(RunStart(classes=["a"], num_params=1, batch_size=1, epochs=1, steps_per_epoch=1, devices=["cpu"]))
        assert sweep.progress().num_running == 1


@pytest.mark.parametrize(
    ("finished", "failed", "is_active", "state"),
    [(3, 0, False, "finished"), (2, 1, False, "failed"), (2, 0, False, "stopped"), (3, 0, True, "live")],
)
def test_state_of_a_sweep_by_its_runs(finished: int, failed: int, is_active: bool, state: str) -> None:
    assert SweepProgress(3, finished, failed, 0, is_active).state == state


def test_failure_to_start_counts_until_the_run_is_carried_on(sweep: SweepFolder) -> None:
    states: dict[Any, str] = {}
    for name in ("one", "three", "four"):
        states[name] = sweep.state_of(SweepRun(name=name, config="base", settings={}, exit_code=3))
    assert states == {"one": "finished", "three": "failed", "four": "failed"}


def test_sweep_carried_out_elsewhere_is_refused(sweep: SweepFolder) -> None:
    sweep.acquire()
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RunBusyError, match="another process: `segapp ls lr` shows"):
        SweepFolder(sweep.path).acquire()
    assert len(os.listdir("/proc/self/fd")) == num_open
    assert sweep.progress().is_active
    sweep.release()
    assert not sweep.progress().is_active


def test_folders_that_are_no_sweeps_are_named_or_left_out(sweep: SweepFolder) -> None:
    root = sweep.path.parent
    (root / "damaged").mkdir()
    (root / "damaged" / "sweep.json").write_text("{")
    (root / "empty").mkdir()
    assert [found.name for found in sweep_folders(root)] == ["lr"]
    assert sweep_folders(root / "missing") == []
    with pytest.raises(ConfigError, match=r"damaged: not a sweep \(its sweep.json is damaged\)"):
        SweepFolder(root / "damaged").read()
    with pytest.raises(ConfigError, match=r"empty: not a sweep \(it has no sweep.json\)"):
        SweepFolder(root / "empty").read()
    for what in ("lr", sweep.path):
        found = find_sweep(what, root)
        assert found is not None
        assert found.path == sweep.path
    assert find_sweep("empty", root) is None
    (root / "file").write_text("")
    with pytest.raises(StorageError, match="choose another folder"):
        SweepFolder(root / "file" / "x").acquire()
