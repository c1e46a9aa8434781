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


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    found = {num_scenes: tmp_path_factory.mktemp(f"scenes{num_scenes}") for num_scenes in (2, 6, 60)}
    for num_scenes, root in found.items():
        draw(root / "data", num_scenes)
    return found


def test_work_of_init_grows_with_the_images(folders: dict[int, Path], capsys: pytest.CaptureFixture[str]) -> None:
    def init(root: Path) -> Counter[str]:
        return calls_of(lambda: init_folder(InitRequest(root / "data", out=root / "made.yaml")))

    _, few, many = (init(folders[num_scenes]) for num_scenes in (2, 6, 60))  # the first loads modules
    assert many["calls"] <= 10.5 * few["calls"]
    assert many["files"] <= 10.5 * few["files"]
    lists = folders[60] / "made-lists"
    assert len((lists / "val.txt").read_text().splitlines()) == 7
    assert len((lists / "train.txt").read_text().splitlines()) == 473
    capsys.readouterr()


def test_work_of_check_grows_with_the_images(folders: dict[int, Path], capsys: pytest.CaptureFixture[str]) -> None:
    def check(root: Path) -> Counter[str]:
        init_folder(InitRequest(root / "data", out=root / "again.yaml"))
        config = load_config(str(root / "again.yaml"))
        return calls_of(lambda: check_data(config, as_json=True))

    _, few, many = (check(folders[num_scenes]) for num_scenes in (2, 6, 60))
    assert many["calls"] <= 10.5 * few["calls"]
    assert many["files"] <= 10.5 * few["files"]
    assert many["files"] > 4 * 473  # an image and a mask, and the header of either, for ranges or for sizes
    capsys.readouterr()
