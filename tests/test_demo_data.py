"""The demo data is what its script draws, and what the Cityscapes layout promises."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs
from segapp.datasets.masks import read_mask
from tests.support import ROOT

DEMO = ROOT / "data" / "demo"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_demo", ROOT / "data" / "make_demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def load_split(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Every fourth pixel of a split: colours (N, 3) and train ids (N,), ignored ones left out."""
    scheme, colours, targets = class_scheme("cityscapes"), [], []
    for pair in find_pairs(DataLocation("cityscapes", DEMO), split):
        assert pair.mask is not None
        target = read_mask(pair.mask, scheme)[::2, ::2]
        with Image.open(pair.image) as image:
            colours.append(np.asarray(image)[::2, ::2][target != 255])
        targets.append(target[target != 255])
    return np.concatenate(colours).astype(float), np.concatenate(targets)


def test_demo_is_a_small_cityscapes_tree_of_eleven_classes() -> None:
    assert sum(p.stat().st_size for p in DEMO.rglob("*.png")) < 3_000_000
    scheme = class_scheme("cityscapes")
    for split, count in (("train", 72), ("val", 20)):
        pairs = find_pairs(DataLocation("cityscapes", DEMO), split)
        assert len(pairs) == count
        masks = [read_mask(pair.mask, scheme) for pair in pairs if pair.mask is not None]
        ids = set(np.unique(np.stack(masks)).tolist())
        assert len(ids - {255}) == 11
        assert 255 in ids


def test_first_image_of_every_town_is_redrawn_identically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script()
    monkeypatch.setattr(script, "TOWNS", tuple(replace(town, num_scenes=1) for town in script.TOWNS))
    script.write_demo(tmp_path)
    drawn = sorted(tmp_path.rglob("*.png"))
    assert len(drawn) == 6
    for path in drawn:
        with Image.open(path) as ours, Image.open(DEMO / path.relative_to(tmp_path)) as kept:
            assert np.array_equal(np.asarray(ours), np.asarray(kept)), path.name


def test_nearest_mean_colour_does_not_separate_the_classes() -> None:
    colours, targets = load_split("train")
    ids = np.unique(targets)
    means = np.stack([colours[targets == i].mean(axis=0) for i in ids])
    colours, targets = load_split("val")
    predictions = ids[((colours[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)]
    iou = [((predictions == i) & (targets == i)).sum() / ((predictions == i) | (targets == i)).sum() for i in ids]
    assert np.mean(iou) < 0.25


@pytest.mark.slow
def test_all_committed_images_are_redrawn_identically(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "data" / "make_demo.py"), "--out", str(tmp_path / "demo")]
    assert subprocess.run(command, timeout=280, capture_output=True).returncode == 0
    drawn = {p.relative_to(tmp_path / "demo"): p for p in (tmp_path / "demo").rglob("*.png")}
    assert set(drawn) == {p.relative_to(DEMO) for p in DEMO.rglob("*.png")}
    for name, path in drawn.items():
        with Image.open(path) as ours, Image.open(DEMO / name) as kept:
            assert np.array_equal(np.asarray(ours), np.asarray(kept)), name
