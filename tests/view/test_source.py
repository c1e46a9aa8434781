"""Status of a run from real folders and locks: live, crashed, damaged, replaced, removed, with clock skew."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from segapp.run.folder import RunFolder
from segapp.view.runs import run_state, summarize
from segapp.view.source import LiveSource, newest_pictures
from tests.support.recorded_runs import Clock, RecordedRun


def read_all(source: LiveSource) -> LiveSource:
    while source.poll():
        pass
    return source


def small_run(path: Path, **keywords: object) -> RecordedRun:
    run = RecordedRun(path, steps_per_epoch=20, epochs=5, **keywords)  # type: ignore[arg-type]
    run.epoch()
    run.train(5)
    return run


@pytest.mark.parametrize(("end", "state"), [(None, "crashed"), ("stopped", "stopped")])
def test_trainer_gone_without_run_end_is_crashed(tmp_path: Path, end: str | None, state: str) -> None:
    """It is gone before its first step, so that an end before it still counts, or after its last."""
    run = small_run(tmp_path / "run")
    if end is not None:
        run.end(end)
    code = "import sys; from segapp.run.folder import RunFolder; RunFolder(sys.argv[1]).acquire()"
    subprocess.run([sys.executable, "-c", code, str(run.folder.path)], check=True)
    for _ in range(2):
        source = read_all(LiveSource(run.folder))
        assert source.status().state == run_state(run.folder.path) == state
        assert source.status().is_over
        run.shift_to_now()  # now the last step is newer than the lock


def test_trainer_that_ends_while_it_is_watched_is_crashed(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    code = (
        "import sys, time; from segapp.run.folder import RunFolder; RunFolder(sys.argv[1]).acquire(); "
        "print('held', flush=True); time.sleep(600)"
    )
    trainer = subprocess.Popen([sys.executable, "-c", code, str(run.folder.path)], stdout=subprocess.PIPE)
    assert trainer.stdout is not None
    assert trainer.stdout.readline() == b"held\n"
    now = Clock(100.0)
    source = read_all(LiveSource(run.folder, monotonic=now))
    assert not source.status().is_over
    trainer.kill()
    trainer.communicate()
    now.now_s += 2.1
    assert source.status().state == "crashed"


def test_replaced_event_file_resets_the_view(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    source = read_all(LiveSource(run.folder))
    before = source.view
    run.writer.rewind(20, epoch=99, batch=1)
    read_all(source)
    assert source.view is not before
    assert source.view.history.step.tolist() == list(range(1, 21))


def test_removed_folder_keeps_the_last_view(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    source = read_all(LiveSource(run.folder, monotonic=iter(range(0, 10_000, 3)).__next__))
    shutil.rmtree(run.folder.path)
    read_all(source)
    status = source.status()
    assert (status.word, status.is_over) == ("gone", True)
    assert source.view.history.size == 25
    other = RecordedRun(tmp_path / "run", steps_per_epoch=20, epochs=5)
    other.train(3)
    read_all(source)
    assert source.view.history.size == 3


def test_slice_that_reads_the_last_block_has_caught_up(tmp_path: Path) -> None:
    run = small_run(tmp_path / "run")
    run.clock.now_s = time.time() + 7200
    source = LiveSource(run.folder, monotonic=itertools.count().__next__)  # each slice is over after its first block
    assert not source.poll()
    run.train(3)
    assert not source.poll()
    assert source.status().skew_s == pytest.approx(7200, abs=30)


@pytest.mark.parametrize("skew_s", [-86_400.0, -7200.0, 7200.0, 3.2e8])
@pytest.mark.parametrize(
    ("named_s", "lock_s", "state"),
    [(None, None, "live"), (4e9, 4e9, "live"), (1e9, 1.1e9, "busy"), (1.1e9, 1e9, "busy")],
)
def test_set_clock_does_not_change_the_state(
    tmp_path: Path, skew_s: float, named_s: float | None, lock_s: float | None, state: str
) -> None:
    """The clock is set after the lock was taken, between two steps, or before another process took the lock."""
    run = small_run(tmp_path / "run", acquired_s=named_s)
    run.shift_to_now()
    run.hold(lock_s)
    source = read_all(LiveSource(run.folder))
    run.clock.now_s = time.time() + skew_s
    run.train(3)
    times_s = [json.loads(line)["t"] for line in run.folder.events.read_text().splitlines()]
    assert any(b - a == pytest.approx(skew_s, abs=10) for a, b in itertools.pairwise(times_s)), "the clock was set"
    read_all(source)
    status = source.status()
    assert status.age_s is not None
    assert status.age_s < 5
    assert status.skew_s == pytest.approx(skew_s, abs=10)
    assert status.now_s == pytest.approx(time.time() + skew_s, abs=10)
    first, found = read_all(LiveSource(run.folder)), summarize(run.folder.path)
    assert [status.state, first.status().state, found.state, run_state(run.folder.path)] == [state] * 4
    assert (first.view.at_step, found.shown["step"], found.facts.event_age_s) == (28, 28, pytest.approx(0, abs=5))
    run.folder.release()


@pytest.mark.parametrize("ahead_s", [-3600.0, -5.5, -4.5, 0.0, 4.5, 5.5, 3600.0])
def test_clock_difference_is_shown_above_five_seconds(tmp_path: Path, ahead_s: float) -> None:
    """Below it, the time that a line takes to arrive would be taken for a difference of the clocks."""
    run = small_run(tmp_path / "run")
    source = read_all(LiveSource(run.folder, clock=lambda: run.clock.now_s - ahead_s, monotonic=lambda: 50.0))
    run.train(1)
    read_all(source)
    assert source.view.last_s == pytest.approx(run.clock.now_s, abs=1e-5)
    wanted = ahead_s if abs(ahead_s) > 5 else 0.0
    assert source.status().skew_s == pytest.approx(wanted, abs=1e-4)
    assert source.status().now_s == pytest.approx(run.clock.now_s - ahead_s + wanted, abs=1e-4)


def test_run_without_events_is_shown(tmp_path: Path) -> None:
    folder = RunFolder.create(path=tmp_path / "run")
    folder.write_info()
    source = LiveSource(folder)
    assert source.status().loaded_frac == 1.0  # before its first look too
    assert not source.poll()
    assert source.status().age_s is None


def test_sample_images_are_newest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The picture of the first batch, the oldest, is always among them."""
    monkeypatch.setattr("segapp.view.source._MAX_PICTURES", 3)
    for i, name in enumerate(("first_batch.png", "0.png", "a.png", "b.png", ".tmp.png", "c.txt")):
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (i, i))
    assert [path.name for path in newest_pictures(tmp_path)] == ["first_batch.png", "b.png", "a.png"]
    assert newest_pictures(tmp_path / "nothing") == []
