"""Layouts that differ in folders, names, splits, lists and groups: usual ones, and those of public data sets."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

import numpy as np

from tests.support.layouts.canvas import (
    BINARY,
    EIGHT,
    FOUR,
    SIZE,
    SPLITS,
    TWELVE,
    UNNAMED,
    Ask,
    Canvas,
    Codes,
    DrawnLayout,
    Refuse,
    coded,
    gray,
    known_split,
    listed,
    named,
    patches,
    save,
    scene,
    split,
    unsplit,
)

CAMVID_COLORS: Codes = {
    (128, 128, 128): "sky", (128, 0, 0): "building", (192, 192, 128): "pole", (128, 64, 128): "road",
    (60, 40, 222): "pavement", (128, 128, 0): "tree", (64, 0, 128): "car", (0, 0, 0): None,
}  # fmt: skip
LOVEDA: Codes = {
    0: None, 1: "background", 2: "building", 3: "road", 4: "water", 5: "barren", 6: "forest", 7: "agricultural",
}  # fmt: skip
SUIM: Codes = {
    (0, 0, 0): "background", (0, 0, 255): "human diver", (255, 255, 0): "fish", (255, 0, 255): "reefs",
    (255, 255, 255): "sea-floor", (0, 255, 0): "plants", (0, 255, 255): "wrecks", (255, 0, 0): "robots",
}  # fmt: skip
STREET: Codes = {0: "road", 2: "building", 8: "vegetation", 10: "sky", 13: "car", 255: None}
PETS: Codes = {1: "pet", 2: "background", 3: "border"}


def table(rows: Sequence[Sequence[object]]) -> str:
    """Returns rows as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


# Names and scenes


def scenes(canvas: Canvas) -> None:
    for place, count in (("barn", 3), ("field", 2), ("lake", 4), ("mill", 3), ("road", 5)):
        for name in TWELVE[:count]:
            canvas.pair(f"{place}/images/{name}.jpg", f"{place}/masks/{name}.png", UNNAMED, group=place, like=place)


def patients(canvas: Canvas) -> None:
    """Slices of patients: slice, patient, eye in the name; a patient must not be divided."""
    for patient in range(6):
        for number in range(2 + patient % 3):
            name, group = f"slice{number}_patient{patient:02}_{number % 2}", f"patient{patient:02}"
            canvas.pair(f"images/{name}.png", f"masks/{name}.png", BINARY, group=group, like=group)


def sparse_video(canvas: Canvas) -> None:
    """Every fourth frame of three videos has a mask."""
    for video, num_frames in (("v1", 16), ("v2", 21), ("v3", 13)):
        for number in range(num_frames):
            stem = f"{video}/{number:05}"
            if number % 4 == 0:
                canvas.pair(f"frames/{stem}.jpg", f"masks/{stem}.png", UNNAMED, group=video, like=video)
            else:
                canvas.other("frame", f"frames/{stem}.jpg", scene(stem, like=video).astype(np.uint8))


def chase(canvas: Canvas) -> None:
    """CHASE_DB1: both eyes of a child, two annotators, all in one folder."""
    for number in range(1, 7):
        for eye in "LR":
            stem = f"Image_{number:02}{eye}"
            areas = canvas.pair(f"{stem}.jpg", f"{stem}_2ndHO.png", BINARY, group=f"{number:02}", like=f"{number}")
            canvas.other("annotator", f"{stem}_1stHO.png", coded(np.roll(areas, 1, axis=1), [0, 255]))


def annotators(canvas: Canvas) -> None:
    """Three annotators, a folder of masks each: one has to be chosen."""
    for name in TWELVE:
        areas = canvas.pair(f"images/{name}.png", f"masks/annotator2/{name}.png", UNNAMED)
        for number in (1, 3):
            canvas.other("mask", f"masks/annotator{number}/{name}.png", np.roll(areas, number, axis=1).astype(np.uint8))


def changes(canvas: Canvas) -> None:
    """Change detection: two pictures of a place and one mask of what changed."""
    for name in TWELVE:
        canvas.pair(f"B/{name}.png", f"label/{name}.png", BINARY)
        canvas.other("before", f"A/{name}.png")


# Splits in folders


def loveda(canvas: Canvas) -> None:
    for word, names in (("Train", TWELVE[:5]), ("Val", TWELVE[5:8])):
        for area in ("Rural", "Urban"):
            for name in names:
                paths = f"{word}/{area}/images_png/{name}.png", f"{word}/{area}/masks_png/{name}.png"
                canvas.pair(*paths, LOVEDA, split=word.lower())


def drive(canvas: Canvas) -> None:
    """DRIVE: masks of vessels as GIF, and round fields of view, shifted by some pixels, outside which all is black."""
    rows, columns = np.ogrid[: SIZE[0], : SIZE[1]]
    for word, numbers in (("training", range(21, 28)), ("test", range(1, 6))):
        for number in numbers:
            image, mask = f"{word}/images/{number:02}_{word}.tif", f"{word}/1st_manual/{number:02}_manual1.gif"
            field = (rows - 17 - number % 3) ** 2 + (columns - 22 - number % 7) ** 2 < 17**2
            areas, pixels = patches(image, 2), canvas.image(image, scene(image).astype(np.uint8) * field[..., None])
            save(canvas.root / mask, coded(areas, [0, 255]))
            save(canvas.root / f"{word}/mask/{number:02}_{word}_mask.gif", field * np.uint8(255))
            names = [*BINARY.values(), None]
            canvas.note(image, mask, pixels, np.where(field, areas, 2), names, split=known_split(word))


def vistas(canvas: Canvas) -> None:
    """Mapillary Vistas as downloaded: two versions of the labels, each with its config."""
    newer: Codes = {0: "animal--bird", 1: "construction--road", 2: "sky", 3: None}
    for (known, names), word in zip(SPLITS, ("training", "validation"), strict=True):
        for name in names:
            image = f"{word}/images/{name}.jpg"
            areas = canvas.pair(image, f"{word}/v2.0/labels/{name}.png", newer, split=known)
            save(canvas.root / f"{word}/v1.2/labels/{name}.png", 3 - areas.astype(np.uint8))
            for version in ("v1.2", "v2.0"):
                save(canvas.root / f"{word}/{version}/instances/{name}.png", (areas * 256).astype(np.uint16))
    colors = [(10, 0, 0), (10, 9, 0), (10, 9, 8), (0, 0, 0)]
    for version, entries in (("v1.2", ("Void", "Sky", "Road", "Bird")), ("v2.0", (*newer.values(),))):
        labels = [
            {"name": name or "void--unlabeled", "readable": name or "Unlabeled", "color": color}
            for name, color in zip(entries, colors, strict=True)
        ]
        canvas.text(f"config_{version}.json", json.dumps({"labels": labels, "version": version[1:]}))


def suim(canvas: Canvas) -> None:
    """SUIM: train_val/ and TEST/, each with images and masks, and masks by class in TEST."""
    for folder, names, kind in (("train_val", EIGHT, "train"), ("TEST", FOUR, "test")):
        for name in names:
            areas = canvas.pair(f"{folder}/images/{name}.jpg", f"{folder}/masks/{name}.bmp", SUIM, split=kind)
            for number, short in ((1, "HD"), (2, "FV"), (3, "RO")) if kind == "test" else ():
                canvas.other(short, f"TEST/masks/{short}/{name}.bmp", np.uint8(255) * (areas == number))


def freiburg(canvas: Canvas) -> None:
    """Freiburg Forest: other pictures of each scene, and one folder of masks by color."""
    codes: Codes = {(170, 170, 170): "Trail", (0, 255, 0): "Grass", (102, 102, 51): "Vegetation", (0, 120, 255): "Sky"}
    for word, names in (("train", EIGHT), ("test", FOUR)):
        for name in names:
            stem = f"b{name}_Clipped"
            canvas.pair(f"{word}/rgb/{stem}.jpg", f"{word}/GT_color/{stem}_mask.png", codes, split=word)
            for kind, suffix in (("nir_gray", "png"), ("evi_gray", "tif"), ("depth_gray", "png")):
                path = f"{word}/{kind}/{stem}.{suffix}"
                canvas.other(kind, path, gray(path))
    canvas.text("labels.txt", [f"{name} {r} {g} {b}" for (r, g, b), name in codes.items()])


# Lists and tables


def voc_train_list(canvas: Canvas) -> None:
    """VOC's folders with own classes; images that are in no list."""
    listed("JPEGImages/{}.jpg", "SegmentationClass/{}.png", "ImageSets/Segmentation/{s}.txt")(canvas)
    canvas.text("ImageSets/Segmentation/trainval.txt", TWELVE)
    canvas.other("image", "JPEGImages/9998.jpg")
    canvas.other("image", "JPEGImages/9999.jpg")


def pet_lists(canvas: Canvas) -> None:
    """Oxford Pets with its lists: a name, and numbers after it; and a list of all images."""
    every = ["#Image CLASS-ID SPECIES BREED"]
    for word, known, numbers in (("trainval", "train", range(4)), ("test", "test", range(4, 6))):
        lines = [f"{kind}_{number} 1 1 1" for kind in ("Abyssinian", "beagle", "Bombay") for number in numbers]
        for name in (line.split()[0] for line in lines):
            canvas.pair(f"images/{name}.jpg", f"annotations/trimaps/{name}.png", PETS, split=known)
        canvas.text(f"annotations/{word}.txt", lines)
        every += lines
    canvas.text("annotations/list.txt", every)


def pseudo(canvas: Canvas) -> None:
    """Names in the lists without the endings of the files, as mmsegmentation has them; the test list repeats some."""
    listed("imgs/{}_img.jpg", "labels/{}_labelTrainIds.png", "splits/{s}.txt")(canvas)
    canvas.text("splits/test.txt", TWELVE[7:9])


def davis(canvas: Canvas) -> None:
    """DAVIS: lists of sequences, not of images; those of another year come after them."""
    for word, sequences in (("train", ("bear", "boat", "camel", "dance")), ("val", ("goat", "kite"))):
        for sequence in sequences:
            for number in range(2):
                path = f"480p/{sequence}/{number:05}"
                paths = f"JPEGImages/{path}.jpg", f"Annotations/{path}.png"
                codes: Codes = {0: "background", 1: "object"}
                canvas.pair(*paths, codes, split=word, group=sequence, like=sequence)
        canvas.text(f"ImageSets/2017/{word}.txt", sequences)
        canvas.text(f"ImageSets/2018/{word}.txt", ["goat"] if word == "train" else ["bear", "boat"])


def split_column(canvas: Canvas) -> None:
    """data.csv has a column of splits, of which one is for a test."""
    rows: list[list[object]] = [["filename", "mask", "subset"]]
    for number, name in enumerate(TWELVE):
        word = ("train", "valid", "train", "test", "train")[number % 5]
        canvas.pair(f"images/{name}.jpg", f"masks/{name}.png", UNNAMED, split=word.replace("valid", "val"))
        rows.append([f"{name}.jpg", f"{name}.png", word])
    canvas.text("data.csv", table(rows))


def image_folder(canvas: Canvas) -> None:
    """A Hugging Face imagefolder: metadata.jsonl names image and mask, whose names differ."""
    rows = []
    for number, name in enumerate(TWELVE):
        canvas.pair(f"train/{name}.png", f"train/seg_{number * 5 % 12:04}.png", UNNAMED)
        rows.append(json.dumps({"file_name": f"{name}.png", "mask_file_name": f"seg_{number * 5 % 12:04}.png"}))
    canvas.text("train/events.jsonl", ["{}"])
    canvas.text("train/metadata.jsonl", rows)


def a2d2(canvas: Canvas) -> None:
    """A2D2: the word of the kind is inside the name."""
    codes: Codes = {(255, 0, 0): "Car 1", (182, 89, 6): "Bicycle 1", (255, 0, 255): "RD normal street"}
    for day in ("20180807145028", "20180925101535", "20181008095521"):
        for number in range(4):
            paths = (f"{day}/{kind}/cam/{day}_{kind}_front_{number:09}.png" for kind in ("camera", "label"))
            canvas.pair(*paths, codes)


LAYOUTS = [
    DrawnLayout(name, *(drawing if isinstance(drawing, tuple) else (drawing,)))
    for name, drawing in {
        "_mask": unsplit("images/{}.jpg", "masks/{}_mask.png"),
        ".jpg.png": unsplit("images/{}.jpg", "masks/{}.jpg.png"),
        "unknown ending": unsplit("images/{}.jpg", "masks/{}_xyz.png"),
        "img_ and mask_": unsplit("images/img_{}.jpg", "masks/mask_{}.png"),
        "numbers after words": unsplit("x/image{}.jpg", "y/label{}.png"),
        "capitals": unsplit("Images/{}.JPG", "Masks/{}.PNG"),
        "side by side": unsplit("{}.jpg", "{}_mask.png"),
        "side by side, jpg and png": unsplit("{}.jpg", "{}.png"),
        "side by side, unknown ending": unsplit("{}.png", "{}_zz.png"),
        "folder per sample": unsplit("{}/image.png", "{}/mask.png"),
        "SpaceNet roads": unsplit("P/PS-RGB/SN3_train_PS-RGB_img{}.tif", "P/masks/SN3_train_geojson_img{}.png", BINARY),
        "imagesTr (nnU-Net)": unsplit("imagesTr/case_{}_0000.png", "labelsTr/case_{}.png"),
        "scenes": scenes,
        "slices of patients": patients,
        "video, sparse masks": sparse_video,
        "two annotators in a folder": (chase, Ask("--layout", ("*_1stHO", "*_2ndHO"))),
        "annotator folders": (annotators, Ask("--layout", tuple(f"masks/annotator{n}" for n in (1, 2, 3)))),
        "change detection": (changes, Ask("--layout", ("A -> label", "B -> label"))),
        "images/masks split": split("images/{s}/{}.jpg", "masks/{s}/{}.png"),
        "capitals, split": split("{s}/Images/{}.jpg", "{s}/Masks/{}.png", ("Train", "Val")),
        "trainannot": split("{s}/{}.png", "{s}annot/{}.png"),
        "x_train": split("images_{s}/{}.png", "masks_{s}/{}.png"),
        "CamVid's colors": named(split("{s}/{}.png", "{s}_labels/{}_L.png", codes=CAMVID_COLORS)),
        "LoveDA": named(loveda),
        "DRIVE": drive,
        "Cityscapes, train ids": named(
            split("leftImg8bit/{s}/a/a_00{}_leftImg8bit.png", "gtFine/{s}/a/a_00{}_gtFine_labelTrainIds.png",
                  codes=STREET)
        ),
        "ISIC 2018": split("ISIC18_{s}_Input/I_{}.jpg", "ISIC18_{s}_GroundTruth/I_{}_segmentation.png",
                           ("Training", "Validation"), BINARY),
        "Vistas, two versions": (named(vistas), Ask("--layout", ("v1.2/labels", "v2.0/labels"))),
        "SUIM": (named(suim), Ask("--layout", ("masks",))),
        "Freiburg forest": (named(freiburg), Ask("--layout", ("rgb -> GT_color",))),
        "Paddle lists, other names": listed("JPEG/{}.jpg", "Ann/m{}q.png", "{s}.txt", "JPEG/{}.jpg Ann/m{}q.png"),
        "VOC's lists": voc_train_list,
        "Oxford pets": named(pet_lists),
        "mmsegmentation's lists": pseudo,
        "DAVIS": davis,
        "column of splits": split_column,
        "imagefolder": (image_folder, Refuse(("metadata.jsonl", "to_csv"))),
        "A2D2": (a2d2, Refuse(("write train.txt and val.txt with an image and its mask a line",))),
    }.items()
]  # fmt: skip
