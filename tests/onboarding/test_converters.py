"""Converters: the masks that `segapp init` writes from annotations, against hand-drawn ones; resuming; bad entries."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segapp.errors import DataError
from segapp.onboarding.annotations import find_yolo
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.layout import DrawnMask, Layout
from segapp.onboarding.tree import survey_tree
from tests.support.drawn_annotations import NAMES, coco, cvat, expected, labelme, nnunet, supervisely, yolo
from tests.support.drawn_folders import draw_image, draw_mask, proposed, samples_read


def written(tmp_path: Path, name: str) -> np.ndarray:
    return np.asarray(Image.open(tmp_path / "made-masks" / f"{name}.png"))


def with_ignored() -> np.ndarray:
    mask = expected(2, 1)
    mask[30:40, 40:50] = 255
    return mask


def with_piece() -> np.ndarray:
    mask, piece = expected(2, 2), np.zeros(36, bool)
    piece[7:10] = piece[11:] = True
    mask[12:18, 14:20][piece.reshape(6, 6)] = 1
    return mask


def with_hole() -> np.ndarray:
    mask = expected(2, 2)
    mask[13:17, 15:19] = 0  # the inside of the hole; its outline belongs to the road
    mask[30:36, 40:46] = 1
    return mask


@pytest.mark.parametrize(
    ("draw", "folder", "names", "wanted", "said"),
    [
        (coco, "images", "road car", expected(), "set data.multilabel: files"),
        (yolo, "images/{split}", "road car", expected(), "4 training images (train), 2 validation images (val)"),
        (labelme, ".", "car road", with_ignored(), "6 of 6 files of labelme name"),
        (cvat, "images", "car road", with_piece(), ""),
        (supervisely, "ds0/img", "car road", with_hole(), ""),
    ],
    ids=["COCO", "YOLO", "labelme", "CVAT", "Supervisely"],
)
def test_annotated_objects_become_masks(
    draw: Any, folder: str, names: str, wanted: np.ndarray, said: str, tmp_path: Path
) -> None:
    draw(tmp_path / "d")
    config, result, found = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["background", *names.split()]
    assert sorted(found["train"] + found["val"]) == [f"{name}.jpg" for name in NAMES]
    for number, name in enumerate(NAMES):
        place = folder.format(split="train" if number < 4 else "val")
        np.testing.assert_array_equal(written(tmp_path, f"{place}/{name}"), wanted)
    assert said in " ".join(result.lines)


def test_polygons_of_yolo_are_drawn_largest_first(tmp_path: Path) -> None:
    draw_image(tmp_path / "a.png", (10, 10))
    small, large = "0 0.35 0.35 0.55 0.35 0.55 0.55 0.35 0.55", "12 0.05 0.05 0.95 0.05 0.95 0.95 0.05 0.95"
    wanted = np.full((10, 10), 13)
    wanted[3:6, 3:6] = 1
    for lines in ([small, large], [large, small]):
        (tmp_path / "a.txt").write_text("\n".join(lines))
        layout = find_yolo(survey_tree(tmp_path))
        assert layout is not None
        assert len(layout.classes) == 14  # 0 to 12, the largest in any line, and the background
        np.testing.assert_array_equal(painted(layout), wanted)
    (tmp_path / "a.txt").write_text(f"254{large[2:]}")
    with pytest.raises(DataError, match="256 classes, but 8-bit masks hold 255"):
        find_yolo(survey_tree(tmp_path))
    (tmp_path / "a.txt").write_text(f"{large}\n-1{large[2:]}")
    layout = find_yolo(survey_tree(tmp_path))
    assert layout is not None
    with pytest.raises(ValueError, match="object 1: class -1 is not in the list of classes"):
        painted(layout)


def painted(layout: Layout) -> np.ndarray:
    """Returns the mask of the first pair, of an image of 10 x 10 pixels."""
    drawing = layout.pairs[0].drawing
    assert drawing is not None
    assert drawing.paint is not None
    return np.asarray(drawing.paint(DrawnMask(np.zeros((10, 10), np.uint8), (10, 10))))


def test_annotations_that_are_all_bad_are_an_error(tmp_path: Path) -> None:
    coco(tmp_path / "d", lambda own: [[1.0, 2.0]])
    with pytest.raises(DataError, match=r"no entry of COCO can be converted: annotations/instances\.json: image 0000"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    assert not (tmp_path / "made.yaml").exists()


def test_names_of_annotation_files_say_the_split(tmp_path: Path) -> None:
    """The numbers of the images begin again in each split."""
    cvat(tmp_path / "d")
    path = tmp_path / "d" / "annotations.xml"
    head, *entries = re.split(r"(?=<image )", path.read_text().removesuffix("</annotations>"))
    path.unlink()
    for split, own in (("train", entries[:4]), ("val", entries[4:])):
        for number, entry in enumerate(own):
            name, new = NAMES[entries.index(entry)], f"{split}/{NAMES[number]}"
            own[number] = entry.replace(f"{name}.jpg", f"{NAMES[number]}.jpg")
            (tmp_path / "d/images" / split).mkdir(exist_ok=True)
            (tmp_path / f"d/images/{name}.jpg").rename(tmp_path / f"d/images/{new}.jpg")
        (tmp_path / "d" / f"{split}.xml").write_text(f"{head}{''.join(own)}</annotations>")
    _, result, names = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (len(names["train"]), len(names["val"])) == (4, 2)
    assert "splits: 4 training images (train), 2 validation images (val)" in result.lines


def test_nnunet_channels_are_refused_and_their_stack_is_read(tmp_path: Path) -> None:
    pytest.importorskip("rasterio", reason="the extra geo is not installed")
    nnunet(root := tmp_path / "d", num_channels=5)
    said = r'imagesTr/p0000_0000.png and .*_0001.png are channels of one image.*np.save\("imagesTr/p0000.npy"'
    with pytest.raises(DataError, match=said):
        propose_config(InitRequest(root, tmp_path / "made.yaml"))
    channel = np.asarray(Image.open(root / "imagesTr/p0001_0001.png"))
    for name in NAMES:
        files = sorted((root / "imagesTr").glob(f"p{name}_*.png"))
        np.save(root / "imagesTr" / f"p{name}.npy", np.stack([np.asarray(Image.open(file)) for file in files], axis=-1))
        for file in files:
            file.unlink()
    config, _, _ = proposed(root, tmp_path / "made.yaml")
    assert config.data.classes == ["ground", "road"]
    read = {image.stem: pixels for _, image, pixels, _ in samples_read(config)}
    assert len(read) == len(NAMES)
    np.testing.assert_array_equal(read["p0001"][..., 1], channel)


def test_nnunet_cases_of_one_file_are_read(tmp_path: Path) -> None:
    """Names that end as those of channels, next to a name without an end, are images of their own."""
    for number in range(4):
        for name in (f"a{number}", f"a{number}_0000", f"a{number}_0001"):
            draw_image(tmp_path / "own/images" / f"{name}.png")
            draw_mask(tmp_path / "own/labels" / f"{name}.png", np.array([0, 1], np.uint8))
    _, _, names = proposed(tmp_path / "own", tmp_path / "own.yaml")
    assert len(names["train"] + names["val"]) == 12


def test_table_chooses_one_of_the_channels_of_nnunet(tmp_path: Path) -> None:
    nnunet(tmp_path / "d", num_channels=2)
    rows = [f"imagesTr/p{name}_0001.png,labelsTr/p{name}.png\n" for name in NAMES]
    (tmp_path / "d" / "pairs.csv").write_text("image,mask\n" + "".join(rows))
    propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    listed = "".join((tmp_path / f"made-lists/{split}.txt").read_text() for split in ("train", "val")).splitlines()
    assert sorted(listed) == [f"imagesTr/p{name}_0001.png\tlabelsTr/p{name}.png" for name in NAMES]


def test_cvat_orders_by_fractions_and_supervisely_by_titles(tmp_path: Path) -> None:
    cvat(tmp_path / "c")
    path = tmp_path / "c" / "annotations.xml"
    path.write_text(path.read_text().replace('z_order="10"', 'z_order="1.5"').replace('z_order="9"', 'z_order="0"'))
    assert proposed(tmp_path / "c", tmp_path / "c.yaml")[0].data.classes == ["background", "car", "road"]
    text = path.read_text().replace(' z_order="1.5"', "")  # as 0, and behind what is drawn at 0
    path.write_text(re.sub(r"(<mask[^>]*>)(<polygon[^>]*>)", r"\2\1", text))
    proposed(tmp_path / "c", tmp_path / "made.yaml")
    assert (written(tmp_path, "images/0001")[12:14, 14:20] == 2).any()
    assert written(tmp_path, "images/0001")[17, 19] == 1
    supervisely(tmp_path / "s")
    (tmp_path / "s" / "meta.json").write_text(json.dumps({"classes": [{"title": "road"}, {"name": "car"}]}))
    assert proposed(tmp_path / "s", tmp_path / "s.yaml")[0].data.classes == ["background", "car", "road"]
