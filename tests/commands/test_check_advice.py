"""The advice of `segapp check` appears exactly when masks and config call for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.commands import check
from segapp.config import validate_config
from segapp.datasets.targets import RULES

CLASSES = ["background", "crack", "stain"]
DICE = {"plus": [{"name": "dice"}]}


def advice(
    tmp_path: Path, shares: dict[int, int], capsys: pytest.CaptureFixture[str], num: int = 3, **keys: Any
) -> list[str]:
    """Return the advice for images of 20 x 50 px; the last mask has these pixels by value, the others none."""
    for kind, split in (("images", "train"), ("images", "val"), ("masks", "train"), ("masks", "val")):
        (tmp_path / kind / split).mkdir(parents=True)
        for index in range(num if split == "train" else 2):
            mask = np.full(1000, 255, np.uint8)
            if index == num - 1 or split == "val":
                mask[: sum(shares.values())] = np.repeat(list(shares), list(shares.values()))
            noise = np.random.default_rng([index, len(split)]).integers(0, 255, (20, 50, 3), dtype=np.uint8)
            cv2.imwrite(
                str(tmp_path / kind / split / f"{index}.png"), noise if kind == "images" else mask.reshape(20, 50)
            )
    data = {"format": "folder", "root": str(tmp_path), "classes": CLASSES, "crop_px": [20, 50], **keys.pop("data", {})}
    check.check_data(validate_config({"name": "x", "data": data, "loss": DICE, **keys}), as_json=True)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert [*report["class_weights"]] == [*RULES][: 3 * (num > 0)]
    return list(report["advice"])


SOME = {"model": {"weights_backbone": "DEFAULT"}}


@pytest.mark.parametrize(
    ("shares", "keys", "words"),
    [
        ({0: 500, 1: 490, 2: 10}, SOME, []),  # half of the pixels and 1 % are the limits
        ({0: 501, 1: 489, 2: 10}, SOME, ["train: 50% of the pixels are background, whose IoU is a part of mIoU"]),
        ({0: 501, 1: 490, 2: 9}, SOME, ["train: stain: less than 1% of the pixels", "monitor=mean_dice_foreground"]),
        ({0: 501, 1: 499}, {**SOME, "data": {"classes": CLASSES[:2]}}, ["checkpoint.monitor='dice:crack'"]),
        ({0: 501, 1: 489, 2: 10}, {**SOME, "checkpoint": {"monitor": "dice:stain"}}, []),
        ({0: 501, 1: 489, 2: 10}, {**SOME, "data": {"classes": ["road", "crack", "stain"]}}, []),
        ({0: 499, 1: 492, 2: 9}, SOME, ["set loss.class_weights=enet, or data.sampling=foreground"]),
        ({0: 9, 1: 982, 2: 9}, {**SOME, "data": {"classes": ["road", *"ab"]}}, ["road, b: less than 1%"]),
        ({0: 499, 1: 492, 2: 9}, {**SOME, "loss": {**DICE, "class_weights": "enet"}}, []),
        ({0: 499, 1: 492, 2: 9}, {**SOME, "data": {"sampling": "class-balanced"}}, []),
        ({0: 499, 1: 492, 2: 9}, {**SOME, "loss": {"name": "ce"}}, []),  # a finding instead
        ({1: 492, 2: 508}, SOME, []),
    ],
)
def test_advice_for_masks(tmp_path, capsys, shares, keys, words):
    found = advice(tmp_path, shares, capsys, **keys)
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("num", "model", "is_told"),
    [
        (0, {}, False),
        (3, {}, True),
        (4, {}, False),
        (3, {"weights_backbone": "DEFAULT"}, False),
        (3, {"weights": "a.pth"}, False),
    ],
)
def test_few_images_without_weights_are_told(tmp_path, capsys, monkeypatch, num, model, is_told):
    monkeypatch.setattr(check, "FEW_IMAGES", 4)
    found = advice(tmp_path, {0: 400, 1: 400, 2: 200}, capsys, num, model=model)
    told = "train: 3 images, and a model with random weights: set model.weights_backbone"
    assert found == [told] * is_told
