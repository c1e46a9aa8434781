"""Usual layouts of folders, and those of well-known data sets with classes of one's own."""

from __future__ import annotations

import numpy as np

from tests.support.layouts.canvas import SIZE, Canvas, Codes, coded, save
from tests.support.layouts.layout import (
    BINARY,
    EIGHT,
    FOUR,
    TWELVE,
    UNNAMED,
    layouts,
    listed,
    published,
    split,
    unsplit,
)

LOVEDA: Codes = {
    0: None, 1: "background", 2: "building", 3: "road", 4: "water", 5: "barren", 6: "forest", 7: "agricultural",
}  # fmt: skip
ISAID: Codes = {
    (0, 0, 0): "background", (0, 0, 63): "ship", (0, 63, 63): "storage tank", (0, 127, 255): "plane",
}  # fmt: skip
STREET: Codes = {0: "road", 2: "building", 8: "vegetation", 10: "sky", 13: "car", 255: None}
LIP: Codes = {0: "background", 2: "hair", 5: "upper-clothes", 9: "pants", 13: "face"}


def mapillary(canvas: Canvas) -> None:
    for word, names, known in (("training", EIGHT, "train"), ("validation", FOUR, "val")):
        for name in names:
            canvas.pair(f"{word}/images/{name}.jpg", f"{word}/v2.0/labels/{name}.png", UNNAMED, split=known)
            for kind in ("instances", "panoptic"):
                ids = np.arange(SIZE[0] * SIZE[1], dtype=np.uint16).reshape(SIZE) // 40
                save(canvas.root / f"{word}/v2.0/{kind}/{name}.png", ids)
    for kind in ("instances", "panoptic"):
        canvas.unused.append(tuple(f"training/v2.0/{kind}/{name}.png" for name in EIGHT))
    canvas.images_unused("testing/images/t1.jpg", "testing/images/t2.jpg")


def drive(canvas: Canvas) -> None:
    field = np.zeros(SIZE, np.uint8)
    field[8:-8, 8:-8] = 255
    fields = []
    for word, first in (("training", 21), ("test", 1)):
        for number in range(first, first + 6):
            name = f"{number:02}"
            canvas.pair(
                f"{word}/images/{name}_{word}.tif",
                f"{word}/1st_manual/{name}_manual1.gif",
                BINARY,
                split="train" if word == "training" else "test",
            )
            fields.append(f"{word}/mask/{name}_{word}_mask.gif")
            save(canvas.root / fields[-1], field)
    canvas.unused.append(tuple(fields))


def bdd(canvas: Canvas) -> None:
    for word, names in (("train", EIGHT), ("val", FOUR)):
        for name in names:
            image, mask = f"images/10k/{word}/{name}.jpg", f"labels/sem_seg/masks/{word}/{name}.png"
            areas = canvas.pair(image, mask, STREET, split=word)
            colors = coded(
                areas, [(128, 64, 128), (70, 70, 70), (107, 142, 35), (70, 130, 180), (0, 0, 142), (0, 0, 0)]
            )
            save(canvas.root / f"labels/sem_seg/colormaps/{word}/{name}.png", colors)
    canvas.unused.append(tuple(f"labels/sem_seg/colormaps/train/{name}.png" for name in EIGHT))
    canvas.images_unused("images/10k/test/x.jpg", "images/10k/test/y.jpg")


def lip(canvas: Canvas) -> None:
    for word, names in (("train", EIGHT), ("val", FOUR)):
        for name in names:
            canvas.pair(
                f"TrainVal_images/{word}_images/{name}.jpg",
                f"TrainVal_parsing_annotations/{word}_segmentations/{name}.png",
                LIP,
                split=word,
            )
        canvas.text(f"{word}_id.txt", names)


def loveda(canvas: Canvas) -> None:
    for word, names in (("Train", TWELVE[:6]), ("Val", TWELVE[6:8])):
        for area in ("Rural", "Urban"):
            for name in names:
                folder = f"{word}/{area}"
                canvas.pair(
                    f"{folder}/images_png/{name}.png", f"{folder}/masks_png/{name}.png", LOVEDA, split=word.lower()
                )


def uavid(canvas: Canvas) -> None:
    for word, scenes in (("uavid_train", ("seq1", "seq2")), ("uavid_val", ("seq3",))):
        for sequence in scenes:
            for name in TWELVE[:4]:
                folder = f"{word}/{sequence}"
                canvas.pair(
                    f"{folder}/Images/{name}.png",
                    f"{folder}/Labels/{name}.png",
                    UNNAMED,
                    split=word[6:],
                    group=sequence,
                )


def scenes(canvas: Canvas) -> None:
    for place in ("barn", "field", "lake", "mill", "road"):
        for name in TWELVE[:3]:
            canvas.pair(f"{place}/images/{name}.jpg", f"{place}/masks/{name}.png", UNNAMED, group=place, like=place)


def pets(canvas: Canvas) -> None:
    for kind in ("Abyssinian", "beagle", "pug", "Bombay", "boxer"):
        for number in range(3):
            name = f"{kind}_{number}"
            canvas.pair(
                f"images/{name}.jpg", f"annotations/trimaps/{name}.png", {1: "pet", 2: "background", 3: "border"}
            )
    (canvas.root / "annotations/xmls").mkdir()


def coco_stuff(canvas: Canvas) -> None:
    for word, names in (("train2017", EIGHT), ("val2017", FOUR)):
        for name in names:
            canvas.pair(
                f"images/{word}/00000000{name}.jpg",
                f"stuffthingmaps/{word}/00000000{name}.png",
                UNNAMED,
                split=word[:-4],
            )


USUAL = layouts(
    {
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
        "imagesTr (nnU-Net)": unsplit("imagesTr/case_{}_0000.png", "labelsTr/case_{}.png"),
        "img_dir/ann_dir (mmseg)": split("img_dir/{s}/{}.jpg", "ann_dir/{s}/{}.png"),
        "imgs and splits (mmseg)": listed("imgs/{}.jpg", "labels/{}.png", "splits/{s}.txt"),
        "lists of names": listed("images/{}.jpg", "masks/{}.png", "{s}.txt"),
        "lists of file names": listed("images/{}.jpg", "masks/{}.png", "{s}_list.txt", "{}.jpg"),
        "Paddle lists": listed(
            "images/{}.jpg", "annotations/{}.png", "{s}_list.txt", "images/{}.jpg annotations/{}.png"
        ),
        "Paddle lists, other names": listed("JPEG/{}.jpg", "Ann/m{}q.png", "{s}.txt", "JPEG/{}.jpg Ann/m{}q.png"),
        "Pascal context": listed(
            "JPEGImages/{}.jpg", "SegmentationClassContext/{}.png", "ImageSets/SegmentationContext/{s}.txt"
        ),
        "VOC, own classes": listed("JPEGImages/{}.jpg", "SegmentationClass/{}.png", "ImageSets/Segmentation/{s}.txt"),
        "ADE folders, own classes": split("images/{s}/{}.jpg", "annotations/{s}/{}.png", ("training", "validation")),
        "LoveDA": published(loveda),
        "Mapillary": mapillary,
        "BDD100K": published(bdd),
        "iSAID": published(
            split("{s}/images/P{}.png", "{s}/Semantic_masks/images/P{}_instance_color_RGB.png", codes=ISAID)
        ),
        "LIP": published(lip),
        "COCO-Stuff": coco_stuff,
        "DRIVE": drive,
        "UAVid": uavid,
        "scenes": scenes,
        "folder per sample": unsplit("{}/image.png", "{}/mask.png"),
        "Oxford pets": pets,
        "Potsdam": unsplit("2_Ortho_RGB/top_{}_RGB.tif", "5_Labels_all/top_{}_label.tif"),
        "ISIC": split(
            "ISIC_{s}_Input/ISIC_{}.jpg", "ISIC_{s}_GroundTruth/ISIC_{}_segmentation.png", ("Training", "Test")
        ),
        "Carvana": unsplit("train/{}.jpg", "train_masks/{}_mask.gif", BINARY),
        "Cityscapes, own names": split("leftImg8bit/{s}/a/a_{}.png", "gtFine/{s}/a/a_{}_labelIds.png"),
    }
)
