"""The alerts about the learning of a run, on evaluations that are worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from segapp.inference.evaluate import Evaluation
from segapp.metrics import ConfusionMatrix
from segapp.run.events import Alert, RunStart, Val
from segapp.training import validation
from segapp.training.learning import LearningWatch
from tests.support.runs import events, merged, resume, train

CLASSES = ["road", "a: b / c", "Stra\u00dfe", "box"]
START = RunStart(classes=CLASSES, num_params=1, batch_size=1, epochs=3, steps_per_epoch=3, devices=[], monitor="miou")
ALL = "0123"


@pytest.fixture
def config(tiny: dict[str, Any]) -> dict[str, Any]:
    return merged(tiny, data={"classes": CLASSES}).model_dump(mode="json")


def val(step: int, predicted: str, masks: str = ALL, miou: float | None = 0.5, loss: float | None = 1.0) -> Val:
    """An evaluation in which the classes with these numbers are predicted, and are in the masks; a to d: all wrong."""
    precision = [0.25 if str(n) in predicted else 0.0 if "abcd"[n] in predicted else None for n in range(4)]
    recall = [0.125 * (str(n) in predicted) if str(n) in masks else None for n in range(4)]
    return Val(
        epoch=7 * step,
        step=step,
        loss=0.5,
        miou=miou,
        iou=[miou] * 4,
        precision=precision,
        recall=recall,
        steps_loss=loss,
    )


def told(watch: LearningWatch, vals: list[Val], last: int | None = None) -> list[tuple[int | None, Any, Any]]:
    found = [(each.step, watch.observe(each, is_last=each.step == last)) for each in vals]
    assert all(alert.kind == "learning" and alert.step == step for step, alerts in found for alert in alerts)
    return [(step, alert.reason, alert.classes) for step, alerts in found for alert in alerts]


UNPREDICTED, ONE = "unpredicted", "one_class"


@pytest.mark.parametrize(
    ("predicted", "masks", "found"),
    [
        (["012"] * 5, [ALL] * 5, [(3, UNPREDICTED, ["box"])]),
        (["012d", "012", "012d", "012d"], [ALL] * 4, [(3, UNPREDICTED, ["box"])]),
        (["012d", "012", ALL, "012d", "012"], [ALL] * 5, []),
        (["012", "012", ALL, "012", "012", "012"], [ALL] * 6, [(6, UNPREDICTED, ["box"])]),
        (["02", "0", "02", "02"], [ALL] * 4, [(3, UNPREDICTED, ["a: b / c"]), (3, UNPREDICTED, ["box"])]),
        (["013", "013", "01", "01", "01"], [ALL] * 5, [(3, UNPREDICTED, ["Stra\u00dfe"]), (5, UNPREDICTED, ["box"])]),
        (["012"] * 4, ["012"] * 4, []),  # absent from the masks too
        (["012"] * 4, [ALL, "012", ALL, ALL], []),
        (["2"] * 4, ["013"] * 4, [(3, ONE, ["road", "a: b / c", "box"])]),
        (["1", "2", "0", "01", "01"], [ALL] * 5, [(3, ONE, CLASSES[1:])]),  # they have one cause, and one alert
        (["2"] * 4, ["2"] * 4, []),  # nothing else is there
        (["3", "3", ALL], [ALL] * 3, []),
        ([""] * 3, ["12"] * 3, [(3, UNPREDICTED, ["a: b / c"]), (3, UNPREDICTED, ["Stra\u00dfe"])]),
    ],
)
def test_class_without_predictions_is_told_once(
    config: dict[str, Any], predicted: list[str], masks: list[str], found: list[Any]
) -> None:
    watch = LearningWatch(START, config)
    vals = [val(step, *each) for step, each in enumerate(zip(predicted, masks, strict=True), start=1)]
    assert told(watch, vals) == found


def test_last_evaluation_tells_of_one_class_at_once(config: dict[str, Any]) -> None:
    assert told(LearningWatch(START, config), [val(1, ALL), val(2, "3")], last=2) == [(2, ONE, CLASSES[:3])]
    assert told(LearningWatch(START, config), [val(1, "023")], last=1) == []
    several = config | {"data": config["data"] | {"multilabel": "bits"}}
    found = told(LearningWatch(START, several), [val(step, "13") for step in (1, 2, 3)] + [val(4, "3")], last=4)
    assert found == [(3, UNPREDICTED, ["road"]), (3, UNPREDICTED, ["Stra\u00dfe"])], "one label at a time is usual"


@pytest.mark.parametrize(
    ("monitor", "scores", "losses", "at"),
    [
        ("miou", [0.4, 0.6, 0.5, 0.6, 0.3, 0.5, 0.59], [9, 9, 2.0, 1.9, 1.9, 1.85, 1.79], 7),  # 0.6 is no gain
        ("miou", [0.4, 0.6, 0.5, 0.61, 0.3, 0.5, 0.59], [9, 9, 2.0, 1.9, 1.9, 1.85, 1.79], None),  # 0.61 is one
        ("miou", [0.6, 0.5, 0.5, 0.5, 0.5, 0.5], [9, 2.0, 1.0, 1.9, 1.9, 1.81], None),  # the loss falls by 9.5 %
        ("miou", [0.6, 0.5, 0.5, 0.5, 0.5, 0.5], [9, 2.0, 3.0, 1.9, 1.9, 1.95], None),  # a peak is not where it began
        ("miou", [0.6, 0.5, None, 0.5, 0.5, None], [9, 2.0, 1.0, None, 1.9, 1.7], 6),
        ("miou", [None, 0.5, 0.5, 0.5, 0.5, 0.5], [9, 2.0, 1.0, 1.9, 1.9, 1.0], None),  # nothing to be better than
        ("miou", [0.6, 0.5, 0.5, 0.5, 0.5, 0.5], [9, None, 1.0, 1.9, 1.9, 1.0], None),
        ("miou", [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [9, 2.0, 1.5, 1.2, 1.1, 1.0], None),  # nothing to gain
        ("miou", [0.5, 0.5, 0.5, 0.5, 0.5], [9, 2.0, 1.0, 0.9, 0.8], None),
        ("loss", [0.4, 0.5, 0.45, 0.6, 0.7, 0.4], [9, 2.0, 1.0, 1.9, 1.9, 1.7], 6),
        ("loss", [0.4, 0.5, 0.45, 0.6, 0.7, 0.3], [9, 2.0, 1.0, 1.9, 1.9, 1.7], None),
    ],
)  # fmt: skip
def test_overfitting_is_a_fall_without_gain(
    config: dict[str, Any], monitor: str, scores: list[Any], losses: list[Any], at: int | None
) -> None:
    watch = LearningWatch(START.model_copy(update={"monitor": monitor}), config)
    rows = enumerate(zip(scores, losses, strict=True), start=1)
    vals = [val(step, ALL, loss=loss).model_copy(update={monitor: score}) for step, (score, loss) in rows]
    assert told(watch, vals) == ([] if at is None else [(at, "overfitting", [])])
    watch = LearningWatch(START, config)
    constant = [val(step, "1", loss=1 / step) for step in range(1, 8)]
    silent = [val(step, "012", loss=1 / step).model_copy(update={"miou": 0.0}) for step in range(1, 8)]
    assert told(LearningWatch(START, config), silent) == [(3, UNPREDICTED, ["box"])], "fewer steps would not help"
    assert told(watch, constant) == [(3, ONE, ["road", "Stra\u00dfe", "box"])], "one class everywhere is the cause"


def test_events_of_an_earlier_version_say_nothing(config: dict[str, Any]) -> None:
    old = [Val(epoch=n, step=n, loss=0.5, miou=0.5 - n / 100, iou=[0.5, None, None, None]) for n in range(1, 9)]
    assert told(LearningWatch(START.model_copy(update={"monitor": None}), config), old, last=8) == []


@pytest.mark.parametrize(
    ("step", "kept", "found"),
    [
        (2, [], [(3, UNPREDICTED, ["box"])]),  # the evaluation of step 3 is repeated
        (3, [], [(4, UNPREDICTED, ["box"])]),  # a version without such alerts wrote these
        (2, [Alert(kind="learning", reason="unpredicted", classes=["box"], message="x")], []),
        (2, [Alert(kind="learning", reason="one_class", classes=["road", "box"], message="x")], []),
        (2, [Alert(kind="learning", reason="unpredicted", classes=["road"], message="x")], [(3, UNPREDICTED, ["box"])]),
        (2, [Alert(kind="data", message="box")], [(3, UNPREDICTED, ["box"])]),
    ],
)
def test_resumed_run_repeats_no_alert(config: dict[str, Any], step: int, kept: list[Alert], found: list[Any]) -> None:
    watch = LearningWatch(START, config)
    before = [val(1, "012"), val(2, "012"), val(3, "012" if step == 3 else ALL), *kept]
    watch.replay([*({"type": "val", "step": 1},), *(event.model_dump() for event in before)], step)
    assert told(watch, [val(each, "012") for each in (step + 1, step + 2)]) == found


def test_repeated_evaluations_count_once(config: dict[str, Any]) -> None:
    """Killed after step 2, resumed from step 1, killed again after step 2, and resumed from step 2."""
    resumed = START.model_copy(update={"resumed_from_step": 1})
    before = [START, val(1, "012"), val(2, "012"), resumed, val(2, "012")]
    watch = LearningWatch(START, config)
    watch.replay([event.model_dump() for event in before], 2)
    assert told(watch, [val(3, ALL)]) == []
    watch.replay([event.model_dump() for event in before], 2)
    assert told(watch, [val(3, "012")]) == [(3, UNPREDICTED, ["box"])]


DICE, ENET = "'loss.plus=[{name: dice}]'", "loss.class_weights=enet"


@pytest.mark.parametrize(
    ("changed", "first", "moves"),
    [
        ({}, "road", [DICE, ENET, "data.sampling=class-balanced", "a larger train.epochs"]),
        ({"train": {"steps": 9}}, "bg", [DICE, ENET, "data.sampling=foreground", "a larger train.steps"]),
        (
            {"loss": {"plus": [{"name": "lovasz"}], "class_weights": [1, 2, 3, 4]}, "data": {"sampling": "foreground"}},
            "road",
            ["a larger train.epochs"],
        ),
        ({"loss": {"name": "bce"}, "data": {"multilabel": "bits"}}, "road", [DICE, "a larger train.epochs"]),
    ],
)
def test_alert_names_the_share_and_keys_that_fit(
    tiny: dict[str, Any], changed: dict[str, Any], first: str, moves: list[str]
) -> None:
    data = {"classes": [first, *CLASSES[1:]], **changed.get("data", {})}
    config = merged(tiny, **{**changed, "data": data}).model_dump(mode="json")
    watch = LearningWatch(START.model_copy(update={"classes": [first, *CLASSES[1:]]}), config)
    alerts = [watch.observe(val(step, "02"), [0.9, 0.016, 0.08, 0.004]) for step in (1, 2, 3)][-1]
    for alert, who in zip(alerts, ("'a: b / c' (1.6 % of", "'box' (0.4 % of"), strict=True):
        assert alert.message.startswith(f"{who} the validation pixels) has an IoU of 0 in 3 evaluations")
        assert alert.message.endswith(f": try {', then '.join([*moves, 'another optim.lr'])}")
        assert "\n" not in alert.message


def test_training_tells_at_its_end_and_not_again(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three classes, of which one is predicted everywhere; the fifth evaluation is the end of the resumed run."""
    confusion = ConfusionMatrix(3)
    target = torch.tensor([[[0, 0, 0, 0, 0, 0, 0, 1, 2, 2]]])
    confusion.update(torch.zeros_like(target), target)
    monkeypatch.setattr(
        validation, "evaluate", lambda *_, **__: Evaluation(confusion.scores(), 1.0, 1, confusion.matrix)
    )
    assert train(merged(base, train={"epochs": 2}), tmp_path / "run") == 0
    (alert,) = [event for event in events(tmp_path / "run", "alert") if event["kind"] == "learning"]
    assert (alert["step"], alert["reason"], alert["classes"]) == (4, ONE, ["box", "disc"])
    assert "'ground' (70 % of the validation pixels)" in alert["message"]
    assert "'box' (10 % of the validation pixels), 'disc' (20 % of the validation pixels)" in alert["message"]
    steps = [event["loss"] for event in events(tmp_path / "run", "step")]
    means = [sum(steps[:2]) / 2, sum(steps[2:]) / 2]
    assert [event["steps_loss"] for event in events(tmp_path / "run", "val")] == pytest.approx(means)
    assert resume(merged(base, train={"epochs": 5}), tmp_path / "run") == 0
    assert [event for event in events(tmp_path / "run", "alert") if event["kind"] == "learning"] == [alert]
