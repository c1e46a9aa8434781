"""`segapp init` on drawn folders of published and usual layouts: the pairs, the splits, and every mask can be read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.support.drawn_folders import BINARY, IDS, draw, draw_image, draw_mask, proposed

TEN = [f"{number:04}" for number in range(10)]
SIX, TWO = TEN[:6], TEN[8:]


@dataclass(frozen=True)
class Case:
    """A layout: how it is drawn, and the numbers of training and validation images that init must find."""

    draw: Callable[[Path], None]
    counts: tuple[int, int]
    format: str | None = None


def unsplit(image: str, mask: str, values: np.ndarray = IDS) -> Case:
    return Case(lambda root: draw(root, TEN, image, mask, values), (8, 2), "list")


def split(image: str, mask: str, words: tuple[str, str] = ("train", "val"), values: np.ndarray = IDS) -> Case:
    """A layout with a folder for each split, `{s}` in the paths."""

    def drawn(root: Path) -> None:
        for word, names in zip(words, (SIX, TWO), strict=True):
            draw(root, names, image.replace("{s}", word), mask.replace("{s}", word), values)

    return Case(drawn, (6, 2))


def listed(image: str, mask: str, lists: str, line: str = "{}", values: np.ndarray = IDS) -> Case:
    """A layout with lists of names, `{s}` in their path."""

    def drawn(root: Path) -> None:
        draw(root, TEN, image, mask, values)
        for word, names in (("train", SIX), ("val", TWO)):
            path = root / lists.replace("{s}", word)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("".join(line.replace("{}", name) + "\n" for name in names))

    return Case(drawn, (6, 2), "list")


def mapillary(root: Path) -> None:
    for word, names in (("training", SIX), ("validation", TWO)):
        for kind in ("labels", "instances", "panoptic"):
            draw(root, names, f"{word}/images/{{}}.jpg", f"{word}/v2.0/{kind}/{{}}.png")
    for name in ("t1", "t2"):
        draw_image(root / "testing" / "images" / f"{name}.jpg")


def drive(root: Path) -> None:
    for word, first in (("training", 21), ("test", 1)):
        for number in range(first, first + 6):
            name = f"{number:02}"
            draw_image(root / word / "images" / f"{name}_{word}.tif")
            draw_mask(root / word / "1st_manual" / f"{name}_manual1.gif", BINARY)
            mask = np.zeros((48, 64), np.uint8)
            mask[8:-8, 8:-8] = 255
            path = root / word / "mask" / f"{name}_{word}_mask.gif"
            path.parent.mkdir(exist_ok=True)
            import PIL.Image

            PIL.Image.fromarray(mask).save(path)


def bdd(root: Path) -> None:
    for word, names in (("train", SIX), ("val", TWO)):
        draw(root, names, f"images/10k/{word}/{{}}.jpg", f"labels/sem_seg/masks/{word}/{{}}.png")
        for name in names:
            draw_mask(root / f"labels/sem_seg/colormaps/{word}/{name}.png", np.eye(3, dtype=np.uint8) * 250)
    for name in ("x", "y"):
        draw_image(root / "images/10k/test" / f"{name}.jpg")


def isaid(root: Path) -> None:
    colors = np.array([[0, 0, 0], [0, 0, 63], [0, 63, 63], [0, 127, 255]], np.uint8)
    for word, names in (("train", SIX), ("val", TWO)):
        draw(
            root,
            [f"P{name}" for name in names],
            f"{word}/images/{{}}.png",
            f"{word}/Semantic_masks/images/{{}}_instance_color_RGB.png",
            colors,
        )


def lip(root: Path) -> None:
    for word, names in (("train", SIX), ("val", TWO)):
        draw(
            root,
            names,
            f"TrainVal_images/{word}_images/{{}}.jpg",
            f"TrainVal_parsing_annotations/{word}_segmentations/{{}}.png",
        )
        (root / f"{word}_id.txt").write_text("\n".join(names))


def loveda(root: Path) -> None:
    ids = np.arange(8, dtype=np.uint8)
    for word, names in (("Train", SIX), ("Val", TWO)):
        for scene in ("Rural", "Urban"):
            draw(root, names, f"{word}/{scene}/images_png/{{}}.png", f"{word}/{scene}/masks_png/{{}}.png", ids)


def uavid(root: Path) -> None:
    for word, scenes in (("uavid_train", ("seq1", "seq2")), ("uavid_val", ("seq3",))):
        for scene in scenes:
            draw(root, TEN[:3], f"{word}/{scene}/Images/{{}}.png", f"{word}/{scene}/Labels/{{}}.png")


def scenes(root: Path) -> None:
    for scene in ("barn", "field", "lake", "mill", "road"):
        draw(root, TEN[:4], f"{scene}/images/{{}}.jpg", f"{scene}/masks/{{}}.png")


def folder_per_sample(root: Path) -> None:
    for name in TEN:
        draw_image(root / name / "image.png")
        draw_mask(root / name / "mask.png")


def pets(root: Path) -> None:
    names = [f"{kind}_{number}" for kind in ("Abyssinian", "beagle", "pug", "Bombay", "boxer") for number in range(4)]
    draw(root, names, "images/{}.jpg", "annotations/trimaps/{}.png", np.array([1, 2, 3], np.uint8))
    (root / "annotations/xmls").mkdir()


def coco_stuff(root: Path) -> None:
    for word, names in (("train2017", SIX), ("val2017", TWO)):
        draw(root, [f"00000000{name}" for name in names], f"images/{word}/{{}}.jpg", f"stuffthingmaps/{word}/{{}}.png")


CASES: dict[str, Case] = {
    "_mask.png": unsplit("images/{}.jpg", "masks/{}_mask.png"),
    "_mask.png, binary": unsplit("images/{}.png", "masks/{}_mask.png", BINARY),
    "same stems": unsplit("images/{}.jpg", "masks/{}.png"),
    ".jpg.png": unsplit("images/{}.jpg", "masks/{}.jpg.png"),
    "_gt": unsplit("images/{}.jpg", "gt/{}_gt.png"),
    "_label": unsplit("imgs/{}.jpg", "labels/{}_label.png"),
    "unknown ending": unsplit("images/{}.jpg", "masks/{}_xyz.png"),
    "img_ and mask_": unsplit("images/img_{}.jpg", "masks/mask_{}.png"),
    "numbers after words": unsplit("x/image{}.jpg", "y/label{}.png"),
    "capitals": unsplit("Images/{}.JPG", "Masks/{}.PNG"),
    "capitals, split": split("{s}/Images/{}.jpg", "{s}/Masks/{}.png", ("Train", "Val")),
    "side by side, _mask": unsplit("{}.jpg", "{}_mask.png"),
    "side by side, below": unsplit("data/{}.png", "data/{}_label.png"),
    "side by side, jpg and png": unsplit("{}.jpg", "{}.png"),
    "side by side, unknown ending": unsplit("{}.png", "{}_zz.png"),
    "image/label": unsplit("image/{}.png", "label/{}.png"),
    "x/y": unsplit("inputs/{}.png", "targets/{}.png"),
    "images/masks split": split("images/{s}/{}.jpg", "masks/{s}/{}.png"),
    "images/masks split, _mask": split("images/{s}/{}.jpg", "masks/{s}/{}_mask.png"),
    "train/images": split("{s}/images/{}.jpg", "{s}/masks/{}.png"),
    "train/images, valid": split("{s}/images/{}.jpg", "{s}/masks/{}.png", ("train", "valid")),
    "train/image, _mask": split("{s}/image/{}.png", "{s}/mask/{}_mask.png", ("train", "test")),
    "train side by side (Roboflow)": split("{s}/{}.jpg", "{s}/{}_mask.png", ("train", "valid")),
    "train_labels (Kaggle CamVid)": split("{s}/{}.png", "{s}_labels/{}_L.png"),
    "trainannot": split("{s}/{}.png", "{s}annot/{}.png"),
    "x_train": split("images_{s}/{}.png", "masks_{s}/{}.png"),
    "imagesTr (nnU-Net)": Case(
        lambda root: draw(root, TEN, "imagesTr/case_{}_0000.png", "labelsTr/case_{}.png"), (8, 2)
    ),
    "img_dir/ann_dir (mmseg)": split("img_dir/{s}/{}.jpg", "ann_dir/{s}/{}.png"),
    "imgs and splits (mmseg)": listed("imgs/{}.jpg", "labels/{}.png", "splits/{s}.txt"),
    "lists of names": listed("images/{}.jpg", "masks/{}.png", "{s}.txt"),
    "lists of file names": listed("images/{}.jpg", "masks/{}.png", "{s}_list.txt", "{}.jpg"),
    "Paddle lists": listed("images/{}.jpg", "annotations/{}.png", "{s}_list.txt", "images/{}.jpg annotations/{}.png"),
    "Paddle lists, other names": listed("JPEG/{}.jpg", "Ann/m{}q.png", "{s}.txt", "JPEG/{}.jpg Ann/m{}q.png"),
    "Pascal context": listed(
        "JPEGImages/{}.jpg", "SegmentationClassContext/{}.png", "ImageSets/SegmentationContext/{s}.txt"
    ),
    "VOC, own classes": listed("JPEGImages/{}.jpg", "SegmentationClass/{}.png", "ImageSets/Segmentation/{s}.txt"),
    "ADE folders, own classes": split("images/{s}/{}.jpg", "annotations/{s}/{}.png", ("training", "validation")),
    "LoveDA": Case(loveda, (12, 4)),
    "Mapillary": Case(mapillary, (6, 2)),
    "BDD100K": Case(bdd, (6, 2)),
    "iSAID": Case(isaid, (6, 2)),
    "LIP": Case(lip, (6, 2)),
    "COCO-Stuff": Case(coco_stuff, (6, 2)),
    "DRIVE": Case(drive, (6, 6)),
    "UAVid": Case(uavid, (6, 3)),
    "scenes": Case(scenes, (16, 4), "list"),
    "folder per sample": Case(folder_per_sample, (8, 2), "list"),
    "Oxford pets": Case(pets, (16, 4), "list"),
    "Potsdam": unsplit("2_Ortho_RGB/top_{}_RGB.tif", "5_Labels_all/top_{}_label.tif"),
    "ISIC": split("ISIC_{s}_Input/ISIC_{}.jpg", "ISIC_{s}_GroundTruth/ISIC_{}_segmentation.png", ("Training", "Test")),
    "Carvana": unsplit("train/{}.jpg", "train_masks/{}_mask.gif", BINARY),
    "Cityscapes, own names": split("leftImg8bit/{s}/a/a_{}.png", "gtFine/{s}/a/a_{}_labelIds.png"),
}


@pytest.mark.parametrize("name", CASES)
def test_layout_is_understood_and_every_mask_read(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    root = tmp_path / "my data"
    case.draw(root)
    config, result, names = proposed(root, tmp_path / "made.yaml")
    print("\n".join(result.lines))
    assert tuple(len(own) for own in names.values()) == case.counts
    assert case.format in (None, config.data.format)
    assert not any(
        word in image for own in names.values() for image in own for word in ("mask", "manual", "_zz", "GroundT")
    )
    assert (
        not set(names["train"]) & set(names["val"])
        or "scene" in name
        or name in ("LoveDA", "UAVid", "folder per sample")
    )
