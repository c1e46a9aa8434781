"""Twenty steps of every recipe on drawn data in float64, and the curves stored for them in tests/e2e/golden/.

python -m tests.support.golden_runs --write [RECIPE ...]   makes all curves, or some, again

A curve has the loss, the norm of the gradients and the learning rate of every step, and the evaluation after the last.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest import mock

import cv2
import numpy as np
import torch

from segapp.config import RunConfig, load_config
from segapp.precision import Precision
from tests.support import ROOT
from tests.support.runs import draw_scene, events, train

CURVES = ROOT / "tests" / "e2e" / "golden"
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
NUM_STEPS = 20
PACKAGES = (
    "torch", "torchvision", "segmentation-models-pytorch", "timm", "albumentations", "opencv-python-headless",
)  # fmt: skip
SIZE = 48, 80
"""Height and width of the drawn images in pixels; crops are smaller and not square either."""

LRASPP = ["model.options={width_mult: 0.3, inter_channels: 16}"]
DEEPLAB = ["model.options={width_mult: 0.3, atrous_rates: [1, 2, 3]}"]
DEEPLAB_WITHOUT_RESNET = ["model.name=deeplabv3", "model.encoder=mobilenet_v3_small", *DEEPLAB]
WARM_UP = "schedule.warmup_steps=5"
EOMT = [
    "model.options={depth: 4, embed_dim: 48, num_heads: 3, num_queries: 6, num_blocks: 2, mask_steps: 20}",
    "train.precision=fp32",  # float64 here; no autocast
    WARM_UP,
]
SMALLER: dict[str, list[str]] = {
    "ade20k": ["model.encoder=tu-test_resnet", "model.options={decoder_channels: 16}"],
    "ade20k-segformer-b2": ["model.encoder=mit_b0", "model.options={decoder_segmentation_channels: 16}", WARM_UP],
    "camvid": [*LRASPP, WARM_UP],
    "camvid-distill": [*LRASPP, WARM_UP],
    "cityscapes": DEEPLAB_WITHOUT_RESNET,
    "cityscapes-eomt-vitl": [*EOMT, "train.accumulate=1"],
    "cityscapes-eomt-vitl-lora": [*EOMT, "train.accumulate=1", "model.adapters=4"],
    "cityscapes-eomt-vits": EOMT,
    "cityscapes-fast": [*LRASPP, WARM_UP],
    "cityscapes-pspnet": [
        "model.encoder=tu-test_resnet",
        "model.options={psp_out_channels: 32, encoder_depth: 5, encoder_output_stride: 8}",
    ],
    "demo": [WARM_UP],
    "folder": [*DEEPLAB, WARM_UP],
    "topdown": [*DEEPLAB, WARM_UP],
    "voc": [*DEEPLAB_WITHOUT_RESNET, WARM_UP],
}
"""What else of a recipe is made smaller than its data: networks, and warm-ups that would not end in 20 steps."""


PLACES: dict[str, tuple[tuple[int, int, int], str, str]] = {
    "cityscapes": (
        (7, 11, 26),
        "leftImg8bit/{split}/town/town_{number:06}_000019_leftImg8bit.png",
        "gtFine/{split}/town/town_{number:06}_000019_gtFine_labelIds.png",
    ),
    "camvid": ((3, 1, 8), "{split}/{number:02}.png", "{split}annot/{number:02}.png"),
    "voc": (
        (0, 7, 15),
        "VOCdevkit/VOC2012/JPEGImages/{split}_{number:06}.jpg",
        "VOCdevkit/VOC2012/SegmentationClass/{split}_{number:06}.png",
    ),
    "ade20k": (
        (1, 2, 150),
        "images/{folder}/ADE_{split}_{number:08}.jpg",
        "annotations/{folder}/ADE_{split}_{number:08}.png",
    ),
    "folder": ((0, 1, 1), "images/{split}/{number:02}.png", "masks/{split}/{number:02}.png"),
}
"""Format -> the ids in its masks of ground, box and disc, and the names of images and masks."""


def draw(format: str, root: Path, split: str, count: int) -> None:
    """Draw images and masks in the layout of a data set."""
    ids, *names = PLACES[format]
    rng = np.random.default_rng(len(split))
    for number in range(count):
        image, mask = draw_scene(rng, *SIZE)
        mask[mask == 255] = 0
        folder = {"train": "training", "val": "validation"}[split]
        for name, picture in zip(names, (image, np.array(ids, np.uint8)[mask]), strict=True):
            path = root / name.format(split=split, number=number, folder=folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            assert cv2.imwrite(str(path), picture)
    if format == "voc":
        listed = root / "VOCdevkit/VOC2012/ImageSets/Segmentation" / f"{split}.txt"
        listed.parent.mkdir(parents=True, exist_ok=True)
        listed.write_text("".join(f"{split}_{number:06}\n" for number in range(count)))


def small(path: Path, root: Path, *more: str) -> RunConfig:
    """Return a recipe's config with smaller crops and batches, five steps an epoch, and one evaluation at the end."""
    crop = "[48,48]" if path.stem == "topdown" else "[32,64]"  # its quarter turns need a square
    overrides = [
        f"data.root={root}", f"data.crop_px={crop}", "data.workers=0", "train.epochs=4", "train.batch_size=4",
        "model.weights_backbone=null", "eval.every_epochs=4", "checkpoint.every_epochs=null", "log.every_steps=1",
        "log.tensorboard=false",
    ]  # fmt: skip
    return load_config(path, [*overrides, *more])


def prepare(path: Path, folder: Path, *more: str) -> RunConfig:
    """Draw a recipe's data, train its teacher if it has one, and return its small config."""
    root = folder / "data"
    config = small(path, root, *more)
    for split, count in (("train", 20), ("val", 3)):
        draw(config.data.format, root, split, count)
    if config.distill is None:
        return config
    teacher = small(ROOT / "configs" / "camvid.yaml", root, *SMALLER["camvid"], "train.epochs=1", "eval.every_epochs=1")
    assert train(teacher, folder / "teacher") == 0  # by the recipe that the header names
    return small(path, root, f"distill.teacher={folder / 'teacher'}", *more)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Train in float64: weights are drawn, and images normalised, in it."""
    set_up = Precision.__init__

    def double(self: Precision, name: str, device: torch.device) -> None:
        set_up(self, name, device)
        self.input_dtype = torch.float64

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with mock.patch.object(Precision, "__init__", double):
            yield
    finally:
        torch.set_default_dtype(before)


def train_recipe(path: Path, folder: Path, *more: str) -> Path:
    """Train the smaller network of a recipe for 20 steps in float64 and return its run folder, in `folder`."""
    with float64():
        assert train(prepare(path, folder, *SMALLER[path.stem], *more), folder / "run") == 0
    return folder / "run"


def curve_of(run: Path) -> dict[str, Any]:
    """Return the curve of a run: `steps`, one dict each, and `val`, its only evaluation."""
    (val,) = events(run, "val")
    return {
        "steps": [
            {field: step[field] for field in ("step", "loss", "grad_norm", "lr")} for step in events(run, "step")
        ],
        "val": {field: val[field] for field in ("loss", "miou", "pixel_accuracy")},
    }


def stored_curve(recipe: str) -> dict[str, Any]:
    """Return the curve in tests/e2e/golden/RECIPE.json."""
    curve: dict[str, Any] = json.loads((CURVES / f"{recipe}.json").read_text())
    return curve


def store_curve(recipe: str, curve: dict[str, Any]) -> None:
    """Write a curve, one line a step, with the versions that it was made with."""
    steps = ",\n".join(f"    {json.dumps(step)}" for step in curve["steps"])
    versions = {package: metadata.version(package) for package in PACKAGES}
    values = {"made_with": json.dumps(versions), "steps": f"[\n{steps}\n  ]", "val": json.dumps(curve["val"])}
    lines = ",\n".join(f'  "{key}": {value}' for key, value in values.items())
    (CURVES / f"{recipe}.json").write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    if sys.argv[1:2] != ["--write"]:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    for config in CONFIGS:
        if config.stem in sys.argv[2:] or not sys.argv[2:]:
            with tempfile.TemporaryDirectory() as made:
                store_curve(config.stem, curve_of(train_recipe(config, Path(made))))
