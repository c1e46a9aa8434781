"""Layouts that a practitioner knows: naming, encodings of masks, published sets, annotation tools, planted faults."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
from PIL import Image

from segapp.datasets.layouts.schemes import PUBLISHED
from tests.support import drawn_annotations
from tests.support.layouts.canvas import SIZE, Canvas, Codes, coded, patches, planes_of, save, scene, seeded, thumbnail
from tests.support.layouts.layout import (
    BINARY,
    CAMVID_COLORS,
    CAMVID_IDS,
    EIGHT,
    FOUR,
    TWELVE,
    UNNAMED,
    Ask,
    Draw,
    Read,
    Refuse,
    layouts,
    listed,
    published,
    split,
    unsplit,
    with_files,
)
from tests.support.layouts.usual import ISAID, LOVEDA, STREET, bdd, coco_stuff, drive, lip, scenes

CAMVID_NAMES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian", "bicyclist",
    "unlabelled",
)  # fmt: skip
CAMVID_UNNAMED: Codes = {value: f"class_{value}" for value in CAMVID_IDS}
VOC: Codes = {0: "background", 2: "bicycle", 7: "car", 15: "person", 255: None}
PALETTE = [value for number in range(256) for value in ((number * 37) % 256, (number * 91) % 256, (number * 53) % 256)]
ROAD_CAR: Codes = {0: "background", 1: "road", 2: "car"}


def mixed(canvas: Canvas) -> None:
    """Images of several formats, and capitals in some endings."""
    for number, name in enumerate(TWELVE):
        canvas.pair(f"images/{name}{('.jpg', '.png', '.JPG', '.bmp')[number % 4]}", f"masks/{name}.png", UNNAMED)


def lossy_masks(canvas: Canvas) -> None:
    """Masks of 0 and 255 saved as JPEG."""
    for name in TWELVE:
        canvas.pair(f"images/{name}.png", f"masks/{name}.jpg", BINARY, quality=60)


def smooth_masks(canvas: Canvas) -> None:
    """Coloured masks whose edges were smoothed."""
    for name in TWELVE:
        image, mask = f"images/{name}.png", f"masks/{name}.png"
        areas = canvas.pair(image, mask, CAMVID_COLORS)
        large = cv2.resize(coded(areas, list(CAMVID_COLORS)), None, fx=4, fy=4, interpolation=cv2.INTER_NEAREST)
        small = cv2.resize(cv2.GaussianBlur(large, (9, 9), 2), SIZE[::-1], interpolation=cv2.INTER_AREA)
        save(canvas.root / mask, small)


def rgba_masks(canvas: Canvas) -> None:
    """Coloured masks with an opaque alpha channel."""
    for name in TWELVE:
        mask = f"masks/{name}.png"
        areas = canvas.pair(f"images/{name}.png", mask, CAMVID_COLORS)
        save(canvas.root / mask, np.dstack([coded(areas, list(CAMVID_COLORS)), np.full(SIZE, 255, np.uint8)]))


def cvat_masks(canvas: Canvas) -> None:
    """CVAT's segmentation mask 1.1: VOC's folders, colours in labelmap.txt."""
    codes: Codes = {(0, 0, 0): "background", (128, 64, 128): "road", (64, 0, 128): "car", (128, 128, 0): "tree"}
    for name in TWELVE:
        areas = canvas.pair(f"JPEGImages/{name}.jpg", f"SegmentationClass/{name}.png", codes)
        save(canvas.root / f"SegmentationObject/{name}.png", coded(areas, [(0, 0, 0), (9, 9, 9), (8, 8, 8), (7, 7, 7)]))
    canvas.unused.append(tuple(f"SegmentationObject/{name}.png" for name in TWELVE))
    canvas.text("ImageSets/Segmentation/default.txt", TWELVE)
    lines = [f"{name}:{','.join(map(str, color))}::" for color, name in codes.items()]
    canvas.text("labelmap.txt", ["# label:color_rgb:parts:actions", *lines])
    canvas.names_said = True


def binary_masks(kind: str) -> Draw:
    """Black and white masks: of one bit, of three channels, or with a few stray grey pixels."""

    def drawing(canvas: Canvas) -> None:
        for name in TWELVE:
            mask = f"masks/{name}.png"
            areas = canvas.pair(f"images/{name}.jpg", mask, BINARY, as_rgb=kind == "rgb")
            if kind == "bit":
                Image.fromarray(areas > 0).save(canvas.root / mask)
            if kind == "stray" and name in TWELVE[:4]:
                areas = areas.copy()
                areas[20, 30:34] = 2
                save(canvas.root / mask, coded(areas, [0, 255, 128]))
                old = canvas.pictures.pop()
                planes, ignored = planes_of(areas, ["background", "object", None])
                canvas.note_planes(old.image, old.source, scene(old.image).astype(np.uint8), planes, ignored)

    return drawing


def voc(canvas: Canvas) -> None:
    """PASCAL VOC with its own names of files and its lists."""
    for number in range(12):
        name, word = f"2007_{number:06}", "train" if number < 8 else "val"
        canvas.pair(f"JPEGImages/{name}.jpg", f"SegmentationClass/{name}.png", VOC, split=word, palette=PALETTE)
    for word, numbers in (("train", range(8)), ("val", range(8, 12)), ("trainval", range(12))):
        canvas.text(f"ImageSets/Segmentation/{word}.txt", [f"2007_{number:06}" for number in numbers])
    canvas.names_said = True


def voc_train_list(canvas: Canvas) -> None:
    """VOC's folders with own classes; images that are in no list."""
    listed("JPEGImages/{}.jpg", "SegmentationClass/{}.png", "ImageSets/Segmentation/{s}.txt")(canvas)
    canvas.images_unused("JPEGImages/9998.jpg", "JPEGImages/9999.jpg")


def test_split(canvas: Canvas) -> None:
    """Training and validation images, and a test split with masks, which is left alone."""
    split("{s}/images/{}.jpg", "{s}/masks/{}.png")(canvas)
    names = ("test/images/9000.jpg", "test/masks/9000.png")
    canvas.pair(*names, UNNAMED, split="test")


def nested(canvas: Canvas) -> None:
    """Folders of drives below each split."""
    for word, drives in (("train", ("a", "b")), ("val", ("c",))):
        for drive_name in drives:
            for name in TWELVE[:4]:
                path = f"{word}/{drive_name}/{name}"
                canvas.pair(f"images/{path}.png", f"masks/{path}.png", UNNAMED, split=word, group=drive_name)


def train_ids(canvas: Canvas) -> None:
    """Cityscapes with masks of train ids, and names that are not Cityscapes'."""
    split(
        "leftImg8bit/{s}/aachen/aachen_{}_000019_leftImg8bit.png",
        "gtFine/{s}/aachen/aachen_{}_000019_gtFine_labelTrainIds.png",
        codes=STREET,
        names={"train": [f"{number:06}" for number in range(8)], "val": [f"{number:06}" for number in range(8, 12)]},
    )(canvas)
    canvas.names_said = True


def mapillary_versions(canvas: Canvas) -> None:
    """Mapillary Vistas as downloaded: two versions of the labels, each with its config."""
    newer: Codes = {0: "animal--bird", 1: "construction--road", 2: "sky", 3: None}
    older = {0: (10, 0, 0), 1: (10, 9, 0), 2: (10, 9, 8), 3: (0, 0, 0)}
    for word, names, known in (("training", EIGHT, "train"), ("validation", FOUR, "val")):
        for name in names:
            areas = canvas.pair(
                f"{word}/images/{name}.jpg", f"{word}/v2.0/labels/{name}.png", newer, split=known, palette=PALETTE
            )
            save(canvas.root / f"{word}/v1.2/labels/{name}.png", 3 - areas.astype(np.uint8), palette=PALETTE)
            for version in ("v1.2", "v2.0"):
                for kind in ("instances", "panoptic"):
                    save(canvas.root / f"{word}/{version}/{kind}/{name}.png", (areas * 256).astype(np.uint16))
    for version, names in (("v1.2", ("Void", "Sky", "Road", "Bird")), ("v2.0", ("Bird", "Road", "Sky", "Void"))):
        labels = [
            {"name": one, "readable": one, "color": older[number], "evaluate": True} for number, one in enumerate(names)
        ]
        if version == "v2.0":
            for label, name in zip(labels, newer.values(), strict=True):
                label["readable"], label["name"] = name or "Unlabeled", name or "void--unlabeled"
        canvas.text(f"config_{version}.json", json.dumps({"labels": labels, "version": version[1:]}))
    canvas.names_said = True


def wide(kind: str) -> Draw:
    """Images that are not 8-bit RGB."""
    sizes = {"u16": 1, "rgb16": 3, "tiff3": 3, "tiff4": 4, "tiff4f": 4, "tiff4u8": 4, "tiff8": 8, "gray": 1, "rgba": 4}

    def drawing(canvas: Canvas) -> None:
        bands = sizes[kind]
        for name in TWELVE:
            path = f"images/{name}{'.tif' if 'tiff' in kind else '.png'}"
            pixels = scene(path, SIZE, bands)
            if kind == "tiff4f":
                pixels = pixels / 255
            elif kind in ("gray", "rgba", "tiff4u8"):
                pixels = pixels.astype(np.uint8)
            else:
                pixels = (pixels * 40 + 300).astype(np.uint16)
            areas = canvas.pair(path, f"masks/{name}.png", UNNAMED, pixels=pixels[..., 0] if bands == 1 else pixels)
            if kind == "rgba":  # alpha is no band
                canvas.pictures.pop()
                canvas.note(path, f"masks/{name}.png", pixels[..., :3], areas, list(UNNAMED.values()))

    return drawing


def arrays(canvas: Canvas) -> None:
    """Images and masks as .npy, one file each."""
    for name in TWELVE:
        canvas.pair(f"images/{name}.npy", f"masks/{name}.npy", UNNAMED)


def instance_dirs(canvas: Canvas) -> None:
    """A folder of masks for each image, one file an object (as in the Data Science Bowl 2018)."""
    for name in TWELVE:
        pixels = canvas.image(f"{name}/images/{name}.png")
        areas = patches(name, 3)
        for number in (1, 2):
            save(canvas.root / f"{name}/masks/{name}_{number}.png", np.uint8(255) * (areas == number).astype(np.uint8))
        canvas.note(f"{name}/images/{name}.png", f"{name}/masks", pixels, areas, ["background", "object", "object"])


def annotated(write: Callable[[Path], None], val: Sequence[str] = (), ignored: bool = False) -> Draw:
    """Annotations of another program: BOX is a road and SMALL a car in every image; the rest is background."""

    def drawing(canvas: Canvas) -> None:
        write(canvas.root)
        areas = drawn_annotations.expected().astype(int)
        if ignored:
            areas[30:40, 40:50] = 3
        for path in sorted(canvas.root.rglob("*.jpg")):
            pixels = np.asarray(Image.open(path).convert("RGB"))
            word = ("val" if path.stem in val else "train") if val else None
            canvas.note(
                str(path.relative_to(canvas.root)),
                "annotations",
                pixels,
                areas,
                ["background", "road", "car", None],
                split=word,
            )
        canvas.names_said = True

    return drawing


def coco(root: Path) -> None:
    """COCO's polygons."""
    drawn_annotations.coco(root, lambda ring: [drawn_annotations.flat(ring)])


def yolo_masks(canvas: Canvas) -> None:
    """YOLO's folders with masks of ids and names in data.yaml."""
    split("images/{s}/{}.jpg", "labels/{s}/{}.png", codes=ROAD_CAR)(canvas)
    names = "train: images/train\nval: images/val\nnames:\n  0: background\n  1: road\n  2: car\n"
    canvas.text("data.yaml", names)
    canvas.names_said = True


def parquet(canvas: Canvas) -> None:
    """Parquet files of the Hugging Face hub: the images are in them."""
    (canvas.root / "data").mkdir()
    for word in ("train", "validation"):
        (canvas.root / f"data/{word}-00000-of-00001.parquet").write_bytes(b"PAR1" + bytes(64) + b"PAR1")
    canvas.text("id2label.json", '{"0": "background", "1": "road", "2": "car"}')


def nnunet(canvas: Canvas) -> None:
    """nnU-Net's raw data: two grey files a case."""
    for name in TWELVE:
        bands = scene(name, SIZE, 2).astype(np.uint8)
        for channel in (0, 1):
            save(canvas.root / f"imagesTr/case{name}_{channel:04}.png", bands[..., channel])
        areas = patches(name, 2)
        save(canvas.root / f"labelsTr/case{name}.png", areas.astype(np.uint8))
        canvas.note(f"imagesTr/case{name}_0000.png", f"labelsTr/case{name}.png", bands, areas, ["background", "tumor"])
    content = {"channel_names": {"0": "T1", "1": "T2"}, "labels": {"background": 0, "tumor": 1}, "file_ending": ".png"}
    canvas.text("dataset.json", json.dumps(content))
    canvas.names_said = True


def ade(canvas: Canvas) -> None:
    """ADE20K's folders, ids and table of names, with other names of files: 0 is everything else, 1 a wall."""
    codes: Codes = {0: None, 1: "wall", 2: "building", 3: "sky", 13: "person"}
    for word, kind, names in (("training", "train", EIGHT), ("validation", "valid", FOUR)):
        for name in names:
            path = f"{word}/ADE_{kind}_0000{name}"
            canvas.pair(f"images/{path}.jpg", f"annotations/{path}.png", codes, split=kind[:5].replace("valid", "val"))
    rows = [f"{number}\t0.1\t100\t10\t{name}" for number, name in enumerate(PUBLISHED["ade20k"].names, 1)]
    canvas.text("objectInfo150.txt", ["Idx\tRatio\tTrain\tVal\tName", *rows])
    canvas.names_said = True


def masks_of_16_bits(canvas: Canvas) -> None:
    """Masks of small ids in 16-bit PNGs."""
    for name in TWELVE:
        mask = f"masks/{name}.png"
        areas = canvas.pair(f"images/{name}.jpg", mask, UNNAMED)
        save(canvas.root / mask, areas.astype(np.uint16))


def roboflow(canvas: Canvas) -> None:
    """Roboflow's semantic masks: hashes in the names, and a table of values in each split."""
    for word, names in (("train", EIGHT), ("valid", FOUR)):
        for name in names:
            stem = f"{word}/{name}_jpg.rf.{seeded(name).bytes(8).hex()}"
            canvas.pair(f"{stem}.jpg", f"{stem}_mask.png", ROAD_CAR, split=word.replace("valid", "val"))
        canvas.text(f"{word}/_classes.csv", "Pixel Value, Class\n0, background\n1, road\n2, car\n")
    canvas.names_said = True


def label_studio_names(canvas: Canvas) -> None:
    """Masks named after their image and the class."""
    for name in TWELVE:
        canvas.pair(f"images/{name}.png", f"masks/{name}-tag-road-0.png", {0: "background", 255: "road"})
    canvas.names_said = True


def supervisely_empty(canvas: Canvas) -> None:
    """A project of Supervisely whose images have no objects yet: all is background."""
    for name in TWELVE:
        image = f"ds0/img/{name}.jpg"
        canvas.note(image, f"ds0/ann/{name}.jpg.json", canvas.image(image), np.zeros(SIZE, int), ["background"])
        content = {"size": {"height": SIZE[0], "width": SIZE[1]}, "objects": []}
        canvas.text(f"ds0/ann/{name}.jpg.json", json.dumps(content))
    canvas.text("meta.json", json.dumps({"classes": [{"title": "road"}, {"title": "car"}]}))


def cvat_empty(canvas: Canvas) -> None:
    """A CVAT export with neither labels nor shapes."""
    for name in TWELVE:
        canvas.image(f"images/{name}.jpg")
    canvas.text("annotations.xml", "<annotations><version>1.1</version></annotations>")


def instances(canvas: Canvas) -> None:
    """16-bit masks of class x 1000 + instance, as Cityscapes' instanceIds."""
    for number, name in enumerate(TWELVE):
        image, mask = f"images/{name}.png", f"masks/{name}.png"
        pixels = canvas.image(image)
        areas = patches(name, 6)
        base = 24_000 + number * 3
        save(canvas.root / mask, coded(areas, [7000, 11_000, base, base + 1, 26_000 + number, 26_050 + number]))
        canvas.note(image, mask, pixels, areas, ["class_7", "class_11", "class_24", "class_24", "class_26", "class_26"])


def planted(kind: str) -> Draw:
    """A folder with one fault in it."""

    def drawing(canvas: Canvas) -> None:
        split("images/{s}/{}.png", "masks/{s}/{}.png", codes=CAMVID_IDS)(canvas)
        canvas.text("classes.csv", ["id,name", *(f"{number},{name}" for number, name in enumerate(CAMVID_NAMES))])
        canvas.names_said = True
        victim = "images/train/0003.png"
        at = next(number for number, one in enumerate(canvas.pictures) if one.image == victim)
        old = canvas.pictures[at]
        broken = replace(old, is_broken=True)
        target = canvas.root / victim
        if kind == "corrupt":
            target.write_bytes(target.read_bytes()[:900])
        elif kind == "html":
            target.write_text("<!DOCTYPE html><html><body>404 Not Found</body></html>")
        elif kind == "zero":
            target.write_bytes(b"")
        elif kind == "size":
            save(target, scene(victim, (40, 64)).astype(np.uint8))
        elif kind == "no mask":
            (canvas.root / "masks/train/0003.png").unlink()
        elif kind == "range":
            areas = patches(victim, len(CAMVID_IDS))
            areas[:5] = len(CAMVID_IDS)
            save(canvas.root / "masks/train/0003.png", coded(areas, [*CAMVID_IDS, 40]))
            planes, ignored = planes_of(areas, [*CAMVID_IDS.values(), None])
            broken = replace(broken, planes=planes, ignored=ignored)
        if kind == "no mask":
            canvas.pictures.pop(at)
            canvas.unused.append((victim,))
        else:
            canvas.pictures[at] = broken

    return drawing


def damaged_jpeg(canvas: Canvas) -> None:
    """A JPEG with 200 zeroed bytes in its middle, which decodes with a warning."""
    unsplit("images/{}.jpg", "masks/{}.png")(canvas)
    path = canvas.root / "images/0003.jpg"
    data = bytearray(path.read_bytes())
    data[len(data) // 2 : len(data) // 2 + 200] = bytes(200)
    path.write_bytes(bytes(data))
    canvas.pictures[3] = replace(canvas.pictures[3], thumbnail=thumbnail(cv2.imread(str(path))))


def empty_masks(canvas: Canvas) -> None:
    """Two masks without any labelled pixel of a class but the background."""
    unsplit("images/{}.jpg", "masks/{}.png", BINARY)(canvas)
    for name in TWELVE[:2]:
        mask = f"masks/{name}.png"
        save(canvas.root / mask, np.zeros(SIZE, np.uint8))
        at = next(number for number, one in enumerate(canvas.pictures) if one.source == mask)
        old = canvas.pictures[at]
        planes = {"background": np.ones(SIZE, bool)}
        canvas.pictures[at] = replace(old, planes=planes)


def no_val_images(canvas: Canvas) -> None:
    """Validation masks whose images are missing."""
    for name in EIGHT:
        canvas.pair(f"imgs/train/{name}.jpg", f"labels/train/{name}.png", UNNAMED, split="train")
    (canvas.root / "imgs/val").mkdir()
    masks = tuple(f"labels/val/{name}.png" for name in FOUR)
    for mask in masks:
        save(canvas.root / mask, patches(mask, 3).astype(np.uint8))
    canvas.unused.append(masks)


CAMVID_TXT = "".join(f"{name}\n" for name in CAMVID_NAMES)

KNOWN = layouts(
    {
        "a_suffix": unsplit("images/{}.jpg", "masks/{}_mask.png"),
        "a_jpgpng": unsplit("images/{}.jpg", "masks/{}.png", CAMVID_UNNAMED),
        "a_prefix": unsplit("images/img_{}.jpg", "masks/mask_{}.png"),
        "a_prefixsame": unsplit("img_{}.jpg", "mask_{}.png"),
        "a_samefolder": unsplit("{}.jpg", "{}_mask.png"),
        "h_mixed": mixed,
        "a_splitfirst": split("{s}/images/{}.jpg", "{s}/masks/{}.png", ("train", "test")),
        "a_jpgmask": (lossy_masks, Refuse(("JPEG", "magick mogrify"))),
        "l_aa": (smooth_masks, Refuse(("smoothed", "magick mogrify"))),
        "b_kaggle_camvid": published(split("{s}/{}.png", "{s}_labels/{}_L.png", codes=CAMVID_COLORS)),
        "b_rgb_nofile": published(unsplit("images/{}.png", "masks/{}.png", CAMVID_COLORS)),
        "l_rgba": published(rgba_masks),
        "d_cvat_mask11": cvat_masks,
        "e_palette": with_files(
            unsplit("images/{}.png", "masks/{}.png", CAMVID_COLORS),
            {"palette.txt": "".join(f"{r} {g} {b} {name or 'void'}\n" for (r, g, b), name in CAMVID_COLORS.items())},
        ),
        "b_modeP": with_files(
            unsplit("images/{}.png", "masks/{}.png", CAMVID_IDS, palette=PALETTE), {"classes.txt": CAMVID_TXT}
        ),
        "m_paddlelist": with_files(
            listed("images/{}.png", "annotations/{}.png", "{s}.txt", "images/{}.png annotations/{}.png", CAMVID_IDS),
            {"labels.txt": CAMVID_TXT},
        ),
        "c_binary": unsplit("images/{}.jpg", "masks/{}.png", BINARY),
        "c_1bit": binary_masks("bit"),
        "c_carvana": unsplit("train/{}.jpg", "train_masks/{}_mask.gif", BINARY),
        "l_bin3": binary_masks("rgb"),
        "m_drive": drive,
        "l_binsmall": binary_masks("stray"),
        "d_voc": voc,
        "m_voctrainlist": voc_train_list,
        "m_lip": published(lip),
        "m_imgdir": split("img_dir/{s}/{}.jpg", "ann_dir/{s}/{}.png"),
        "m_isaid": published(
            split("{s}/images/P{}.png", "{s}/Semantic_masks/images/P{}_instance_color_RGB.png", codes=ISAID)
        ),
        "m_cocostuff": coco_stuff,
        "m_testsplit": test_split,
        "n_nested": nested,
        "n_scene": scenes,
        "m_bdd": published(bdd),
        "m_city_trainids": train_ids,
        "m_loveda": published(
            split("{s}/Rural/images_png/{}.png", "{s}/Rural/masks_png/{}.png", ("Train", "Val"), codes=LOVEDA)
        ),
        "m_mapillary": (mapillary_versions, Ask("--layout", or_read=True)),
        "m_pseudo": listed("imgs/{}_img.jpg", "labels/{}_labelTrainIds.png", "splits/{s}.txt"),
        "f_ade": ade,
        "g_16bit": wide("u16"),
        "g_png16rgb": wide("rgb16"),
        "g_tiff3_u16": wide("tiff3"),
        "g_tiff4_u16": wide("tiff4"),
        "g_tiff4_f32": wide("tiff4f"),
        "g_tiff8_u16": wide("tiff8"),
        "g_gray": wide("gray"),
        "g_rgba": wide("rgba"),
        "g_16mask": masks_of_16_bits,
        "g_tiff4_u8": wide("tiff4u8"),
        "g_npy": arrays,
        "j_cvatxml": (cvat_empty, Refuse(("annotations.xml",))),
        "j_instance_dirs": (instance_dirs, Refuse(("has 2 masks", "np.any"))),
        "j_coco": annotated(coco),
        "j_labelme": annotated(drawn_annotations.labelme, ignored=True),
        "j_yolo": annotated(drawn_annotations.yolo, val=drawn_annotations.NAMES[4:]),
        "j_yolo_sem": yolo_masks,
        "j_parquet": (parquet, Refuse(("2 files of other kinds (.parquet)", "save images and masks as PNG"))),
        "j_roboflow": roboflow,
        "j_nnunet": (nnunet, Refuse(("channels of one image", "np.stack"))),
        "j_labelstudio": label_studio_names,
        "j_supervisely": (supervisely_empty, Refuse(("no object",))),
        "l_idgaps": unsplit("images/{}.jpg", "masks/{}.png", {0: "class_0", 7: "class_7", 26: "class_26"}),
        "l_onebased": unsplit("images/{}.jpg", "masks/{}.png", {1: "class_1", 2: "class_2", 3: "class_3"}),
        "l_instance": (instances, Refuse(("np.uint8", "--masks ids"))),
        "e_corrupt": (planted("corrupt"), Read(check_names=("0003.png",))),
        "e_htmljpg": (planted("html"), Read(check_names=("0003.png",))),
        "e_zero": (planted("zero"), Read(check_names=("0003.png",))),
        "e_size": (planted("size"), Read(check_names=("0003.png",))),
        "e_nomask": planted("no mask"),
        "e_range": planted("range"),
        "e_corruptmid": damaged_jpeg,
        "e_empty": empty_masks,
        "e_noval": no_val_images,
    }
)
