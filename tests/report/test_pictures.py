"""Pictures of evaluated images and the key figures of runs, by hand."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

from segapp.datasets.layouts.schemes import ClassScheme
from segapp.report.compare import compare_runs, print_comparison
from segapp.report.images import WRONG_RGB, pictures_of
from segapp.run.events import DeviceMemory, Memory, Step, Val
from segapp.view.runs import summarize
from tests.support.recorded_runs import RecordedRun

ROAD, SKY = (200, 40, 40), (20, 60, 220)


def decoded(address: str, at: tuple[int, int]) -> NDArray[Any]:
    data = np.frombuffer(base64.b64decode(address.split(",")[1]), np.uint8)
    return cv2.imdecode(data, cv2.IMREAD_COLOR)[at][::-1].astype(int)


def test_pictures_show_target_prediction_and_wrong_pixels() -> None:
    """Quarters: ignored, right, wrong, right; 1440 x 320 px, shown at half the size."""
    image = np.full((320, 1440, 3), 100, np.uint8)
    target, labels = np.zeros((320, 1440), np.uint8), np.ones((320, 1440), np.uint8)
    target[:, :360], target[:, 360:720], target[:, 720:1080] = 255, 1, 0
    target[:, 1080:] = labels[:, 1080:] = 0
    found = pictures_of(image, target, labels, ClassScheme(("road", "sky"), (ROAD, SKY)))
    grey = (100 // 3 + 160,) * 3
    expected: dict[str, list[Any]] = {
        "image": [(100,) * 3] * 4,
        "target": [(110,) * 3, SKY, ROAD, ROAD],
        "prediction": [SKY, SKY, SKY, ROAD],
        "wrong pixels": [grey, grey, WRONG_RGB, grey],
    }
    assert list(found) == list(expected)
    for name, colors in expected.items():
        for i, color in enumerate(colors):
            np.testing.assert_allclose(decoded(found[name], (80, 88 + 180 * i)), color, atol=4)
        with pytest.raises(IndexError):
            decoded(found[name], (160, 0))
        assert decoded(found[name], (159, 719)).shape == (3,)
    assert decoded(found["target"], (80, 92)).tolist() == [190] * 3  # the next of the stripes of ignored pixels


def test_prediction_has_the_mean_color_of_its_classes() -> None:
    scheme = ClassScheme(("road", "sky"), (ROAD, SKY), ignore_index=-1, multilabel="bits")
    labels = np.zeros((32, 64), np.int32)
    labels[:, 32:] = 0b11
    found = pictures_of(np.full((32, 64, 3), 100, np.uint8), labels, labels, scheme)["prediction"]
    np.testing.assert_allclose(decoded(found, (16, 8)), (0,) * 3)
    np.testing.assert_allclose(decoded(found, (16, 56)), (110, 50, 130))


def test_key_figures_are_those_of_the_best_evaluation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RecordedRun(tmp_path / "run", classes=["a", "b"], num_devices=2, batch_size=8, gpu0_bsz=3)
    for epoch, miou in enumerate((0.25, 0.75, 0.5), start=1):
        step = Step(epoch=epoch, step=epoch, loss=2.0, lr=0.1, images_per_s=12.5, split=[3, 5])
        run.write(step, 10.0)
        run.write(Memory(devices=[DeviceMemory(device="cuda:0", peak_mib=mib) for mib in (1024.0, 2048.0 * epoch)]))
        val = Val(epoch=epoch, step=epoch, loss=0.1 * epoch, miou=miou, iou=[miou, None], mean_dice=miou + 0.1)
        run.write(val, 20.0)
    run.end()
    summary = summarize(run.folder.path)
    assert (summary.folder.name, summary.state) == ("run", "finished")
    expected = {
        "best_miou": 0.75, "num_scored": 1, "num_evaluations": 3,
        "best_epoch": 2, "last_loss": 2.0,
        "last_val_loss": pytest.approx(0.3), "epochs": 3, "steps": 3, "images_per_s": 12.5,
        "duration_s": pytest.approx(90.1), "num_params": 11_200_000, "peak_mib": 6144.0, "iou": {"a": 0.75, "b": None},
        "last_miou": 0.5, "last_num_scored": 1, "monitor": "miou", "best_score": 0.75, "best_over": [1, 2],
        "best_num_scored": 1, "num_classes": 2,
    }  # fmt: skip
    assert {**summary.figures, "scores": {}} == expected | {"scores": {}}
    scores = summary.figures["scores"]
    assert (scores["mean_dice"], scores["loss"], scores["mean_recall"]) == (0.85, 0.2, None)
    row = {"name": "run", "state": summary.state, **summary.figures}
    print_comparison({"runs": [row], "differences": {"optim.lr": [0.1]}})
    lines = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    assert {
        "state finished",
        "best mIoU 75.00 % (1/2)",
        "mean Dice 85.00 %",
        "at epoch 2 of 3",
        "loss of the last epoch 2.0000",
    } <= lines
    assert {"validation loss 0.3000", "images/s 12.5", "time 1m30s", "parameters 11,200,000", "peak GiB 6.0"} <= lines
    assert {"differences run", "optim.lr 0.1"} <= lines


def test_best_value_of_each_class_is_bold_unless_all_are_equal(tmp_path: Path) -> None:
    ious = {"one": [0.75, None, 0.1, 0.2], "two": [0.5, 0.2, 0.1, 0.0], "three": [0.75, 0.1, 0.1, None]}
    for name, iou in ious.items():
        run = RecordedRun(tmp_path / name, classes=["a", "b", "c", "d", "e"])
        run.write(Val(epoch=1, step=1, loss=0.1, miou=0.5, iou=[*iou, None]))
    (tmp_path / "sweep.json").write_text("{}")  # whose runs are in the order of their names
    found = compare_runs([str(tmp_path)], tmp_path / "page.html")
    assert found["differences"] == {}
    assert set(found["common_classes"]) == {"a", "c"}
    assert found["common_miou"] == pytest.approx([0.425, 0.425, 0.3])
    page = (tmp_path / "page.html").read_text()
    cell = r"<td class=n>(.*?)</td>"
    assert re.findall(rf"<tr><td>([a-e])</td>{cell}{cell}{cell}</tr>", page) == [
        ("a", "<b>75.0 %</b>", "<b>75.0 %</b>", "50.0 %"),
        ("b", "-", "10.0 %", "<b>20.0 %</b>"),
        ("c", "10.0 %", "10.0 %", "10.0 %"),
        ("d", "<b>20.0 %</b>", "-", "0.0 %"),
    ]
    assert "only the name" in page
