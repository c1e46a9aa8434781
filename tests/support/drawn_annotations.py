"""Small folders of images with annotations in other programs' formats: BOX with SMALL on top, in every image."""

import base64
import json
import zlib
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support import annotation_formats as formats
from tests.support.drawn_folders import draw_image, draw_mask

HEIGHT, WIDTH = 48, 64
NAMES = [f"{number:04}" for number in range(6)]


def expected(big: int = 1, small: int = 2) -> np.ndarray:
    """The mask of BOX with SMALL on top: corners are pixel centres, outlines are filled."""
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[8:28, 10:30] = big
    mask[12:18, 14:20] = small
    return mask


BOX, SMALL = formats.Drawn(expected() > 0, 1), formats.Drawn(expected() == 2, 1)
ENTRIES = [formats.Annotated(name, (HEIGHT, WIDTH), {"road": BOX.plane, "car": SMALL.plane}) for name in NAMES]


def images(folder: Path) -> None:
    for name in NAMES:
        draw_image(folder / f"{name}.jpg", (HEIGHT, WIDTH))


def coco(root: Path, outline: Callable[[formats.Drawn], Any] = lambda own: [[*chain(*own.outer)]]) -> None:
    """COCO: the small object first; it must end on top."""
    images(root / "images")
    formats.save_json("annotations/instances.json")(root, formats.coco(outline)(ENTRIES))


def yolo(root: Path) -> None:
    """YOLO polygons with data.yaml."""
    for number, (name, objects) in enumerate(formats.yolo(ENTRIES).items()):
        split = "train" if number < 4 else "val"
        draw_image(root / "images" / split / f"{name}.jpg", (HEIGHT, WIDTH))
        path = root / "labels" / split / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(" ".join(map(str, line)) for line in reversed(objects)))
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnames:\n  0: road\n  1: car\n")


def labelme(root: Path) -> None:
    """labelme: a polygon, a mask, an ignored box."""
    images(root)
    shapes = [
        {"label": "road", "shape_type": "polygon", "points": BOX.inner},
        {"label": "car", "shape_type": "mask", "points": SMALL.inner[::2],
         "mask": base64.b64encode(SMALL.png).decode()},
        {"label": "ignore", "shape_type": "rectangle", "points": [[40, 30], [49, 39]]},
    ]  # fmt: skip
    trees = {name: {"imagePath": f"{name}.jpg", "shapes": shapes, "imageData": None} for name in NAMES}
    formats.save_json("{}.json")(root, trees)


def label_studio(root: Path) -> None:
    """Label Studio: two polygons."""
    images(root / "images")
    formats.FORMATS["Label Studio"].write(root, ENTRIES)


def cvat(root: Path) -> None:
    """CVAT: a polygon and run lengths in front of it."""
    images(root / "images")
    points = ";".join(f"{x}.0,{y}.0" for x, y in BOX.outer)
    entries = [
        f'<image id="{number}" name="{name}.jpg" width="{WIDTH}" height="{HEIGHT}">'
        f'<mask label="car" rle="7,3,1,25" left="14" top="12" width="6" height="6" z_order="10"/>'
        f'<polygon label="road" points="{points}" z_order="9"/></image>'
        for number, name in enumerate(NAMES)
    ]
    labels = "".join(f"<label><name>{name}</name></label>" for name in ("road", "car"))
    text = f"<annotations><version>1.1</version><meta><task><labels>{labels}</labels></task></meta>{''.join(entries)}"
    (root / "annotations.xml").write_text(text + "</annotations>")


def supervisely(root: Path) -> None:
    """Supervisely: a polygon with a hole, and a bitmap."""
    images(root / "ds0" / "img")
    bitmap = {"data": base64.b64encode(zlib.compress(SMALL.png)).decode(), "origin": [40, 30]}
    objects = [
        {"classTitle": "road", "geometryType": "polygon",
         "points": {"exterior": BOX.inner, "interior": [SMALL.inner]}},
        {"classTitle": "car", "geometryType": "bitmap", "bitmap": bitmap},
    ]  # fmt: skip
    tree = {"size": {"height": HEIGHT, "width": WIDTH}, "objects": objects}
    formats.save_json("ds0/ann/{}.jpg.json")(root, dict.fromkeys(NAMES, tree))
    (root / "meta.json").write_text(json.dumps({"classes": [{"title": "road"}, {"title": "car"}]}))


def nnunet(root: Path, num_channels: int) -> None:
    """nnU-Net's raw data: a grey file for each channel of a case."""
    for number, name in enumerate(NAMES):
        rng = np.random.default_rng(number)
        (root / "imagesTr").mkdir(parents=True, exist_ok=True)
        for channel in range(num_channels):
            pixels = rng.integers(0, 255, (HEIGHT, WIDTH), np.uint8)
            Image.fromarray(pixels).save(root / "imagesTr" / f"p{name}_{channel:04}.png")
        draw_mask(root / "labelsTr" / f"p{name}.png", np.array([0, 1], np.uint8), (HEIGHT, WIDTH))
    channels = {str(i): name for i, name in enumerate(("T1", "T2", "FLAIR", "T1c", "PD")[:num_channels])}
    content = {"channel_names": channels, "labels": {"ground": 0, "road": 1}, "file_ending": ".png"}
    (root / "dataset.json").write_text(json.dumps(content))
