"""Layouts that differ in what the files hold: encodings of masks, types of images, annotations, faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import cv2
import numpy as np
from PIL import Image

from tests.support import drawn_annotations
from tests.support.layouts.canvas import (
    BINARY,
    SIZE,
    SPLITS,
    TWELVE,
    UNNAMED,
    Ask,
    Canvas,
    Codes,
    Draw,
    DrawnLayout,
    Refuse,
    coded,
    gray,
    named,
    patches,
    planes_of,
    save,
    scene,
    split,
    thumbnail,
    unsplit,
)
from tests.support.layouts.naming import CAMVID_COLORS, table

CAMVID_NAMES = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign symbol", "fence", "car", "pedestrian", "bicyclist",
    "unlabelled",
)  # fmt: skip
CAMVID_IDS: Codes = {0: "sky", 1: "building", 2: "pole", 3: "road", 4: "pavement", 5: "tree", 8: "car", 11: None}
PALETTE = [value for number in range(256) for value in ((number * 37) % 256, (number * 91) % 256, (number * 53) % 256)]


def rewritten(codes: Codes, change: Callable[[np.ndarray], np.ndarray]) -> Draw:
    """Draws images and masks, of which `change` makes what is stored from the areas of each mask."""

    def drawing(canvas: Canvas) -> None:
        for name in TWELVE:
            mask = f"masks/{name}.png"
            areas = canvas.pair(f"images/{name}.png", mask, codes)
            save(canvas.root / mask, change(areas))

    return drawing


def smooth(areas: np.ndarray) -> np.ndarray:
    large = cv2.resize(coded(areas, list(CAMVID_COLORS)), None, fx=4, fy=4, interpolation=cv2.INTER_NEAREST)
    return np.asarray(cv2.resize(cv2.GaussianBlur(large, (9, 9), 2), SIZE[::-1], interpolation=cv2.INTER_AREA))


def with_alpha(areas: np.ndarray) -> np.ndarray:
    return np.dstack([coded(areas, list(CAMVID_COLORS)), np.full(SIZE, 255, np.uint8)])


def in_alpha(areas: np.ndarray) -> np.ndarray:
    return np.dstack([np.zeros((*SIZE, 3), np.uint8), coded(areas, [0, 255])])


def transparent(areas: np.ndarray) -> np.ndarray:
    return np.dstack([coded(areas, [(0, 0, 0), (0, 200, 60)]), coded(areas, [0, 255])])


def salt(canvas: Canvas) -> None:
    """TGS salt: masks of 0 and 65535, with run lengths and depths in tables."""
    rows: list[list[object]] = [["id", "rle_mask"]]
    for name in TWELVE:
        areas = canvas.pair(f"train/images/{name}.png", f"train/masks/{name}.png", {0: "background", 65535: "object"})
        edges = np.flatnonzero(np.diff(np.concatenate([[0], areas.T.ravel(), [0]]))) + 1
        runs = (f"{start} {end - start}" for start, end in zip(edges[::2], edges[1::2], strict=True))
        rows.append([name, " ".join(runs)])
    canvas.text("train.csv", table(rows))
    canvas.text("depths.csv", table([["id", "z"], *([name, 300] for name in TWELVE)]))


# Types of images


def wide(suffix: str, bands: int, dtype: type, factor: float = 1.0) -> Draw:
    """Images of a type and a number of bands, or of one without an axis of bands; alpha is no band of a PNG."""

    def drawing(canvas: Canvas) -> None:
        for name in TWELVE:
            path = f"images/{name}.{suffix}"
            pixels = (scene(path, SIZE, max(1, bands)) * factor).astype(dtype)
            canvas.pair(path, f"masks/{name}.png", UNNAMED, pixels=pixels if bands else pixels[..., 0])
            if suffix == "png" and bands == 4:
                canvas.pictures[-1] = replace(canvas.pictures[-1], thumbnail=thumbnail(pixels[..., :3]))

    return drawing


def bits_mixed(canvas: Canvas) -> None:
    """Images of 8 and of 16 bits in one folder."""
    for number, name in enumerate(TWELVE):
        pixels = gray(name)
        pixels = pixels if number % 2 else pixels.astype(np.uint16) * 257
        canvas.pair(f"images/{name}.png", f"masks/{name}.png", UNNAMED, pixels=pixels)


def floods(canvas: Canvas) -> None:
    """Sen1Floods11: radar of two float bands, optical images of 13 bands, labels of -1, 0 and 1, tables of splits."""
    for word, names in SPLITS:
        rows = []
        for name in names:
            stem = f"{('Bolivia', 'Ghana', 'India')[int(name) % 3]}_{name}"
            folder = "data/HandLabeled"
            canvas.image(f"{folder}/S1Hand/{stem}_S1Hand.tif", scene(stem, SIZE, 2) / 10 - 30)
            canvas.image(f"{folder}/S2Hand/{stem}_S2Hand.tif", (scene(stem, SIZE, 13) * 20).astype(np.uint16))
            canvas.image(f"{folder}/LabelHand/{stem}_LabelHand.tif", (patches(stem, 3) - 1).astype(np.int16))
            rows.append([f"{stem}_S1Hand.tif", f"{stem}_LabelHand.tif"])
        canvas.text(f"splits/flood_{word}_data.csv", table(rows))


def geotiff(canvas: Canvas) -> None:
    """One large GeoTIFF and its mask."""
    size = (389, 503)
    tags = [(33550, "d", 3, (0.5, 0.5, 0.0), True), (33922, "d", 6, (0.0, 0.0, 0.0, 400_000.0, 5_600_000.0, 0.0), True)]
    save(canvas.root / "ortho.tif", scene("area", size).astype(np.uint8), extratags=tags)
    save(canvas.root / "ortho_mask.tif", (patches("area", 40, size) % 3).astype(np.uint8))


def ome_tiff(canvas: Canvas) -> None:
    """OME-TIFFs of two channels, a page each."""
    import tifffile

    for name in TWELVE:
        image, mask = f"images/{name}.ome.tif", f"masks/{name}.png"
        pixels = (scene(name, SIZE, 2) * 40 + 300).astype(np.uint16)
        canvas.pair(image, mask, UNNAMED, pixels=pixels)
        pages = np.moveaxis(pixels, 2, 0)
        tifffile.imwrite(canvas.root / image, pages, metadata={"axes": "CYX"}, photometric="minisblack")


def rotated(canvas: Canvas) -> None:
    """Photographs that are stored lying, with the turn in EXIF; their masks are upright."""
    for name in TWELVE:
        image = f"images/{name}.jpg"
        pixels = scene(image, SIZE[::-1]).astype(np.uint8)
        canvas.pair(image, f"masks/{name}.png", UNNAMED, pixels=pixels)
        exif = Image.Exif()
        exif[0x0112] = 6  # turn clockwise by a quarter to show
        save(canvas.root / image, np.rot90(pixels, 1).copy(), exif=exif)


def unread(suffix: str, content: bytes) -> Draw:
    """Images of a format that segapp does not read, with masks of the same stem."""

    def drawing(canvas: Canvas) -> None:
        for name in TWELVE:
            (canvas.root / "images").mkdir(exist_ok=True)
            (canvas.root / f"images/{name}.{suffix}").write_bytes(content)
            save(canvas.root / f"masks/{name}.png", patches(name, 2).astype(np.uint8))

    return drawing


# Annotations


def labelme(canvas: Canvas) -> None:
    drawn_annotations.labelme(canvas.root)
    areas = drawn_annotations.expected().astype(int)
    areas[30:40, 40:50] = 3
    for path in sorted(canvas.root.glob("*.jpg")):
        pixels = np.asarray(Image.open(path))
        canvas.note(path.name, f"{path.stem}.json", pixels, areas, ["background", "road", "car", None])


# Faults


def planted(kind: str) -> Draw:
    """A folder with one fault in it, in the fourth training image or its mask."""

    def drawing(canvas: Canvas) -> None:
        split("images/{s}/{}.png", "masks/{s}/{}.png", codes=CAMVID_IDS)(canvas)
        canvas.text("classes.csv", ["id,name", *(f"{number},{name}" for number, name in enumerate(CAMVID_NAMES))])
        old = canvas.pictures[3]
        target = canvas.root / old.image
        canvas.pictures[3] = replace(old, is_broken=True)
        if kind == "cut":
            target.write_bytes(target.read_bytes()[:900])
        elif kind == "size":
            save(target, scene(old.image, (40, 64)).astype(np.uint8))
        elif kind == "no mask":
            (canvas.root / old.source).unlink()
            canvas.unused["image"].append(canvas.pictures.pop(3).image)
        elif kind == "range":
            areas = patches(old.image, len(CAMVID_IDS))
            areas[:4] = len(CAMVID_IDS)
            save(canvas.root / old.source, coded(areas, [*CAMVID_IDS, 40]))
            planes, ignored = planes_of(areas, [*CAMVID_IDS.values(), None])
            canvas.pictures[3] = replace(old, planes=planes, ignored=ignored)

    return named(drawing)


def empty_masks(canvas: Canvas) -> None:
    """Three masks without any labeled pixel of a class but the background."""
    unsplit("images/{}.jpg", "masks/{}.png", BINARY)(canvas)
    for at in (0, 1, 7):
        old = canvas.pictures[at]
        save(canvas.root / old.source, np.zeros(SIZE, np.uint8))
        canvas.pictures[at] = replace(old, planes={"background": np.ones(SIZE, bool)})


LAYOUTS = [
    DrawnLayout(name, *(drawing if isinstance(drawing, tuple) else (drawing,)))
    for name, drawing in {
        "colors without a file": named(unsplit("images/{}.png", "masks/{}.png", CAMVID_COLORS)),
        "colors and an opaque alpha": named(rewritten(CAMVID_COLORS, with_alpha)),
        "transparent background": rewritten({0: "class_0", 1: "class_1"}, transparent),
        "palette, names in order": named(
            unsplit("images/{}.png", "masks/{}.png", CAMVID_IDS, palette=PALETTE), {"classes.txt": CAMVID_NAMES}
        ),
        "value 0 unlabeled": named(
            unsplit("images/{}.jpg", "masks/{}.png", {0: None, 1: "sky", 2: "road", 3: "car"}),
            {"classes.json": '{"0": "unlabeled", "1": "sky", "2": "road", "3": "car"}'},
        ),
        "ids with gaps": unsplit("images/{}.jpg", "masks/{}.png", {0: "class_0", 7: "class_7", 26: "class_26"}),
        "ids from one": unsplit("images/{}.jpg", "masks/{}.png", {1: "class_1", 2: "class_2", 3: "class_3"}),
        "ids in 16 bits": rewritten(UNNAMED, lambda areas: areas.astype(np.uint16)),
        "REFUGE": (
            unsplit("images/{}.jpg", "masks/{}.bmp", {0: "class_0", 128: "class_128", 255: "class_255"}),
            Ask("--unlabelled"),
        ),
        "one bit": rewritten(BINARY, lambda areas: areas > 0),
        "black and white in RGB": unsplit("images/{}.jpg", "masks/{}.png", BINARY, as_rgb=True),
        "TGS salt": salt,
        "empty masks": empty_masks,
        "masks as JPEG": (unsplit("images/{}.png", "masks/{}.jpg", BINARY), Refuse(("JPEG", "magick mogrify"))),
        "smoothed colors": (rewritten(CAMVID_COLORS, smooth), Refuse(("smoothed", "magick mogrify"))),
        "object in alpha": (rewritten(BINARY, in_alpha), Refuse(("-alpha extract",))),
        "16-bit gray": wide("png", 0, np.uint16, 40),
        "float TIFF of four bands": wide("tif", 4, np.float32, 1 / 255),
        "TIFF of eight bands": wide("tif", 8, np.uint16, 40),
        "8-bit gray": wide("png", 0, np.uint8),
        "8-bit RGBA": wide("png", 4, np.uint8),
        "8 and 16 bits": (bits_mixed, Refuse(("8", "16"))),
        "OME-TIFF": ome_tiff,
        "EXIF-rotated": rotated,
        "arrays": unsplit("images/{}.npy", "masks/{}.npy"),
        "Sen1Floods11": (floods, Refuse(("np.where(mask < 0, 255, mask)",))),
        "one GeoTIFF": (geotiff, Refuse(("gdal_retile.py",))),
        "npz per image": (unread("npz", b"PK"), Refuse(("12 files of other kinds (.npz)", "np.save"))),
        "DICOM": (unread("dcm", b"DICM"), Refuse(("12 files of other kinds (.dcm)", "save images and masks as PNG"))),
        "labelme": named(labelme),
        "Label Studio's tags": named(
            unsplit("images/{}.png", "masks/{}-tag-road-0.png", {0: "background", 255: "road"})
        ),
        "damaged image": planted("cut"),
        "image of another size": planted("size"),
        "image without its mask": planted("no mask"),
        "value without a name": planted("range"),
    }.items()
]  # fmt: skip
