"""Scores as viewers state them: the best of a row, the loss of an epoch, the number of classes; over drawn values."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from segapp.commands.runs import print_runs, print_status
from segapp.config.sections import CheckpointConfig
from segapp.inference.evaluate import Evaluation
from segapp.metrics import ConfusionMatrix, SegmentationScores
from segapp.run.events import EpochStart, EventReader, EventWriter, RunStart, Step, Val
from segapp.run.folder import RunFolder
from segapp.scores import SCORES, EpochLoss, best_shown, count_scored
from segapp.view.runs import summarize
from segapp.view.view import EventFold, View

LOSSES = st.none() | st.floats(1e-3, 1e3)


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ([None, 0.0], []),  # an absent class does not lose to a false positive
        ([None, 0.1, 0.2], [2]),
        ([0.3, 0.3, 0.2], [0, 1]),
        ([0.2, 0.5, None, 0.5004, math.inf, math.nan], [1, 3]),  # shown with one digit of a percentage
        ([0.5, 0.5004], []),
        ([math.nan, 0.7], []),
        ([0.0, 0.0004, 0.001], [2]),
        ([], []),
    ],
)
def test_best_of_a_row_by_hand(values: list[float | None], best: list[int]) -> None:
    assert best_shown(values) == frozenset(best)


def start() -> RunStart:
    return RunStart(classes=["a", "b", "c"], num_params=1, batch_size=1, epochs=3, steps_per_epoch=3, devices=[])


@given(st.lists(st.lists(LOSSES, max_size=4), max_size=4), st.booleans())
def test_loss_is_the_mean_of_the_last_epoch_for_every_reader(
    tmp_path_factory, epochs: list[list[float | None]], is_resumed: bool
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    step = 0
    with EventWriter(folder.events) as writer:
        writer.write(start())
        for epoch, losses in enumerate(epochs, start=1):
            writer.write(EpochStart(epoch=epoch, lr=0.1, step=step))
            for at, loss in enumerate(losses):
                if is_resumed and at == 2:  # a resume within an epoch: its first steps stay
                    writer.write(start().model_copy(update={"resumed_from_step": step}))
                    writer.write(EpochStart(epoch=epoch, lr=0.1, step=step))
                step += 1
                writer.write(Step(epoch=epoch, step=step, loss=loss, lr=0.1))
    last = next(((epoch, losses) for epoch, losses in reversed(list(enumerate(epochs, start=1))) if losses), None)
    finite = [] if last is None else [loss for loss in last[1] if loss is not None]
    wanted = (None if last is None else last[0], math.fsum(finite) / len(finite) if finite else None)
    summary = summarize(folder.path).as_json()
    plain = EpochLoss()
    for raw in EventReader(folder.events).read_raw():
        plain.add_event(raw)
    skimmed = View()
    EventFold(skimmed).add(EventReader(folder.events).read_skimmed())
    found = [(summary["loss_epoch"], summary["loss"]), *((loss.epoch, loss.mean) for loss in (plain, skimmed.loss))]
    assert found == [wanted] * 3


def test_repeated_steps_count_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with EventWriter(folder.events) as writer:
        writer.write(start())
        writer.write(EpochStart(epoch=1, lr=0.1, step=0))
        for step, loss in enumerate((4.0, 2.0, 9.0), start=1):
            writer.write(Step(epoch=1, step=step, loss=loss, lr=0.1))
        writer.write(start().model_copy(update={"resumed_from_step": 2}))  # its writer could not rewind
        writer.write(EpochStart(epoch=1, lr=0.1, step=2))
        writer.write(Step(epoch=1, step=3, loss=3.0, lr=0.1))
    view = View()
    EventFold(view).add(EventReader(folder.events).read_skimmed())
    assert summarize(folder.path).as_json()["loss"] == view.loss.mean == 3.0


@given(st.lists(st.tuples(st.none() | st.floats(0, 1), LOSSES), min_size=1, max_size=6))
def test_best_evaluation_is_finite_for_every_reader(
    tmp_path_factory, found: list[tuple[float | None, float | None]]
) -> None:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    with EventWriter(folder.events) as writer:
        writer.write(start())
        for epoch, (miou, loss) in enumerate(found, start=1):
            writer.write(Val(epoch=epoch, step=epoch, loss=loss, miou=miou, iou=[miou, None, 0.0]))
    view, summary = View(), summarize(folder.path).as_json()
    EventFold(view).add(EventReader(folder.events).read_raw())
    finite = [(miou, epoch) for epoch, (miou, loss) in enumerate(found, 1) if miou is not None and loss is not None]
    if not finite:
        assert view.best is None
        assert (summary["best_miou"], summary["best_epoch"], summary["best_num_scored"]) == (None, None, None)
    else:
        miou, epoch = max(finite, key=lambda pair: (pair[0], -pair[1]))
        assert view.best is not None
        assert (view.best.miou, view.best.epoch) == (summary["best_miou"], summary["best_epoch"]) == (miou, epoch)
        assert count_scored(view.best.iou) == summary["best_num_scored"] == 2


def test_list_and_status_say_what_a_score_is_made_of(tmp_path: Path, capsys) -> None:
    for name, losses in (("good", (1.5, 0.75)), ("bad", (None, None)), ("empty", None)):
        with RunFolder.create(name, root=tmp_path) as folder:
            folder.write_info()
            if losses is not None:
                with EventWriter(folder.events) as writer:
                    writer.write(start())
                    writer.write(EpochStart(epoch=1, lr=0.1, step=0))
                    writer.write(Step(epoch=1, step=1, loss=losses[0], lr=0.1))
                    writer.write(Val(epoch=1, step=1, loss=losses[1], miou=0.25, iou=[0.5, None, 0.0]))
    print_runs(tmp_path, as_json=False)
    rows = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert "EPOCH LOSS" in rows["RUN"]
    assert "1.5000      0.2500 (2/3)  0.2500 (2/3)" in rows["good"]
    assert "not finite  0.2500 (2/3)  -" in rows["bad"]
    assert "finite" not in rows["empty"]
    for name, *said in (
        ("good", "loss 1.5 (training, mean of epoch 1)", "val_loss 0.75", "miou 0.25 over 2 of 3 classes"),
        ("bad", "loss not finite (training, mean of epoch 1)", "val_loss not finite"),
    ):
        print_status(str(tmp_path / name), as_json=False)
        assert {*said} <= {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    print_runs(tmp_path, as_json=True)
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert (found["good"]["num_scored"], found["good"]["best_num_scored"], found["good"]["num_classes"]) == (2, 2, 3)


def test_a_score_of_the_table_reaches_every_reader(tmp_path: Path) -> None:
    """Fields of `SegmentationScores`, the config, the event, the summary and the Python API follow the table."""
    assert set(SCORES) - {"loss"} <= {each.name for each in dataclasses.fields(SegmentationScores)}
    assert {name for name in SCORES if not SCORES[name].larger_is_better} == {"loss"}
    confusion = ConfusionMatrix(2)
    confusion.update(torch.tensor([[[0, 1, 1, 0]]]), torch.tensor([[[0, 1, 0, 255]]]))
    found = Evaluation(confusion.scores(), 0.5, 1, confusion.matrix)
    values = found.values()
    assert values == {"loss": 0.5} | {name: getattr(found.scores, name) for name in SCORES if name != "loss"}
    assert found.monitored("loss") == -0.5
    assert found.monitored("frequency_weighted_iou") == found.scores.frequency_weighted_iou
    own = {name: value for name, value in values.items() if name in Val.model_fields}
    rest = {name: value for name, value in values.items() if name not in Val.model_fields}
    val = Val.model_validate({"epoch": 1, "step": 3, "iou": found.scores.iou, "scores": rest, **own})
    assert {name: val.score(name) for name in SCORES} == values
    folder = RunFolder(tmp_path)
    with EventWriter(folder.events) as writer:
        writer.write(val)
    assert summarize(folder.path).as_json()["scores"] == values
    assert CheckpointConfig(monitor="mean_recall").monitor == "mean_recall"
    with pytest.raises(ValueError, match="mean_recall"):
        CheckpointConfig(monitor="recall")
