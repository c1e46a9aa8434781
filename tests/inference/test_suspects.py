"""Suspicious regions against the published formulas, a search pixel by pixel, and errors drawn into masks."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp.commands import suspects
from segapp.commands.suspects import (
    ClassCounts,
    JudgedImage,
    SuspectedRegion,
    find_regions,
    judge_masks,
    label_quality,
    rank_regions,
    write_suspects,
)
from segapp.config import validate_config
from segapp.custom.trust import TRUST_VARIABLE
from segapp.errors import DataError
from segapp.run.folder import RunFolder
from tests.support.runs import train


def drawn(seed: int, num_classes: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Return a mask (H, W) with coarse parts, 255 in some, and probabilities (C, H, W) that mostly agree with it."""
    rng = np.random.default_rng(seed)
    ids = rng.choice([*range(num_classes), 255], (6, 5), p=[*[0.9 / num_classes] * num_classes, 0.1])
    mask = np.kron(ids, np.ones((3, 3), int)).astype(np.uint8)
    logits = rng.normal(0, 0.7, (num_classes, *mask.shape))
    shown = np.roll(np.where(mask == 255, 0, mask), int(rng.integers(-2, 3)), 1)
    np.put_along_axis(logits, shown[None].astype(int), 2.5, 0)
    values = np.exp(logits)
    return mask, (values / values.sum(0)).astype(np.float32)


def flooded(mask: np.ndarray, labels: np.ndarray) -> list[set[tuple[int, int]]]:
    """Return the sets of neighbors whose classes in mask and prediction differ in the same way, pixel by pixel."""
    left = {(y, x) for y, x in np.ndindex(*mask.shape) if mask[y, x] != 255 and mask[y, x] != labels[y, x]}
    found = []
    while left:
        part, edge = set(), [min(left)]
        pair = mask[edge[0]], labels[edge[0]]
        while edge:
            y, x = edge.pop()
            if (y, x) in left and (mask[y, x], labels[y, x]) == pair:
                left.discard((y, x))
                part.add((y, x))
                edge += [(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)]
        found.append(part)
    return found


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 4))
def test_regions_equal_a_search_pixel_by_pixel(seed: int, least_px: int) -> None:
    mask, probabilities = drawn(seed)
    labels, quality = probabilities.argmax(0), label_quality(probabilities, mask, 255)
    found = list(find_regions(mask, labels, quality, probabilities.max(0), 255, min_area_px=least_px))
    expected = []
    for part in flooded(mask, labels):
        if len(part) >= least_px:
            ys, xs = zip(*part, strict=True)
            at = ys[0], xs[0]
            mean = float(np.mean([probabilities[mask[y, x], y, x] for y, x in part]))
            box = min(xs), min(ys), max(xs) - min(xs) + 1, max(ys) - min(ys) + 1
            expected.append((int(mask[at]), int(labels[at]), len(part), box, pytest.approx(mean, rel=1e-4)))
    got = [(each.given, each.suggested, each.area_px, each.box, each.quality) for each in found]
    assert sorted(got, key=lambda row: row[:4]) == sorted(expected, key=lambda row: row[:4])


def test_thresholds_equal_their_definition() -> None:
    """The mean probability of a class over the pixels to which masks give it; no class without pixels is suggested."""
    counts, sums = ClassCounts(5), [[] for _ in range(5)]
    for seed in range(3):
        mask, probabilities = drawn(seed)
        valid = mask != 255
        counts.add(mask[valid], probabilities.argmax(0)[valid], label_quality(probabilities, mask, 255)[valid])
        for y, x in zip(*np.nonzero(valid), strict=True):
            sums[mask[y, x]].append(probabilities[mask[y, x], y, x])
    assert counts.thresholds[:4] == pytest.approx([np.mean(values) for values in sums[:4]], rel=1e-5)
    assert counts.thresholds[4] == math.inf


def test_rare_confusions_come_first() -> None:
    """By hand: regions with the same probabilities; 0 is read as 1 at one in four pixels, 2 as 1 never."""
    counts = ClassCounts(3)
    for mask_id, seen, num_px in ((0, 0, 75), (0, 1, 25), (1, 1, 100), (2, 2, 100)):
        counts.add(np.full(num_px, mask_id), np.full(num_px, seen), np.full(num_px, 0.8))
    common, rare, doubtful = (
        SuspectedRegion(mask_id, 1, "class", 9, (0, 0, 3, 3), np.zeros((1, 2), np.int32), 0.1, confidence)
        for mask_id, confidence in ((0, 0.9), (2, 0.9), (2, 0.79))
    )
    judged = JudgedImage(cast(Any, None), 0, "run", [], b"")
    ranked = rank_regions(counts, [(judged, common), (judged, rare), (judged, doubtful)])
    assert [suspect.region for suspect in ranked] == [rare, common]
    assert [suspect.score for suspect in ranked] == pytest.approx([0.8, 0.8 * 0.75])


CASES = {
    "class": (np.s_[2:8, 2:8], np.s_[2:8, 2:8]),  # the mask has all of a square as another class
    "missing": (None, np.s_[12:16, 12:16]),
    "outline": (np.s_[2:8, 2:8], np.s_[2:8, 2:10]),
}


@pytest.mark.parametrize("turns", range(4))  # a region may touch its class on any side
@pytest.mark.parametrize("kind", CASES)
def test_kind_of_a_region_by_hand(kind: str, turns: int) -> None:
    in_mask, seen = CASES[kind]
    mask, labels = np.zeros((20, 23), np.uint8), np.zeros((20, 23), np.uint8)
    labels[seen] = 1
    if in_mask is not None:
        mask[in_mask] = 2 if kind == "class" else 1
    mask, labels = np.rot90(mask, turns), np.rot90(labels, turns)
    (region,) = find_regions(mask, labels, np.zeros(mask.shape), np.ones(mask.shape), 255, min_area_px=1)
    assert (region.kind, region.suggested, region.given) == (kind, 1, 2 if kind == "class" else 0)


@pytest.fixture(autouse=True)
def _trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, "1")


@pytest.fixture(scope="module")
def folds(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A sweep of a network that knows the colors: two folds, and a run that never began; the wrong pixels of masks."""
    root = tmp_path_factory.mktemp("folds")
    for kind in ("images", "masks"):
        (root / kind).mkdir()
    masks, wrong = {}, {}
    for path in sorted(tiny_root.glob("masks/*/*.png")):
        name = f"{path.parent.name}{path.name}"
        masks[name] = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
        shutil.copy(tiny_root / "images" / path.parent.name / path.name, root / "images" / name)
    for name, was, instead in (("train01", 1, 2), ("train04", 2, 0), ("train07", 1, 0), ("val02", 2, 1)):
        name = f"{name}.png"
        wrong[name] = masks[name] == was
        wrong[name][:, 40 if "07" in name else 64 :] = False  # a part of a box is given to the ground
        masks[name][wrong[name]] = instead
        assert wrong[name].sum() > 40
    for name, mask in masks.items():
        cv2.imwrite(str(root / "masks" / name), mask)
    for fold in (0, 1):
        for split, parity in (("train", fold), ("val", 1 - fold)):
            lines = [f"images/{name} masks/{name}" for name in list(masks)[parity::2]]
            (root / f"{split}{fold}.txt").write_text("\n".join(lines) + "\n")
        config = {
            "name": "fold",
            "data": {
                "format": "list", "root": str(root), "classes": ["ground", "box", "disc"], "crop_px": [32, 32],
                "workers": 0, "train_split": f"train{fold}", "val_split": f"val{fold}",
            },
            "model": {"library": "python", "name": "tests.support.own_parts:ColorNet"},
            "optim": {"name": "adamw", "lr": 1e-6}, "train": {"epochs": 1, "batch_size": 4},
            "log": {"tensorboard": False},
        }  # fmt: skip
        assert train(validate_config(config), root / f"fold{fold}") == 0
    RunFolder.create(path=root / "begun").write_info()
    (root / "sweep.json").write_text("{}")
    return root, wrong


def test_wrong_regions_of_masks_are_found_and_no_others(
    folds: tuple[Path, dict[str, np.ndarray]], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, wrong = folds
    runs = [str(root / "fold0"), str(root / "fold1")]
    monkeypatch.setattr(suspects, "MAX_PICTURED", 3)  # a constant: no option sets it
    write_suspects([runs[1], str(root)], split=None, out=root / "out", min_area_px=20)
    rows = json.loads((root / "out" / "suspects.json").read_text())
    assert {row["run"] for row in rows} == set(runs)
    assert {Path(row["mask"]).name for row in rows} == set(wrong)
    for row in rows:
        box = np.s_[row["top"] : row["top"] + row["height"], row["left"] : row["left"] + row["width"]]
        assert wrong[Path(row["mask"]).name][box].any(), row
        assert Path(row["image"]).name == Path(row["mask"]).name
    scores = [row["score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert f"{len(rows)} regions of" in capsys.readouterr().out
    page = (root / "out" / "suspects.html").read_text()
    assert page.count("<figure id=") == 4 * 3
    assert rows[0]["reason"] in page
    found = judge_masks(runs[:1], None, 20)
    names = {split: {line.split()[0] for line in (root / f"{split}0.txt").read_text().splitlines()} for split in
             ("train", "val")}  # fmt: skip
    assert {f"images/{image.pair.image.name}" for image in found.images} == names["val"]
    assert {f"images/{path.name}" for path in found.unjudged} == names["train"]
    with pytest.raises(DataError, match="is a training image of the runs"):
        judge_masks(runs[:1], "train0", 20)
