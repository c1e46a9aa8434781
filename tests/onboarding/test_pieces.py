"""Several masks for each image (classes, annotators): training reads the drawing, pixel by pixel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from segapp.errors import ConfigError
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.layout import DrawnMask, OpenQuestionError
from segapp.onboarding.pieces import combine, overlap_share
from tests.support.drawn_folders import draw_image, proposed, seeded, targets_read

HEIGHT, WIDTH = 48, 64
NAMES = [f"{number:04}" for number in range(10)]
Plane = NDArray[np.bool_]


def stripe(name: str, part: int) -> Plane:
    """Columns of a third of the image, with rows that depend on the name: stripes of other parts are apart."""
    plane = np.zeros((HEIGHT, WIDTH), bool)
    top = int(seeded(f"{name}{part}").integers(0, 20))
    plane[top : top + 25, 20 * part : 20 * part + 20] = True
    return plane


def disk(name: str, radius: int = 14) -> Plane:
    rows, columns = np.ogrid[:HEIGHT, :WIDTH]
    y, x = seeded(name).integers(18, 30), seeded(name).integers(20, 44)
    return np.asarray((rows - y) ** 2 + (columns - x) ** 2 < radius**2)


def save(path: Path, plane: Plane) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(plane.astype(np.uint8) * 255).save(path)


FOLDERS = {
    "annotations/masks/{class}/{split}/{}.png": "images/{split}/{}.jpg",
    "labeled/{split}/labels/{class}/{}.png": "labeled/{split}/images/rgb/{}.jpg",
    "masks/{}_mask_{class}.png": "images/{}.jpg",
}


@pytest.mark.parametrize("pattern", FOLDERS)
def test_masks_of_classes_that_are_apart_become_ids(pattern: str, tmp_path: Path) -> None:
    root, wanted = tmp_path / "d", {}
    for number, name in enumerate(NAMES):
        split = "val" if number > 7 else "train"
        wanted[name] = np.zeros((HEIGHT, WIDTH), np.uint8)
        draw_image(root / FOLDERS[pattern].replace("{split}", split).replace("{}", name), (HEIGHT, WIDTH))
        for part, kind in enumerate(("2_wheeler", "car", "road")):
            if kind == "2_wheeler" and number % 2:
                continue
            save(
                root / pattern.replace("{class}", kind).replace("{split}", split).replace("{}", name),
                stripe(name, part),
            )
            wanted[name][stripe(name, part)] = part + 1
    config, result, names = proposed(root, tmp_path / "made.yaml")
    assert config.data.classes == ["background", "2_wheeler", "car", "road"]
    assert config.data.multilabel is None
    read = targets_read(config)
    assert sorted(read) == NAMES
    for name, mask in wanted.items():
        assert (read[name] == mask).all()
    if "{split}" in pattern:
        assert sorted(names["val"]) == ["0008.jpg", "0009.jpg"]
    lines = "\n".join(result.lines)
    assert "10 of 10 images have masks of single classes" in lines
    assert "0.0% of the labeled pixels belong to several classes" in lines


def test_masks_of_classes_that_overlap_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "CelebAMask-HQ"
    kinds = {"skin": 16, "nose": 3, "l_eye": 2, "mouth": 4}
    for number, name in enumerate(NAMES):
        draw_image(root / "CelebA-HQ-img" / f"{number}.jpg", (2 * HEIGHT, 2 * WIDTH))
        for kind, radius in kinds.items():
            save(root / "CelebAMask-HQ-mask-anno" / str(number // 5) / f"0{name}_{kind}.png", disk(name, radius))
    with pytest.raises(ConfigError, match=r"\d+\.\d% of the labeled pixels belong to several classes: list a mask"):
        propose_config(InitRequest(root, tmp_path / "made.yaml"))


def test_masks_that_mostly_agree_are_opinions_not_classes(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for name in NAMES:
        draw_image(root / "images" / f"{name}.jpg", (HEIGHT, WIDTH))
        for who, radius in (("anna", 12), ("bert", 13)):
            save(root / "masks" / who / f"{name}.png", disk(name, radius))
    with pytest.raises(OpenQuestionError, match=r"--layout masks/anna.*--layout masks/bert"):
        propose_config(InitRequest(root, tmp_path / "made.yaml"))


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("images/{}.png", "masks/{}/{n}.png"),
        ("images/{}.jpg", "labels/{}/{}_lbl{n}.png"),
        ("{}/images/{}.png", "{}/masks/c{n}.png"),
    ],
    ids=["folders of masks", "names of the image", "folders of images"],
)
def test_folder_of_masks_for_each_image_is_refused(image: str, mask: str, tmp_path: Path) -> None:
    root = tmp_path / "d"
    for number, name in enumerate(NAMES):
        draw_image(root / image.replace("{}", name), (HEIGHT, WIDTH))
        for part in range(1 + number % 3):
            save(root / mask.replace("{}", name).replace("{n}", str(part)), stripe(name, part))
    with pytest.raises(ConfigError, match=r"has 2 masks, such as .*: move masks of classes to masks/CLASS/IMAGE\.png"):
        propose_config(InitRequest(root, tmp_path / "made.yaml"))


@given(st.integers(1, 12), st.data())
def test_combined_planes_hold_each_plane(num_classes: int, data: st.DataObject) -> None:
    bits = data.draw(st.lists(st.integers(0, 2**num_classes - 1), min_size=12, max_size=12))
    sets = np.array(bits).reshape(3, 4)
    planes = {number: (sets >> number) & 1 == 1 for number in range(num_classes)}
    ids = combine(
        [(number + 1, plane) for number, plane in planes.items()], DrawnMask(np.zeros((3, 4), np.uint8), (3, 4))
    )
    areas = {number: plane.sum() for number, plane in planes.items()}
    for pixel, value in zip(sets.ravel(), ids.ravel(), strict=True):
        own = [number for number in planes if pixel >> number & 1]
        assert value == 0 if not own else areas[value - 1] == min(areas[number] for number in own)
        assert not own or value - 1 in own
    several = sum(bin(pixel).count("1") > 1 for pixel in bits) / max(1, sum(pixel > 0 for pixel in bits))
    assert overlap_share([list(planes.values())]) == pytest.approx(several)
