"""Lists of transforms that do not fit the data are refused by `segapp check`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.commands.check import check_data
from segapp.config import RunConfig, validate_config
from segapp.errors import ConfigError
from tests.support.runs import draw_scene


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
    return {"name": "data", "data": data}


def with_data(config: dict[str, Any], **data: Any) -> RunConfig:
    return validate_config({**config, "data": {**config["data"], **data}})


def test_unusable_lists_are_errors_of_check(config: dict[str, Any]) -> None:
    wrong = with_data(config, augment=["ScaledCrop", {"Transpose": {"p": 0.1}}])
    with pytest.raises(ConfigError, match=r"data.augment\[1\]: Transpose can give images of 40 x 32 px"):
        check_data(wrong, as_json=False)
