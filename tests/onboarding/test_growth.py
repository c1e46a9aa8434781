"""The work of `init` and `check` grows with the number of images: calls and opened files are counted, not seconds."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import cv2
import numpy as np
import pytest

from segapp.commands.check import check_data
from segapp.config import load_config
from segapp.onboarding.init import InitRequest, init_folder


def draw(root: Path, num_scenes: int) -> None:
    """Draw pairs in scenes of 7, 8, 9, 7, ... images of odd sizes, and a list that names every scene's folder."""
    rng = np.random.default_rng(num_scenes)
    scenes = [f"street{3 * number:05}" for number in range(num_scenes)]
    for number, scene in enumerate(scenes):
        for part in ("images", "masks"):
            (root / part / scene).mkdir(parents=True)
        for frame in range(7 + number % 3):
            name, size = f"{scene}/{scene}_{5 * frame:03}.png", (33 + frame, 40)
            few = rng.integers(0, 255, (4, 4, 3), np.uint8)
            cv2.imwrite(str(root / "images" / name), cv2.resize(few, size[::-1], interpolation=cv2.INTER_CUBIC))
            mask = np.zeros(size, np.uint8)
            mask[3 : 9 + frame, 5:20] = 1 + number % 2
            cv2.imwrite(str(root / "masks" / name), mask)
    for split, own in (("train", scenes[1:]), ("val", scenes[:1])):
        (root / f"{split}.txt").write_text("\n".join(own) + "\n")


def calls_of(work: Callable[[], object]) -> Counter[str]:
    """Return the number of all calls of functions, in all threads, and of opened files, while some work is done."""
    counts: Counter[str] = Counter()

    def count(_frame: FrameType, event: str, function: object) -> None:
        if event in ("call", "c_call"):
            counts["calls"] += 1
            counts["files"] += function is open

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return counts


def test_work_of_init_and_check_grows_with_the_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    counts: dict[str, list[Counter[str]]] = {"init": [], "check": []}
    for num_scenes in (2, 3, 18):  # the first loads modules
        draw(tmp_path / f"{num_scenes}", num_scenes)
        request = InitRequest(tmp_path / f"{num_scenes}", out=tmp_path / f"made{num_scenes}.yaml")
        counts["init"].append(calls_of(lambda: init_folder(request, as_json=False)))  # noqa: B023  # called at once
        config = load_config(str(request.out))
        counts["check"].append(calls_of(lambda: check_data(config, as_json=True)))  # noqa: B023
    for _, few, many in counts.values():
        assert many["calls"] <= 6.3 * few["calls"]
        assert many["files"] <= 6.3 * few["files"]
    assert counts["check"][2]["files"] > 4 * 137  # an image and a mask, and the header of either, for ranges or sizes
    lists = (tmp_path / f"made18-lists/{split}.txt" for split in ("train", "val"))
    assert [len(path.read_text().splitlines()) for path in lists] == [137, 7]
    capsys.readouterr()
