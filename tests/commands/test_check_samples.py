"""Augmented samples in `segapp check --html`, and lists of transforms that do not fit the data."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.commands.check import check_data
from segapp.config import RunConfig, validate_config
from segapp.errors import ConfigError
from tests.support.runs import draw_scene

PALETTE = [[0, 0, 0], [255, 0, 0], [0, 0, 255]]


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    for split, count in (("train", 4), ("val", 2)):
        for kind in ("images", "masks"):
            (tmp_path / kind / split).mkdir(parents=True)
        for i in range(count):
            image, mask = draw_scene(rng, 48, 64)
            cv2.imwrite(str(tmp_path / "images" / split / f"{i:02}.png"), image)
            cv2.imwrite(str(tmp_path / "masks" / split / f"{i:02}.png"), mask)
    data = {"format": "folder", "root": str(tmp_path), "classes": ["ground", "box", "disc"], "crop_px": [32, 40]}
    return {"name": "data", "data": {**data, "palette": PALETTE}}


def with_data(config: dict[str, Any], **data: Any) -> RunConfig:
    return validate_config({**config, "data": {**config["data"], **data}})


def test_page_shows_augmented_samples_with_masks(config: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    flipped = with_data(config, augment=["ScaledCrop", {"VerticalFlip": {"p": 1}}], sampling="class-balanced")
    assert check_data(flipped, as_json=False, html_file=page) == 0
    text = page.read_text()
    captions = re.findall(r"<figcaption>\S*0\d\.png, aimed at (\w+)</figcaption>", text)
    assert sorted(set(captions)) == ["box", "disc", "ground"]
    found = re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", text)
    assert len(found) == len(captions) == 4
    for encoded, aim in zip(found, captions, strict=True):
        picture = cv2.imdecode(np.frombuffer(base64.b64decode(encoded), np.uint8), cv2.IMREAD_COLOR)[..., ::-1]
        assert picture.shape == (32, 40, 3)
        color = np.array(PALETTE[["ground", "box", "disc"].index(aim)])
        assert (np.abs(picture.astype(int) - color).max(-1) == 0).any()


def test_page_without_options_shows_the_built_in_recipe(config: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert check_data(with_data(config), as_json=False, html_file=page) == 0
    assert page.read_text().count("data:image/jpeg;base64,") == 4


def test_unusable_lists_are_errors_of_check(config: dict[str, Any]) -> None:
    wrong = with_data(config, augment=["ScaledCrop", {"Transpose": {"p": 0.1}}])
    with pytest.raises(ConfigError, match=r"data.augment\[1\]: Transpose can give images of 40 x 32 px"):
        check_data(wrong, as_json=False, html_file=None)
