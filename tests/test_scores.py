"""Scores as viewers state them: the best of a row, the loss of an epoch, the number of classes; over drawn values."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from segapp.assembly.pairs import check_monitor
from segapp.commands.runs import print_runs, print_status
from segapp.config import dump_config
from segapp.config.load import config_of
from segapp.config.sections import CheckpointConfig
from segapp.datasets.layouts.schemes import ClassScheme, bit_palette
from segapp.errors import ConfigError
from segapp.inference.evaluate import Evaluation
from segapp.metrics import ConfusionMatrix, SegmentationScores
from segapp.run.events import EpochStart, EventReader, EventWriter, RunStart, Step, Val
from segapp.run.folder import RunFolder
from segapp.scores import FOREGROUND, SCORES, EpochLoss, best_shown, foreground_means, scores_text
from segapp.session.request import TrainRequest
from segapp.session.session import run_session
from segapp.training.progress import Best
from segapp.view.runs import summarize
from segapp.view.view import EventFold, View
from tests.support.runs import merged

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
    assert set(SCORES) - {"loss", *FOREGROUND} <= {each.name for each in dataclasses.fields(SegmentationScores)}
    assert {name for name in SCORES if not SCORES[name].larger_is_better} == {"loss"}
    confusion = ConfusionMatrix(2)
    confusion.update(torch.tensor([[[0, 1, 1, 0]]]), torch.tensor([[[0, 1, 0, 255]]]))
    found, scheme = Evaluation(confusion.scores(), 0.5, 1, confusion.matrix), scheme_of("road", "sky")
    values = found.values(scheme)
    apart = {"loss": 0.5, "miou_foreground": None, "mean_dice_foreground": None}
    assert values == apart | {name: getattr(found.scores, name) for name in SCORES if name not in apart}
    assert found.monitored("loss", scheme) == -0.5
    assert found.monitored("frequency_weighted_iou", scheme) == found.scores.frequency_weighted_iou
    own = {name: value for name, value in values.items() if name in Val.model_fields}
    rest = {name: value for name, value in values.items() if name not in Val.model_fields}
    val = Val.model_validate({"epoch": 1, "step": 3, "iou": found.scores.iou, "scores": rest, **own})
    assert {name: val.score(name) for name in SCORES} == values
    folder = RunFolder(tmp_path)
    with EventWriter(folder.events) as writer:
        writer.write(val)
    assert summarize(folder.path).as_json()["scores"] == values
    assert CheckpointConfig(monitor="mean_recall").monitor == "mean_recall"
    for name in ("recall", "mean_dice_of:x", "Dice:x", "dice"):
        with pytest.raises(ValueError, match="mean_recall"):
            CheckpointConfig(monitor=name)


CLASSES = ("_Background_", "a:b / c", "Stra\u00dfe #1", "iou:x", "a: b")
"""The signs of names that a colon, YAML, a path or a case could change; a background is no class 0 by its place."""


def scheme_of(*names: str, multilabel: Literal["bits"] | None = None) -> ClassScheme:
    return ClassScheme(names, bit_palette(len(names)), multilabel=multilabel)


def test_scores_of_classes_equal_numpy_on_drawn_pixels() -> None:
    """The last class is in neither prediction nor target, so its score does not exist."""
    rng = np.random.default_rng(5)
    target, prediction = rng.integers(0, 4, (2, 1, 31, 17))
    confusion = ConfusionMatrix(5)
    confusion.update(torch.from_numpy(prediction), torch.from_numpy(target))
    found, scheme = Evaluation(confusion.scores(), 1.5, 1, confusion.matrix), scheme_of(*CLASSES)
    both = [((target == n) & (prediction == n)).sum() for n in range(4)]
    iou = np.array([both[n] / ((target == n) | (prediction == n)).sum() for n in range(4)])
    dice = np.array([2 * both[n] / ((target == n).sum() + (prediction == n).sum()) for n in range(4)])
    for number, name in enumerate(CLASSES[:4]):
        assert found.monitored(f"iou:{name}", scheme) == pytest.approx(iou[number])
        assert found.monitored(f"dice:{name}", scheme) == pytest.approx(dice[number])
    assert found.monitored("miou_foreground", scheme) == pytest.approx(iou[1:].mean())
    assert found.monitored("mean_dice_foreground", scheme) == pytest.approx(dice[1:].mean())
    assert [found.monitored(f"{kind}:a: b", scheme) for kind in ("iou", "dice")] == [None, None]
    for other in (scheme_of("road", "background", "x", "y", "z"), scheme_of(*CLASSES, multilabel="bits")):
        assert [found.values(other)[name] for name in FOREGROUND] == [None, None], "no class 0 to leave out"


@pytest.mark.parametrize("name", [f"{kind}:{each}" for kind in ("iou", "dice") for each in CLASSES] + [*FOREGROUND])
def test_monitor_of_any_class_name_is_read_as_written(tiny: dict[str, Any], name: str) -> None:
    raw = merged(tiny, data={"classes": CLASSES}).model_dump(mode="json")
    config = config_of(raw, [f"checkpoint.monitor={name}"])
    assert config.checkpoint.monitor == name
    assert yaml.safe_load(dump_config(config))["checkpoint"]["monitor"] == name
    check_monitor(config)


@pytest.mark.parametrize(
    ("name", "classes", "said"),
    [
        ("dice:crak", ["background", "crack", "joint"], "no class has the name 'crak': use 'dice:crack'"),
        ("iou:Crack", ["background", "crack", "joint"], "no class has the name 'Crack': use 'iou:crack'"),
        ("iou:q", ["a, b", "crack", "joint"], "use 'iou:a, b' or 'iou:crack' or 'iou:joint'"),
        ("miou_foreground", ["road", "background", "sky"], "class 0 is 'road', which is no name of a background: "
         "use miou, or dice:NAME"),
        ("mean_dice_foreground", ["road", "background", "sky"], "use mean_dice, or dice:NAME"),
    ],
)  # fmt: skip
def test_score_that_the_data_lack_is_refused_before_the_run(
    tiny: dict[str, Any], tmp_path: Path, name: str, classes: list[str], said: str
) -> None:
    config = merged(tiny, data={"classes": classes}, checkpoint={"monitor": name})
    with pytest.raises(ConfigError) as refused:
        run_session(TrainRequest(config, run=tmp_path / "run"))
    assert said in str(refused.value)
    assert (refused.value.key, refused.value.value) == ("checkpoint.monitor", name)
    assert not (tmp_path / "run").exists()
    multilabel = merged(tiny, data={"classes": ["background", "x"], "multilabel": "bits"}, loss={"name": "bce"})
    with pytest.raises(ConfigError, match="several classes per pixel"):
        check_monitor(merged(multilabel.model_dump(mode="json"), checkpoint={"monitor": "miou_foreground"}))


COURSE = {
    3: (0.50, 0.9, [0.9, 0.0, 0.6]),
    1: (0.45, 0.4, [0.8, 0.1, None]),
    7: (None, 0.1, [None, None, 0.6]),
    4: (0.45, 0.7, [0.7, 0.5, 0.15]),
    9: (0.49, None, [1.0, 1.0, 1.0]),
    8: (0.40, 0.2, [0.6, 0.5, 0.1]),
}
"""Epoch -> mIoU, loss and IoU: epochs out of order, ties, missing scores, and a loss that was not finite."""


@pytest.mark.parametrize(
    ("monitor", "epoch", "value"),
    [
        (None, 3, 0.50),  # an earlier version
        ("miou", 3, 0.50),
        ("loss", 7, 0.1),
        ("iou:a:b / c", 4, 0.5),  # the first of two
        ("dice:a:b / c", 4, 2 / 3),
        ("iou:z", 3, 0.6),
        ("miou_foreground", 7, 0.6),  # over one class
        ("mean_dice_foreground", 7, 0.75),
        ("iou:nowhere", None, None),
    ],
)
def test_best_is_what_the_monitor_names(tmp_path: Path, monitor: str | None, epoch: int | None, value: Any) -> None:
    begun = start().model_copy(update={"classes": ["bg", "a:b / c", "z"], "monitor": monitor})
    folder, kept = RunFolder(tmp_path), Best()
    with EventWriter(folder.events) as writer:
        writer.write(begun)
        for step, (at, (miou, loss, iou)) in enumerate(COURSE.items(), start=1):
            val = Val(epoch=at, step=step, loss=loss, miou=miou, iou=iou, scores=foreground_means(iou))
            writer.write(val)
            score = val.score(monitor or "miou", begun.classes) if loss is not None else None
            kept.note(-score if monitor == "loss" and score is not None else score, at)
    view, facts = View(), summarize(folder.path).shown
    EventFold(view).add(EventReader(folder.events).read_raw())
    assert (facts["best_epoch"], facts["monitor"]) == (epoch, monitor or "miou")
    assert facts["best_score"] == (None if value is None else pytest.approx(value))
    assert (kept.epoch, None if view.best is None else view.best.epoch) == (epoch, epoch)
    scored = None if epoch is None else sum(each is not None for each in COURSE[epoch][2])
    assert facts["best_num_scored"] == scored


@pytest.mark.parametrize(
    ("starts", "best"),
    [
        ([("miou", None, 4), ("loss", 4, 4), ("miou", 4, 6)], 2),  # killed before a checkpoint of the second monitor
        ([("miou", None, 4), ("loss", 3, 6), ("miou", 5, 7)], 6),  # after one
        ([("miou", None, 4), ("loss", 4, 6), ("loss", 1, 4)], 3),  # from before the change
        ([(None, None, 4), ("loss", 2, 5)], 3),
        ([(None, None, 4), ("miou", 3, 5)], 2),
    ],
)
def test_view_ranks_from_where_the_trainer_does(starts: list[tuple[str | None, int | None, int]], best: int) -> None:
    """Step 2 has the best mIoU, step 3 the best loss after it, and of steps 6 and 7, 6 has the better mIoU."""
    view, at = View(), 0.0
    fold, miou, loss = (
        EventFold(view),
        [0.1, 0.3, 0.9, 0.2, 0.3, 0.4, 0.8, 0.7],
        [9.0, 0.1, 0.5, 0.2, 0.4, 0.6, 0.7, 0.8],
    )
    for monitor, resumed, end in starts:
        begun = start().model_copy(update={"monitor": monitor, "resumed_from_step": resumed})
        vals = [
            Val(epoch=n, step=n, loss=loss[n], miou=miou[n], iou=[0.5] * 3) for n in range((resumed or 0) + 1, end + 1)
        ]
        for event in (begun, *vals):
            fold.add([event.model_dump() | {"t": (at := at + 1)}])
    assert view.best is not None
    assert view.best.step == best


def test_another_monitor_begins_anew_at_a_resume(tmp_path: Path) -> None:
    """mIoU ranks up to step 2, the loss from there on; the evaluation of step 3 is made twice."""
    view = View()
    fold, at = EventFold(view), 0.0
    for event in (
        start().model_copy(update={"monitor": "miou"}),
        *(Val(epoch=n, step=n, loss=n / 10, miou=n / 10, iou=[n / 10] * 3) for n in (1, 2, 3)),
        start().model_copy(update={"monitor": "loss", "resumed_from_step": 2}),
        *(Val(epoch=n, step=n, loss=2.0 + n % 4, miou=0.1, iou=[0.1] * 3) for n in (3, 4, 5)),
    ):
        fold.add([event.model_dump() | {"t": (at := at + 1)}])
    assert view.best is not None
    assert (view.best.epoch, view.best_words) == (4, "best loss 2.00 at epoch 4")


def test_line_of_two_classes_names_the_dice_of_the_object() -> None:
    """Of three classes, the mean says over how many of the foreground it is; without a background it is left out."""
    values = {"miou": 0.5, "mean_dice": 0.6, "mean_dice_foreground": 0.4821, "pixel_accuracy": 0.985, "loss": 0.1}
    two = scores_text(values, [0.99, 0.3], ["a:b / c"])
    assert two == "mIoU 0.5000 over 2 of 2 classes  mean Dice 0.6000  Dice of a:b / c 0.4821  loss 0.1000"
    three = scores_text(values, [0.99, None, 0.3], ["x", "y"])
    assert "mIoU 0.5000 over 2 of 3 classes" in three
    assert "foreground Dice 0.4821 over 1 of 2 foreground classes  pixel accuracy 0.9850" in three
    assert "foreground" not in (plain := scores_text(values, [0.99, 0.3]))
    assert "pixel accuracy 0.9850" in plain
