"""From a folder to the first training step: what `segapp init` says of each layout, and a person's whole path.

Programs are forked from one that has imported torch; add its import, 3 to 6 s, to each command.

    pytest tests/benchmarks/test_first_step.py -m benchmark -n 0 -s
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import drawn_annotations
from tests.support.drawn_folders import draw as draw_folder
from tests.support.layouts import ROOMS
from tests.support.programs import segapp
from tests.support.runs import events

pytestmark = pytest.mark.benchmark

SMALL = (
    "model.library=torchvision", "model.name=lraspp", "model.encoder=mobilenet_v3_small", "model.weights=null",
    "model.weights_backbone=null", "model.options={}", "data.crop_px=[32,32]", "train.batch_size=2", "train.epochs=1",
    "log.every_steps=1", "log.tensorboard=false",
)  # fmt: skip
"""A network that is quick on a CPU; everything about the data is as init wrote it."""

CONVERTERS: dict[str, Callable[[Path], None]] = {
    "COCO": lambda root: drawn_annotations.coco(root, lambda ring: [drawn_annotations.flat(ring)]),
    "YOLO": drawn_annotations.yolo,
    "labelme": drawn_annotations.labelme,
    "Label Studio": drawn_annotations.label_studio,
    "CVAT": drawn_annotations.cvat,
    "Supervisely": drawn_annotations.supervisely,
}


def test_each_layout_to_its_first_step(tmp_path: Path) -> None:
    drawings = {**{layout.name: layout.draw for layout in ROOMS["usual"]}, **CONVERTERS}
    for name, draw in drawings.items():
        work = tmp_path / "".join(letter if letter.isalnum() else "-" for letter in name)
        work.mkdir()
        draw(work / "data")
        began = time.time()
        init = segapp("init", "data", "--out", "own.yaml", cwd=work)
        assert init.returncode == 0, f"{name}: {init.stderr}"
        init_s = time.time() - began
        trained = segapp("train", "--plain", "--config", "own.yaml", "--run", "run", *SMALL, cwd=work)
        assert trained.returncode == 0, f"{name}: {trained.stderr}"
        first = events(work / "run", "step")[0]["t"] - began
        print(f"{name:32} init {init_s:4.1f} s, first step {first:4.1f} s: {init.stdout.splitlines()[0]}", flush=True)


def test_path_of_a_person_with_unsplit_images_and_masks(tmp_path: Path) -> None:
    names = [f"{number:04}" for number in range(10)]
    draw_folder(tmp_path / "photos", names, "images/{}.jpg", "masks/{}_mask.png")
    total_s = 0.0
    for words in (
        ("init", "photos"),
        ("check", "--config", "photos.yaml"),
        ("plan", "--config", "photos.yaml", "--gpus", "2x8GiB", *SMALL),
        ("train", "--plain", "--config", "photos.yaml", "--run", "runs/photos", *SMALL),
        ("eval", "runs/photos"),
        ("predict", "runs/photos", "photos/images", "--out", "out"),
    ):
        began = time.time()
        done = segapp(*words, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        total_s += time.time() - began
        print(f"{time.time() - began:5.1f} s  segapp {' '.join(word for word in words if word not in SMALL)}")
    print(f"{total_s:5.1f} s  in all")
    assert len(list((tmp_path / "out").rglob("*.png"))) >= 10
