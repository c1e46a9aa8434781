"""Twenty steps of every recipe on drawn data in float64, and the curves stored for them in tests/e2e/golden/.

python -m tests.support.golden_runs                    compares every recipe with its curve
python -m tests.support.golden_runs --write [RECIPE]   makes all curves, or one, again

A curve has the loss, the norm of the gradients and the learning rate of every step, and the evaluation after the last.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
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
        DRAW[config.data.format](root, split, count)
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


# --- stored curves ---


def stored_curve(recipe: str) -> dict[str, Any]:
    """Return the curve in tests/e2e/golden/RECIPE.json."""
    curve: dict[str, Any] = json.loads((CURVES / f"{recipe}.json").read_text())
    return curve


def versions() -> dict[str, str]:
    """Return the versions of what computes a curve."""
    packages = (
        "torch",
        "torchvision",
        "segmentation-models-pytorch",
        "timm",
        "albumentations",
        "opencv-python-headless",
    )
    return {package: metadata.version(package) for package in packages}


def store_curve(recipe: str, curve: dict[str, Any]) -> None:
    """Write a curve, one line a step, with the versions that it was made with."""
    steps = ",\n".join(f"    {json.dumps(step)}" for step in curve["steps"])
    values = {"made_with": json.dumps(versions()), "steps": f"[\n{steps}\n  ]", "val": json.dumps(curve["val"])}
    lines = ",\n".join(f'  "{key}": {value}' for key, value in values.items())
    CURVES.mkdir(exist_ok=True)
    (CURVES / f"{recipe}.json").write_text(f"{{\n{lines}\n}}\n")


LR_TOLERANCE = 1e-12
"""Relative; a schedule is arithmetic of floats."""
VAL_TOLERANCES = {"loss": 1e-6, "miou": 2e-3, "pixel_accuracy": 2e-3}
"""Relative and absolute. Weight averages are float32, and a tie of two classes may turn a pixel over."""


def tolerance(step: int) -> float:
    """Return the relative tolerance of a step's loss, 1e-8 to 1.5e-6; the gradients' norm has ten times as much.

    Measured against AVX-512: with SSE4 (torch, MKL and OpenCV) 2e-15 in the first three steps, and up to 9e-11 in the
    others; 2e-10 with distillation, whose teacher is a float32 average. torch 2.11 against 2.15: 6e-15.
    """
    return 1e-8 * 1.3 ** (step - 1)


def differences(recipe: str, curve: dict[str, Any], stored: dict[str, Any]) -> list[str]:
    """Return a line for each value of a curve that is not the stored one: recipe, step, both values."""
    found = []
    if len(curve["steps"]) != len(stored["steps"]):
        found.append(f"{recipe}: {len(curve['steps'])} steps, stored are {len(stored['steps'])}")
    for new, old in zip(curve["steps"], stored["steps"], strict=False):
        limits = {"lr": LR_TOLERANCE, "loss": tolerance(old["step"]), "grad_norm": 10 * tolerance(old["step"])}
        for field, limit in limits.items():
            if not math.isclose(new[field], old[field], rel_tol=limit):
                found.append(_difference(f"{recipe}, step {old['step']}: {field}", new[field], old[field], limit))
    for field, limit in VAL_TOLERANCES.items():
        new, old = curve["val"][field], stored["val"][field]
        if not math.isclose(new, old, rel_tol=limit, abs_tol=limit):
            found.append(_difference(f"{recipe}, evaluation: {field}", new, old, limit))
    return found


def _difference(what: str, new: float, old: float, limit: float) -> str:
    return f"{what} is {new!r}, stored is {old!r} (tolerance {limit:.0e})"


def main() -> None:
    """Compare every recipe, or make the curves of those named, or of all, again."""
    torch.set_num_threads(1)
    words = sys.argv[1:]
    names = [word for word in words if word != "--write"]
    for path in CONFIGS:
        if names and path.stem not in names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            curve = curve_of(train_recipe(path, Path(folder)))
        if "--write" in words:
            store_curve(path.stem, curve)
        else:
            print("\n".join(differences(path.stem, curve, stored_curve(path.stem))) or f"{path.stem}: as stored")


if __name__ == "__main__":
    main()
