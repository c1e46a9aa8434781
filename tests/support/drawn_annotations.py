"""Small folders of images with annotations in other programs' formats: BOX with SMALL on top, in every image."""

from __future__ import annotations

import base64
import io
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.support.drawn_folders import draw_image, draw_mask

HEIGHT, WIDTH = 48, 64
NAMES = [f"{number:04}" for number in range(6)]
BOX = [(10, 8), (29, 8), (29, 27), (10, 27)]
SMALL = [(14, 12), (19, 12), (19, 17), (14, 17)]


def expected(big: int = 1, small: int = 2) -> np.ndarray:
    """The mask of BOX with SMALL on top: corners are pixel centres, outlines are filled."""
    mask = np.zeros((HEIGHT, WIDTH), np.uint8)
    mask[8:28, 10:30] = big
    mask[12:18, 14:20] = small
    return mask


def flat(ring: list[tuple[int, int]]) -> list[float]:
    return [float(value) for corner in ring for value in corner]


def sides(ring: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The border of the pixels of BOX or SMALL, from the top left corner of the image."""
    (x0, y0), (x1, y1) = ring[0], ring[2]
    return [(x0, y0), (x1 + 1, y0), (x1 + 1, y1 + 1), (x0, y1 + 1)]


def coco(root: Path, segmentation: Any, names: list[str] = NAMES, folder: str = "images") -> None:
    for name in names:
        draw_image(root / folder / f"{name}.jpg", (HEIGHT, WIDTH))
    annotations = []
    for number in range(len(names)):
        for category, ring, area in ((7, SMALL, 36), (3, BOX, 400)):  # the small one first: it must end on top
            annotations.append({"id": len(annotations), "image_id": number, "category_id": category,
                                "segmentation": segmentation(ring), "area": area})  # fmt: skip
    content = {
        "images": [{"id": i, "file_name": f"{name}.jpg"} for i, name in enumerate(names)],
        "annotations": annotations,
        "categories": [{"id": 3, "name": "road"}, {"id": 7, "name": "car"}],
    }
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / "annotations" / "instances.json").write_text(json.dumps(content))


def yolo(root: Path) -> None:
    """YOLO polygons with data.yaml."""
    for split, names in (("train", NAMES[:4]), ("val", NAMES[4:])):
        for name in names:
            draw_image(root / "images" / split / f"{name}.jpg", (HEIGHT, WIDTH))
            lines = [
                f"{number} " + " ".join(f"{(x + 0.5) / WIDTH:.8f} {(y + 0.5) / HEIGHT:.8f}" for x, y in ring)
                for number, ring in ((1, SMALL), (0, BOX))
            ]
            path = root / "labels" / split / f"{name}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("\n".join(lines))
    (root / "data.yaml").write_text("train: images/train\nval: images/val\nnames:\n  0: road\n  1: car\n")


def labelme(root: Path) -> None:
    """labelme: a polygon, a mask, an ignored box."""
    piece = io.BytesIO()
    Image.fromarray(np.full((6, 6), 255, np.uint8)).save(piece, "PNG")
    for name in NAMES:
        draw_image(root / f"{name}.jpg", (HEIGHT, WIDTH))
        shapes = [
            {"label": "road", "shape_type": "polygon", "points": BOX},
            {"label": "car", "shape_type": "mask", "points": [[14, 12], [19, 17]],
             "mask": base64.b64encode(piece.getvalue()).decode()},
            {"label": "ignore", "shape_type": "rectangle", "points": [[40, 30], [49, 39]]},
        ]  # fmt: skip
        (root / f"{name}.json").write_text(
            json.dumps({"imagePath": f"{name}.jpg", "shapes": shapes, "imageData": None})
        )


def percent(ring: list[tuple[int, int]]) -> list[list[float]]:
    return [[x / WIDTH * 100, y / HEIGHT * 100] for x, y in sides(ring)]


def label_studio(root: Path) -> None:
    """Label Studio: two polygons."""
    tasks = []
    for name in NAMES:
        draw_image(root / "images" / f"{name}.jpg", (HEIGHT, WIDTH))
        result = [
            {"type": "polygonlabels", "value": {"points": percent(BOX), "polygonlabels": ["road"]}},
            {"type": "polygonlabels", "value": {"points": percent(SMALL), "polygonlabels": ["car"]}},
        ]
        annotations = [
            {"was_cancelled": True, "result": []},
            {"was_cancelled": False, "result": result},
            {"result": []},
        ]
        tasks.append({"data": {"image": f"/data/upload/3/1a2b3c4d-{name}.jpg"}, "annotations": annotations})
    (root / "export.json").write_text(json.dumps(tasks))


def cvat(root: Path) -> None:
    """CVAT: a polygon and run lengths in front of it."""
    entries = []
    for number, name in enumerate(NAMES):
        draw_image(root / "images" / f"{name}.jpg", (HEIGHT, WIDTH))
        points = ";".join(f"{x}.0,{y}.0" for x, y in sides(BOX))
        entries.append(
            f'<image id="{number}" name="{name}.jpg" width="{WIDTH}" height="{HEIGHT}">'
            f'<mask label="car" rle="7,3,1,25" left="14" top="12" width="6" height="6" z_order="10"/>'
            f'<polygon label="road" points="{points}" z_order="9"/></image>'
        )
    labels = "".join(f"<label><name>{name}</name></label>" for name in ("road", "car"))
    text = f"<annotations><version>1.1</version><meta><task><labels>{labels}</labels></task></meta>{''.join(entries)}"
    (root / "annotations.xml").write_text(text + "</annotations>")


def supervisely(root: Path) -> None:
    """Supervisely: a polygon with a hole, and a bitmap."""
    data = io.BytesIO()
    Image.fromarray(np.full((6, 6), 255, np.uint8)).save(data, "PNG")
    bitmap = {"data": base64.b64encode(zlib.compress(data.getvalue())).decode(), "origin": [40, 30]}
    for name in NAMES:
        draw_image(root / "ds0" / "img" / f"{name}.jpg", (HEIGHT, WIDTH))
        objects = [
            {"classTitle": "road", "geometryType": "polygon", "points": {"exterior": BOX, "interior": [SMALL]}},
            {"classTitle": "car", "geometryType": "bitmap", "bitmap": bitmap},
        ]
        (root / "ds0" / "ann").mkdir(exist_ok=True)
        content = {"size": {"height": HEIGHT, "width": WIDTH}, "objects": objects}
        (root / "ds0" / "ann" / f"{name}.jpg.json").write_text(json.dumps(content))
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
