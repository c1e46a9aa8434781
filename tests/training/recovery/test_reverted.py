"""A split under which a rank ran out of memory is reported as reverted, and its command rejected, exactly once."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from segapp.run.events import CommandAnswer, EventLog, EventWriter, Gpu0Bsz
from segapp.run.folder import RunFolder
from segapp.training.inbox import applied_after
from segapp.training.recovery import MemoryFallbacks, fallbacks_after, report_reverted_split
from tests.support.runs import events


class Run:
    """A run with a change of the split to 3 and 5 samples, and reports of ranks."""

    def __init__(self, path: Path, status: str) -> None:
        self.folder = RunFolder.create(path=path)
        self.log = EventLog(EventWriter(self.folder.events))
        command = "set gpu0_bsz=3"
        self.log.emit(CommandAnswer(id="c1", command=command, by="me", status="accepted", reason=None, step=4))
        self.log.emit(Gpu0Bsz(status=status, old=1, new=3, split=[3, 5], epoch=3, id="c1", step=4))  # type: ignore[arg-type]
        if status == "applied":
            done = {"changes": {"gpu0_bsz": 3}}
            self.log.emit(
                CommandAnswer(id="c1", command=command, by="me", status="applied", reason=None, step=4, **done)
            )

    def rank_fails(self, split: tuple[int, ...], later_s: float = 1.0) -> None:
        self.folder.reports.mkdir(exist_ok=True)
        path = self.folder.reports / "rank_1_step_4.json"
        fallbacks = MemoryFallbacks(failed_splits=(split,)).to_json()
        path.write_text(json.dumps({"step": 4, "problem": "no memory", "fallbacks": fallbacks}))
        at_s = events(self.folder.path)[-1]["t"] + later_s
        os.utime(path, (at_s, at_s))


@pytest.mark.parametrize("status", ["pending", "applied"])
def test_failed_split_of_a_rank_is_reverted_once(tmp_path: Path, status: str) -> None:
    run = Run(tmp_path / "run", status)
    run.rank_fails((3, 5))
    for _ in range(2):
        report_reverted_split(run.folder, run.log)
    reverted = [event for event in events(run.folder.path, "gpu0_bsz") if event["status"] == "reverted"]
    assert [(event["id"], event["old"], event["new"]) for event in reverted] == [("c1", 1, 3)]
    assert "no memory" in reverted[0]["reason"]
    final = [event for event in events(run.folder.path, "command") if event["status"] != "accepted"]
    assert [event["status"] for event in final] == ["rejected" if status == "pending" else "applied"]
    assert applied_after(run.folder.events, 0) == []
    assert fallbacks_after(run.folder, 0) == [(4, MemoryFallbacks(failed_splits=((3, 5),)))]


@pytest.mark.parametrize(("split", "later_s"), [((4, 4), 1.0), ((3, 5), -9.0)], ids=["another split", "before it"])
def test_reports_of_other_failures_revert_nothing(tmp_path: Path, split: tuple[int, ...], later_s: float) -> None:
    run = Run(tmp_path / "run", "pending")
    run.rank_fails(split, later_s)
    report_reverted_split(run.folder, run.log)
    assert [event["status"] for event in events(run.folder.path, "gpu0_bsz")] == ["pending"]
