"""Runs whose workers load ahead: the batches and losses of a run that loads each batch in its own process."""

from __future__ import annotations

import hashlib
import multiprocessing
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

import segapp
from segapp import failpoints
from segapp.config import RunConfig
from segapp.datasets.sampling import sample_order
from segapp.inference.evaluate import Evaluation
from segapp.run.commands import parse_command, send_command
from segapp.run.events import Event
from segapp.training import inbox
from segapp.training.signals import EXIT_STOPPED_AND_SAVED
from segapp.training.step.engine import StepEngine
from tests.datasets.conftest import no_worker_is_left  # noqa: F401  # a fixture
from tests.support.own_parts import DROPOUT
from tests.support.runs import each_save, events, final_state, losses, merged, resume, train

pytestmark = pytest.mark.usefixtures("no_worker_is_left")
Loaded = tuple[int, tuple[int, ...], str]
NUM_EPOCHS, NUM_IMAGES, STEPS_PER_EPOCH = 3, 10, 5


def loading(tiny: dict[str, Any], workers: int, **sections: Any) -> RunConfig:
    """Return a config with dropout, BatchNorm, and an evaluation after each epoch."""
    return merged({**tiny, "model": DROPOUT}, data={"workers": workers}, **sections)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[Loaded]:
    """Epoch, images, and a hash of the pixels of each batch that a step was made with."""
    found: list[Loaded] = []
    original = StepEngine.step

    def step(engine: StepEngine, group: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(engine, group, *args, **kwargs)
        for batch in group:
            content = hashlib.sha256(batch.images.numpy().tobytes() + batch.target.numpy().tobytes())
            found.append((batch.epoch, batch.indices, content.hexdigest()))
        return result

    monkeypatch.setattr(StepEngine, "step", step)
    return found


def scores(folder: Path) -> list[tuple[int, float, list[float]]]:
    return [(val["epoch"], val["loss"], val["iou"]) for val in events(folder, "val")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stop", [8, 6], ids=["within an epoch", "at the border of an epoch"])
def test_stopped_run_with_workers_takes_the_course_without(
    tiny: dict[str, Any], tmp_path: Path, batches: list[Loaded], stop: int
) -> None:
    assert train(loading(tiny, 0), tmp_path / "plain") == 0
    expected = batches.copy()
    assert [(epoch, indices) for epoch, indices, _ in expected] == [
        (epoch, tuple(sample_order(NUM_IMAGES, 3, epoch)[at : at + 2]))
        for epoch in range(1, NUM_EPOCHS + 1)
        for at in range(0, NUM_IMAGES, 2)
    ]
    assert len({content for *_, content in expected}) == NUM_EPOCHS * STEPS_PER_EPOCH
    batches.clear()
    failpoints.arm(f"train.step={stop}:term")
    assert train(loading(tiny, 2), tmp_path / "run") == EXIT_STOPPED_AND_SAVED
    failpoints.arm("")
    assert len(batches) == stop - 1
    assert resume(loading(tiny, 2), tmp_path / "run") == 0
    assert batches == expected
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert scores(tmp_path / "run") == scores(tmp_path / "plain")


def test_changed_split_at_a_border_keeps_the_batches(
    tiny: dict[str, Any], tmp_path: Path, batches: list[Loaded], monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel = {"mode": "dp", "devices": ["cpu", "cpu"], "gpu0_bsz": 1}
    assert train(loading(tiny, 0, parallel=parallel), tmp_path / "plain") == 0
    expected = batches.copy()
    batches.clear()

    def change(event: Event) -> None:
        if event.type == "step" and event.step == STEPS_PER_EPOCH + 2:
            send_command(tmp_path / "run", parse_command("set gpu0_bsz=2"))

    monkeypatch.setattr(inbox, "POLL_S", 1e9)  # only the border of an epoch reads the folder again
    scored(monkeypatch, [0.9, 0.5, 0.4])  # the first epoch is saved as the best one
    config = loading(tiny, 2, parallel=parallel, checkpoint={"every_epochs": 1000})
    with each_save():
        segapp.train(config, run=tmp_path / "run", on_event=change)
    assert batches == expected
    splits = [(step["epoch"], step["split"]) for step in events(tmp_path / "run", "step")]
    assert splits == [(e, [2, 0] if e == 3 else [1, 1]) for e in (1, 2, 3) for _ in range(STEPS_PER_EPOCH)]
    changes = [(change["status"], change["split"]) for change in events(tmp_path / "run", "gpu0_bsz")]
    assert changes == [("pending", [2, 0]), ("applied", [2, 0])]
    assert final_state(tmp_path / "run")["live"]["settings"]["gpu0_bsz"] == 2
    saved = [save["step"] for save in events(tmp_path / "run", "checkpoint")]
    expected_saves = [STEPS_PER_EPOCH * epoch for epoch in (1, 1, 2, 3)]
    assert saved == expected_saves, "before the first evaluation, the best, before the change, and at the end"
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "plain"), rel=1e-5)


@pytest.fixture
def workers() -> Callable[[], list[BaseProcess]]:
    """Give the data workers of a training in this test, those of training first."""
    others = set(multiprocessing.active_children())

    def found() -> list[BaseProcess]:
        own = set(multiprocessing.active_children()) - others
        return sorted(own, key=lambda child: int(child.name.rpartition("-")[2]))  # the number of its start

    return found


def test_workers_start_once_for_all_epochs_and_evaluations(
    tiny: dict[str, Any], tmp_path: Path, workers: Callable[[], list[BaseProcess]]
) -> None:
    """Two of training and two of validation."""
    seen: list[tuple[int | None, ...]] = []

    def note(event: Event) -> None:
        if event.type in ("step", "val"):
            seen.append(tuple(child.pid for child in workers()))

    segapp.train(loading(tiny, 2, eval={"every_steps": 3, "batch_size": 3}), run=tmp_path / "run", on_event=note)
    assert [event["step"] for event in events(tmp_path / "run", "val")] == [3, 6, 9, 12, 15]
    assert len(seen) == 15 + 5
    assert (len(set(seen)), len(seen[0])) == (1, 4)


def test_run_with_killed_workers_takes_the_course_without(
    tiny: dict[str, Any], tmp_path: Path, batches: list[Loaded], workers: Callable[[], list[BaseProcess]]
) -> None:
    """One of training in epoch 1, and all of training and evaluation at the end of epoch 2, each by a signal."""
    sections = {"train": {"epochs": 4, "accumulate": 3}}
    assert train(loading(tiny, 0, **sections), tmp_path / "plain") == 0
    expected = batches.copy()
    batches.clear()
    kills = {("step", 1): 1, ("val", 4): 4}

    def kill(event: Event) -> None:
        for child in workers()[: kills.pop((event.type, getattr(event, "step", 0)), 0)]:
            child.kill()

    segapp.train(loading(tiny, 2, **sections), run=tmp_path / "run", on_event=kill)
    assert not kills
    assert batches == expected
    assert losses(tmp_path / "run") == losses(tmp_path / "plain")
    assert scores(tmp_path / "run") == scores(tmp_path / "plain")
    alerts = [alert["message"] for alert in events(tmp_path / "run", "alert") if alert["kind"] == "data"]
    of_training = [message for message in alerts if message.endswith("; the workers start again with the same samples")]
    assert (len(alerts), len(of_training)) == (3, 2)
    assert all("ended by SIGKILL" in message for message in alerts)


def test_early_stop_discards_what_is_loaded_ahead(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best is the third, after one that is worse; the next two are not better."""
    scored(monkeypatch, [0.5, 0.4, 0.6, 0.6, 0.5, 0.9])
    assert train(loading(tiny, 2, train={"epochs": 7, "early_stop": 2}), tmp_path / "run") == 0
    assert [event["epoch"] for event in events(tmp_path / "run", "val")] == [1, 2, 3, 4, 5]
    assert "no better miou for 2 evaluations" in events(tmp_path / "run", "run_end")[-1]["reason"]


def scored(monkeypatch: pytest.MonkeyPatch, scores: list[float]) -> None:
    """Give the evaluations of the next training these scores, in this order."""
    left = iter(scores)
    monkeypatch.setattr(Evaluation, "monitored", lambda *_: next(left))
