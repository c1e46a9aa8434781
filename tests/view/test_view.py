"""The fold of events: equal in any pieces, skimmed or not; what a resume removes; robust to any content."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual.geometry import Size

from segapp.memory.split_check import SplitChecker
from segapp.run.events import EVENT_TYPES, CommandAnswer, EpochStart, EventReader, Gpu0Bsz, Heartbeat, Val
from segapp.tui.devices import gpu_content
from segapp.tui.header import epoch_fraction
from segapp.view.view import EventFold, View
from tests.support.recorded_runs import RecordedRun, folded


def summary(view: View) -> dict[str, Any]:
    """Return all fields of a view that the screen shows."""
    history = view.history
    curves = (history.step, history.low, history.average(0.9))
    return {
        "curve": [np.nan_to_num(c, nan=-1.0).round(9).tolist() for c in curves],
        "step": view.step, "epoch": view.epoch, "vals": list(view.vals), "best": view.best, "marks": view.marks,
        "split": view.split, "gpu0": view.gpu0, "peaks": view.peaks_mib, "devices": view.devices, "log": list(view.log),
        "pending": view.pending, "answers": view.answers, "end": view.end, "last": (view.last_s, view.moved_s),
        "num": view.num_events,
    }  # fmt: skip


@pytest.fixture(scope="module")
def canned(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    run = RecordedRun(tmp_path_factory.mktemp("view") / "run", steps_per_epoch=20, epochs=6)
    run.epoch()
    run.change_gpu0(5)
    run.epoch(loss=math.nan)
    for phase in ("eval", "paused", "save"):
        run.beat(phase)
    run.epoch()
    run.end()
    return run


@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=20))
@settings(max_examples=25)
def test_events_folded_in_any_parts_give_the_same_view(canned: RecordedRun, sizes: list[int]) -> None:
    raws = EventReader(canned.folder.events).read_raw()
    fold, start = EventFold(View()), 0
    for size in [*sizes, len(raws)]:
        fold.add(raws[start : start + size])
        start += size
    assert summary(fold.view) == summary(folded(canned))


@given(sizes=st.lists(st.integers(1, 4000), min_size=1, max_size=10))
@settings(max_examples=25)
def test_skimmed_events_give_the_same_view(canned: RecordedRun, sizes: list[int]) -> None:
    reader, fold = EventReader(canned.folder.events), EventFold(View())
    for size in sizes:
        fold.add(reader.read_skimmed(size))
    fold.add(reader.read_raw())
    skimmed, full = summary(fold.view), summary(folded(canned))
    assert skimmed == full


def test_resume_removes_steps_that_are_repeated(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=10, epochs=4)
    run.epoch()
    run.epoch()
    run.train(5)
    run.step = 10
    run.write_start(resumed_from_step=10)
    run.train(3)
    view = folded(run)
    assert view.history.step.tolist() == [*range(1, 11), 11, 12, 13]
    assert [val.epoch for val in view.vals] == [1]
    assert view.best == view.vals[0]
    assert [(mark.kind, mark.step) for mark in view.marks] == [("best", 10), ("resume", 10)]
    assert view.step is not None
    assert view.step.step == 13
    assert view.num_starts == 2


def test_resumed_run_shows_the_share_it_resumes_with(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=10)
    run.epoch()
    run.change_gpu0(6)
    auto = {"gpu0_bsz": "auto", "lr_factor": 0.5, "recompute": "off", "shares": None}
    run.write(Gpu0Bsz(status="applied", old=6, new=7, split=[7, 9, 8, 8], epoch=2, live=auto), 1.0)
    view = folded(run)
    assert (view.gpu0.value, view.live) == (7, auto)
    run.gpu0_bsz = None
    run.clock.now_s += 1
    run.write_start(resumed_from_step=10)
    view = folded(run)
    assert (view.gpu0.value, view.live, view.split) == (None, {"gpu0_bsz": None}, (8, 8, 8, 8))


def test_skimmed_steps_are_folded_before_what_follows(tmp_path: Path) -> None:
    """A new epoch, and memory of a split that changed without a command."""
    run = RecordedRun(tmp_path / "run", steps_per_epoch=3)
    run.train(3)
    run.write(EpochStart(epoch=2, lr=0.007, step=3))
    run.gpu0_bsz = 6
    run.train(3, memory_every=2)
    run.write(EpochStart(epoch=3, lr=0.006, step=6))
    view = View()
    EventFold(view).add(EventReader(run.folder.events).read_skimmed())
    assert (view.epoch, view.lr, view.split, epoch_fraction(view)) == (3, 0.006, (6, 9, 9, 8), 0.0)
    assert summary(view) == summary(folded(run))
    assert view.last_s == pytest.approx(run.clock.now_s, abs=1e-5)


def test_interval_of_steps_leaves_out_the_time_before_a_resume(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.train(5)
    run.clock.now_s += 5  # an evaluation
    run.train(2)
    assert folded(run).step_interval_s == pytest.approx(0.777, abs=1e-3)
    run.clock.now_s += 1000
    run.write_start(resumed_from_step=7)
    run.train(1)
    assert folded(run).step_interval_s == 0
    run.train(1)
    assert folded(run).step_interval_s == pytest.approx(0.777, abs=1e-3)


@pytest.mark.parametrize("does_end", [True, False])
def test_commands_and_changes_do_not_outlive_their_trainer(tmp_path: Path, does_end: bool) -> None:
    run = RecordedRun(tmp_path / "run")
    run.train(1)
    run.change_gpu0(6, apply=False)
    assert folded(run).pending
    run.end() if does_end else run.write_start(resumed_from_step=1)
    view = folded(run)
    assert (view.pending, view.gpu0.pending) == ({}, None)


def test_split_of_an_epoch_is_known_at_its_start(tmp_path: Path) -> None:
    """A short last batch is not a new split."""
    run = RecordedRun(tmp_path / "run")
    run.train(2)
    raws = EventReader(run.folder.events).read_raw()
    step = dict(next(raw for raw in raws if raw["type"] == "step"), step=3, split=[2, 2, 2, 1])
    view = View()
    EventFold(view).add([*raws, step])
    assert view.split == (4, 10, 9, 9)
    run.write(EpochStart(epoch=2, lr=0.01, split=[6, 9, 9, 8], step=2))
    assert folded(run).split == (6, 9, 9, 8)


def test_split_change_is_pending_then_applied_then_reverted(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.train(3)
    run.change_gpu0(7, apply=False, command_id="0123456789aa")
    run.write(Gpu0Bsz(status="cancelled", old=4, new=7))
    run.write(CommandAnswer(id="0123456789aa", command="set gpu0_bsz=7", by="a@b", status="cancelled"))
    assert (folded(run).gpu0.pending, folded(run).gpu0.value) == (None, 4)
    assert not [mark for mark in folded(run).marks if mark.kind == "gpu0_bsz"]
    run.change_gpu0(6, apply=False)
    view = folded(run)
    assert view.gpu0.pending is not None
    assert view.gpu0.value == 4
    assert list(view.pending) == ["0123456789ab"]
    run.write(Gpu0Bsz(status="applied", old=4, new=6, split=[6, 9, 9, 8], epoch=2, observed_mib=[1.0, 2.0, 3.0, 4.0]))
    run.write(CommandAnswer(id="0123456789ab", command="set gpu0_bsz=6", by="a@b", status="applied"))
    view = folded(run)
    assert (view.gpu0.value, view.pending) == (6, {})
    assert [mark.kind for mark in view.marks] == ["gpu0_bsz"]
    assert view.answers["0123456789ab"].status == "applied"
    assert view.peaks_mib[(6, 9, 9, 8)] == [1.0, 2.0, 3.0, 4.0]
    facts = SplitChecker(32, 4, current=(4, 10, 9, 9)).with_failure((6, 9, 9, 8)).to_json()
    reason = "out of memory on cuda:0"
    run.write(Gpu0Bsz(status="reverted", old=4, new=6, split=[4, 10, 9, 9], epoch=2, reason=reason, checker=facts))
    view = folded(run)
    assert view.gpu0.value == 4
    assert "out of memory" in view.alerts["reverted"].last.message
    assert view.split_checker.check(6).level == "won't fit"
    assert view.split_checker.check(7).level == "won't fit"


def test_other_shares_with_the_same_first_are_a_change(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.train(3)
    shares: dict[str, Any] = {"old": 4, "new": 4, "epoch": 2}
    run.write(EpochStart(epoch=2, lr=0.1, split=[4, 9, 9, 10], step=3))
    run.write(Gpu0Bsz(status="applied", split=[4, 9, 9, 10], step=3, observed_mib=[1.0, 2.0, 3.0, 4.0], **shares))
    run.write(Gpu0Bsz(status="applied", split=[4, 9, 9, 10], step=3, **shares))  # with another setting
    view = folded(run)
    assert view.peaks_mib[4, 9, 9, 10] == [1.0, 2.0, 3.0, 4.0]
    assert [mark[::2] for mark in view.marks] == [(3, "gpu0_bsz 4 to 4, split 4·9·9·10")]
    run.train(5)
    run.write(Gpu0Bsz(status="reverted", split=[4, 10, 9, 9], reason="split 4·9·9·10 does not fit", **shares))
    view = folded(run)
    assert view.split == (4, 10, 9, 9)
    assert view.marks[-1][::2] == (8, "gpu0_bsz 4 to 4, split 4·10·9·9")
    assert view.alerts["reverted"].last.message == "the split was reverted: split 4·9·9·10 does not fit"


def test_peak_of_the_old_split_is_not_the_new_one_s(tmp_path: Path) -> None:
    """The sample after a change may hold a peak from before it."""
    run = RecordedRun(tmp_path / "run")
    run.train(3)
    raws = EventReader(run.folder.events).read_raw()

    def memory_of(*peaks_mib: float) -> dict[str, Any]:
        devices = [{"device": f"cuda:{i}", "used_mib": 1.0, "peak_mib": mib} for i, mib in enumerate(peaks_mib)]
        return {"v": 1, "seq": 99, "t": 99.0, "type": "memory", "devices": devices}

    step = next(raw for raw in raws if raw["type"] == "step")
    moved = dict(step, step=9, split=[6, 9, 9, 8])
    view = View()
    fold = EventFold(view)
    fold.add([*raws, memory_of(900.0, 1.0, 1.0, 1.0), moved])
    assert view.split == (6, 9, 9, 8)
    before = view.peaks_mib[4, 10, 9, 9]
    fold.add([memory_of(900.0, 800.0, 800.0, 800.0)])
    assert (6, 9, 9, 8) not in view.peaks_mib
    assert "peak  0.9" not in gpu_content(view, (), Size(68, 20)).plain
    fold.add([memory_of(500.0, 400.0, 400.0, 400.0), memory_of(450.0, 410.0, 400.0, 400.0)])
    assert view.peaks_mib == {(4, 10, 9, 9): before, (6, 9, 9, 8): [500.0, 410.0, 400.0, 400.0]}
    assert "peak  0.5" in gpu_content(view, (), Size(68, 20)).plain.splitlines()[0]


def test_reverted_share_leaves_the_earlier_values(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.train(1)
    for old, applied in ((5, 3), (3, 4), (4, 2)):
        run.write(Gpu0Bsz(status="applied", old=old, new=applied, epoch=2))
    run.write(Gpu0Bsz(status="reverted", old=4, new=2, split=[4, 10, 9, 9], epoch=2, reason="out of memory"))
    assert folded(run).gpu0.value == 4


def test_evaluation_ends_with_its_result(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=5)
    run.train(5)
    run.write(Heartbeat(phase="eval", step=5, num_evaluated=0, num_images=10))
    begun = folded(run).evaluating
    assert begun is not None
    assert (begun.num_done, begun.num_images) == (0, 10)
    run.write(Heartbeat(phase="eval", step=5, num_evaluated=9, num_images=10))
    assert folded(run).evaluating is not None
    run.write(Val(epoch=1, step=5, loss=0.1, miou=0.5, iou=[0.5]))
    assert folded(run).evaluating is None


def test_events_with_invalid_fields_are_counted_and_skipped(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.train(1)
    raws = EventReader(run.folder.events).read_raw()
    step, memory = (next(raw for raw in raws if raw["type"] == kind) for kind in ("step", "memory"))
    wrong = ({**step, "lr": "fast"}, {**step, "step": -1}, {**memory, "devices": 3}, {**raws[0], "epochs": None})
    view = View()
    for count, raw in enumerate(wrong, start=1):
        EventFold(view).add([raw])
        assert view.num_bad == count
    assert view.step is None
    assert view.start is None
    assert view.devices == []


def test_last_answers_are_kept() -> None:
    view = View()
    answers = [CommandAnswer(id=str(i), command="pause", by="a@b", status="rejected", t=1.0) for i in range(202)]
    for num_before, num_kept in ((199, 199), (200, 200), (202, 200)):
        EventFold(view).add([answer.model_dump() for answer in answers[len(view.answers) : num_before]])
        assert list(view.answers) == [str(i) for i in range(num_before - num_kept, num_before)]


def test_pause_follows_answer_heartbeat_and_next_step(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path / "run")
    run.train(1)
    run.write(CommandAnswer(id="a" * 12, command="pause", by="a@b", status="applied"))
    assert folded(run).is_paused
    run.train(1)
    assert not folded(run).is_paused
    run.beat("paused")
    assert folded(run).is_paused
    run.write_start(resumed_from_step=2)
    assert not folded(run).is_paused


junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(
    sorted({name for model in EVENT_TYPES.values() for name in model.model_fields} - {"v", "seq", "t", "type"})
)


@given(st.lists(st.tuples(fields, junk), min_size=1, max_size=3), st.integers(0, 10**6))
def test_any_changed_field_of_a_good_run_is_folded(
    canned: RecordedRun, changes: list[tuple[str, Any]], at: int
) -> None:
    raws = EventReader(canned.folder.events).read_raw()
    for i, (name, value) in enumerate(changes):
        index = (at + 7 * i) % len(raws)
        raws[index] = {**raws[index], name: value}
    view = View()
    EventFold(view).add(raws)
    assert view.num_events == len(raws)
