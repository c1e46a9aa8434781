"""Annotations of other programs, each read by a small function: COCO, YOLO, labelme, Label Studio, CVAT, Supervisely.

A reader collects images with their objects, and says how one object is drawn. Pixels without an object are background.
Objects of COCO and YOLO are drawn by area, larger ones first, the others in their order (CVAT: by z_order first).
"""

import base64
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any
from xml.etree import ElementTree

import cv2
import numpy as np
from numpy.typing import NDArray

from segapp.datasets.files import open_bytes, read_bytes, shown
from segapp.datasets.images.reading import decode
from segapp.errors import DataError, install_command
from segapp.onboarding.class_files import find_class_files
from segapp.onboarding.conversion import (
    Annotations,
    area_of,
    by,
    check_classes,
    decode_runs,
    fill_area,
    fill_box,
    fill_polygon,
    json_files,
)
from segapp.onboarding.encoding import FileFit, name_clash
from segapp.onboarding.layout import DrawnMask, Layout
from segapp.onboarding.tree import Tree
from segapp.scores import is_background

_YOLO_LINE = re.compile(rb"\s*\d+(\s+-?[\d.]+(e-?\d+)?){6,}\s*")
_CVAT_KINDS = ("polygon", "box", "mask", "ellipse", "polyline")
_LABEL_STUDIO_KINDS = ("polygonlabels", "brushlabels", "rectanglelabels")


def find_coco(tree: Tree) -> Layout | None:
    """Return the conversion of COCO files with segmentations: polygons, or run lengths by columns."""
    files: dict[str, Any] = {}
    for path, content in json_files(tree, dict):
        is_coco = all(isinstance(content.get(key), list) for key in ("images", "annotations", "categories"))
        if is_coco and any("segmentation" in one for one in content["annotations"][:50]):
            files[path] = content
    if not files:
        return None
    named: dict[int, tuple[str, str]] = {}
    for path, one in ((path, one) for path, content in files.items() for one in content["categories"]):
        name, other = named.setdefault(int(one["id"]), (str(one["name"]), path))
        if name != str(one["name"]):
            raise DataError(
                f"category {one['id']} is {shown(name)} in {shown(other)} and {shown(str(one['name']))} in "
                f"{shown(path)}: give each name the same id everywhere"
            )
    categories = {number: name for number, (name, _) in named.items()}
    own_background = next((number for number, name in categories.items() if is_background(name)), None)
    others = [number for number in sorted(categories) if number != own_background]
    first = next(iter(files))
    names = check_classes(["background", *(categories[number] for number in others)], first)
    found = Annotations(
        tree, "coco", "COCO", _draw_coco, lambda one: int(one["category_id"]), lambda one: float(one["area"])
    )
    found.values = {number: value for value, number in enumerate(others, start=1)}
    if own_background is not None:
        found.values[own_background] = 0
    for path, content in files.items():
        by_image: dict[str, list[Any]] = defaultdict(list)  # an id may be text in one place and a number in another
        for annotation in content["annotations"]:
            by_image[str(annotation.get("image_id")).removesuffix(".0")].append(annotation)
        known: dict[str, str] = {}
        for entry in content["images"]:
            name, number = str(entry.get("file_name", "")), str(entry.get("id")).removesuffix(".0")
            if number in known:
                raise DataError(
                    f"{shown(path)}: {known[number]} and {shown(name)} have the same id {number}: export it anew"
                )
            known[number] = shown(name)
            sides = entry.get("height"), entry.get("width")
            found.add(path, name, by_image[number], f"image {shown(name)}", sides)
        if lost := [number for number, own in by_image.items() if number not in known for _ in own]:
            share = f"{len(lost)} of {len(content['annotations'])} annotations of {shown(path)}"
            found.notes.append(f"{share} belong to no image, such as image_id {shown(lost[0])}: they are not drawn")
    return found.layout(names, f"the categories of {shown(first)}", [*files])


def _draw_coco(canvas: DrawnMask, annotation: Mapping[str, Any], value: int) -> None:
    segmentation = annotation["segmentation"]
    if isinstance(segmentation, list):
        for flat in segmentation:
            fill_area(canvas, [_corners(flat)], value)
        return
    height, width = (int(side) for side in segmentation["size"])
    if (height, width) != canvas.drawn_px:
        raise ValueError(f"run lengths of {width} x {height} pixels for an image of {by(canvas.drawn_px)}")
    counts = segmentation["counts"]
    pixels = decode_runs(counts, height, width, order="F") if isinstance(counts, list) else _decompressed(segmentation)
    canvas.paste(pixels, 0, 0, value)


def _decompressed(segmentation: Mapping[str, Any]) -> NDArray[np.bool_]:
    try:
        from pycocotools import mask as coco_masks
    except ImportError:
        missing = "compressed run lengths of COCO need pycocotools, which is not installed"
        raise DataError(f"{missing}: {install_command('import')}") from None
    counts = segmentation["counts"]
    encoded = {"size": segmentation["size"], "counts": counts.encode() if isinstance(counts, str) else counts}
    return np.asarray(coco_masks.decode(encoded)).astype(bool)


def _corners(flat: Sequence[float]) -> list[tuple[float, float]]:
    return list(zip(flat[0::2], flat[1::2], strict=True))


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
    first_lines = [tree.read(path, 4096).partition(b"\n")[0] for path in list(labels.values())[:200]]
    num_polygons = sum(_YOLO_LINE.fullmatch(line) is not None for line in first_lines)
    if not num_polygons or num_polygons < 0.3 * len(first_lines):
        return None
    found = Annotations(
        tree,
        "yolo",
        "YOLO polygons",
        _draw_yolo,
        lambda line: int(line.split()[0]),
        lambda line: area_of(_yolo_corners(line, 1, 1)),
    )
    for image, path in sorted(labels.items()):
        lines = [line for line in tree.read(path).splitlines() if line.strip()]
        found.add(path, image, lines, "", (None, None))
    names, reason, source = _yolo_names(tree, max(found.labels, default=0), found.notes)
    found.values = {number: number + 1 for number in range(len(names))}
    classes = check_classes(["background", *names], "the labels")
    return found.layout(classes, reason, [*sorted(labels.values()), *source])


def _yolo_names(tree: Tree, largest: int, notes: list[str]) -> tuple[list[str], str, list[str]]:
    """Return the names of classes, the reason, and the file, if it names the largest number; note contradictions."""
    files = [one for one in find_class_files(tree) if not one.colors]
    files.sort(key=lambda one: not one.source.endswith((".yaml", ".yml")))
    notes += [one.note for one in files if one.note]
    if not files or largest >= len(files[0].names):
        numbers = check_classes(range(largest + 1), "the labels")
        few = f"; {shown(files[0].source)} names only {len(files[0].names)}" if files else ""
        return [f"class_{number}" for number in numbers], f"replace with their names{few}", []
    used, *others = (FileFit(one, one.ids or dict(enumerate(one.names)), ()) for one in files)
    notes += [note for other in others for note in name_clash(used, other, [*used.named])]
    numbers = check_classes(range(max(used.named) + 1), source := used.file.source)
    names = [used.named.get(number, f"class_{number}") for number in numbers]
    return names, f"from {shown(source)}; YOLO's 0 is 1 here", [source]


def _draw_yolo(canvas: DrawnMask, line: bytes, value: int) -> None:
    fill_polygon(canvas, [_yolo_corners(line, *canvas.drawn_px)], value)


def _yolo_corners(line: bytes, height: int, width: int) -> Sequence[tuple[float, float]]:
    """Return the corners in pixels from a line; raise ValueError for a box."""
    values = [float(word) for word in line.split()[1:]]
    if len(values) < 6:
        raise ValueError(f"a box of {len(values)} numbers is not read: draw it as a polygon")
    return [(x * width - 0.5, y * height - 0.5) for x, y in _corners(values)]


def find_cvat(tree: Tree) -> Layout | None:
    """Return the conversion of XML files of CVAT for images 1.1."""
    found = Annotations(tree, "cvat", "CVAT", _draw_cvat, lambda kind_and_shape: kind_and_shape[1]["label"])
    for path in tree.others_named(".xml"):
        if b"<annotations" not in tree.read(path, 4096):
            continue
        try:
            top = ElementTree.fromstring(read_bytes(tree.root / path))  # expat refuses entities that multiply
        except (ElementTree.ParseError, ValueError, LookupError, DataError):
            continue
        labels = {one.text for one in top.iterfind("./meta//labels/label/name") if one.text}
        used = {one.get("label", "") for kind in _CVAT_KINDS for one in top.iterfind(f"image/{kind}")} - {""}
        for entry in top.iterfind("image"):
            shapes = [(one.tag, dict(one.attrib)) for one in entry if one.tag in _CVAT_KINDS]
            shapes.sort(key=lambda shape: float(shape[1].get("z_order") or 0))
            name = entry.get("name", "")
            found.add(path, name, shapes, f"image {shown(name)}", (entry.get("height"), entry.get("width")))
        found.labels |= labels
        if others := labels and used - labels:
            named = ", ".join(map(shown, sorted(others)))
            found.notes.append(f"{shown(path)}: its list of labels lacks {named}: rename them if they are misspelled")
        sizes = [int(one.text) for one in top.iterfind("./meta//size") if one.text and one.text.isdecimal()]
        if sizes and sum(sizes) != len(entries := top.findall("image")):
            found.notes.append(
                f"{shown(path)}: {len(entries)} images of {sum(sizes)} are in it: was the export complete?"
            )
    return found.by_label("entries in XML")


def _draw_cvat(canvas: DrawnMask, kind_and_shape: tuple[str, Mapping[str, str]], value: int) -> None:
    kind, shape = kind_and_shape
    if kind == "polygon":
        corners = [tuple(float(side) for side in corner.split(",")) for corner in shape["points"].split(";") if corner]
        fill_area(canvas, [corners], value)
    elif kind == "box":
        x0, y0, x1, y1 = (float(shape[key]) for key in ("xtl", "ytl", "xbr", "ybr"))
        fill_box(canvas, (x0, y0), (x1, y1), value)
    elif kind == "mask":
        left, top, width, height = (int(shape[key]) for key in ("left", "top", "width", "height"))
        counts = [int(count) for count in shape["rle"].split(",")]
        canvas.paste(decode_runs(counts, height, width, num_px=canvas.num_px), left, top, value)
    else:
        raise ValueError(f"the shape {kind} is not read: draw it as a polygon")


def find_label_studio(tree: Tree) -> Layout | None:
    """Return the conversion of Label Studio's JSON: the first annotation of each task that was not canceled."""
    found = Annotations(
        tree, "label-studio", "Label Studio", _draw_label_studio, lambda region: region["value"][region["type"]][0]
    )
    for path, tasks in json_files(tree, list):
        for number, task in enumerate(tasks):
            if not isinstance(task, dict) or "data" not in task or not isinstance(task.get("annotations"), list):
                continue
            said = next((value for value in task["data"].values() if isinstance(value, str)), "")
            made = [one for one in task["annotations"] if isinstance(one, dict) and not one.get("was_cancelled")]
            kept = made[0].get("result", []) if made else []
            regions = [one for one in kept if not isinstance(one, dict) or one.get("type") in _LABEL_STUDIO_KINDS]
            name = said.partition("/data/local-files/?d=")[2] or said
            first = next((one for one in regions if isinstance(one, dict)), {})
            sides = first.get("original_height"), first.get("original_width")
            if made:
                found.add(path, name, regions, f"task {number}", sides)
    return found.by_label("tasks")


def _draw_label_studio(canvas: DrawnMask, region: Mapping[str, Any], value: int) -> None:
    height, width = canvas.drawn_px
    content = region["value"]
    if region.get("image_rotation"):
        raise ValueError(f"its image was rotated by {region['image_rotation']} degrees: rotate it back in Label Studio")
    if region["type"] == "brushlabels":
        raise ValueError("brush strokes are not read: export them with the format Brush labels to PNG")
    corners = content.get("points")
    if region["type"] == "rectanglelabels":
        if content.get("rotation"):
            raise ValueError("a rotated rectangle cannot be read: draw it as a polygon")
        x, y, w, h = (float(content[key]) for key in ("x", "y", "width", "height"))
        corners = [(x, y), (x + w, y), (x + w, y + h), (x, y + h)]
    fill_area(canvas, [[(x / 100 * width, y / 100 * height) for x, y in corners]], value)  # percent of the sides


def find_labelme(tree: Tree) -> Layout | None:
    """Return the conversion of labelme: a JSON file for each image."""
    found = Annotations(tree, "labelme", "labelme", _draw_labelme, lambda shape: str(shape["label"]))
    for path, content in json_files(tree, dict):
        if not isinstance(content.get("shapes"), list) or "imagePath" not in content:
            continue
        sides = content.get("imageHeight"), content.get("imageWidth")
        found.add(path, str(content["imagePath"]), content["shapes"], "", sides)
    return found.by_label("files")


def _draw_labelme(canvas: DrawnMask, shape: Mapping[str, Any], value: int) -> None:
    """Draw a shape in place, without points. Raise ValueError if its kind is unknown, or it has too few points."""
    kind, points = shape.get("shape_type") or "polygon", shape["points"]
    if kind == "polygon":
        fill_polygon(canvas, [points], value)
    elif kind == "rectangle":
        first, last = points
        fill_box(canvas, first, last, value)
    elif kind == "mask":
        piece = _bitmap(base64.b64decode(shape["mask"]), cv2.IMREAD_GRAYSCALE, canvas.num_px)
        canvas.paste(piece, round(points[0][0]), round(points[0][1]), value)
    elif kind not in ("point", "points"):
        raise ValueError(f"shape_type {kind!r} is not read: draw it as a polygon")


def _bitmap(png: bytes, flags: int, num_px: int) -> NDArray[np.bool_]:
    """Return the pixels of a PNG that are not 0, (H, W); of several channels, the last one is used.

    DataError is raised if it is larger than its image, of `num_px` pixels.
    """
    if not png.startswith(b"\x89PNG"):
        raise ValueError("its bitmap is not a PNG")
    open_bytes(png, Path("bitmap"), num_px)
    pixels = decode(png, flags)
    if pixels is None:
        raise ValueError("its bitmap is damaged")
    return np.asarray((pixels[..., -1] if pixels.ndim == 3 else pixels) > 0)


def find_supervisely(tree: Tree) -> Layout | None:
    """Return the conversion of a Supervisely project: ann/NAME.json for each img/NAME."""
    found = Annotations(tree, "supervisely", "Supervisely", _draw_supervisely, lambda one: str(one["classTitle"]))
    for path, content in json_files(tree, dict):
        folder, _, name = path.removesuffix(".json").rpartition("/")
        objects = content.get("objects")
        if not folder.endswith("ann") or not isinstance(objects, list):
            continue
        size = content["size"] if isinstance(content.get("size"), dict) else {}
        sides = size.get("height"), size.get("width")
        found.add(path, f"{folder.removesuffix('ann')}img/{name}", objects, "", sides)
    return found.by_label("files")


def _draw_supervisely(canvas: DrawnMask, one: Mapping[str, Any], value: int) -> None:
    kind = one["geometryType"]
    if kind == "polygon":
        fill_polygon(canvas, [one["points"]["exterior"], *one["points"].get("interior", [])], value)
    elif kind == "rectangle":
        first, last = one["points"]["exterior"]
        fill_box(canvas, first, last, value)
    elif kind == "bitmap":
        most_bytes = 2**20 + 9 * canvas.num_px  # of a PNG of the image's size, uncompressed
        png = zlib.decompressobj().decompress(base64.b64decode(one["bitmap"]["data"]), most_bytes)
        left, top = one["bitmap"]["origin"]
        canvas.paste(_bitmap(png, cv2.IMREAD_UNCHANGED, canvas.num_px), int(left), int(top), value)
    elif kind not in ("point", "line"):
        raise ValueError(f"geometryType {kind!r} is not known")
