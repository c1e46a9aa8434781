"""Several classes per pixel, and binary segmentation with one logit: from masks to predictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_pairs, build_scheme
from segapp.config import DataConfig
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.masks import read_mask
from segapp.errors import DataError
from segapp.inference.drawing import colorize
from segapp.losses.confusion import upsample_label_counts, upsample_probabilities, upsample_sets
from segapp.metrics import LabelCounts
from tests.support.loss_cases import draw
from tests.support.programs import segapp
from tests.support.runs import events, merged, train


def scheme_of(kind: str, classes: tuple[str, ...] = ("box", "disc", "any"), ignore: int | None = None) -> Any:
    return class_scheme("folder", classes=classes, multilabel=kind, ignore_index=ignore)


def test_masks_of_channels_and_of_bits_hold_the_same_sets(tmp_path: Path) -> None:
    sets = np.random.default_rng(0).integers(0, 8, (9, 13)).astype(np.uint8)
    planes = [(sets >> c & 1) * 255 for c in range(3)]
    cv2.imwrite(str(tmp_path / "channels.png"), np.dstack(planes)[..., ::-1])
    cv2.imwritemulti(str(tmp_path / "pages.tif"), planes)
    cv2.imwrite(str(tmp_path / "bits.png"), sets)
    for name in ("channels.png", "pages.tif", "bits.png"):
        found = read_mask(tmp_path / name, scheme_of("bits" if name == "bits.png" else "channels"))
        assert found.dtype == np.int32
        assert np.array_equal(found, sets), name


@pytest.mark.parametrize("white", [1, 255])
def test_binary_masks_of_0_and_1_or_255(white: int, tmp_path: Path) -> None:
    mask = np.array([[0, white, 0], [7, 0, white]], np.uint8)
    cv2.imwrite(str(tmp_path / "grey.png"), mask)
    cv2.imwrite(str(tmp_path / "rgb.png"), np.dstack([mask] * 3))
    for name in ("grey.png", "rgb.png"):
        found = read_mask(tmp_path / name, scheme_of("channels", ("road",), ignore=7))
        assert found.tolist() == [[0, 1, 0], [-1, 0, 1]]


def test_masks_that_do_not_fit_are_named(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "grey.png"), np.full((4, 4), 9, np.uint8))
    cv2.imwrite(str(tmp_path / "rgb.png"), np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(DataError, match="1 channels for 3 classes"):
        read_mask(tmp_path / "grey.png", scheme_of("channels"))
    with pytest.raises(DataError, match="values 9 have bits beyond the 3 classes"):
        read_mask(tmp_path / "grey.png", scheme_of("bits"))
    with pytest.raises(DataError, match=r"set data\.multilabel: channels"):
        read_mask(tmp_path / "rgb.png", scheme_of("bits"))


def test_counts_and_sets_match_plain_operators() -> None:
    logits, _ = draw(3, 4, (5, 6), (17, 23), sigma=1.0)
    target = torch.randint(0, 16, (3, 17, 23), generator=torch.Generator().manual_seed(2)).int()
    target[0, :5] = -1
    views = [logits, draw(3, 4, (3, 4), seed=4, sigma=1.0)[0]]
    full = [F.interpolate(view, (17, 23), mode="bilinear", align_corners=True) for view in views]
    probability = torch.stack([each.sigmoid() for each in full]).mean(0)
    bits = torch.arange(4).view(1, -1, 1, 1)
    found = probability > 0.3
    torch.testing.assert_close(upsample_probabilities(views, (17, 23), is_sigmoid=True), probability)
    assert torch.equal(upsample_sets(views, (17, 23), 0.3), (found << bits).sum(1).int())
    valid, own = (target != -1).unsqueeze(1), (target.unsqueeze(1) >> bits) & 1 == 1
    counts = upsample_label_counts(views, target, 0.3)
    for c in range(4):
        for t in range(2):
            for p in range(2):
                expected = ((own[:, c] == bool(t)) & (found[:, c] == bool(p)) & valid[:, 0]).sum()
                assert counts[c, t, p] == expected
    again = LabelCounts(4)
    again.update((found << bits).sum(1), target)
    assert torch.equal(again.matrix, counts)


def test_color_of_several_classes_is_their_mean() -> None:
    scheme = class_scheme("folder", classes=["a", "b"], palette=[[100, 0, 0], [0, 50, 200]], multilabel="bits")
    assert colorize(np.array([[0, 1, 2, 3]]), scheme).tolist() == [
        [[0, 0, 0], [100, 0, 0], [0, 50, 200], [50, 25, 100]]
    ]


def test_a_mask_file_for_each_class_holds_the_same_sets(tmp_path: Path) -> None:
    sets = np.random.default_rng(1).integers(0, 4, (2, 9, 13)).astype(np.uint8)
    for path in ("images", "masks/big box", "masks/disc"):
        (tmp_path / path / "train").mkdir(parents=True)
    lines = []
    for number, each in enumerate(sets):
        cv2.imwrite(str(tmp_path / "images/train" / f"{number}.png"), np.zeros((9, 13, 3), np.uint8))
        for bit, name in enumerate(("big box", "disc")):
            mask = (each >> bit & 1) * 255
            mask[0, bit] = 9  # ignored in one of the files
            cv2.imwrite(str(tmp_path / "masks" / name / "train" / f"{number}.png"), mask)
        lines.append(f"images/train/{number}.png\tmasks/big box/train/{number}.png\tmasks/disc/train/{number}.png\n")
    (tmp_path / "train.txt").write_text("".join(lines))
    for values in ({"format": "folder", "mask_dir": "masks/{class}/{split}"}, {"format": "list"}):
        data = DataConfig(root=str(tmp_path), classes=["big box", "disc"], multilabel="files", ignore_index=9, **values)
        dataset = build_dataset(data, build_scheme(data), "train", is_training=False, seed=0)
        for number, each in enumerate(sets):
            expected = each.astype(int)
            expected[0, :2] = -1
            assert np.array_equal(dataset[(1, number)].target.numpy(), expected)
    (tmp_path / "masks/disc/train/1.png").unlink()
    with pytest.raises(DataError, match=r"1 of 2 images have no mask below .*disc"):
        build_pairs(data.model_copy(update={"format": "folder", "mask_dir": "masks/{class}/{split}"}), "train")


@pytest.fixture
def sets_root(tiny_root: Path, tmp_path: Path) -> Path:
    """The tiny data with sets: box, disc, and both of them as a third class; the first rows are ignored."""
    for split in ("train", "val"):
        (tmp_path / "data" / "masks" / split).mkdir(parents=True)
        for path in sorted((tiny_root / "masks" / split).iterdir()):
            mask = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
            sets = np.select([mask == 1, mask == 2], [0b101, 0b110], 0).astype(np.uint8)
            sets[:3] = 200
            cv2.imwrite(str(tmp_path / "data" / "masks" / split / path.name), sets)
    (tmp_path / "data" / "images").symlink_to(tiny_root / "images")
    return tmp_path / "data"


def sets_config(tiny: dict[str, Any], root: Path, **sections: Any) -> Any:
    data = {"root": str(root), "classes": ["box", "disc", "thing"], "multilabel": "bits", "ignore_index": 200}
    data["allow_outside_root"] = True
    plus = [{"name": "dice"}, {"name": "focal", "weight": 0.01}]
    return merged(tiny, data=data, loss={"name": "bce", "plus": plus}, **sections)


def test_from_masks_to_predictions(tiny: dict[str, Any], sets_root: Path, tmp_path: Path) -> None:
    model = {"library": "python", "name": "tests.support.own_parts:Net"}
    config = sets_config({**tiny, "model": model}, sets_root, train={"epochs": 4, "batch_size": 5}, optim={"lr": 0.03})
    assert train(config, tmp_path / "run") == 0
    first, *_, val = events(tmp_path / "run", "val")
    assert val["loss"] < first["loss"]
    assert len(val["precision"]) == 3
    images = sets_root / "images" / "val"
    result = segapp("predict", "run", images, "--out", "out", "--save", "labels,overlay,color", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    result = segapp("eval", "run", "--json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    counts = LabelCounts(3)
    scheme = scheme_of("bits", ("box", "disc", "thing"), ignore=200)
    for number in range(4):
        masks = [cv2.imread(str(tmp_path / "out" / "labels" / name / f"{number:02}.png"), -1) for name in scheme.names]
        assert {int(value) for mask in masks for value in np.unique(mask)} <= {0, 255}
        sets = sum((mask > 0).astype(np.int32) << c for c, mask in enumerate(masks))
        target = read_mask(sets_root / "masks" / "val" / f"{number:02}.png", scheme)
        counts.update(torch.from_numpy(sets), torch.from_numpy(target))
    assert found["confusion"] == counts.matrix.tolist()
    # Three rows of each mask are ignored, for each of three classes.
    assert np.array(found["confusion"]).sum() == 3 * (45 * 64 + 42 * 61 + 45 * 53 + 45 * 64)
    assert found["iou"] == pytest.approx(val["iou"], abs=1e-3)
