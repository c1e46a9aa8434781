"""When `CheckpointSaver` writes: retries of failed saves, postponed saves, and the state of a training that hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.checkpoint import saver as module
from segapp.checkpoint.saver import MAX_RETRY_S, Captured, CheckpointSaver, Position, SaveRules
from segapp.checkpoint.training_state import SavedCheckpoint, load_checkpoint, save_checkpoint
from segapp.errors import StorageError
from segapp.parallel.distributed import Ranks
from segapp.run.checkpoints import CheckpointFacts
from segapp.run.events import Alert, Event, EventLog
from segapp.run.folder import RunFolder


class Disk:
    """Stands for `save_checkpoint`: first fails as often as it is told, and writes only while it is allowed to."""

    def __init__(self) -> None:
        self.num_failures = 0
        self.may_write = threading.Event()
        self.may_write.set()
        self.steps: list[int] = []

    def save(self, folder: Path, state: dict[str, Any], facts: CheckpointFacts, **options: Any) -> SavedCheckpoint:
        assert self.may_write.wait(60)
        if self.num_failures:
            self.num_failures -= 1
            raise StorageError("the disk is full")
        self.steps.append(facts.step)
        return save_checkpoint(folder, state, facts, **options)


class Training:
    """A saver, the training whose state it saves, and its clock, which only `now_s` moves."""

    def __init__(self, root: Path, rules: SaveRules, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        self.events: list[Event] = []
        self.position = Position(step=1)
        self.weight = torch.ones(2)
        folder = RunFolder.create(path=root / "run")
        self.folder, self.store = folder.checkpoints, Disk()
        self.saver = CheckpointSaver(
            folder.checkpoints, rules, EventLog(None, [self]), Ranks(), self.capture, retry_s=100.0
        )
        monkeypatch.setattr(module, "save_checkpoint", self.store.save)
        monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        return self.now_s

    perf_counter = monotonic

    def capture(self) -> Captured:
        return Captured({"model": {"weight": self.weight}}, self.position, None)

    def handle(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        pass

    def alerts(self) -> list[str]:
        return [event.message for event in self.events if isinstance(event, Alert)]


@pytest.fixture
def training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Training]:
    one = Training(tmp_path, SaveRules(every_steps=5, every_minutes=3.0), monkeypatch)
    yield one
    one.store.may_write.set()
    one.saver.wait()


def test_failed_saves_are_retried_ever_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(tmp_path, SaveRules(), monkeypatch)
    saver, training.store.num_failures = training.saver, 5
    for wait_s in (100.0, 200.0, 400.0, MAX_RETRY_S, MAX_RETRY_S):
        saver.begin()
        assert not saver.wait()
        assert (
            f"the disk is full; training continues, the older checkpoints stay, tried again in {wait_s:g} s"
            in (training.alerts()[-1])
        )
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
    assert training.alerts()[-1].endswith("tried again in 100 s"), "after a success the first wait holds again"


def test_postponed_save_is_made_once_the_writer_is_free(training: Training) -> None:
    training.store.may_write.clear()
    training.saver.begin_or_postpone()
    training.position, training.weight = Position(step=2), torch.full((2,), 2.0)
    training.saver.begin_or_postpone()
    assert not training.saver.is_overdue(), "there is never a second writer"
    training.store.may_write.set()
    assert training.saver.wait()
    assert training.store.steps == [1]
    assert training.saver.is_overdue()
    training.position, training.weight = Position(step=3), torch.full((2,), 3.0)
    training.saver.begin()
    assert training.saver.wait()
    assert training.store.steps == [1, 3], "the present state is saved, not the one of the postponed save"
    assert not training.saver.is_overdue()


def test_timed_save_is_due_so_long_after_the_last_began(training: Training) -> None:
    training.saver.begin()
    training.saver.wait()
    training.now_s += 179.0
    assert not training.saver.is_overdue()
    training.now_s += 1.0
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


def test_state_is_written_as_it_was_when_the_save_began(training: Training) -> None:
    training.store.may_write.clear()
    training.saver.begin()
    training.weight += 5  # the next update, while the writer works
    training.store.may_write.set()
    assert training.saver.wait()
    assert load_checkpoint(training.folder).state["model"]["weight"].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("moves", ["before the copy", "during the copy", "never"])
def test_copy_of_a_hanging_training_is_saved_unless_it_moved(
    training: Training, monkeypatch: pytest.MonkeyPatch, moves: str
) -> None:
    has_moved = moves == "before the copy"

    def copied(state: Any) -> Any:
        nonlocal has_moved
        result = snapshot(state)
        has_moved = has_moved or moves == "during the copy"
        return result

    snapshot = module.snapshot
    monkeypatch.setattr(module, "snapshot", copied)
    problem = training.saver.save_last_boundary(training.capture(), lambda: not has_moved)
    assert problem == (None if moves == "never" else "the training moved on")
    assert training.store.steps == ([1] if moves == "never" else [])


def test_hanging_training_is_not_saved_twice(training: Training) -> None:
    training.saver.begin()
    assert training.saver.save_last_boundary(training.capture(), lambda: True) is None
    assert training.store.steps == [1]
    training.position = Position(step=2)
    training.store.num_failures = 1
    assert training.saver.save_last_boundary(training.capture(), lambda: True) == "the disk is full"
    assert training.saver.save_last_boundary(training.capture(), lambda: True) is None
    assert training.store.steps == [1, 2]


def test_finish_saves_once_more_after_a_failure(training: Training) -> None:
    training.store.num_failures = 2
    training.saver.begin()
    with pytest.raises(StorageError, match="the disk is full"):
        training.saver.finish(training.position, is_required=True)
    training.saver.finish(training.position, is_required=True)
    training.saver.finish(training.position, is_required=True)
    assert training.store.steps == [1]
