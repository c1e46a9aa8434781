"""What is said before the first step: a table of facts and alerts, and whole runs that say it once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.commands.check import check_data
from segapp.config import validate_config
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.targets import ClassFrequencies, Targets
from segapp.errors import ConfigError, DataError
from segapp.session.request import ImageLimit
from segapp.session.start_checks import changed_length_note, check_crop, start_alerts, start_notes
from tests.support.runs import events, merged, train

CLASSES = ["ground", "box", "disc"]
SCHEME = class_scheme("folder", classes=CLASSES)


def counted(split: str, pixels: tuple[int, ...], ignored_px: int = 0) -> Targets:
    frequencies = ClassFrequencies(pixels, pixels, pixels, ignored_px, 4, ())
    return Targets(split, frequencies, sum(pixels), 4, 4)


SOUND = counted("train", (50, 20, 30)), counted("val", (9, 1, 1))


def said(
    tiny: dict[str, Any], num_batches: int = 100, sets: tuple[Targets, Targets] = SOUND, **sections: Any
) -> list[tuple[str, str]]:
    """Returns kind and message of the alerts of 201 images of 48 x 64 px with some keys changed."""
    config = merged(merged(tiny, schedule={"warmup_steps": 0}).model_dump(mode="json"), **sections)
    sizes: dict[str, Any] = {"largest_px": (48, 64), "num_images": 201, "num_batches": num_batches}
    return [(alert.kind, alert.message) for alert in start_alerts(config, SCHEME, *sets, **sizes, device_type="cpu")]


@pytest.mark.parametrize(
    ("sections", "kind", "words"),
    [
        ({"schedule": {"warmup_steps": 60}}, None, ""),
        ({"schedule": {"warmup_steps": 61}}, "schedule", "for 20% of the 300 steps of this run: set it to 5%,"),
        ({"schedule": {"warmup_steps": "20%"}}, None, ""),
        ({"schedule": {"warmup_steps": "20.4%"}}, "schedule", "warmup_steps = 20.4%: the learning rate rises"),
        ({"schedule": {"warmup_steps": 45}, "train": {"steps": 3}}, "schedule", "for all of the 3 steps of this run"),
        ({"data": {"crop_px": [96, 128]}}, None, ""),  # data.scale reaches 2
        ({"data": {"crop_px": [96, 160]}}, "data", "(at most 48 x 64 px, enlarged by at most 2 (data.scale))"),
        ({"data": {"crop_px": [96, 160], "resize_px": [90, 90]}}, None, ""),
        ({"data": {"crop_px": [64, 64], "scale": [1, 1]}}, "data", "every training image (at most 48 x 64 px)"),
        ({"data": {"crop_px": [64, 64], "scale": [1, 1], "format": "m:f"}}, None, ""),  # not all images are read
        ({"data": {"crop_px": [96, 160], "resize_px": [40, 60], "format": "m:f"}}, "data", "at most 40 x 60 px, enl"),
        ({"data": {"val_split": "test"}}, "data", "data.val_split = test: the best checkpoint is chosen on this split"),
        ({"data": {"val_split": "latest"}}, None, ""),
        ({"data": {"val_split": "test", "crop_px": [96, 160]}}, "data", "data."),
        ({"data": {"val_split": "test_2017"}}, "data", "segapp eval --split test_2017"),
        ({"train": {"precision": "fp16"}}, "precision", "train.precision = fp16 on the CPU"),
        ({"train": {"precision": "amp-bf16"}}, None, ""),
        ({"train": {"batch_size": 201}}, None, ""),
        ({"train": {"batch_size": 202}}, "batch", "there are only 201 training images, so each step has all of them"),
        ({"train": {"accumulate": 100}}, None, ""),
        ({"train": {"accumulate": 101}}, "batch", "only 100 batches of 2 of the 201 training images, so each step has"),
    ],
)
def test_alerts_of_a_config(tiny: dict[str, Any], sections: dict[str, Any], kind: str | None, words: str) -> None:
    found = said(tiny, **sections)
    num_alerts = len(sections["data"]) if words == "data." else 1
    assert [each for each, _ in found] == ([] if kind is None else [kind] * num_alerts)
    assert all(words in message for _, message in found)


class Network:
    """Takes multiples of 32 px, and at least 64."""

    def suitable_size(self, *sides: int) -> tuple[int, ...]:
        return tuple(max(64, -(-side // 32) * 32) for side in sides)


@pytest.mark.parametrize(
    ("crop_px", "data", "words"),
    [  # images of 40 x 70 px; enlarged by 1.5, 60 x 105
        ([64, 256], {}, None),  # of [64, 128], twice the pixels
        ([64, 288], {}, "[64, 288]: at least 65% of every crop is padding, because the training images are smaller"),
        ([64, 288], {}, "(at most 40 x 70 px, enlarged by at most 1.5 (data.scale)): use [64, 128]"),
        ([6016, 6016], {}, ": at least 99% of every crop"),
        ([32, 6016], {}, "use [32, 128]"),  # a side that is smaller already stays
        ([64, 288], {"scale": [0.5, 2.1]}, None),
        ([64, 288], {"resize_px": [50, 100]}, None),
        ([64, 288], {"resize_px": [50, 80], "scale": [1, 1]}, "(at most 50 x 80 px): use [64, 96]"),
        ([64, 288], {"format": "module:factory"}, None),
        ([64, 288], {"augment": [{"RandomCrop": {"height": 64, "width": 288}}]}, None),
    ],
)
def test_crop_that_is_mostly_padding_is_refused(tiny, crop_px, data, words):
    scale = {} if "augment" in data else {"scale": [0.5, 1.5]}
    section = merged(tiny, data={"crop_px": crop_px, **scale, **data}).data
    if words is None:
        check_crop(section, (40, 70), Network())
        return
    with pytest.raises(ConfigError) as caught:
        check_crop(section, (40, 70), Network())
    assert words in str(caught.value)
    cured = section.model_copy(update={"crop_px": tuple(map(int, str(caught.value).split("[")[-1][:-1].split(",")))})
    check_crop(cured, (40, 70), Network())


def test_a_crop_of_padding_is_refused_at_the_start_of_a_run(tiny, tmp_path):
    config = merged(tiny, data={"crop_px": [6016, 6016]}, train={"steps": 1})
    with pytest.raises(ConfigError, match=r"at most 48 x 64 px.*: use \[96, 128\]"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_trial_knows_the_size_of_the_images_that_it_leaves_out(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segapp.session.build.image_sizes_of", lambda *_: [(48, 64), (40, 300), (300, 40)])
    config = merged(tiny, data={"crop_px": [128, 160]}, train={"steps": 1})
    assert train(config, tmp_path / "run", limit=ImageLimit(num_batches=1, num_val=1)) == 0
    assert [each["message"] for each in events(tmp_path / "run", "alert") if "crop_px" in each["message"]] == []


WSD = {"name": "wsd", "options": {"decay_ratio": 0.5}}
POLY = {"name": "poly", "power": 1.0}


@pytest.mark.parametrize(
    ("schedule", "step", "old", "new", "words"),
    [  # 10 steps an epoch and lr 0.1; worked by hand
        (POLY, 9, {"epochs": 2}, {"epochs": 2}, None),
        ({"name": "constant"}, 9, {"epochs": 2}, {"epochs": 4}, None),
        (
            POLY,
            20,
            {"epochs": 2},
            {"steps": 40},
            "step 21 is 0.05, under the old length the run ended at 0.005: put train.epochs=2 train.steps=null back; "
            "a run with schedule.name=wsd can be made longer without this change",
        ),
        (POLY, 10, {"steps": 40}, {"steps": 20}, "train.steps=20: the learning rate of step 11 is 0.05, under the old"),
        (WSD, 10, {"epochs": 2}, {"epochs": 4}, None),  # the first step of the decay has the stable rate
        (
            WSD,
            15,
            {"epochs": 2},
            {"epochs": 4},
            "train.epochs=4: the learning rate of step 16 is 0.1, under the old length it would be 0.05: put "
            "train.epochs=2 back, or, since the decay began after step 10, resume from a checkpoint up to that step",
        ),
        (WSD, 9, {"epochs": 4}, {"epochs": 2}, None),
    ],
)
def test_another_length_says_both_learning_rates(
    tiny: dict[str, Any],
    schedule: dict[str, Any],
    step: int,
    old: dict[str, Any],
    new: dict[str, Any],
    words: str | None,
) -> None:
    config = merged(tiny, schedule={"warmup_steps": 0, **schedule}, optim={"lr": 0.1}, train={"accumulate": 1, **new})
    found = changed_length_note({"steps": None, **old}, config, num_batches=10, step=step)
    assert found is None if words is None else words in (found or "")


def test_another_length_says_the_rates_that_steps_have(tiny: dict[str, Any]) -> None:
    config = merged(tiny, schedule={"warmup_steps": 0, **POLY}, optim={"lr": 0.1}, train={"accumulate": 1, "epochs": 4})
    found = changed_length_note({"epochs": 2}, config, num_batches=10, step=10, lr_factor=0.5)
    assert "step 11 is 0.0375, under the old length it would be 0.025:" in (found or "")
    assert said(tiny, num_batches=0, schedule={"warmup_steps": 1000}) == [], "the length of a trial says nothing"


def test_alerts_of_the_masks(tiny: dict[str, Any]) -> None:
    def of(train_set: Targets, val_set: Targets, monitor: str = "miou") -> tuple[list[str], list[str]]:
        alerts = said(tiny, sets=(train_set, val_set), checkpoint={"monitor": monitor})
        assert {kind for kind, _ in alerts} <= {"classes"}
        return [message for _, message in alerts], start_notes(SCHEME, (train_set, val_set))

    full = counted("val", (1, 1, 1))
    assert of(counted("train", (9, 0, 0)), full)[0] == [
        "classes without a pixel in the 4 masks of split train: box, disc; the model cannot learn them"
    ]
    assert of(counted("train", (9, 9, 0)), counted("val", (9, 0, 0)))[0] == [
        "class without a pixel in the 4 masks of split train: disc; the model cannot learn it",
        "in the 4 masks of split val only ground has pixels: the scores of the other classes are meaningless",
    ]
    assert of(full, counted("val", (9, 1, 0))) == ([], [])
    assert of(full, counted("val", (9, 1, 0)), "dice:box") == ([], [])
    assert of(full, counted("val", (9, 1, 0)), "dice:disc")[0] == [
        "checkpoint.monitor = dice:disc: no pixel of the 4 masks of split val is disc: monitor another score"
    ]
    assert of(counted("train", (90, 1, 1), 8), full) == (
        [],
        ["8.0% of the pixels of the 4 masks of split train are ignored: value 255 (data.ignore_index)"],
    )
    assert of(counted("train", (97, 1, 1), 1), full) == ([], [])


def test_train_refuses_black_and_white_masks(tiny: dict[str, Any], tiny_root: Path, tmp_path: Path) -> None:
    """A set of two classes whose masks hold 0 and 255."""
    root = tmp_path / "set"
    shutil.copytree(tiny_root, root)
    for path in (root / "masks").rglob("*.png"):
        cv2.imwrite(str(path), np.where(cv2.imread(str(path), cv2.IMREAD_UNCHANGED) == 1, 255, 0))
    raw = {**tiny["data"], "root": str(root), "classes": ["background", "road"]}
    config = validate_config({**tiny, "data": raw})
    with pytest.raises(DataError, match=r"set data\.label_map: \{255: 1\} and data\.ignore_index: -1") as refused:
        train(config, tmp_path / "run")
    assert refused.value.exit_code == 3
    assert not (tmp_path / "run").exists()
    mended = {**tiny, "data": {**raw, "label_map": {255: 1}, "ignore_index": -1}}
    assert train(merged(mended, train={"epochs": 1, "batch_size": 5}), tmp_path / "mended") == 0


def test_training_on_the_validation_images_is_refused(
    tiny: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = merged(tiny, data={"val_split": "train"})
    with pytest.raises(DataError, match=r"validation images are training images too \(.*\.png.*images of their own"):
        train(config, tmp_path / "run")
    assert check_data(config, as_json=False) == 3
    assert "training images too" in " ".join(capsys.readouterr().out.split())
