"""Layouts as they lie on people's disks: tables, lists, run lengths, arrays, videos, several annotators or versions."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence

import numpy as np
from PIL import Image

from tests.support.layouts.canvas import SIZE, Canvas, Codes, coded, patches, save, scene
from tests.support.layouts.layout import (
    BINARY,
    CAMVID_COLORS,
    EIGHT,
    FOUR,
    TWELVE,
    UNNAMED,
    Ask,
    Refuse,
    layouts,
    published,
    unsplit,
    with_files,
)
from tests.support.layouts.usual import drive, loveda

POTSDAM: Codes = {
    (255, 255, 255): "impervious surfaces", (0, 0, 255): "building", (0, 255, 255): "low vegetation",
    (0, 255, 0): "tree", (255, 255, 0): "car", (255, 0, 0): "clutter",
}  # fmt: skip
SUIM: Codes = {
    (0, 0, 0): "background", (0, 0, 255): "human diver", (255, 255, 0): "fish", (255, 0, 255): "reefs",
    (255, 255, 255): "sea-floor", (0, 255, 0): "plants", (0, 255, 255): "wrecks", (255, 0, 0): "robots",
}  # fmt: skip
DEEPGLOBE: Codes = {
    (0, 255, 255): "urban_land", (255, 255, 0): "agriculture_land", (0, 255, 0): "forest_land", (0, 0, 0): None,
}  # fmt: skip


def runs_by_column(mask: np.ndarray) -> str:
    """Returns Kaggle's run lengths: starts from 1 and lengths, down the columns."""
    padded = np.concatenate([[0], mask.T.ravel().astype(np.int8), [0]])
    edges = np.flatnonzero(np.diff(padded)) + 1
    return " ".join(f"{start} {end - start}" for start, end in zip(edges[::2], edges[1::2], strict=True))


def table(rows: Sequence[Sequence[object]]) -> str:
    """Returns rows as CSV."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def severstal(canvas: Canvas) -> None:
    """Severstal: train.csv with a row of run lengths for each image and class; images without a row have no defect."""
    rows: list[list[object]] = [["ImageId", "ClassId", "EncodedPixels"]]
    for number, name in enumerate(TWELVE):
        image = f"train_images/{name}.jpg"
        pixels = canvas.image(image)
        areas = patches(name, 3) if number < 10 else np.zeros(SIZE, int)
        defects = [one for one in (1, 2) if (areas == one).any()]
        rows += [[f"{name}.jpg", one + 1, runs_by_column(areas == one)] for one in defects]
        canvas.note(image, "train.csv", pixels, areas, ["background", "class_2", "class_3"])
    canvas.text("train.csv", table(rows))
    canvas.images_unused("test_images/t1.jpg", "test_images/t2.jpg")


def chase(canvas: Canvas) -> None:
    """CHASE_DB1: both eyes of a child, two annotators, all in one folder."""
    for number in range(1, 7):
        for eye in "LR":
            stem = f"Image_{number:02}{eye}"
            areas = canvas.pair(
                f"{stem}.jpg", f"{stem}_1stHO.png", BINARY, group=f"{number:02}", like=f"child {number}"
            )
            second = np.roll(areas, 1, axis=1)
            save(canvas.root / f"{stem}_2ndHO.png", coded(second, [0, 255]))
    canvas.unused.append(tuple(f"Image_{number:02}{eye}_2ndHO.png" for number in range(1, 7) for eye in "LR"))


def suim(canvas: Canvas) -> None:
    """SUIM: train_val/ and TEST/, each with images and masks, and masks by class in TEST."""
    for folder, names, kind in (("train_val", EIGHT, "train"), ("TEST", FOUR, "test")):
        for name in names:
            areas = canvas.pair(f"{folder}/images/{name}.jpg", f"{folder}/masks/{name}.bmp", SUIM, split=kind)
            if kind == "test":
                for number, short in ((1, "HD"), (2, "FV"), (3, "RO")):
                    one = np.uint8(255) * (areas == number).astype(np.uint8)
                    save(canvas.root / f"TEST/masks/{short}/{name}.bmp", one)
    for short in ("HD", "FV", "RO"):
        canvas.unused.append(tuple(f"TEST/masks/{short}/{name}.bmp" for name in FOUR))


def a2d2(canvas: Canvas) -> None:
    """A2D2: the word of the kind is inside the name."""
    codes: Codes = {(255, 0, 0): "Car 1", (182, 89, 6): "Bicycle 1", (255, 0, 255): "RD normal street"}
    for sequence in ("20180807_145028", "20180925_101535", "20181008_095521"):
        day = sequence.replace("_", "")
        for number in range(4):
            stem = f"camera_lidar_semantic/{sequence}"
            end = f"frontcenter_{number:09}.png"
            canvas.pair(
                f"{stem}/camera/cam_front_center/{day}_camera_{end}",
                f"{stem}/label/cam_front_center/{day}_label_{end}",
                codes,
                group=sequence,
                like=sequence,
            )
    names = {"#{:02x}{:02x}{:02x}".format(*color): name for color, name in codes.items()}
    canvas.text("camera_lidar_semantic/class_list.json", json.dumps(names))
    canvas.names_said = True


def vistas(canvas: Canvas) -> None:
    """Mapillary Vistas with v2.0 alone."""
    codes: Codes = {0: "Bird", 1: "Road", 2: "Sky", 3: None}
    for word, names, known in (("training", EIGHT, "train"), ("validation", FOUR, "val")):
        for name in names:
            canvas.pair(f"{word}/images/{name}.jpg", f"{word}/v2.0/labels/{name}.png", codes, split=known)
    labels = [
        {"name": name or "void--unlabeled", "readable": name or "Unlabeled", "color": [9 * number, 0, 0]}
        for number, name in enumerate(codes.values())
    ]
    canvas.text("config_v2.0.json", json.dumps({"labels": labels}))
    canvas.names_said = True


def bdd_old(canvas: Canvas) -> None:
    """BDD100K as of 2018: bdd100k/seg, with colours beside the train ids."""
    codes: Codes = {0: "road", 2: "building", 10: "sky", 13: "car", 255: None}
    colors = [(128, 64, 128), (70, 70, 70), (70, 130, 180), (0, 0, 142), (0, 0, 0)]
    for word, names in (("train", EIGHT), ("val", FOUR)):
        for name in names:
            stem = f"{word}/{name}"
            areas = canvas.pair(f"seg/images/{stem}.jpg", f"seg/labels/{stem}_train_id.png", codes, split=word)
            save(canvas.root / f"seg/color_labels/{stem}_train_color.png", coded(areas, colors))
    canvas.unused.append(tuple(f"seg/color_labels/train/{name}_train_color.png" for name in EIGHT))
    canvas.names_said = True


def freiburg(canvas: Canvas) -> None:
    """Freiburg Forest: other pictures of each scene, and one folder of masks by colour."""
    codes: Codes = {(170, 170, 170): "Trail", (0, 255, 0): "Grass", (102, 102, 51): "Vegetation", (0, 120, 255): "Sky"}
    others = {"nir_gray": ".png", "evi_gray": ".tif", "depth_gray": ".png"}
    for word, names in (("train", EIGHT), ("test", FOUR)):
        for name in names:
            canvas.pair(
                f"{word}/rgb/b{name}_Clipped.jpg", f"{word}/GT_color/b{name}_Clipped_mask.png", codes, split=word
            )
            for kind, suffix in others.items():
                pixels = scene(f"{kind} {word} {name}", SIZE, 1).astype(np.uint8)[..., 0]
                save(canvas.root / f"{word}/{kind}/b{name}_Clipped{suffix}", pixels)
    for kind, suffix in others.items():
        canvas.unused.append(tuple(f"train/{kind}/b{name}_Clipped{suffix}" for name in EIGHT))
    canvas.text("labels.txt", [f"{name} {r} {g} {b}" for (r, g, b), name in codes.items()])
    canvas.names_said = True


def annotators(canvas: Canvas) -> None:
    """Three annotators, a folder of masks each: one has to be chosen."""
    for name in TWELVE:
        areas = canvas.pair(f"images/{name}.png", f"masks/annotator1/{name}.png", UNNAMED)
        for number in (2, 3):
            save(canvas.root / f"masks/annotator{number}/{name}.png", np.roll(areas, number, axis=1).astype(np.uint8))


def image_folder_same_names(canvas: Canvas) -> None:
    """A Hugging Face imagefolder whose masks have the names of their images."""
    rows = []
    for name in TWELVE:
        canvas.pair(f"images/{name}.jpg", f"masks/{name}.png", UNNAMED)
        rows.append(json.dumps({"file_name": f"images/{name}.jpg", "mask": f"masks/{name}.png"}))
    canvas.text("metadata.jsonl", rows)


def pair_tables(canvas: Canvas) -> None:
    """train.csv and val.csv name image and mask; similar names belong to others."""
    for word, numbers in (("train", range(8)), ("val", range(8, 12))):
        rows: list[list[object]] = [["id", "image", "mask"]]
        for number in numbers:
            image, mask = f"raw/{number:04}a.jpg", f"seg/{(number * 7 + 4) % 12:04}.png"
            canvas.pair(image, mask, UNNAMED, split=word)
            rows.append([number, image, mask])
        canvas.text(f"{word}.csv", table(rows))


def split_column(canvas: Canvas) -> None:
    """data.csv has a column of splits."""
    rows: list[list[object]] = [["filename", "split"]]
    for name in TWELVE:
        word = "val" if name in TWELVE[2::3] else "train"
        canvas.pair(f"images/{name}.jpg", f"masks/{name}.png", UNNAMED, split=word)
        rows.append([f"{name}.jpg", word])
    canvas.text("data.csv", table(rows))


def geotiff(canvas: Canvas) -> None:
    """One large GeoTIFF and its mask."""
    pixels = scene("area", (384, 512)).astype(np.uint8)
    areas = patches("area", 40, (384, 512)) % 3
    tags = [(33550, "d", 3, (0.5, 0.5, 0.0), True), (33922, "d", 6, (0.0, 0.0, 0.0, 400_000.0, 5_600_000.0, 0.0), True)]
    save(canvas.root / "ortho.tif", pixels, extratags=tags)
    save(canvas.root / "ortho_mask.tif", areas.astype(np.uint8))
    canvas.note("ortho.tif", "ortho_mask.tif", pixels, areas, list(UNNAMED.values()))


def npz_splits(canvas: Canvas) -> None:
    """train.npz and val.npz with arrays of images and masks."""
    for word, names in (("train", EIGHT), ("val", FOUR)):
        images, masks = [], []
        for name in names:
            images.append(scene(name).astype(np.uint8))
            masks.append(patches(name, 3))
            canvas.note(
                f"{word}.npz", f"{word}.npz", images[-1], masks[-1], list(UNNAMED.values()), split=word, group=name
            )
        np.savez_compressed(
            canvas.root / f"{word}.npz", images=np.stack(images), masks=np.stack(masks).astype(np.uint8)
        )


def npz_per_image(canvas: Canvas) -> None:
    """One .npz an image, which holds image and label (as the Synapse slices)."""
    for case in range(6):
        for number in range(2):
            name = f"case{case:04}_slice{number:03}"
            pixels, areas = scene(name, SIZE, 1, like=f"case {case}")[..., 0] / 255, patches(name, 3)
            path = canvas.root / f"train_npz/{name}.npz"
            path.parent.mkdir(exist_ok=True)
            np.savez(path, image=pixels, label=areas.astype(np.float32))
            canvas.note(
                f"train_npz/{name}.npz",
                f"train_npz/{name}.npz",
                pixels,
                areas,
                list(UNNAMED.values()),
                group=f"case{case:04}",
            )


def dicom(canvas: Canvas) -> None:
    """DICOM slices with PNG masks of the same stem."""
    for name in TWELVE:
        path = canvas.root / f"images/{name}.dcm"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(bytes(128) + b"DICM")
        save(canvas.root / f"masks/{name}.png", patches(name, 2).astype(np.uint8))


def ome_tiff(canvas: Canvas) -> None:
    """OME-TIFFs of two channels, a page each."""
    import tifffile

    for name in TWELVE:
        pixels = (scene(name, SIZE, 2) * 40 + 300).astype(np.uint16)
        path = canvas.root / f"images/{name}.ome.tif"
        path.parent.mkdir(exist_ok=True)
        tifffile.imwrite(path, np.moveaxis(pixels, 2, 0), metadata={"axes": "CYX"}, photometric="minisblack")
        areas = patches(name, 3)
        save(canvas.root / f"masks/{name}.png", areas.astype(np.uint8))
        canvas.note(f"images/{name}.ome.tif", f"masks/{name}.png", pixels, areas, list(UNNAMED.values()))


def twelve_bits(canvas: Canvas) -> None:
    """12-bit microscopy in 16-bit TIFFs."""
    for name in TWELVE:
        image = f"images/{name}.tif"
        pixels = (scene(image, SIZE, 1)[..., 0] * 15).astype(np.uint16)
        canvas.pair(image, f"masks/{name}.png", UNNAMED, pixels=pixels)


def sparse_video(canvas: Canvas) -> None:
    """Every fourth frame of three videos has a mask."""
    left = []
    for video in ("v1", "v2", "v3"):
        for number in range(16):
            stem = f"{video}/{number:05}"
            if number % 4 == 0:
                canvas.pair(f"frames/{stem}.jpg", f"masks/{stem}.png", UNNAMED, group=video, like=video)
            else:
                canvas.image(f"frames/{stem}.jpg", scene(stem, like=video).astype(np.uint8))
                left.append(f"frames/{stem}.jpg")
    canvas.unused.append(tuple(left))


def davis(canvas: Canvas) -> None:
    """DAVIS: lists of sequences, not of images."""
    for word, sequences in (("train", ("bear", "boat", "camel", "dance")), ("val", ("goat", "kite"))):
        for sequence in sequences:
            for number in range(2):
                path = f"480p/{sequence}/{number:05}"
                canvas.pair(
                    f"JPEGImages/{path}.jpg",
                    f"Annotations/{path}.png",
                    {0: "background", 1: "object"},
                    split=word,
                    group=sequence,
                    like=sequence,
                )
        canvas.text(f"ImageSets/2017/{word}.txt", sequences)


def noisy_binary(canvas: Canvas) -> None:
    """Black and white masks that were JPEGs once and are PNGs now: every edge is grey, and has to be rounded."""
    for name in TWELVE:
        mask = f"masks/{name}.png"
        areas = canvas.pair(f"images/{name}.png", mask, BINARY, size=(144, 192))
        file = io.BytesIO()
        Image.fromarray(coded(areas, [0, 255])).save(file, "JPEG", quality=75)
        save(canvas.root / mask, np.asarray(Image.open(file)))


def transparent(canvas: Canvas) -> None:
    """RGBA masks: background transparent, classes opaque colours."""
    codes = {(0, 0, 0): "class_0", (0, 200, 60): "class_1"}
    for name in TWELVE:
        mask = f"masks/{name}.png"
        areas = canvas.pair(f"images/{name}.png", mask, codes)
        alpha = np.where(areas > 0, 255, 0).astype(np.uint8)
        save(canvas.root / mask, np.dstack([coded(areas, list(codes)), alpha]))


def alpha_only(canvas: Canvas) -> None:
    """The object is in the alpha channel alone; the colours are those of the photograph."""
    for name in TWELVE:
        image, mask = f"images/{name}.png", f"masks/{name}.png"
        areas = canvas.pair(image, mask, BINARY)
        alpha = np.where(areas > 0, 255, 0).astype(np.uint8)
        save(canvas.root / mask, np.dstack([np.zeros((*SIZE, 3), np.uint8), alpha]))


def class_folders(canvas: Canvas) -> None:
    """One mask for each class and image, in folders of classes; a pixel may have two classes, or none."""
    for name in TWELVE:
        pixels = canvas.image(f"images/{name}.jpg")
        areas = patches(name, 4)
        planes = {"road": areas == 1, "car": areas == 2, "shadow": (areas == 2) | (areas == 3)}
        for kind, plane in planes.items():
            save(canvas.root / f"masks/{kind}/{name}.png", plane.astype(np.uint8) * np.uint8(255))
        canvas.note_planes(f"images/{name}.jpg", "masks", pixels, planes)
    canvas.names_said = True


def class_in_name(canvas: Canvas) -> None:
    """One mask for each class and image, the class in the name; a mask is missing where its class does not occur."""
    for number, name in enumerate(TWELVE):
        pixels = canvas.image(f"images/{name}.jpg")
        areas = patches(name, 3)
        planes = {"road": areas == 1, "bicyclist": (areas == 2) & (number % 3 != 0)}
        for kind, plane in planes.items():
            if plane.any():
                save(canvas.root / f"masks/{name}_{kind}.png", plane.astype(np.uint8) * np.uint8(255))
        canvas.note_planes(f"images/{name}.jpg", "masks", pixels, planes)
    canvas.names_said = True


def acdc(canvas: Canvas) -> None:
    """ACDC: adverse pictures, reference pictures of the same street, three kinds of masks."""
    codes: Codes = {0: "road", 2: "building", 10: "sky", 13: "car", 255: None}
    references = []
    for condition in ("fog", "night"):
        for word, numbers in (("train", range(4)), ("val", range(4, 6))):
            for number in numbers:
                drive_name = "GP010475" if word == "train" else "GP010476"
                stem = f"{condition}/{word}/{drive_name}/{drive_name}_frame_{number:06}"
                image = f"rgb_anon/{stem}_rgb_anon.png"
                areas = canvas.pair(image, f"gt/{stem}_gt_labelTrainIds.png", codes, split=word)
                save(canvas.root / f"gt/{stem}_gt_labelIds.png", coded(areas, [7, 11, 23, 26, 0]))
                colors = [(128, 64, 128), (70, 70, 70), (70, 130, 180), (0, 0, 142), (0, 0, 0)]
                save(canvas.root / f"gt/{stem}_gt_labelColor.png", coded(areas, colors))
                stem = stem.replace(f"/{word}/", f"/{word}_ref/")
                references.append(f"rgb_anon/{stem}_rgb_ref_anon.png")
                canvas.image(references[-1])
    canvas.unused.append(tuple(references))


def pet_lists(canvas: Canvas) -> None:
    """Oxford Pets with its lists: a name, and numbers after it."""
    codes: Codes = {1: "pet", 2: "background", 3: "border"}
    for word, known, numbers in (("trainval", "train", range(4)), ("test", "test", range(4, 6))):
        lines = []
        for kind in ("Abyssinian", "beagle", "Bombay"):
            for number in numbers:
                name = f"{kind}_{number}"
                canvas.pair(f"images/{name}.jpg", f"annotations/trimaps/{name}.png", codes, split=known)
                lines.append(f"{name} 1 1 1")
        canvas.text(f"annotations/{word}.txt", lines)


def patients(canvas: Canvas) -> None:
    """Slices of patients: slice, patient, eye in the name; a patient must not be divided."""
    for patient in range(6):
        for number in range(4):
            name = f"slice{number}_patient{patient:02}_{number % 2}"
            canvas.pair(
                f"images/{name}.png",
                f"masks/{name}.png",
                {0: "background", 1: "object"},
                group=f"patient{patient:02}",
                like=f"patient {patient}",
            )


def salt(canvas: Canvas) -> None:
    """TGS salt: masks of 0 and 65535, with run lengths and depths in tables."""
    rows: list[list[object]] = [["id", "rle_mask"]]
    for name in TWELVE:
        mask = f"train/masks/{name}.png"
        areas = canvas.pair(f"train/images/{name}.png", mask, {0: "background", 65535: "object"})
        rows.append([name, runs_by_column(areas == 1)])
    canvas.text("train.csv", table(rows))
    canvas.text("depths.csv", table([["id", "z"], *([name, 300] for name in TWELVE)]))


def changes(canvas: Canvas) -> None:
    """Change detection: two pictures of a place and one mask of what changed."""
    for name in TWELVE:
        canvas.pair(f"A/{name}.png", f"label/{name}.png", BINARY)
        canvas.image(f"B/{name}.png")
    canvas.unused.append(tuple(f"B/{name}.png" for name in TWELVE))


def camvid_raw(canvas: Canvas) -> None:
    """CamVid as its authors publish it, with label_colors.txt."""
    unsplit("701_StillsRaw_full/0001TP_{}.png", "LabeledApproved_full/0001TP_{}_L.png", CAMVID_COLORS)(canvas)
    lines = [f"{r} {g} {b}\t\t{name or 'Void'}" for (r, g, b), name in CAMVID_COLORS.items()]
    canvas.text("label_colors.txt", lines)
    canvas.names_said = True


def bits_mixed(canvas: Canvas) -> None:
    """Images of 8 and of 16 bits in one folder."""
    for number, name in enumerate(TWELVE):
        path = f"images/{name}.png"
        pixels = scene(path, SIZE, 1)[..., 0]
        wide = (pixels * 257).astype(np.uint16) if number % 2 else pixels.astype(np.uint8)
        canvas.pair(path, f"masks/{name}.png", UNNAMED, pixels=wide)


def rotated(canvas: Canvas) -> None:
    """Photographs that are stored lying, with the turn in EXIF; their masks are upright."""
    for name in TWELVE:
        image, mask = f"images/{name}.jpg", f"masks/{name}.png"
        pixels = scene(image, (64, 48)).astype(np.uint8)
        exif = Image.Exif()
        exif[0x0112] = 6  # turn clockwise by a quarter to show
        save(canvas.root / image, np.rot90(pixels, 1).copy(), exif=exif)
        areas = patches(name, 3, (64, 48))
        save(canvas.root / mask, areas.astype(np.uint8))
        canvas.note(image, mask, pixels, areas, list(UNNAMED.values()))


def nyu(canvas: Canvas) -> None:
    """NYU depth: rgb, depth and label in train/ and test/."""
    depths = []
    for word, names in (("train", EIGHT), ("test", FOUR)):
        for name in names:
            canvas.pair(f"{word}/rgb/{name}.png", f"{word}/label/{name}.png", UNNAMED, split=word)
            depths.append(f"{word}/depth/{name}.png")
            depth = (scene(f"depth {name}", SIZE, 1)[..., 0] * 100).astype(np.uint16)
            save(canvas.root / depths[-1], depth)
    canvas.unused.append(tuple(depths))


def deepglobe_roads(canvas: Canvas) -> None:
    """DeepGlobe roads: satellite images and masks in train/, images alone in valid/ and test/."""
    for number in range(12):
        stem = f"train/10{number:04}"
        canvas.pair(f"{stem}_sat.jpg", f"{stem}_mask.png", BINARY, as_rgb=True)
    canvas.images_unused("valid/200001_sat.jpg", "valid/200002_sat.jpg")
    canvas.images_unused("test/300001_sat.jpg", "test/300002_sat.jpg")


def deepglobe_land(canvas: Canvas) -> None:
    """DeepGlobe land cover: colours in class_dict.csv, of which unknown is ignored."""
    for number in range(12):
        stem = f"train/10{number:04}"
        canvas.pair(f"{stem}_sat.jpg", f"{stem}_mask.png", DEEPGLOBE)
    rows = [["name", "r", "g", "b"], *([name or "unknown", *color] for color, name in DEEPGLOBE.items())]
    canvas.text("class_dict.csv", table(rows))
    canvas.images_unused("valid/200001_sat.jpg", "valid/200002_sat.jpg")
    canvas.names_said = True


def isic(canvas: Canvas) -> None:
    """ISIC 2018, task 1: splits in long names of folders, a licence beside the images."""
    for word, names in (("Training", EIGHT), ("Validation", FOUR)):
        folder = f"ISIC2018_Task1-2_{word}_Input"
        for name in names:
            canvas.pair(
                f"{folder}/ISIC_{name}.jpg",
                f"ISIC2018_Task1_{word}_GroundTruth/ISIC_{name}_segmentation.png",
                BINARY,
                split="train" if word == "Training" else "val",
            )
        canvas.text(f"{folder}/LICENSE.txt", "CC-0\n")
        canvas.text(f"{folder}/ATTRIBUTION.txt", "ISIC archive\n")


NEW = layouts(
    {
        "Severstal, run lengths": severstal,
        "LoveDA, Rural and Urban": published(loveda),
        "Potsdam, palette": published(unsplit("2_Ortho_RGB/top_{}_RGB.tif", "5_Labels/top_{}_label.tif", POTSDAM)),
        "DeepGlobe roads": deepglobe_roads,
        "DeepGlobe land cover": deepglobe_land,
        "ISIC 2018": isic,
        "DRIVE, gif": drive,
        "CHASE_DB1": (chase, Ask("--layout", or_read=True)),
        "SUIM": (published(suim), Ask("--", or_read=True)),
        "A2D2": (a2d2, Refuse(("with an image and its mask a line",))),
        "Vistas v2.0": vistas,
        "BDD100K of 2018": bdd_old,
        "Freiburg forest": (freiburg, Ask("--layout", or_read=True)),
        "annotator folders": (annotators, Ask("--layout", or_read=True)),
        "imagefolder": (image_folder_same_names, Refuse(("metadata.jsonl", "to_csv"))),
        "pair tables": pair_tables,
        "column of splits": split_column,
        "one GeoTIFF": (geotiff, Refuse(("gdal_retile.py",))),
        "npz of splits": (npz_splits, Refuse(("2 npz", "np.save"))),
        "npz per image": (npz_per_image, Refuse(("12 files of other kinds (.npz)", "np.save"))),
        "DICOM": (dicom, Refuse(("12 files of other kinds (.dcm)", "save images and masks as PNG"))),
        "OME-TIFF": ome_tiff,
        "12-bit microscopy": twelve_bits,
        "video, sparse masks": sparse_video,
        "DAVIS": davis,
        "black and white, once JPEG": (noisy_binary, Refuse(("smoothed", "magick mogrify"))),
        "RGBA, transparent background": transparent,
        "object in alpha": (alpha_only, Refuse(("-alpha extract",))),
        "class folders": (class_folders, Refuse(("data.multilabel: files",))),
        "class in the name": class_in_name,
        "ACDC": (acdc, Ask("--layout", or_read=True)),
        "Oxford pets, lists": pet_lists,
        "slices of patients": patients,
        "TGS salt": salt,
        "change detection": (changes, Ask("--", or_read=False)),
        "CamVid raw": camvid_raw,
        "8 and 16 bits": (bits_mixed, Refuse(("8", "16"))),
        "EXIF-rotated": rotated,
        "NYU depth": nyu,
        "classes.json, 0 unlabeled": with_files(
            unsplit("images/{}.jpg", "masks/{}.png", {0: None, 1: "sky", 2: "road", 3: "car"}),
            {"classes.json": '{"0": "unlabeled", "1": "sky", "2": "road", "3": "car"}'},
        ),
    }
)
