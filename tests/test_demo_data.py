"""The demo data equals what its script draws and follows the Cityscapes layout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs
from segapp.datasets.masks import read_mask
from tests.support import ROOT

DEMO = ROOT / "data" / "demo"


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


@pytest.mark.parametrize(("options", "count"), [(["--scenes", "1"], 6), pytest.param([], None, marks=pytest.mark.slow)])
def test_committed_images_are_redrawn_identically(options: list[str], count: int | None, tmp_path: Path) -> None:
    """The first image of every town; the slow case draws all."""
    command = [sys.executable, str(ROOT / "data" / "make_demo.py"), "--out", str(tmp_path), *options]
    done = subprocess.run(command, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    drawn = sorted(tmp_path.rglob("*.png"))
    assert len(drawn) == (count or len(list(DEMO.rglob("*.png"))))
    for path in drawn:
        with Image.open(path) as new, Image.open(DEMO / path.relative_to(tmp_path)) as committed:
            assert np.array_equal(np.asarray(new), np.asarray(committed)), path.name
