"""Every shipped config runs 10 steps on synthetic data in its layout, with smaller sizes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from segapp.config import RunConfig, load_config
from tests.support import ROOT
from tests.support.runs import draw_scene, events, train

CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
# ResNet-50 and transformers: cityscapes and tests/train/test_modern_networks.py stand for them in the default suite.
HEAVY = {"cityscapes-pspnet", "ade20k", "voc", "ade20k-segformer-b2", "cityscapes-eomt-vits"}
TEACHER = ROOT / "configs" / "camvid.yaml"
NUM_STEPS = 10
SIZE = 48, 64


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_recipe_header_cites_published_result_and_source(path: Path) -> None:
    header = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("#"))
    for word in ("Data:", "Launch:", "Override:", "Published:", "Source:"):
        assert re.search(rf"^# {word}\s+\S", header, re.MULTILINE), f"{path.name} has no line '# {word} ...'"
    published = header.partition("Published:")[2].partition("Source:")[0]
    assert re.search(r"\d\d\.\d+ % mIoU|^\s+nothing, ", published), published


def scenes(count: int, ids: tuple[int, ...], seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return images, and masks with these three values in the files."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(count):
        image, mask = draw_scene(rng, *SIZE)
        mask[mask == 255] = 0
        drawn.append((image, np.array(ids, np.uint8)[mask]))
    return drawn


def write(path: Path, picture: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), picture)


def draw_cityscapes(root: Path, split: str, count: int) -> None:
    for number, (image, mask) in enumerate(scenes(count, (7, 11, 26), len(split))):
        stem = f"town_{number:06}_000019"
        write(root / "leftImg8bit" / split / "town" / f"{stem}_leftImg8bit.png", image)
        write(root / "gtFine" / split / "town" / f"{stem}_gtFine_labelIds.png", mask)


def draw_camvid(root: Path, split: str, count: int) -> None:
    for number, (image, mask) in enumerate(scenes(count, (3, 1, 8), len(split))):
        write(root / split / f"{number:02}.png", image)
        write(root / f"{split}annot" / f"{number:02}.png", mask)


def draw_voc(root: Path, split: str, count: int) -> None:
    names = []
    for number, (image, mask) in enumerate(scenes(count, (0, 7, 15), len(split))):
        names.append(f"{split}_{number:06}")
        write(root / "VOCdevkit/VOC2012/JPEGImages" / f"{names[-1]}.jpg", image)
        write(root / "VOCdevkit/VOC2012/SegmentationClass" / f"{names[-1]}.png", mask)
    listed = root / "VOCdevkit/VOC2012/ImageSets/Segmentation" / f"{split}.txt"
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.write_text("\n".join(names) + "\n")


def draw_ade20k(root: Path, split: str, count: int) -> None:
    folder = {"train": "training", "val": "validation"}[split]
    for number, (image, mask) in enumerate(scenes(count, (1, 2, 150), len(split))):
        write(root / "images" / folder / f"ADE_{split}_{number:08}.jpg", image)
        write(root / "annotations" / folder / f"ADE_{split}_{number:08}.png", mask)


def draw_folder(root: Path, split: str, count: int) -> None:
    for number, (image, mask) in enumerate(scenes(count, (0, 1, 1), len(split))):
        write(root / "images" / split / f"{number:02}.png", image)
        write(root / "masks" / split / f"{number:02}.png", mask)


DRAW: dict[str, Callable[[Path, str, int], None]] = {
    "cityscapes": draw_cityscapes,
    "camvid": draw_camvid,
    "voc": draw_voc,
    "ade20k": draw_ade20k,
    "folder": draw_folder,
}


def small(path: Path, root: Path, *more: str) -> RunConfig:
    """Return the config with smaller sizes and other paths."""
    overrides = [
        f"data.root={root}", "data.crop_px=[32,32]", "data.workers=0", "train.epochs=2", "train.batch_size=2",
        "model.weights_backbone=null", "eval.every_epochs=2", "checkpoint.every_epochs=null", "log.every_steps=1",
    ]  # fmt: skip
    return load_config(path, [*overrides, *more])


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem in HEAVY else [], id=path.stem) for path in CONFIGS],
)
def test_every_recipe_trains_ten_steps(path: Path, tmp_path: Path) -> None:
    config = small(path, tmp_path / "data")
    if config.distill is not None:
        config = small(path, tmp_path / "data", f"distill.teacher={tmp_path / 'teacher'}")
    for split, count in (("train", 10), ("val", 2)):
        DRAW[config.data.format](tmp_path / "data", split, count)
    if config.distill is not None:  # trained by the recipe in its header
        assert train(small(TEACHER, tmp_path / "data", "train.epochs=1"), tmp_path / "teacher") == 0
    assert train(config, tmp_path / "run") == 0
    steps = events(tmp_path / "run", "step")
    assert [step["step"] for step in steps] == list(range(1, NUM_STEPS + 1))
    assert all(math.isfinite(step["loss"]) and step["grad_norm"] > 0 for step in steps)
    assert not events(tmp_path / "run", "alert")
    (start,) = events(tmp_path / "run", "run_start")
    (val,) = events(tmp_path / "run", "val")
    assert len(val["iou"]) == len(start["classes"])
    assert val["miou"] is not None
    assert (tmp_path / "run" / "checkpoints" / "best.pt").is_file()
    assert events(tmp_path / "run", "run_end")[-1]["status"] == "finished"
