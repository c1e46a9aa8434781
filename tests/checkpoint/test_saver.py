"""When `CheckpointSaver` writes: skipped saves, the best state in memory, retries, and a training that hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.checkpoint import saver as module
from segapp.checkpoint.saver import MAX_RETRY_S, Captured, CheckpointSaver, Position, SaveRules
from segapp.checkpoint.training_state import load_checkpoint, save_checkpoint
from segapp.errors import DiskFullError, NonFiniteError, StorageError
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import CheckpointFacts
from segapp.run.events import Alert, Checkpoint, Event, EventLog
from segapp.run.folder import RunFolder


class Disk:
    """Stands for `save_checkpoint`: first fails as often as it is told, and writes only while it is allowed to.

    A write takes `write_s` of the training's clock.
    """

    def __init__(self, training: Training) -> None:
        self.training, self.write_s = training, 0.0
        self.num_failures, self.error = 0, StorageError
        self.may_write = threading.Event()
        self.may_write.set()
        self.steps: list[int] = []

    def save(self, folder: Path, state: dict[str, Any], facts: CheckpointFacts, **options: Any) -> Any:
        assert self.may_write.wait(60)
        if self.num_failures:
            self.num_failures -= 1
            raise self.error("the disk is full")
        self.steps.append(facts.step)
        self.training.now_s += self.write_s
        return save_checkpoint(folder, state, facts, **options)


class Training:
    """A saver, the training whose state it saves, and its clock, which only `now_s` moves."""

    def __init__(self, root: Path, rules: SaveRules, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s, self.copy_s = 1000.0, 0.0
        self.metric: float | None = None
        self.events: list[Event] = []
        self.position = Position(step=1)
        self.weight = torch.ones(2)
        folder = RunFolder.create(path=root / "run")
        self.folder, self.store = folder.checkpoints, Disk(self)
        monkeypatch.setattr(module, "save_checkpoint", self.store.save)
        monkeypatch.setattr(module, "time", self)
        self.saver = CheckpointSaver(folder.checkpoints, rules, EventLog(None, [self]), Ranks(), self.capture)

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def capture(self) -> Captured:
        self.now_s += self.copy_s
        return Captured({"model": {"weight": self.weight}}, self.position, self.metric)

    def move_to(self, *, step: int) -> None:
        """Makes steps, which change the weights in place."""
        self.position.step = step
        self.weight.fill_(step)

    def save_at_length(self) -> None:
        """Saves in 50 s, so that due saves are skipped for a long time."""
        self.store.write_s = 50.0
        self.saver.begin()
        assert self.saver.wait()

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def alerts(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Alert)]

    def checkpoints(self) -> list[Checkpoint]:
        return [event for event in self.events if isinstance(event, Checkpoint)]


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    one = Training(tmp_path, SaveRules(every_steps=5, every_minutes=3.0), monkeypatch)
    yield one
    one.store.may_write.set()
    one.saver.wait()


def test_failed_saves_are_retried_ever_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, SaveRules(), monkeypatch)
    saver, training.store.num_failures = training.saver, 7
    for wait_s in (30.0, 60.0, 120.0, 240.0, 480.0, MAX_RETRY_S, MAX_RETRY_S):
        saver.begin()
        assert not saver.wait()
        assert f"the disk is full; the older checkpoints stay, tried again in {wait_s:g} s" in (training.alerts()[-1])
        training.now_s += wait_s - 0.5
        assert not saver.is_overdue()
        training.now_s += 0.5
        assert saver.is_overdue()
    saver.begin()
    assert saver.wait()
    assert load_checkpoint(training.folder).step == 1
    training.now_s += 10 * MAX_RETRY_S
    assert not saver.is_overdue(), "it is saved, and no rule asks for another save"
    training.store.num_failures = 1
    saver.begin()
    assert not saver.wait()
    assert training.alerts()[-1].endswith("tried again in 30 s"), "after a success the first wait holds again"


def test_last_save_waits_for_space(training: Training) -> None:
    training.store.num_failures, training.store.error = 8, DiskFullError
    training.saver.finish(training.position, is_required=True, waits_for_space=True)
    assert load_checkpoint(training.folder).step == 1
    assert 1080 <= training.now_s <= 1082, "an attempt every 10 s"
    said = "the disk is full; the run has ended, and its last save waits for space, for at most"
    assert training.alerts() == [f"{said} 600 s", f"{said} 540 s"], "a line each minute"


@pytest.mark.parametrize(
    ("error", "waits", "num_failures", "waited_s"),
    [(DiskFullError, True, 1000, 600), (DiskFullError, False, 1, 0), (StorageError, True, 1, 0)],
)
def test_last_save_waits_ten_minutes_for_space_only(
    training: Training, error: type[StorageError], waits: bool, num_failures: int, waited_s: int
) -> None:
    training.store.num_failures, training.store.error = num_failures, error
    with pytest.raises(error):
        training.saver.finish(training.position, is_required=True, waits_for_space=waits)
    assert 0 <= training.now_s - 1000 - waited_s < 15


@pytest.mark.parametrize("is_own", [True, False], ids=["this rank", "another rank"])
def test_stop_ends_the_wait_for_space(training: Training, is_own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    training.store.num_failures, training.store.error = 1000, DiskFullError
    stops = iter([False, False, True])
    if is_own:
        monkeypatch.setattr(training.saver, "_is_stopped", lambda: training.now_s > 1015)
    else:
        monkeypatch.setattr(training.saver._ranks, "any_of", lambda own: (own or next(stops),))
    with pytest.raises(DiskFullError):
        training.saver.finish(training.position, is_required=True, waits_for_space=True)
    assert training.now_s < 1031


def test_due_save_is_skipped_while_the_writer_is_busy(training: Training) -> None:
    training.store.may_write.clear()
    training.saver.begin_or_skip()
    training.move_to(step=2)  # the next update, while the writer works
    training.saver.begin_or_skip()
    assert training.store.steps == []
    training.store.may_write.set()
    assert training.saver.wait()
    assert training.store.steps == [1]
    assert load_checkpoint(training.folder).state["model"]["weight"].tolist() == [1.0, 1.0]
    training.move_to(step=3)
    training.saver.begin_or_skip()
    assert training.saver.wait()
    assert training.store.steps == [1, 3], "the present state is saved, not the skipped one"


def test_saves_of_any_rhythm_take_a_twentieth_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes 7 s, a copy 1 s and a write 3 s of the background: 20 x 4 s lie between two saves."""
    training = Training(tmp_path, SaveRules(grace_s=3.5), monkeypatch)
    training.copy_s, training.store.write_s = 1.0, 3.0
    begun_s = []
    for step in range(1, 60):
        training.move_to(step=step)
        num_saves, at_s = len(training.store.steps), training.now_s
        training.saver.begin_or_skip()
        training.saver.wait()
        begun_s += [at_s] * (len(training.store.steps) - num_saves)
        training.now_s += 7.0
    gaps_s = [after - before for before, after in pairwise(begun_s)]
    assert len(gaps_s) == 5
    assert set(gaps_s) == {4 + 11 * 7.0}, "4 s of saving and the first multiple of 7 s with which they make 80 s"
    (alert,) = (message for message in training.alerts() if "checkpoint.grace_s" in message)  # once
    assert alert.startswith("a checkpoint takes 4.0 s, longer than the 3.5 s")


def test_commands_and_ends_are_saved_at_any_time(training: Training) -> None:
    training.save_at_length()
    training.move_to(step=2)
    training.saver.begin_or_skip()
    training.saver.begin_asked(training.position)
    assert training.saver.wait()
    training.move_to(step=3)
    training.saver.finish(training.position, is_required=True)
    assert training.store.steps == [1, 2, 3]


def test_save_apart_does_not_move_the_next_due_save(training: Training) -> None:
    training.saver.begin()
    training.saver.save_apart(training.position)
    assert training.store.steps == [1], "it is saved"
    training.now_s += 179.0
    training.store.write_s = 10.0
    training.move_to(step=2)
    training.saver.save_apart(training.position)
    assert training.store.steps == [1, 2], "it is written before the training goes on"
    assert training.saver.is_overdue(), "three minutes after the first save began"
    training.move_to(step=3)
    training.saver.begin_or_skip()
    training.saver.wait()
    assert training.store.steps == [1, 2, 3]


def test_skipped_saves_are_reported_once_if_they_are_far_apart(training: Training) -> None:
    for write_s, num_alerts in ((0.4, 0), (0.6, 1), (0.9, 1)):
        training.store.write_s = write_s
        training.saver.begin()
        assert training.saver.wait()
        training.saver.begin_or_skip()
        assert len(training.alerts()) == num_alerts
    assert training.alerts() == [
        "a save takes 0.6 s: the next checkpoints that are due are skipped until 12 s after that save began, "
        "and the best one is kept in memory"
    ]


def evaluations(training: Training, metrics: list[float]) -> None:
    """Evaluates after each of the next steps, and offers the best states to the saver, which skips all of them."""
    for metric in metrics:
        is_best = training.metric is None or metric > training.metric
        training.metric = max(metric, training.metric or metric)
        training.move_to(step=training.position.step + 1)
        training.saver.begin_or_skip(is_best=is_best)


@pytest.mark.parametrize("is_writing", [True, False])
def test_best_state_waits_in_memory_until_the_next_save(training: Training, is_writing: bool) -> None:
    """Of the steps 2 to 5, the third is the best; the second one had been the best before."""
    training.store.write_s = 50.0
    if is_writing:
        training.store.may_write.clear()
    training.saver.begin()
    if not is_writing:
        assert training.saver.wait()
    evaluations(training, [0.3, 0.7, 0.8, 0.5])
    assert training.saver.has_kept_best
    assert training.store.steps == ([] if is_writing else [1])
    training.store.may_write.set()
    training.move_to(step=9)
    training.saver.begin()
    assert not training.saver.has_kept_best
    assert training.saver.wait()
    assert training.store.steps == [1, 4, 9], "the best one first: no checkpoint is newer than the best that it names"
    best, last = (load_checkpoint(training.folder, which) for which in ("best", "last"))
    assert (best.step, best.state["model"]["weight"].tolist()) == (4, [4.0, 4.0])
    assert (last.step, last.state["model"]["weight"].tolist()) == (9, [9.0, 9.0])
    assert [(event.step, event.is_best) for event in training.checkpoints()] == [(1, False), (4, True), (9, False)]


@pytest.mark.parametrize("way", ["better", "same position", "failed write", "failed training", "not finite"])
def test_best_state_in_memory_reaches_the_disk_on_every_way(training: Training, way: str) -> None:
    training.save_at_length()
    evaluations(training, [0.3, 0.7, 0.5] if way != "same position" else [0.3, 0.7])
    saver, steps = training.saver, [1, 3, 8]
    training.position = Position(step=3 if way == "same position" else 8)
    if way == "better":
        training.metric = 0.9
        saver.begin(is_best=True)
        steps = [1, 8]
    elif way == "same position":
        saver.finish(training.position, is_required=True)
        steps = [1, 3]
    elif way == "failed write":
        training.store.num_failures = 1
        saver.begin()
        assert not saver.wait()
        assert training.store.steps == [1]
        saver.begin()
    elif way == "failed training":
        saver.wait_for_writer()
        steps = [1, 3]
    else:
        training.weight = torch.tensor([8.0, float("inf")])
        with pytest.raises(NonFiniteError, match=r"model\.weight is not finite"):
            saver.finish(training.position, is_required=True)
        assert "model.weight is not finite" in training.alerts()[-1]
        steps = [1, 3]
    saver.wait()
    assert training.store.steps == steps
    assert load_checkpoint(training.folder, "best").step == (8 if way == "better" else 3)
    assert load_checkpoint(training.folder, "last").step == steps[-1]


def test_state_at_the_end_of_an_epoch_has_its_name(training: Training) -> None:
    for position in (Position(1, 0, 0), Position(1, 4, 4), Position(2, 0, 7), Position(2, 3, 10), Position(4, 0, 21)):
        training.position = position
        training.saver.begin()
        assert training.saver.wait()
    assert [(event.path, event.epoch, event.step) for event in training.checkpoints()] == [
        ("checkpoints/last.pt", 1, 0),
        ("checkpoints/last.pt", 1, 4),
        ("checkpoints/epoch_0001.pt", 1, 7),
        ("checkpoints/last.pt", 2, 10),
        ("checkpoints/epoch_0003.pt", 3, 21),
    ]
    assert sorted(path.name for path in training.folder.glob("epoch_*.pt")) == ["epoch_0001.pt", "epoch_0003.pt"]


def test_timed_save_is_due_so_long_after_the_last_began(training: Training) -> None:
    training.saver.begin()
    training.saver.wait()
    training.now_s += 179.0
    assert not training.saver.is_overdue()
    training.now_s += 1.0
    assert training.saver.is_overdue()
    training.store.write_s = 10.0
    training.saver.begin()
    training.saver.wait()
    training.now_s += 189.9
    assert not training.saver.is_overdue(), "20 x 10 s are longer than three minutes"
    training.now_s += 0.1
    assert training.saver.is_overdue()
    assert [step for step in range(1, 12) if training.saver.is_due(step)] == [5, 10]


@pytest.mark.parametrize(("every_epochs", "due"), [(None, [8]), (1, [2, 4, 6, 8]), (2, [4, 8])])
def test_epochs_and_steps_are_due_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every_epochs: int | None, due: list[int]
) -> None:
    rules = SaveRules(every_epochs=every_epochs, every_steps=8)
    saver = Training(tmp_path, rules, monkeypatch).saver
    ends = {2: 1, 4: 2, 6: 3, 8: 4}
    assert [step for step in range(1, 9) if saver.is_due(step, ends.get(step))] == due


def test_finish_saves_once_more_after_a_failure(training: Training) -> None:
    training.store.num_failures = 2
    training.saver.begin()
    with pytest.raises(StorageError, match="the disk is full"):
        training.saver.finish(training.position, is_required=True)
    training.saver.finish(training.position, is_required=True)
    training.saver.finish(training.position, is_required=True)
    assert training.store.steps == [1]
