"""How many of the first regions of `segapp suspects` are errors that were put into the masks of CamVid.

Trains two folds in about eight minutes on one free core; skips without the CamVid images.

uv run pytest -m benchmark -n 0 -s tests/benchmarks/test_suspects.py
"""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from segapp.commands.suspects import JudgedMasks, judge_masks

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(3 * 3600)]
KINDS = ("shifted", "swapped", "eroded", "missing")
LEAST_PX = 400
"""Pixels of the smallest region that gets an error: 20 x 20."""
LEAST_CHANGE_PX = 100
IGNORED = 11
CLASSES = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"]
CONFIG = """
name: fold{fold}
data:
  format: list
  root: {root}
  classes: {classes}
  label_map: {{11: 255}}
  train_split: fold{fold}-train
  val_split: fold{fold}-val
  resize_px: [180, 240]
  crop_px: [144, 192]
  scale: [0.8, 1.5]
  photometric: 0.5
  workers: 0
  cache: ram
model:
  library: smp
  name: DeepLabV3Plus
  encoder: tu-test_resnet
  options: {{decoder_channels: 64, decoder_atrous_rates: [3, 6, 9]}}
loss: {{name: ce, align_corners: false}}
optim: {{name: adamw, lr: 0.01, weight_decay: 0.01, decay_norm_and_bias: false}}
schedule: {{name: poly, power: 0.9, warmup_steps: 50}}
train: {{epochs: 12, batch_size: 4, bn_momentum: 0.05, ema: 0.98}}
eval: {{every_epochs: 12}}
"""


def regions_of(mask: NDArray[Any]) -> list[tuple[int, NDArray[np.bool_]]]:
    """Return class and pixels (H, W) of each connected part of a mask with at least `LEAST_PX` pixels."""
    found = []
    for class_id in np.unique(mask[mask != IGNORED]):
        count, parts, stats, _ = cv2.connectedComponentsWithStats((mask == class_id).astype(np.uint8))
        found += [(int(class_id), parts == i) for i in range(1, count) if stats[i, cv2.CC_STAT_AREA] >= LEAST_PX]
    return found


def filled(mask: NDArray[Any], hole: NDArray[np.bool_]) -> NDArray[Any]:
    """Return a mask in which the pixels of a hole have the class of the nearest pixel around it."""
    unknown = hole | (mask == IGNORED)
    _, nearest = cv2.distanceTransformWithLabels(
        unknown.astype(np.uint8), cv2.DIST_L2, 5, labelType=cv2.DIST_LABEL_PIXEL
    )
    class_of = np.zeros(nearest.max() + 1, mask.dtype)
    class_of[nearest[~unknown]] = mask[~unknown]
    return np.where(hole, class_of[nearest], mask)


def damaged(
    mask: NDArray[Any], region: NDArray[np.bool_], kind: str, num_classes: int, rng: np.random.Generator
) -> NDArray[Any]:
    """Return a mask with an error of a kind in one region."""
    class_id = mask[region][0]
    if kind == "swapped":
        other = rng.choice([each for each in range(num_classes) if each != class_id])
        return np.where(region, other, mask)
    if kind == "missing":
        return filled(mask, region)
    extent = int(np.sqrt(region.sum()))
    if kind == "eroded":
        size = 2 * int(rng.integers(3, max(4, extent // 4) + 1)) + 1
        kernel = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (size, size))
        kept = cv2.erode(region.astype(np.uint8), kernel, borderValue=1).astype(bool)
        return filled(mask, region & ~kept)
    angle, distance = rng.uniform(0, 2 * np.pi), rng.integers(8, max(9, extent // 2) + 1)
    move = np.array([[1, 0, distance * np.cos(angle)], [0, 1, distance * np.sin(angle)]])
    size = (mask.shape[1], mask.shape[0])
    moved = cv2.warpAffine(region.astype(np.uint8), move, size, flags=cv2.INTER_NEAREST).astype(bool)
    result = filled(mask, region)
    result[moved & (mask != IGNORED)] = class_id
    return result


def inject(masks: dict[str, NDArray[Any]], num_classes: int) -> tuple[dict[str, NDArray[np.uint8]], int]:
    """Change one in twenty regions in place; return which pixels changed, as 1 + the kind, and the number of errors."""
    rng = np.random.default_rng(0)
    original = {name: mask.copy() for name, mask in masks.items()}
    places = [(name, at) for name, mask in masks.items() for at in range(len(regions_of(mask)))]
    codes, number = {name: np.zeros(mask.shape, np.uint8) for name, mask in masks.items()}, 0
    for turn, index in enumerate(rng.permutation(len(places))[: round(0.05 * len(places))]):
        name, at = places[index]
        class_id, region = regions_of(original[name])[at]
        before = masks[name].copy()
        region = region & (before == class_id)  # an earlier error may have changed a part of it
        if region.sum() >= LEAST_PX:
            kind = turn % len(KINDS)
            changed = (after := damaged(before, region, KINDS[kind], num_classes, rng)) != before
            if changed.sum() >= LEAST_CHANGE_PX:
                masks[name][...] = after
                codes[name][changed] = 1 + kind
                number += 1
    return codes, number


def write_folds(camvid: Path, out: Path) -> tuple[dict[str, NDArray[np.uint8]], int]:
    """Write images, masks with errors, lists and configs of folds; return what `inject` does."""
    images = {path.stem: path for split in ("train", "val") for path in sorted((camvid / split).iterdir())}
    annotated = {path.stem: path for split in ("train", "val") for path in sorted((camvid / f"{split}annot").iterdir())}
    masks = {name: np.array(Image.open(annotated[name])) for name in images}
    codes, number = inject(masks, len(CLASSES))
    (out / "masks").mkdir()
    (out / "images").mkdir()
    for name, path in images.items():
        shutil.copy(path, out / "images" / path.name)
        Image.fromarray(masks[name]).save(out / "masks" / f"{name}.png")
    order = np.random.default_rng(0).permutation(len(images))
    names = list(images)
    for fold in range(2):
        held = {names[i] for i in order[fold::2]}
        for split, members in (("train", [n for n in names if n not in held]), ("val", sorted(held))):
            lines = [f"images/{images[name].name} masks/{name}.png" for name in members]
            (out / f"fold{fold}-{split}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        config = CONFIG.format(fold=fold, root=out.resolve(), classes=CLASSES)
        (out / f"fold{fold}.yaml").write_text(config, encoding="utf-8")
    return codes, number


def kinds_found(found: JudgedMasks, all_codes: dict[str, NDArray[np.uint8]]) -> list[str | None]:
    """Return the kind of the error that at least half of the pixels of the first 300 regions belong to; else None."""
    kinds: list[str | None] = []
    for suspect in found.suspects[:300]:
        region, pair = suspect.region, suspect.judged.pair
        labels = cv2.imdecode(np.frombuffer(suspect.judged.labels_png, np.uint8), cv2.IMREAD_UNCHANGED)
        inside = np.zeros(labels.shape, np.uint8)
        cv2.drawContours(inside, [region.outline], -1, 1, cv2.FILLED)
        mask = np.array(Image.open(str(pair.mask)))
        pixels = (inside > 0) & (mask == region.given) & (labels == region.suggested)
        codes = all_codes[pair.image.stem][pixels]
        is_error = np.count_nonzero(codes) >= 0.5 * len(codes)
        kinds.append(KINDS[np.bincount(codes[codes > 0]).argmax() - 1] if is_error else None)
    return kinds


def test_first_regions_are_errors_in_masks_of_camvid(camvid, tmp_path, capsys):
    """Five in a hundred regions are shifted, swapped, eroded or missing; the network of each fold sees them too."""
    all_codes, number = write_folds(camvid, tmp_path)
    configs = [word for fold in (0, 1) for word in ("--config", f"fold{fold}.yaml")]
    done = subprocess.run([sys.executable, "-m", "segapp", "sweep", "folds", *configs], cwd=tmp_path, timeout=3 * 3600)
    assert done.returncode == 0
    found = judge_masks([str(tmp_path / "runs/folds" / fold) for fold in ("fold0", "fold1")], None, None)
    kinds = kinds_found(found, all_codes)
    with capsys.disabled():
        print(f"\n{number} regions have an error; {len(found.suspects)} regions are suspicious")
        for first in (50, 100, 200, 300):
            right = [kind for kind in kinds[:first] if kind is not None]
            shares = ", ".join(f"{kind} {right.count(kind)}" for kind in sorted(set(right)))
            print(f"of the first {first}: {len(right) / first:.2f} are errors ({shares})")
    assert sum(kind is not None for kind in kinds[:100]) >= 80
