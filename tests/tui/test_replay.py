"""The tool that plays a run again."""

from __future__ import annotations

from pathlib import Path

from tests.support.recorded_runs import RecordedRun
from tests.support.replay import play


def test_replay_takes_the_run_time_divided_by_speed(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=5)
    run.train(5)
    run.clock.now_s += 86_400  # a night between two sessions counts as a minute
    run.train(5)
    waited_s: list[float] = []
    play(run.folder.events, tmp_path / "events.jsonl", 10.0, sleep=waited_s.append)
    assert (tmp_path / "events.jsonl").read_bytes() == run.folder.events.read_bytes()
    assert max(waited_s) == 6.0
    assert waited_s[0] == 0.0
    assert sum(waited_s) < 10.0
