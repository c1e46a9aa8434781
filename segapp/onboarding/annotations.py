"""Annotations of other programs, each read by a small function: COCO, YOLO, labelme, Label Studio, CVAT, Supervisely.

A reader collects images with their objects, and says how one object is drawn. Pixels without an object are background.
Objects of COCO and YOLO are drawn by area, larger ones first, the others in their order (CVAT: by z_order first).
"""

import base64
import math
import os
import re
import zlib
from collections import defaultdict
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import MAX_FILE_BYTES, open_bytes, read_bytes, shown
from segapp.datasets.images.reading import decode
from segapp.datasets.orientation import Size
from segapp.datasets.walk import IMAGE_SUFFIXES
from segapp.errors import DataError
from segapp.onboarding.class_files import find_class_files
from segapp.onboarding.conversion import (
    Annotations,
    Images,
    area_of,
    box_of,
    by,
    check_classes,
    check_size,
    decode_runs,
    fill_area,
    fill_polygon,
    json_files,
    size_said,
    values_of,
)
from segapp.onboarding.encoding import FileFit, name_clash
from segapp.onboarding.fields import Corners, Field
from segapp.onboarding.layout import DrawnMask, Layout
from segapp.onboarding.tree import Tree

_YOLO_LINE = re.compile(r"\s*\d+(\s+-?[\d.]+(e-?\d+)?){6,}\s*")
_NOT_DRAWN = {"point", "points", "tag", "keypoint", "keypointlabels", "choices", "textarea", "rating", "number",
              "datetime", "taxonomy", "pairwise", "ranker", "relation"}  # fmt: skip
"""Kinds of objects without an area."""
_LABEL_STUDIO_KINDS = {"polygon": "points", "brush": "rle", "rectangle": "width"}  # kind -> field of its outline


def find_coco(tree: Tree) -> Layout | None:
    """Return the conversion of COCO files with segmentations: polygons, or run lengths by columns."""
    files: dict[str, Field] = {}
    for path, content in json_files(tree, dict):
        said = content.value.get("annotations") if {"images", "categories"} <= content.value.keys() else None
        if isinstance(said, list) and any(isinstance(one, dict) and "segmentation" in one for one in said):
            files[path] = content
    if not files:
        return None
    named: dict[int, tuple[str, str]] = {}
    for path, one in ((path, one) for path, content in files.items() for one in content["categories"].items()):
        number, said = one["id"].whole(), one["name"].text()
        name, other = named.setdefault(number, (said, path))
        if name != said:
            raise DataError(
                f"category {number} is {shown(name)} in {shown(other)} and {shown(said)} in {shown(path)}: give each "
                "name the same id everywhere"
            )
    categories = {number: name for number, (name, _) in named.items()}
    first = next(iter(files))
    names, values = values_of(dict(sorted(categories.items())), first)
    found = Annotations(
        tree, "coco", "COCO", _draw_coco, lambda one: one["category_id"].whole(), lambda one: -one["area"].number()
    )
    found.values = values
    for path, content in files.items():
        by_image: dict[str, list[Any]] = defaultdict(list)  # an id may be text in one place and a number in another
        for annotation in content["annotations"].items():
            by_image[annotation["image_id"].key()].append(annotation.value)
        known: dict[str, str] = {}
        for entry in content["images"].items():
            name, key = entry["file_name"].text(), entry["id"].key()
            if key in known:
                raise DataError(f"{shown(path)}: {known[key]} and {shown(name)} have the same id {key}: export it anew")
            known[key] = shown(name)
            found.add(path, name, Field(by_image[key]), (entry.get("height").value, entry.get("width").value))
        if lost := [key for key, own in by_image.items() if key not in known for _ in own]:
            share = f"{len(lost)} of {len(content['annotations'].value)} annotations of {shown(path)}"
            found.notes.append(f"{share} belong to no image, such as image_id {shown(lost[0])}: they are not drawn")
    return found.layout(names, f"the categories of {shown(first)}", [*files])


def _draw_coco(canvas: DrawnMask, one: Field, value: int) -> None:
    outline = one["segmentation"]
    if outline.value == []:
        raise ValueError("segmentation is empty, and a box is not read: draw the object as a polygon")
    if isinstance(outline.value, list):
        for ring in outline.items():
            fill_area(canvas, [ring.corners()], value)
        return
    counts, (height, width) = outline["counts"], map(int, outline["size"].wholes(2, 2))
    if (said := (height, width)) != canvas.drawn_px:
        raise ValueError(f"{outline.name}.size: run lengths of {by(said)} pixels for an image of {by(canvas.drawn_px)}")
    lengths = counts.wholes() if isinstance(counts.value, list) else _uncompressed(counts)
    _paste(canvas, decode_runs(lengths, height, width, order="F"), (0, 0), value, counts)


def _uncompressed(counts: Field) -> NDArray[np.int64]:
    """Return the run lengths (N,) in COCO's text, as `rleFrString` of its maskApi.c does.

    A character has 5 bits of a number, lowest first, and a bit that says if another one follows; the last one has the
    sign. From the fourth on, a number is the difference to the last but one.
    """
    codes = np.frombuffer(counts.text().encode(), np.uint8).astype(np.int64) - 48
    last = np.flatnonzero(codes & 32 == 0)
    first = np.append(0, last[:-1] + 1)
    if codes.min() < 0 or codes.max() > 63 or codes[-1] & 32 or (last - first > 6).any():
        raise counts.error("compressed run lengths")
    place = 5 * (np.arange(len(codes)) - np.repeat(first, last - first + 1))
    sign = (codes[last] & 16) << 1 << place[last]
    lengths: NDArray[np.int64] = np.add.reduceat((codes & 31) << place, first) - sign
    for parity in (1, 2):
        lengths[parity::2] = np.cumsum(lengths[parity::2])
    return lengths


def _paste(canvas: DrawnMask, piece: NDArray[np.bool_], place: tuple[int, int], value: int, said: Field) -> None:
    """Set the pixels of an object, whose left and top are given; raise ValueError if it has none."""
    if not piece.any():
        raise ValueError(f"{said.name} has no pixel of the object")
    canvas.paste(piece, *place, value)


def find_yolo(tree: Tree) -> Layout | None:
    """Return the conversion of YOLO: text files with a class and a polygon per line.

    They lie next to the images, or in labels/ if the images are in images/. Images without a file are left out.
    """
    texts = tree.others_named(".txt")
    by_place = {os.path.splitext(path)[0]: path for path in tree.images if texts}
    labels = {}
    for path in texts:
        place = str(PurePosixPath(path).with_suffix(""))
        head, below_labels, tail = place.rpartition("labels/")  # the last such folder is images/ for the images
        for image_place in (place, f"{head}images/{tail}" if below_labels else place):
            if image_place in by_place:
                labels[by_place[image_place]] = path
    first_lines = [_lines(tree, path, 4096)[:1] for path in list(labels.values())[:200]]
    num_polygons = sum(_YOLO_LINE.fullmatch(line) is not None for lines in first_lines for line in lines)
    if not num_polygons or num_polygons < 0.3 * len(first_lines):
        return None
    found = Annotations(
        tree,
        "yolo",
        "YOLO polygons",
        _draw_yolo,
        lambda line: line["class"].whole(),
        lambda line: -area_of(_yolo_corners(line)),
        "shares",
    )
    for image, path in sorted(labels.items()):
        lines = [words for line in _lines(tree, path) if (words := line.split())]
        objects = [{"class": number, "corners": corners} for number, *corners in lines]
        found.add(path, image, Field(objects), (None, None))
    names, reason, source = _yolo_names(tree, max(found.labels, default=0), found.notes)
    classes, found.values = values_of(dict(enumerate(names)), (*source, "the labels")[0])
    reason += f"; YOLO's 0 is {found.values[0]} here" if source else ""
    return found.layout(classes, reason, [*sorted(labels.values()), *source])


def _lines(tree: Tree, path: str, most: int = MAX_FILE_BYTES) -> list[str]:
    return tree.read(path, most).decode("utf-8-sig", "replace").splitlines()


def _yolo_names(tree: Tree, largest: int, notes: list[str]) -> tuple[list[str], str, list[str]]:
    """Return the names of classes, the reason, and the file, if it names the largest number; note contradictions."""
    files = [one for one in find_class_files(tree) if not one.colors]
    # data.yaml is the file of YOLO itself.
    files.sort(key=lambda one: not one.source.endswith((".yaml", ".yml")))
    notes += [one.note for one in files if one.note]
    files = [one for one in files if one.names]
    if not files or largest >= len(files[0].names):
        numbers = check_classes(range(largest + 1), "the labels")
        few = f"; {shown(files[0].source)} names only {len(files[0].names)}" if files else ""
        return [f"class_{number}" for number in numbers], f"replace with their names{few}", []
    used, *others = (FileFit(one, one.ids or dict(enumerate(one.names)), ()) for one in files)
    notes += [note for other in others for note in name_clash(used, other, [*used.named])]
    numbers = check_classes(range(max(used.named) + 1), source := used.file.source)
    names = [used.named.get(number, f"class_{number}") for number in numbers]
    return names, f"from {shown(source)}", [source]


def _draw_yolo(canvas: DrawnMask, line: Field, value: int) -> None:
    fill_polygon(canvas, [_yolo_corners(line) * canvas.drawn_px[::-1] - 0.5], value)


def _yolo_corners(line: Field) -> Corners:
    """Return the corners as shares of the sides; raise ValueError for a box."""
    corners = line["corners"]
    if len(corners.value) in (4, 5):  # the fifth number of a prediction is its confidence
        raise ValueError(f"a box of {len(corners.value)} numbers is not read: draw it as a polygon")
    return corners.corners()


def find_cvat(tree: Tree) -> Layout | None:
    """Return the conversion of XML files of CVAT for images 1.1."""
    found = Annotations(
        tree,
        "cvat",
        "CVAT",
        _draw_cvat,
        lambda shape: shape["label"].text(),
        lambda shape: shape.get("z_order").number() if shape.value.get("z_order") else 0.0,
    )
    for path in tree.others_named(".xml"):
        if b"<annotations" not in tree.read(path, 4096):
            continue
        try:
            top = ElementTree.fromstring(read_bytes(tree.root / path))  # expat refuses entities that multiply
        except (ElementTree.ParseError, ValueError, LookupError) as error:
            raise DataError(f"{shown(path)} is not complete XML ({error}): export it again, or remove it") from error
        labels = {one.text for one in top.iterfind("./meta//labels/label/name") if one.text}
        if top.find("track") is not None:  # next to images, their objects would be background
            cure = "export the task as CVAT for images 1.1"
            raise DataError(f"{shown(path)}: tracks of CVAT for video are not read: {cure}", path=path)
        entries = top.findall("image")
        used = {one.get("label", "") for entry in entries for one in entry if one.tag not in _NOT_DRAWN} - {""}
        for number, entry in enumerate(entries):
            shapes = [{"kind": one.tag, **one.attrib} for one in entry if one.tag not in _NOT_DRAWN]
            name = Field(dict(entry.attrib), f"{shown(path)}: image {number} ")["name"].text()
            found.add(path, name, Field(shapes), (entry.get("height"), entry.get("width")))
        found.labels |= labels
        if others := labels and used - labels:
            named = ", ".join(map(shown, sorted(others)))
            found.notes.append(f"{shown(path)}: its list of labels lacks {named}: rename them if they are misspelled")
        sizes = [int(one.text) for one in top.iterfind("./meta//size") if one.text and one.text.isdecimal()]
        if sizes and sum(sizes) != len(entries):
            found.notes.append(
                f"{shown(path)}: {len(entries)} images of {sum(sizes)} are in it: was the export complete?"
            )
    return found.by_label("entries in XML")


def _draw_cvat(canvas: DrawnMask, shape: Field, value: int) -> None:
    kind = shape["kind"]
    _refuse_turned(shape.get("rotation"), "draw it as a polygon")
    if kind.value == "polygon":
        corners = [corner.split(",") for corner in shape["points"].text().split(";") if corner]
        fill_area(canvas, [Field(corners, "points").corners()], value)
    elif kind.value == "box":
        ends = np.array([shape[key].number() for key in ("xtl", "ytl", "xbr", "ybr")])
        fill_area(canvas, [box_of(ends.reshape(2, 2))], value)
    elif kind.value == "mask":
        left, top, width, height = (shape[key].whole() for key in ("left", "top", "width", "height"))
        lengths = Field(shape["rle"].text().split(","), "rle").wholes()
        piece = decode_runs(lengths, height, width, num_px=canvas.num_px)
        _paste(canvas, piece, (left, top), value, shape["rle"])
    else:
        raise _unread(kind)


def _refuse_turned(degrees: Field, cure: str) -> None:
    """Raise ValueError if an object, or its image, was rotated in the annotation tool."""
    if degrees.value and (turn := degrees.number()):
        raise ValueError(f"{degrees.name} by {turn:g} degrees is not read: {cure}")


def _unread(kind: Field) -> ValueError:
    return ValueError(f"{kind.name} {shown(kind.text())!r} is not read: draw it as a polygon")


def _files_of_images(tree: Tree, keys: set[str], folder: str = "") -> list[tuple[str, Field]]:
    """Return the JSON files with one of the keys, in folders that end with `folder`; none if no file has all keys."""
    found = [(path, content) for path, content in json_files(tree, dict) if path.rpartition("/")[0].endswith(folder)]
    found = [(path, content) for path, content in found if not keys.isdisjoint(content.value)]
    return found if any(keys <= content.value.keys() for _, content in found) else []


def find_label_studio(tree: Tree) -> Layout | None:
    """Return the conversion of Label Studio's JSON: the first annotation of a task with objects, unless canceled."""
    found = Annotations(tree, "label-studio", "Label Studio", _draw_label_studio, _label_of_region, unit="percent")
    for path, content in json_files(tree, list):
        # Folders hold lists in JSON that are no tasks.
        if not any(isinstance(task, dict) and {"data", "annotations"} <= task.keys() for task in content.value):
            continue
        empty = []
        for number, one in enumerate(content.value):
            task = Field(one, f"{shown(path)}: task {number} ")
            made = [one for one in task["annotations"].items() if not one.get("was_cancelled").is_true()]
            # A task that was skipped says nothing about its image.
            if not made:
                continue
            drawn = ((at, regions) for at, one in enumerate(made) if (regions := _regions(one["result"])))
            at, regions = next(drawn, (0, []))
            if at:
                empty.append(number)
            first = next((one for one in regions if isinstance(one, dict)), {})
            sides = first.get("original_height"), first.get("original_width")
            found.add(path, _image_of_task(task["data"], path, found.images), Field(regions), sides)
        if empty:
            said = f"{shown(path)}: the first annotation of {len(empty)} tasks is empty, such as of task {empty[0]}"
            found.notes.append(f"{said}: the first one with objects is used")
    return found.by_label("tasks")


def _image_of_task(data: Field, path: str, images: Images) -> str:
    """Return the text of a task that names its image: an image of the folder, or one with the usual ending or key."""
    said_all = data.value if isinstance(data.value, dict) else {}
    texts = [key for key, value in said_all.items() if isinstance(value, str) and value.strip()]

    def said(key: str) -> str:
        text = data[key].text()
        return text.partition("/data/local-files/?d=")[2] or text

    def rank(key: str) -> tuple[bool, bool, bool]:
        is_file = said(key).partition("?")[0].lower().endswith(IMAGE_SUFFIXES)
        return images.find(said(key), path) is None, not is_file, key not in ("image", "img", "$undefined$")

    return said(min(texts, key=rank, default="image"))


def _regions(result: Field) -> list[Any]:
    """Return the regions with an area; of a region that is there with and without its label, the former."""
    kinds = [(one.value, one.value.get("type") if isinstance(one.value, dict) else None) for one in result.items()]
    labeled = [one.get("id") for one, kind in kinds if isinstance(kind, str) and kind.endswith("labels")]
    bare = [one for one, kind in kinds if kind in [*_LABEL_STUDIO_KINDS] and one.get("id") in labeled]
    return [one for one, kind in kinds if str(kind) not in _NOT_DRAWN and one not in bare]


def _label_of_region(region: Field) -> str:
    return region["value"][region["type"].text()].items(1, 1)[0].text()


def _draw_label_studio(canvas: DrawnMask, region: Field, value: int) -> None:
    content, kind = region["value"], region["type"].text().removesuffix("labels")
    _refuse_turned(region.get("image_rotation"), "rotate the image back in Label Studio")
    _refuse_turned(content.get("rotation"), "draw it as a polygon")
    check_size(size_said(region.get("original_height").value, region.get("original_width").value), canvas)
    if not kind:  # of a region of any shape with `labels`
        kind = next((kind for kind, field in _LABEL_STUDIO_KINDS.items() if field in content.value), "")
    if kind == "brush":
        _paste(canvas, _brush(content["rle"], canvas.drawn_px), (0, 0), value, content["rle"])
        return
    if kind == "rectangle":
        x, y, width, height = (content[key].number() for key in ("x", "y", "width", "height"))
        corners = box_of(np.array([(x, y), (x + width, y + height)]))
    elif kind == "polygon":
        corners = content["points"].corners()
    else:
        raise _unread(region["type"])
    fill_area(canvas, [corners / 100 * canvas.drawn_px[::-1]], value)  # percent of the sides


def _brush(said: Field, size_px: Size) -> NDArray[np.bool_]:
    """Return the pixels (H, W) of a brush stroke, which are those that are not transparent.

    Its bytes are a stream of bits, as in brush.py of label-studio-converter: the number of values (32 bits), the width
    of a value less one (5), four widths of lengths less one (4 each), and blocks. A block has a bit that is 1 for one
    value that is repeated, the number of its width (2), its length less one, and the value or values. The values are
    red, green, blue and opacity of each pixel.
    """
    codes = said.wholes(1)
    if codes.min() < 0 or codes.max() > 255:
        raise said.error("a list of bytes")
    bits = np.unpackbits(codes.astype(np.uint8))
    text = (bits + ord("0")).tobytes().decode()
    place = 0

    def number(width: int) -> int:
        nonlocal place
        place += width
        if place > len(text):
            raise ValueError(f"{said.name} is cut off: its {len(codes)} bytes end before its last pixel")
        return int(text[place - width : place], 2)

    num_values, value_width = number(32), number(5) + 1
    length_widths = [number(4) + 1 for _ in range(4)]
    if num_values != 4 * math.prod(size_px):
        raise ValueError(f"{said.name} has {num_values} values, not 4 for each of {by(size_px)} pixels")
    is_set, done = np.zeros(num_values, bool), 0
    while done < num_values:
        is_repeated, length = number(1), number(length_widths[number(2)]) + 1
        first, num_own = place, 1 if is_repeated else length
        number(num_own * value_width)
        if done + length > num_values:
            raise ValueError(f"{said.name} continues after its last pixel")
        is_set[done : done + length] = bits[first:place].reshape(num_own, value_width).any(axis=1)
        done += length
    # The last byte is filled up with zeros.
    if bits[place:].any():
        raise ValueError(f"{said.name} continues after its last pixel")
    return is_set.reshape(*size_px, 4)[..., 3]


def find_labelme(tree: Tree) -> Layout | None:
    """Return the conversion of labelme: a JSON file for each image."""
    found = Annotations(tree, "labelme", "labelme", _draw_labelme, lambda shape: shape["label"].text())
    for path, content in _files_of_images(tree, {"imagePath", "shapes"}):
        sides = content.get("imageHeight").value, content.get("imageWidth").value
        found.add(path, content["imagePath"].text(), content["shapes"], sides)
    return found.by_label("files")


def _draw_labelme(canvas: DrawnMask, shape: Field, value: int) -> None:
    kind, points = shape.get("shape_type"), shape["points"]
    if kind.value in (None, "polygon"):
        fill_polygon(canvas, [points.corners()], value)
    elif kind.value == "rectangle":
        fill_polygon(canvas, [box_of(points.corners(2, 2))], value)
    elif kind.value == "mask":
        left, top = map(round, points.corners(1)[0])
        _paste(canvas, _bitmap(shape["mask"], canvas), (left, top), value, shape["mask"])
    elif kind.text() not in _NOT_DRAWN:
        raise _unread(kind)


def _bitmap(said: Field, canvas: DrawnMask, *, is_packed: bool = False) -> NDArray[np.bool_]:
    """Return the pixels that are not 0, (H, W), of a PNG in base64; of several channels, the last one is used.

    ValueError is raised if it is damaged, or larger than the image.
    """
    most_bytes = 2**20 + 9 * canvas.num_px  # of a PNG of the image's size, uncompressed
    try:
        png = base64.b64decode(said.text())
        png = zlib.decompressobj().decompress(png, most_bytes) if is_packed else png
    except (ValueError, zlib.error):
        png = b""
    if not png.startswith(b"\x89PNG"):
        raise said.error("a compressed PNG in base64" if is_packed else "a PNG in base64")
    try:
        open_bytes(png, Path(said.name), canvas.num_px)
    except DataError as error:
        raise ValueError(str(error)) from error
    pixels = decode(png, cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise said.error("a PNG that can be read")
    return np.asarray((pixels[..., -1] if pixels.ndim == 3 else pixels) > 0)


def find_supervisely(tree: Tree) -> Layout | None:
    """Return the conversion of a Supervisely project: ann/NAME.json for each img/NAME."""
    found = Annotations(tree, "supervisely", "Supervisely", _draw_supervisely, lambda one: one["classTitle"].text())
    for path, content in _files_of_images(tree, {"size", "objects"}, "ann"):
        folder, _, name = path.removesuffix(".json").rpartition("/")
        size = content.get("size")
        sides = (size.get("height").value, size.get("width").value) if size.value else (None, None)
        found.add(path, f"{folder.removesuffix('ann')}img/{name}", content["objects"], sides)
    return found.by_label("files")


def _draw_supervisely(canvas: DrawnMask, one: Field, value: int) -> None:
    kind = one["geometryType"]
    if kind.value == "polygon":
        points = one["points"]
        holes = points.get("interior").items() if points.get("interior").value else []
        fill_polygon(canvas, [ring.corners() for ring in (points["exterior"], *holes)], value)
    elif kind.value == "rectangle":
        fill_polygon(canvas, [box_of(one["points"]["exterior"].corners(2, 2), are_pixels=True)], value)
    elif kind.value == "bitmap":
        data = one["bitmap"]["data"]
        left, top = map(int, one["bitmap"]["origin"].wholes(2, 2))
        _paste(canvas, _bitmap(data, canvas, is_packed=True), (left, top), value, data)
    elif kind.text() not in _NOT_DRAWN:
        raise _unread(kind)
