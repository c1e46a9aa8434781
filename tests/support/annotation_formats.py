"""Annotations of other programs as trees of plain values, and how these are saved; the encoders follow the formats."""

from __future__ import annotations

import base64
import io
import json
import zlib
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray
from PIL import Image

Plane = NDArray[np.bool_]
"""The pixels of an object, (H, W), a box."""


class Annotated(NamedTuple):
    """An image `NAME.jpg`, the height and width that the annotation says, and its objects by label."""

    name: str
    sides: tuple[Any, Any]
    planes: dict[str, Plane]
    factor: int = 1  # side of a square of annotated pixels that is one pixel of the image


class Drawn(NamedTuple):
    """An object to encode."""

    plane: Plane
    factor: int

    @property
    def ends(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of its pixels."""
        rows, columns = np.nonzero(self.plane)
        return int(columns.min()), int(rows.min()), int(columns.max()), int(rows.max())

    @property
    def cut(self) -> Plane:
        left, top, right, bottom = self.ends
        return self.plane[top : bottom + 1, left : right + 1]

    @property
    def outer(self) -> list[list[float]]:
        """Its outline; (0, 0) is the corner of the first pixel."""
        left, top, right, bottom = self.ends
        return [[left, top], [right + 1, top], [right + 1, bottom + 1], [left, bottom + 1]]

    @property
    def inner(self) -> list[list[float]]:
        """Its outline through the centers of the outermost pixels of the image; (0, 0) is the center of the first."""
        half, (left, top, right, bottom) = self.factor / 2 - 0.5, self.ends
        (x0, y0), (x1, y1) = (left + half, top + half), (right - half, bottom - half)
        return [[x0, y0], [x1, y0], [x1, y1], [x0, y1]]

    @property
    def percent(self) -> list[list[float]]:
        height, width = self.plane.shape
        return [[x / width * 100, y / height * 100] for x, y in self.outer]

    @property
    def png(self) -> bytes:
        buffer = io.BytesIO()
        Image.fromarray(self.cut.astype(np.uint8) * 255).save(buffer, "PNG")
        return buffer.getvalue()


def runs(pixels: NDArray[Any]) -> list[int]:
    """Lengths of alternating runs, background first."""
    changes = np.flatnonzero(np.diff(pixels.astype(int), prepend=0))
    return np.diff([0, *changes, len(pixels)]).tolist()


def compressed(counts: list[int]) -> str:
    """COCO's text: differences to the last but one, 5 bits a character from the lowest, with a bit for more."""
    text = ""
    for number, count in enumerate(counts):
        value, more = count - (counts[number - 2] if number > 2 else 0), True
        while more:
            code = value & 31
            value >>= 5
            more = value != (-1 if code & 16 else 0)
            text += chr(48 + code + 32 * more)
    return text


def brush(
    plane: Plane, widths: Sequence[int] = (3, 4, 8, 16), color: Sequence[int] = (255, 255, 255, 255), width: int = 8
) -> list[int]:
    """Label Studio's bytes of a stroke with a color (RGBA), with widths of lengths and of values."""
    values = (plane[..., None] * np.array(color)).reshape(-1).tolist()
    bits = f"{len(values):032b}{width - 1:05b}" + "".join(f"{one - 1:04b}" for one in widths)
    start = 0
    while start < len(values):
        end = start + 1
        while end < len(values) and end - start < 2 ** widths[3] and values[end] == values[start]:
            end += 1
        if is_single := end == start + 1:  # one by one, until two values are equal
            while end < min(len(values) - 1, start + 2 ** widths[0]) and values[end] != values[end + 1]:
                end += 1
        own = values[start:end]
        which = next(number for number, one in enumerate(widths) if len(own) <= 2**one)
        bits += f"{not is_single:b}{which:02b}{len(own) - 1:0{widths[which]}b}"
        bits += "".join(f"{value:0{width}b}" for value in (own if is_single else own[:1]))
        start = end
    bits += "0" * (8 - len(bits) % 8)  # label-studio-converter adds a byte to whole ones
    return [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]


def starts(plane: Plane) -> str:
    """Kaggle's runs: the start from 1, down the columns, and the length of each."""
    counts = runs(plane.ravel("F"))
    ends = np.cumsum(counts)
    return " ".join(f"{end + 1} {length}" for end, length in zip(ends[::2], counts[1::2], strict=False))


Shape = Callable[[Drawn], Any]


def drawn(one: Annotated) -> dict[str, Drawn]:
    return {label: Drawn(plane, one.factor) for label, plane in one.planes.items()}


def coco(outline: Shape) -> Callable[[Sequence[Annotated]], Any]:
    def tree(entries: Sequence[Annotated]) -> Any:
        ids = {label: 5 + 4 * number for number, label in enumerate(entries[0].planes)}
        objects = [
            {"id": 50 + 7 * i, "image_id": 10 + 3 * i, "category_id": ids[label], "segmentation": outline(own),
             "area": int(own.plane.sum()), "bbox": [1, 1, 5, 5]}
            for i, one in enumerate(entries) for label, own in drawn(one).items()
        ]  # fmt: skip
        images = [
            {"id": 10 + 3 * i, "file_name": f"{one.name}.jpg", "height": one.sides[0], "width": one.sides[1]}
            for i, one in enumerate(entries)
        ]
        categories = [{"id": number, "name": label} for label, number in ids.items()]
        return {"images": images, "annotations": objects[::-1], "categories": categories}

    return tree


def labelme(shape: Shape) -> Callable[[Sequence[Annotated]], Any]:
    return lambda entries: {
        one.name: {"imagePath": f"{one.name}.jpg", "imageHeight": one.sides[0], "imageWidth": one.sides[1],
                   "shapes": [{"label": label, **shape(own)} for label, own in drawn(one).items()]}
        for one in entries
    }  # fmt: skip


def supervisely(shape: Shape) -> Callable[[Sequence[Annotated]], Any]:
    return lambda entries: {
        one.name: {"size": {"height": one.sides[0], "width": one.sides[1]},
                   "objects": [{"classTitle": label, **shape(own)} for label, own in drawn(one).items()]}
        for one in entries
    }  # fmt: skip


def label_studio(kind: str, value: Shape) -> Callable[[Sequence[Annotated]], Any]:
    def task(i: int, one: Annotated) -> Any:
        regions = [
            {"id": f"r{label}", "type": kind, "original_height": one.sides[0], "original_width": one.sides[1],
             "image_rotation": 0, "value": {kind: [label], **value(own)}}
            for label, own in drawn(one).items()
        ]  # fmt: skip
        annotations = [{"was_cancelled": True, "result": []}, {"was_cancelled": False, "result": regions}]
        return {"id": 31 + 4 * i, "data": {"image": f"/data/upload/3/1a2b-{one.name}.jpg"}, "annotations": annotations}

    return lambda entries: [task(i, one) for i, one in enumerate(entries)]


def cvat(kind: str, shape: Shape) -> Callable[[Sequence[Annotated]], Any]:
    return lambda entries: [
        {"name": f"{one.name}.jpg", "height": one.sides[0], "width": one.sides[1], "shapes": [
            {"kind": kind, "label": label, "z_order": 3, **shape(own)} for label, own in drawn(one).items()]}
        for one in entries
    ]  # fmt: skip


def yolo(entries: Sequence[Annotated]) -> Any:
    def line(number: int, own: Drawn) -> list[Any]:
        height, width = own.plane.shape
        return [number, *(side for x, y in own.inner for side in ((x + 0.5) / width, (y + 0.5) / height))]

    return {one.name: [line(number, own) for number, own in enumerate(drawn(one).values())] for one in entries}


def table(entries: Sequence[Annotated]) -> Any:
    """Rows of a pixel have no other object; the first objects of an image lie below the others."""
    rows: list[list[Any]] = [["ImageId", "ClassId", "EncodedPixels", "Height", "Width"]]
    for one in entries:
        above = np.zeros_like(next(iter(one.planes.values())))
        own = []
        for label, plane in reversed(one.planes.items()):
            own.append([f"{one.name}.jpg", label, starts(plane.astype(bool) & ~above), *one.sides])
            above = above | plane.astype(bool)
        rows += own[::-1]
    return rows


def save_json(place: str) -> Callable[[Path, Any], None]:
    """Returns a function that saves a tree in a file, or in a file for each image, whose name is {}."""

    def save(root: Path, tree: Any) -> None:
        for name, content in tree.items() if "{}" in place else [("", tree)]:
            path = root / place.format(name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content))

    return save


def save_supervisely(root: Path, tree: Any) -> None:
    (root / "img").mkdir()
    for path in root.glob("*.jpg"):
        path.rename(root / "img" / path.name)
    save_json("ann/{}.jpg.json")(root, tree)


def save_cvat(root: Path, tree: Any) -> None:
    def attributes(one: Any) -> str:
        return "".join(f" {key}={quoteattr(str(value))}" for key, value in one.items() if key not in ("kind", "shapes"))

    def shapes(image: Any) -> str:
        return "".join(f"<{one.get('kind') or 'x'}{attributes(one)}/>" for one in image["shapes"])

    images = [f"<image{attributes(image)}>{shapes(image)}</image>" for image in tree]
    (root / "annotations.xml").write_text(f"<annotations>{''.join(images)}</annotations>")


def save_yolo(root: Path, tree: Any) -> None:
    for name, lines in tree.items():
        (root / f"{name}.txt").write_text("\n".join(" ".join(map(str, line)) for line in lines))
    (root / "data.yaml").write_text("names: [road, car, sign]")


def save_table(root: Path, tree: Any) -> None:
    (root / "train.csv").write_text("\n".join(",".join(map(str, row)) for row in tree))


class Format(NamedTuple):
    """A tree of the entries, how it is saved, and the object of an image: the way to it, and its file."""

    tree: Callable[[Sequence[Annotated]], Any]
    save: Callable[[Path, Any], None]
    file: str  # {} is the name of the image
    way: tuple[Any, ...]  # to the second object of the second of three images; {} is the name of the image

    def write(self, root: Path, entries: Sequence[Annotated]) -> None:
        self.save(root, self.tree(entries))


def _of_json(tree: Callable[[Sequence[Annotated]], Any], *way: Any) -> Format:
    return Format(tree, save_json(file := "tasks.json" if way[0] == 1 else "instances.json"), file, way)


def _of_labelme(shape: Shape) -> Format:
    return Format(labelme(shape), save_json("{}.json"), "{}.json", ("{}", "shapes", 1))


def _of_supervisely(shape: Shape) -> Format:
    return Format(supervisely(shape), save_supervisely, "ann/{}.jpg.json", ("{}", "objects", 1))


def _of_studio(kind: str, value: Shape) -> Format:
    return _of_json(label_studio(kind, value), 1, "annotations", 1, "result", 1)


def _of_cvat(kind: str, shape: Shape) -> Format:
    return Format(cvat(kind, shape), save_cvat, "annotations.xml", (1, "shapes", 1))


def _coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


FORMATS: dict[str, Format] = {
    "COCO": _of_json(coco(lambda own: [[*chain(*own.outer)]]), "annotations", 4),
    "COCO runs": _of_json(
        coco(lambda own: {"size": [*own.plane.shape], "counts": runs(own.plane.ravel("F"))}), "annotations", 4
    ),
    "COCO text": _of_json(
        coco(lambda own: {"size": [*own.plane.shape], "counts": compressed(runs(own.plane.ravel("F")))}),
        "annotations", 4),
    "labelme": _of_labelme(lambda own: {"points": own.inner}),
    "labelme box": _of_labelme(lambda own: {"shape_type": "rectangle", "points": own.inner[::2]}),
    "labelme mask": _of_labelme(
        lambda own: {"shape_type": "mask", "points": [[*own.ends[:2]], [*own.ends[2:]]], "mask": _coded(own.png)}),
    "Supervisely": _of_supervisely(
        lambda own: {"geometryType": "polygon", "points": {"exterior": own.inner, "interior": []}}),
    "Supervisely box": _of_supervisely(
        lambda own: {"geometryType": "rectangle", "points": {"exterior": own.inner[::2], "interior": []}}),
    "Supervisely bitmap": _of_supervisely(lambda own: {
        "geometryType": "bitmap", "bitmap": {"data": _coded(zlib.compress(own.png)), "origin": [*own.ends[:2]]}}),
    "Label Studio": _of_studio("polygonlabels", lambda own: {"points": own.percent}),
    "Label Studio box": _of_studio("rectanglelabels", lambda own: {
        "x": own.percent[0][0], "y": own.percent[0][1], "width": own.percent[1][0] - own.percent[0][0],
        "height": own.percent[2][1] - own.percent[0][1]}),
    "Label Studio brush": _of_studio("brushlabels", lambda own: {"format": "rle", "rle": brush(own.plane)}),
    "CVAT": _of_cvat("polygon", lambda own: {"points": ";".join(f"{x},{y}" for x, y in own.outer)}),
    "CVAT box": _of_cvat("box", lambda own: dict(zip(("xtl", "ytl", "xbr", "ybr"), chain(*own.outer[::2]),
                                                     strict=True))),
    "CVAT mask": _of_cvat("mask", lambda own: {
        "rle": ",".join(map(str, runs(own.cut.ravel()))), "left": own.ends[0], "top": own.ends[1],
        "width": own.cut.shape[1], "height": own.cut.shape[0]}),
    "YOLO": Format(yolo, save_yolo, "{}.txt", ("{}", 1)),
    "table": Format(table, save_table, "train.csv", (5,)),
}  # fmt: skip
"""Kinds of outlines in every format with annotations."""
