"""Fallbacks that need less memory: in their order, adopted after a resume, and splits that ranks reverted."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from segapp.config import LiveSettings
from segapp.datasets.images.pixel_format import PixelFormat
from segapp.datasets.preprocessing import Preprocessing
from segapp.inference.sliding import Inference
from segapp.run.events import CommandAnswer, EpochStart, EventLog, EventWriter, Gpu0Bsz, Oom, Settings
from segapp.run.folder import RunFolder
from segapp.session.build import _start_of
from segapp.training.context import DeviceLocations
from segapp.training.live.changes import Answered, Change, ChangeRecord, Replay
from segapp.training.live.oom import OomPolicy, next_eval_fallback
from segapp.training.live.replay import applied_after, fallbacks_after, report_reverted_split
from segapp.training.reporting import TrainingReporter
from tests.support.runs import events, merged

WHOLE = Inference(Preprocessing(PixelFormat(mean=(0.5,) * 3, std=(0.25,) * 3)))
"""Whole images."""


def test_window_is_no_larger_than_the_config_s() -> None:
    assert WHOLE.within((64, 96)).window_px == (64, 96)
    assert replace(WHOLE, window_px=(48, 128)).within((64, 96)).window_px == (48, 96)
    assert replace(WHOLE, window_px=(48, 128)).within(None).window_px == (48, 128)


def test_evaluation_shrinks_until_nothing_is_left() -> None:
    """Single images, windows of the crop's size, then half of it along each side, down to 64 px."""
    settings, found = LiveSettings(), []
    while True:
        result = next_eval_fallback(settings, WHOLE.within(settings.window_px), 4, (256, 100), is_fixed=False)
        if result is None:
            break
        settings = settings.with_changes(result.values)
        found.append((settings.is_eval_single, settings.window_px))
    assert found == [(True, None), (True, (256, 100)), (True, (128, 64)), (True, (64, 64))]
    assert next_eval_fallback(LiveSettings(), WHOLE, 1, (256, 100), is_fixed=True) is None
    assert next_eval_fallback(LiveSettings(), WHOLE.within((256, 200)), 1, (256, 100), is_fixed=True) is None
    assert next_eval_fallback(LiveSettings(), WHOLE.within((32, 32)), 1, (32, 32), is_fixed=False) is None


def test_fallback_recomputes_until_others_are_chosen() -> None:
    settings = LiveSettings(recompute="off").with_changes({"is_recomputed": True, "num_pieces": 2})
    assert (settings.recompute, settings.fallbacks) == ("all", {"num_pieces": 2, "is_recomputed": True})
    settings = settings.with_changes({"recompute": "off"})
    assert (settings.recompute, settings.fallbacks) == ("off", {"num_pieces": 2})


def test_later_fallbacks_are_adopted_at_their_steps() -> None:
    replays = Replay(3, {"num_pieces": 2}), Replay(5, {"lr_factor": 9}), Replay(6, {"window_px": (64, 32)})
    record, found = ChangeRecord(LiveSettings(), replays=(*replays, Replay(7, {"num_pieces": 8}))), []
    for step in (2, 3, 5, 6):
        record = record.with_due_fallbacks(step)
        found.append(record.settings.fallbacks)
    assert found == [{}, {"num_pieces": 2}, {"num_pieces": 2}, {"num_pieces": 2, "window_px": (64, 32)}]
    assert record.replays == (Replay(5, {"lr_factor": 9}), Replay(7, {"num_pieces": 8})), (
        "of an epoch, and of a later step"
    )
    assert record.with_due_fallbacks(9).settings.fallbacks["num_pieces"] == 8


def test_replayed_split_is_silent_until_it_is_reverted() -> None:
    """So that the next resume does not apply it once more."""
    replays = (Replay(5, {"lr_factor": 9}, "c1"), Replay(7, {"gpu0_bsz": 4, "lr_factor": 3}, "c2"))
    record = ChangeRecord(LiveSettings(gpu0_bsz=2), replays=replays).with_due_replays(7)
    record, effects = record.begin_epoch(record.requested, ((2, 3, 3), (4, 2, 2)), 3, 7)
    assert [effect.change.id for effect in effects if isinstance(effect, Answered)] == ["c1"]
    record, effects = record.after_step((4, 2, 2), [9.0, 8.0, 7.0])
    assert effects == []
    reverted = record.revert((4, 2, 2), "full")
    assert reverted is not None
    record, effects, _ = reverted
    assert (record.settings.gpu0_bsz, record.settings.lr_factor) == (2, 3)
    told = [(each.status, each.id, each.epoch, each.split) for each in effects if isinstance(each, Gpu0Bsz)]
    assert told == [("reverted", "c2", 3, [2, 3, 3])]


def test_command_after_a_replay_of_the_same_epoch_is_on_trial() -> None:
    """The replay's split never holds, and the command is answered."""
    replays = (Replay(7, {"gpu0_bsz": 3}, "c1"),)
    record = ChangeRecord(LiveSettings(gpu0_bsz=2), replays=replays)
    record, _ = record.request(Change({"gpu0_bsz": 4, "lr_factor": 3}, id="c2", split=(4, 2, 2)), "later", 3)
    record = record.with_due_replays(7)
    record, effects = record.begin_epoch(record.requested, ((2, 3, 3), (4, 2, 2)), 3, 7)
    assert record.settings.gpu0_bsz == 4
    assert [effect for effect in effects if isinstance(effect, Gpu0Bsz)] == []
    failed = record.revert((4, 2, 2), "full")
    assert failed is not None
    assert [(each.id, each.new) for each in failed[1] if isinstance(each, Gpu0Bsz)] == [("c2", 4)]
    (answer,) = (each for each in failed[1] if isinstance(each, Answered))
    assert (answer.status, answer.change.values, answer.step) == ("applied", {"lr_factor": 3}, 7), "since its epoch"
    _, effects = record.after_step((4, 2, 2), [9.0, 8.0, 7.0])
    assert [(each.status, each.id) for each in effects if isinstance(each, Gpu0Bsz)] == [("applied", "c2")]
    assert [(each.change.id, each.status) for each in effects if isinstance(each, Answered)] == [("c2", "applied")]


def test_repeated_fallbacks_are_counted_once(tmp_path: Path) -> None:
    """A resume writes them again; a value that has grown is another one."""
    folder = RunFolder.create(path=tmp_path / "run")
    log = EventLog(EventWriter(folder.events))
    for step, num_pieces in ((3, 2), (5, 4), (3, 2), (5, 4), (9, 4)):
        fallbacks = {"num_pieces": num_pieces, "window_px": (64, 32)}
        log.emit(Settings(step=step, reason="out of memory", fallbacks=fallbacks))
    found = [(each.step, each.fallbacks) for each in fallbacks_after(folder, 4)]
    assert found == [(step, {"num_pieces": 4, "window_px": (64, 32)}) for step in (5, 9)]


def test_each_new_value_of_a_fallback_is_an_event() -> None:
    """Also one that grows; what is in force already, or is given up, is none."""
    reporter = Mock(_choice="config", _blocks=[[]], _fallbacks={})
    reporter.controller.recomputed, reporter.controller.blocks.names = (("a", "b"), ()), "abcd"
    reporter.engine.ranks.gather = lambda own: [own, (("c",),)]
    reporter.progress.position.step = 7
    for values in ({}, {"num_pieces": 2}, {"num_pieces": 4}, {"num_pieces": 4}, {"num_pieces": 4, "window_px": (8, 9)}):
        reporter.controller.settings = LiveSettings(**values)
        TrainingReporter.live_settings(reporter)
    for values in ({"num_pieces": 4}, {"num_pieces": 4, "recompute": "all"}):
        reporter.controller.settings = LiveSettings(**values)
        TrainingReporter.live_settings(reporter)
    *found, last = [call.args[0] for call in reporter.event_log.emit.call_args_list]
    fallbacks = [{"num_pieces": 2}, {"num_pieces": 4}, {"num_pieces": 4, "window_px": (8, 9)}]
    assert [each.fallbacks for each in found] == fallbacks
    assert (last.fallbacks, last.reason) == (None, "by hand")
    assert (last.blocks, last.num_blocks) == ([["a", "b"], [], ["c"]], 4)


def test_rank_keeps_the_fallbacks_of_its_earlier_starts(tmp_path: Path) -> None:
    folder = RunFolder.create(path=tmp_path / "run")
    policy = Mock(_folder=folder.reports, _ranks=Mock(is_main=False, rank=2))
    for num_pieces in (2, 4, 8):
        OomPolicy._record(policy, Settings(step=5, reason="full", fallbacks={"num_pieces": num_pieces}))
    assert sorted(each.fallbacks["num_pieces"] for each in fallbacks_after(folder, 5)) == [2, 4, 8]


def test_no_report_replaces_one_of_a_rank_or_after_a_gap(tmp_path: Path) -> None:
    """Ranks may write at the same time, and a user may remove the first report."""
    policies = [Mock(_folder=tmp_path, _ranks=Mock(is_main=rank == 0, rank=rank)) for rank in (0, 2, 11)]
    report = Oom(device="cpu", index=0, phase="forward", step=5, action="it stops")
    names = [Path(OomPolicy._write(policy, report) or "").name for _ in range(3) for policy in policies]
    assert names[::3] == ["oom_0001.txt", "oom_0002.txt", "oom_0003.txt"]
    assert len({*names}) == len(list(tmp_path.iterdir())) == 9
    (tmp_path / names[0]).unlink()
    assert Path(OomPolicy._write(policies[0], report) or "").name == "oom_0004.txt"


def test_split_in_use_ends_as_applied_with_its_other_setting() -> None:
    change = Change({"gpu0_bsz": 2, "lr_factor": 3}, id="c1", split=(2, 3, 3))
    record, effects = ChangeRecord(LiveSettings(gpu0_bsz=2)).request(change, "later", 4)
    told = [each for each in effects if isinstance(each, Gpu0Bsz)]
    _, effects = record.begin_epoch(record.requested, ((2, 3, 3), (2, 3, 3)), 4, 9)
    told += [each for each in effects if isinstance(each, Gpu0Bsz)]
    assert [(each.status, each.epoch, each.step) for each in told] == [("pending", 4, None), ("applied", 4, 9)]
    (answer,) = (each for each in effects if isinstance(each, Answered))
    assert (answer.status, answer.change.values, answer.step) == ("applied", {"gpu0_bsz": 2, "lr_factor": 3}, 9)


class Run:
    """A run with a change of the split to 3 and 5 samples, after an earlier one, and reports of ranks."""

    def __init__(self, path: Path, status: str, command: str = "set gpu0_bsz=3") -> None:
        self.folder = RunFolder.create(path=path)
        self.log = EventLog(EventWriter(self.folder.events))
        self.log.emit(CommandAnswer(id="c0", command="stop epoch", by="you", status="accepted", reason=None, step=1))
        self.log.emit(Gpu0Bsz(status="applied", old=2, new=1, split=[1, 7], epoch=2, id=None, step=2))
        self.log.emit(CommandAnswer(id="c1", command=command, by="me", status="accepted", reason=None, step=4))
        self.log.emit(Gpu0Bsz(status=status, old=1, new=3, split=[3, 5], epoch=3, id="c1", step=4))  # type: ignore[arg-type]
        if status == "applied":
            done = {"changes": {"gpu0_bsz": 3}}
            self.log.emit(
                CommandAnswer(id="c1", command=command, by="me", status="applied", reason=None, step=4, **done)
            )

    def rank_fails(self, split: tuple[int, ...], rank: int = 1, step: int = 4) -> None:
        self.folder.reports.mkdir(exist_ok=True)
        path = self.folder.reports / f"rank_{rank}_step_{step}.json"
        adopted = {"fallbacks": {"window_px": [64, 32 * rank]}, "failed_split": split}
        path.write_text(json.dumps({"step": step, "reason": f"no memory on {rank}", **adopted}))
        os.utime(path, (0, 0))  # the clock of its machine may be wrong


@pytest.mark.parametrize("status", ["pending", "applied"])
def test_failed_split_of_a_rank_is_reverted_once(tmp_path: Path, status: str) -> None:
    run = Run(tmp_path / "run", status)
    for rank, split, step in ((1, (1, 7), 6), (2, (3, 5), 4), (3, (3, 5), 5)):
        run.rank_fails(split, rank=rank, step=step)
    for _ in range(2):
        report_reverted_split(run.folder, run.log)
    reverted = [event for event in events(run.folder.path, "gpu0_bsz") if event["status"] == "reverted"]
    assert [(event["id"], event["old"], event["new"]) for event in reverted] == [("c1", 1, 3)]
    assert "split 3·5 does not fit: back to the one before (no memory on 2)" in reverted[0]["reason"]
    final = [event for event in events(run.folder.path, "command") if event["status"] != "accepted"]
    of_command = "rejected" if status == "pending" else "applied"
    assert [(event["id"], event["status"], event["by"]) for event in final] == [("c1", of_command, "me")]
    assert applied_after(run.folder.events, 3) == []
    fallbacks = fallbacks_after(run.folder, 4)
    assert [fallback.step for fallback in fallbacks] == [4, 5, 6]
    assert fallbacks[0] == (4, {"window_px": (64, 64)}, (3, 5))
    assert fallbacks_after(run.folder, 5) == fallbacks[1:]


def test_settings_next_to_a_failed_split_of_a_rank_hold(tmp_path: Path) -> None:
    """From the step at which the split began, but for what a newer command has set there."""
    run = Run(tmp_path / "run", "pending", "set gpu0_bsz=3 lr_factor=0.5 recompute=all --force")
    for epoch, step in ((2, 2), (3, 5), (3, 7)):  # of epoch 3 once more after a resume
        run.log.emit(EpochStart(epoch=epoch, lr=0.1, step=step))
    newer: dict[str, Any] = {"changes": {"gpu0_bsz_auto": False, "recompute": "off"}, "step": 7}
    run.log.emit(CommandAnswer(id="c2", command="set recompute=off", by="you", status="applied", **newer))
    run.rank_fails((3, 5), step=8)
    for _ in range(2):
        report_reverted_split(run.folder, run.log)
    (answer,) = (e for e in events(run.folder.path, "command") if e["id"] == "c1" and e["status"] != "accepted")
    assert (answer["status"], answer["changes"], answer["step"]) == ("applied", {"lr_factor": 0.5}, 7)
    assert applied_after(run.folder.events, 7) == [(7, newer["changes"], "c2"), (7, {"lr_factor": 0.5}, "c1")]
    assert applied_after(run.folder.events, 8) == []


def test_reports_of_other_failures_revert_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", "pending")
    run.rank_fails((4, 4), rank=1)
    report_reverted_split(run.folder, run.log)
    assert [event["status"] for event in events(run.folder.path, "gpu0_bsz")] == ["applied", "pending"]
    run.rank_fails((3, 5), rank=2)
    report_reverted_split(run.folder, run.log)
    run.log.emit(Gpu0Bsz(status="pending", old=1, new=3, split=[3, 5], epoch=5, id="c3"))
    report_reverted_split(run.folder, run.log)  # the next start, of a run that has ended otherwise
    found = [event["status"] for event in events(run.folder.path, "gpu0_bsz")]
    assert found == ["applied", "pending", "reverted", "pending"], "a report is about the changes before it"
    assert len(fallbacks_after(run.folder, 0)) == 2, "resumes from before them need both"


@pytest.mark.parametrize(("num_ranks", "failed"), [(1, set()), (2, {(3, 5), (2, 6)}), (3, {(4, 3, 1)})])
def test_split_that_failed_counts_for_as_many_ranks(
    tiny: dict[str, Any], tmp_path: Path, num_ranks: int, failed: set[tuple[int, ...]]
) -> None:
    """One process in dp has another memory than the ranks that reported it, and three ranks have other splits."""
    run = Run(tmp_path / "run", "applied")
    for rank, split, step in ((1, (3, 5), 4), (2, (4, 3, 1), 7), (3, (2, 6), 5)):
        run.rank_fails(split, rank, step)
    ranks = Mock(is_main=True, world_size=num_ranks, from_main=lambda value: value)
    context = Mock(folder=run.folder, ranks=ranks, locations=DeviceLocations(("cpu",) * 2))
    start, found = _start_of(merged(tiny), context, None, None)
    assert found == failed
    assert [each.values.get("window_px") for each in start.record.replays[2:]] == [(64, 32), (64, 96), (64, 64)]
