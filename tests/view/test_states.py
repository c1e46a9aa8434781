"""The word for the state of a run: from facts, and the same for a screen, a list and a command."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from segapp.run.folder import RunFolder
from segapp.run.state import StateFacts, process_of, word_of
from segapp.view import runs
from segapp.view.runs import FollowedRun, looked_at_twice, summarize
from segapp.view.source import LiveSource
from tests.support.recorded_runs import RecordedRun

TRAINS = StateFacts(is_trainer_alive=True, event_age_s=1.0, step_age_s=2.0)
ELSEWHERE: dict[str, Any] = {"is_trainer_alive": None}
OLD: dict[str, Any] = {"event_age_s": 60.0, "step_age_s": 61.0}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"is_there": False, "is_read": False, "is_trainer_alive": False}, "gone"),
        ({"is_read": False, "end_status": "failed"}, "reading"),
        ({"end_status": "stopped", "is_paused": True}, "stopped"),
        ({"is_trainer_alive": False, "is_paused": True, **OLD}, "crashed"),
        ({**ELSEWHERE, "is_paused": True, **OLD}, "lost"),
        ({"is_paused": True, **OLD}, "stale"),
        ({"is_paused": True, "step_age_s": None}, "paused"),
        ({"is_paused": True, "step_age_s": 60.0}, "paused"),
        ({"is_paused": True, "is_starting": True, "is_resumed": True}, "resuming"),
        ({"is_starting": True, "end_status": "stopped", "is_resumed": True}, "resuming"),
        ({"step_age_s": None, "is_resumed": True}, "resuming"),
        ({"step_age_s": None}, "starting"),
        ({"step_age_s": 60.0}, "busy"),
        ({}, "live"),
        ({**ELSEWHERE}, "live"),
    ],
)
def test_first_word_that_holds_wins(changes: dict[str, Any], word: str) -> None:
    assert word_of(StateFacts(**{**vars(TRAINS), **changes})) == word


def test_copy_of_a_run_has_no_trainer(tmp_path: Path) -> None:
    """Its lock names a process that is alive, and holds another folder."""
    original = RecordedRun(tmp_path / "original", steps_per_epoch=5)
    original.train(3)
    original.folder.acquire()
    try:
        copy = RunFolder(shutil.copytree(original.folder.path, tmp_path / "copy"))
        assert copy.read_holder() == original.folder.read_holder()
        assert process_of(copy) is None
        assert process_of(original.folder) is not None
        for folder, word in ((copy, "crashed"), (original.folder, None)):
            source = LiveSource(folder)
            source.poll(5.0)
            found = {summarize(folder.path).word, source.status().word}
            assert found == {word} if word else "crashed" not in found
        assert summarize(copy.path).as_json()["pid"] is None
    finally:
        original.folder.release()


def elsewhere(path: Path, monkeypatch: pytest.MonkeyPatch) -> RecordedRun:
    """Return a run whose trainer is on another machine, with a clock that is 60 s behind."""
    monkeypatch.setattr(runs, "is_trainer_alive", lambda folder: None)
    monkeypatch.setattr("segapp.view.source.is_trainer_alive", lambda folder: None)
    run = RecordedRun(path, steps_per_epoch=50)
    run.clock.now_s = time.time() - 60
    run.train(4)
    return run


def test_clock_of_another_machine_decides_nothing_in_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = elsewhere(tmp_path / "run", monkeypatch)
    monkeypatch.setattr(runs, "_SETTLED_S", 0.0)
    summarize(run.folder.path)
    assert runs.read_kept(run.folder) is not None, "the time of its last event says that it is live, for ever"
    followed = FollowedRun(str(run.folder.path), time.time)
    words = []
    for seconds in (0, 20, 1):
        for source in filter(None, [followed._source]):
            source._opened -= seconds
            source._arrived = None if source._arrived is None else source._arrived - seconds
            source._step_arrived = None if source._step_arrived is None else source._step_arrived - seconds
        if seconds == 1:
            run.train(1)
        followed.look()
        followed.poll(5.0)
        words.append(followed.summary.word)
    assert words == ["live", "lost", "live"]


def test_run_is_lost_only_if_it_writes_nothing_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, writing = (elsewhere(tmp_path / name, monkeypatch) for name in ("silent", "writing"))
    summaries = [summarize(run.folder.path) for run in (silent, writing)]
    assert [summary.word for summary in summaries] == ["lost", "lost"]
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        writing.train(1)

    monkeypatch.setattr(runs.time, "sleep", sleep)
    assert [summary.word for summary in looked_at_twice(summaries)] == ["lost", "live"]
    assert [summary.word for summary in looked_at_twice(summaries[:0])] == []
    assert slept == [runs.SECOND_LOOK_S]
