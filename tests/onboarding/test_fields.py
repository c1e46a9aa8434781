"""Fields of annotations in every format that init reads, each with a dozen odd values: drawn, left out by name, or refused.

An image has three objects, of which the second of the second image is changed. One of three verdicts is right: the
masks are those drawn by hand; only the changed image is left out, with file, image, object and field; or the folder is
refused in one line with the file and the field. Equal fields have equal verdicts in all formats.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import quoteattr

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from segapp.errors import DataError, SegappError
from segapp.onboarding.candidates import find_candidates
from segapp.onboarding.conversion import write_files
from segapp.onboarding.tree import survey_tree

HEIGHT, WIDTH = 33, 47
NAMES = ("0003", "0010", "0017")
CHANGED = NAMES[1]
BOXES = {"road": (4, 3, 20, 15), "car": (8, 6, 12, 10), "sign": (30, 18, 44, 30)}
"""Left, top, right and bottom of the objects of every image; the pixels right and bottom belong to them."""
Plane = NDArray[np.bool_]
MISSING = object()


def plane(label: str) -> Plane:
    left, top, right, bottom = BOXES[label]
    pixels = np.zeros((HEIGHT, WIDTH), bool)
    pixels[top : bottom + 1, left : right + 1] = True
    return pixels


def by_hand(labels: Mapping[str, str] | None = None) -> NDArray[Any]:
    """The name of the class of each pixel; `labels` renames objects."""
    names = np.full((HEIGHT, WIDTH), "background", object)
    for label in BOXES:
        names[plane(label)] = (labels or {}).get(label, label)
    return names


# --- encoders, written from the definitions of the formats


def ring(label: str, *, is_center: bool) -> list[list[int]]:
    left, top, right, bottom = BOXES[label]
    right, bottom = right + (not is_center), bottom + (not is_center)
    return [[left, top], [right, top], [right, bottom], [left, bottom]]


def flat(corners: list[list[int]]) -> list[int]:
    return [side for corner in corners for side in corner]


def runs(pixels: Plane) -> list[int]:
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


def brush(pixels: Plane, widths: tuple[int, int, int, int] = (3, 4, 8, 16), *, has_color: bool = False) -> list[int]:
    """Label Studio's bytes of a stroke, RGBA; with a color, the values of a pixel differ, and are written one by one."""
    color = (200, 0, 7, 255) if has_color else (255, 255, 255, 255)
    values = (pixels[..., None] * np.array(color)).reshape(-1).tolist()
    bits = f"{len(values):032b}{7:05b}" + "".join(f"{width - 1:04b}" for width in widths)
    start = 0
    while start < len(values):
        end = start + 1
        while end < len(values) and end - start < 2 ** widths[3] and values[end] == values[start]:
            end += 1
        own = values[start:end]
        if len(own) == 1:  # different values up to the next ones that are equal, or as many as the first width has
            end = start + 1
            while end < min(len(values) - 1, start + 2 ** widths[0]) and values[end] != values[end + 1]:
                end += 1
            own = values[start:end]
        which = next(number for number, width in enumerate(widths) if len(own) <= 2**width)
        is_repeated = len(own) > 1 and len({*own}) == 1
        bits += f"{is_repeated:b}{which:02b}{len(own) - 1:0{widths[which]}b}"
        bits += "".join(f"{value:08b}" for value in (own[:1] if is_repeated else own))
        start = end
    bits += "0" * (8 - len(bits) % 8)  # label-studio-converter adds a byte to whole ones
    return [int(bits[at : at + 8], 2) for at in range(0, len(bits), 8)]


def png(pixels: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels.astype(np.uint8) * 255).save(buffer, "PNG")
    return buffer.getvalue()


def cut(label: str) -> Plane:
    left, top, right, bottom = BOXES[label]
    return np.ones((bottom + 1 - top, right + 1 - left), bool)


# --- formats: a tree of plain values, and how it is saved


def coco(outline: Callable[[str], Any]) -> Callable[[], Any]:
    def tree() -> Any:
        ids = {"road": 9, "car": 4, "sign": 21}
        objects = [
            {"id": 50 + 7 * i, "image_id": 11 + 5 * i, "category_id": ids[label], "segmentation": outline(label),
             "area": int(plane(label).sum()), "bbox": [1, 1, 5, 5]}
            for i in range(len(NAMES)) for label in BOXES
        ]  # fmt: skip
        images = [
            {"id": 11 + 5 * i, "file_name": f"{name}.png", "height": HEIGHT, "width": WIDTH}
            for i, name in enumerate(NAMES)
        ]
        return {"images": images, "annotations": objects, "categories": [{"id": i, "name": n} for n, i in ids.items()]}

    return tree


def each(content: Callable[[str], Any]) -> Callable[[], Any]:
    """Returns a tree with the content of the file of each image."""
    return lambda: {name: content(name) for name in NAMES}


def labelme(shape: Callable[[str], Any]) -> Callable[[], Any]:
    return each(lambda name: {"imagePath": f"{name}.png", "imageHeight": HEIGHT, "imageWidth": WIDTH,
                              "shapes": [{"label": label, **shape(label)} for label in BOXES]})  # fmt: skip


def supervisely(shape: Callable[[str], Any]) -> Callable[[], Any]:
    size = {"height": HEIGHT, "width": WIDTH}
    return each(
        lambda name: {"size": dict(size), "objects": [{"classTitle": label, **shape(label)} for label in BOXES]}
    )


def label_studio(kind: str, value: Callable[[str], Any]) -> Callable[[], Any]:
    def tree() -> Any:
        return [
            {"id": 31 + 4 * i, "data": {"image": f"/data/upload/3/1a2b3c4d-{name}.png"}, "annotations": [{
                "id": 71 + i, "was_cancelled": False, "result": [
                    {"id": f"r{label}", "type": kind, "original_height": HEIGHT, "original_width": WIDTH,
                     "image_rotation": 0, "value": {kind: [label], **value(label)}}
                    for label in BOXES
                ]}]}
            for i, name in enumerate(NAMES)
        ]  # fmt: skip

    return tree


def cvat(kind: str, shape: Callable[[str], Any]) -> Callable[[], Any]:
    def image(name: str) -> Any:
        shapes = [{"kind": kind, "label": label, "z_order": 3, **shape(label)} for label in BOXES]
        return {"name": f"{name}.png", "width": WIDTH, "height": HEIGHT, "shapes": shapes}

    return lambda: [image(name) for name in NAMES]


def percent(label: str) -> list[list[float]]:
    return [[x / WIDTH * 100, y / HEIGHT * 100] for x, y in ring(label, is_center=False)]


def shares(label: str) -> list[float]:
    return [side for x, y in ring(label, is_center=True) for side in ((x + 0.5) / WIDTH, (y + 0.5) / HEIGHT)]


def start_and_length(label: str) -> str:
    counts = runs((plane(label) & (by_hand() == label)).ravel("F"))
    ends = np.cumsum(counts)
    return " ".join(f"{end + 1} {length}" for end, length in zip(ends[::2], counts[1::2], strict=False))


def save_json(place: str) -> Callable[[Path, Any], None]:
    def save(root: Path, tree: Any) -> None:
        for name, content in tree.items() if "{}" in place else [("", tree)]:
            path = root / place.format(name)
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(content))

    return save


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
    """A tree of plain values, how it is saved, the file of the changed image, and the place of the changed object."""

    tree: Callable[[], Any]
    save: Callable[[Path, Any], None]
    file: str
    object: tuple[Any, ...]
    fields: dict[str, str]  # place below the object, or from the top with a slash -> sort of the field


POLYGON = {"points": "outline", "points.1": "corner", "points.1.0": "number"}
ENDS = {"points": "two corners", "points.1": "one of two corners", "points.1.0": "number"}
LABELME = {"": "element", "label": "label", "shape_type": "kind, or a polygon", "/shapes": "list of objects",
           "/imagePath": "image", "/imageWidth": "side"}  # fmt: skip
SUPERVISELY = {"": "element", "classTitle": "label", "geometryType": "object", "/objects": "list of objects", "/size": "size",
               "/size.height": "side"}  # fmt: skip
STUDIO = {"": "element", "type": "object", "value": "object", "/annotations": "list of annotations",
          "/annotations.0": "annotation", "/annotations.0.result": "list of objects", "/data": "data",
          "original_width": "side", "image_rotation": "rotation"}  # fmt: skip
COCO = {"": "record", "image_id": "id of an image", "category_id": "runs", "area": "area",
        "segmentation": "rings", "//images.1.id": "id of an image", "//images.1.file_name": "image",
        "//images.1.height": "side", "//images.1": "image that is listed", "//categories.1.id": "id of a class",
        "//categories.1.name": "name", "//categories.1": "data", "//categories": "classes"}  # fmt: skip
CVAT = {"label": "text of a label", "z_order": "z_order", "//1.name": "text of an image", "//1.width": "side"}

FORMATS: dict[str, Format] = {
    "COCO": Format(coco(lambda label: [flat(ring(label, is_center=False))]), save_json("instances.json"),
                   "instances.json", ("annotations", 4),
                   {**COCO, "segmentation.0": "outline of pairs", "segmentation.0.3": "number"}),
    "COCO runs": Format(coco(lambda label: {"size": [HEIGHT, WIDTH], "counts": runs(plane(label).ravel("F"))}),
                        save_json("instances.json"), "instances.json", ("annotations", 4),
                        {**COCO, "segmentation.size": "runs", "segmentation.size.0": "runs",
                         "segmentation.counts": "runs", "segmentation.counts.2": "runs"}),
    "COCO text": Format(coco(lambda label: {"size": [HEIGHT, WIDTH],
                                            "counts": compressed(runs(plane(label).ravel("F")))}),
                        save_json("instances.json"), "instances.json", ("annotations", 4),
                        {"segmentation.counts": "runs"}),
    "labelme": Format(labelme(lambda label: {"points": ring(label, is_center=True)}), save_json("{}.json"),
                      f"{CHANGED}.json", (CHANGED, "shapes", 1), {**LABELME, **POLYGON}),
    "labelme box": Format(
        labelme(lambda label: {"shape_type": "rectangle", "points": ring(label, is_center=True)[::2]}),
        save_json("{}.json"), f"{CHANGED}.json", (CHANGED, "shapes", 1), ENDS),
    "labelme mask": Format(
        labelme(lambda label: {"shape_type": "mask", "points": ring(label, is_center=True)[::2],
                               "mask": base64.b64encode(png(cut(label))).decode()}),
        save_json("{}.json"), f"{CHANGED}.json", (CHANGED, "shapes", 1),
        {"mask": "blob", "points": "place", "points.0": "corner of a place", "points.0.0": "number"}),
    "Supervisely": Format(
        supervisely(lambda label: {"geometryType": "polygon",
                                   "points": {"exterior": ring(label, is_center=True), "interior": []}}),
        save_json("ann/{}.png.json"), f"ann/{CHANGED}.png.json", (CHANGED, "objects", 1),
        {**SUPERVISELY, "points": "object", "points.interior": "holes",
         **{key.replace("points", "points.exterior"): sort for key, sort in POLYGON.items()}}),
    "Supervisely box": Format(
        supervisely(lambda label: {"geometryType": "rectangle",
                                   "points": {"exterior": ring(label, is_center=True)[::2], "interior": []}}),
        save_json("ann/{}.png.json"), f"ann/{CHANGED}.png.json", (CHANGED, "objects", 1),
        {key.replace("points", "points.exterior"): sort for key, sort in ENDS.items()}),
    "Supervisely bitmap": Format(
        supervisely(lambda label: {"geometryType": "bitmap", "bitmap": {
            "data": base64.b64encode(zlib.compress(png(cut(label)))).decode(), "origin": [*BOXES[label][:2]]}}),
        save_json("ann/{}.png.json"), f"ann/{CHANGED}.png.json", (CHANGED, "objects", 1),
        {"bitmap": "object", "bitmap.data": "blob", "bitmap.origin": "object", "bitmap.origin.0": "number"}),
    "Label Studio": Format(label_studio("polygonlabels", lambda label: {"points": percent(label)}),
                           save_json("tasks.json"), "tasks.json", (1, "annotations", 0, "result", 1),
                           {**STUDIO, "value.polygonlabels": "object", "value.polygonlabels.0": "label",
                            **{f"value.{key}": sort for key, sort in POLYGON.items()}}),
    "Label Studio box": Format(
        label_studio("rectanglelabels", lambda label: {
            "x": percent(label)[0][0], "y": percent(label)[0][1],
            "width": percent(label)[1][0] - percent(label)[0][0], "height": percent(label)[2][1] - percent(label)[0][1]}),
        save_json("tasks.json"), "tasks.json", (1, "annotations", 0, "result", 1),
        {f"value.{key}": "number" for key in ("x", "y", "width", "height")}),
    "Label Studio brush": Format(label_studio("brushlabels", lambda label: {"format": "rle", "rle": brush(plane(label))}),
                                 save_json("tasks.json"), "tasks.json", (1, "annotations", 0, "result", 1),
                                 {"value.rle": "runs", "value.rle.3": "runs", "value.brushlabels": "object"}),
    "CVAT": Format(cvat("polygon", lambda label: {"points": ";".join(f"{x},{y}" for x, y in ring(label, is_center=False))}),
                   save_cvat, "annotations.xml", (1, "shapes", 1), {**CVAT, "points": "outline", "kind": "tag"}),
    "CVAT box": Format(cvat("box", lambda label: dict(zip(("xtl", "ytl", "xbr", "ybr"), BOXES[label], strict=True))),
                       save_cvat, "annotations.xml", (1, "shapes", 1),
                       {key: "number" for key in ("xtl", "ytl", "xbr", "ybr")}),
    "CVAT mask": Format(
        cvat("mask", lambda label: {"rle": ",".join(map(str, runs(cut(label).ravel()))), "left": BOXES[label][0],
                                    "top": BOXES[label][1], "width": cut(label).shape[1], "height": len(cut(label))}),
        save_cvat, "annotations.xml", (1, "shapes", 1),
        {"rle": "runs", "left": "number", "top": "number", "width": "runs", "height": "runs"}),
    "YOLO": Format(each(lambda _: [[number, *shares(label)] for number, label in enumerate(BOXES)]), save_yolo,
                   f"{CHANGED}.txt", (CHANGED, 1), {"0": "number of a class", "3": "number"}),
    "table": Format(
        lambda: [["ImageId", "ClassId", "EncodedPixels", "Height", "Width"],
                 *([f"{name}.png", label, start_and_length(label), HEIGHT, WIDTH]
                   for name in NAMES for label in BOXES)],
        save_table, "train.csv", (5,), {"0": "cell of an image", "1": "cell of a class", "2": "cell of runs", "3": "cell of a side"}),
}  # fmt: skip

VALUES: dict[str, Any] = {
    "missing": MISSING, "null": None, "empty": "", "no list": [], "no object": {}, "true": True, "text": "abc",
    "number": 7, "negative": -5, "nan": math.nan, "inf": math.inf, "huge": 1e300, "digits": 10**30, "nested": [[[1]]],
    "short": lambda value: value[:-1], "repeated": lambda value: value * 2,
}  # fmt: skip
TEXTS = ("missing", "empty", "text", "number", "negative", "nan", "inf", "huge", "digits", "short", "repeated")
"""The values of fields that are text in their file."""


def changed(tree: Any, place: tuple[Any, ...], value: Any) -> bool:
    """Changes a value in place; returns False if it cannot be shortened or repeated."""
    *above, key = place
    for step in above:
        tree = tree[step]
    if callable(value):
        if not isinstance(tree[key] if isinstance(tree, list) else tree.get(key), str | list):
            return False
        tree[key] = value(tree[key])
    elif value is not MISSING:
        tree[key] = value
    elif isinstance(tree, list) or key in tree:
        del tree[key]
    return True


PYTHONS_WORDS = re.compile(
    r"NoneType|subscriptable|out of range|could not convert|invalid literal|unsupported|expected|iterable|has no attribute"
    r"|unhashable|object is not|argument|Traceback|Error\b|unpack|must be|inhomogeneous|too large to convert|Errno|'int'"
    r"|'str'|'list'|'dict'|'float'|codec|padding|\bNone\b|\bTrue\b|\bFalse\b|mmap|<class|float\(|int\(|cannot cast"
)


def written(root: Path, out: Path) -> tuple[str, list[str], dict[str, NDArray[Any]]]:
    """Returns the verdict, the lines that were said, and the names of the classes of the pixels of each mask."""
    try:
        layout = find_candidates(survey_tree(root))[0]
        kept, problems = write_files(layout, out, root)
    except SegappError as error:
        assert isinstance(error, DataError), error
        return "refused", [str(error)], {}
    masks = {}
    for pair in kept.pairs:
        ids = np.asarray(Image.open(out / pair.mask))
        masks[Path(pair.image).stem] = np.array([*kept.classes, "unknown"], object)[np.minimum(ids, len(kept.classes))]
    return "left out" if problems else "drawn", [*problems, *kept.notes[1:]], masks


def verdicts(default: str, **exceptions: str) -> dict[str, str]:
    """Values of a sort of fields -> verdict.

    Besides refused, left out and drawn: "other" (only the object's pixels differ), "renamed" (only the name of its class
    does), "numbered" (classes lose their names), "absent" (the image is not annotated).
    """
    found = dict.fromkeys(VALUES, default)
    for verdict, values in exceptions.items():
        found |= dict.fromkeys((value.replace("_", " ") for value in values.split()), verdict)
    return found


WORDS = "text number negative digits short repeated"
NO_VALUE = "missing null empty no_list no_object"
SORTS: dict[str, dict[str, str]] = {
    "record": verdicts("refused", other="missing"),
    "image that is listed": verdicts("refused", absent="missing"),
    "element": verdicts("left out", other="missing"),
    "object": verdicts("left out"),
    "rings": verdicts("left out", drawn="repeated"),
    "outline": verdicts("left out", other="repeated short"),
    "outline of pairs": verdicts("left out", other="repeated"),
    "corner": verdicts("left out", other="repeated missing"),
    "number": verdicts("left out", other="number negative"),
    "two corners": verdicts("left out"),
    "one of two corners": verdicts("left out", other="repeated"),
    "place": verdicts("left out", other="repeated short"),
    "corner of a place": verdicts("left out", other="repeated missing"),
    "holes": verdicts("left out", drawn=f"{NO_VALUE} short repeated"),
    "runs": verdicts("left out"),
    "blob": verdicts("left out", drawn="repeated"),
    "label": verdicts("left out", renamed=WORDS),
    "text of a label": verdicts("renamed", **{"left out": "missing empty"}),
    "kind, or a polygon": verdicts("left out", drawn="missing null"),
    "tag": verdicts("left out", refused="number negative huge digits"),
    "rotation": verdicts("left out", drawn=NO_VALUE),
    "z_order": verdicts("left out", drawn="number repeated", other="missing empty negative"),
    "area": verdicts("left out", drawn="number negative"),
    "number of a class": verdicts("left out", numbered="number"),
    "list of objects": verdicts("refused", other="no_list short repeated", **{"left out": "nested"}),
    "list of annotations": verdicts("refused", absent="no_list short", drawn="repeated"),
    "annotation": verdicts("refused", absent="missing"),
    "image": verdicts("refused", absent=WORDS),
    "text of an image": verdicts("absent", refused="missing empty"),
    "id of an image": verdicts("refused", other="text number negative"),
    "id of a class": verdicts("refused"),
    "classes": verdicts("refused", drawn="repeated"),
    "name": verdicts("refused", renamed=WORDS),
    "data": verdicts("refused"),
    "size": verdicts("refused", drawn=NO_VALUE),
    "side": verdicts("left out", drawn=f"{NO_VALUE} text nan inf nested negative"),
    "cell of an image": verdicts("other", refused="missing empty"),
    "cell of a class": verdicts("renamed", refused="missing", **{"left out": "empty"}),
    "cell of runs": verdicts("left out", refused="missing", other="empty nan"),
    "cell of a side": verdicts("refused", drawn="empty text nan inf negative"),
}
"""Sort of a field -> value -> verdict, in all formats."""
CELLS = [
    pytest.param(name, place, sort, id=f"{name}-{place or 'object'}")
    for name, format in FORMATS.items()
    for place, sort in format.fields.items()
]


def problem_of(name: str, place: str, value: str, verdict: str, folder: Path) -> str:
    """Returns what is wrong with the conversion of a changed folder; an empty text if nothing is."""
    root, format = folder / "d", FORMATS[name]
    root.mkdir(parents=True)
    for image in NAMES:
        (root / "img").mkdir(exist_ok=True)
        Image.new("RGB", (WIDTH, HEIGHT)).save(root / ("img" if "Supervisely" in name else "") / f"{image}.png")
    steps = tuple(int(step) if step.isdigit() else step for step in place.strip("/").split(".") if step)
    top = () if place.startswith("//") else format.object[:1] if place.startswith("/") else format.object
    tree = format.tree()
    if value and not changed(tree, (*top, *steps), VALUES[value]):
        return ""
    format.save(root, tree)
    found, lines, masks = written(root, folder / "out")
    said = "\n".join(lines)
    if match := PYTHONS_WORDS.search(said):
        return f"says {match[0]!r} in {said}"
    if found == "refused":
        is_named = "\n" not in said and format.file in said
        return "" if verdict == "refused" and is_named else f"refused: {said}"
    own = masks.pop(CHANGED, None)
    rest = ~plane("car") if verdict == "renamed" and place.startswith("//") else np.s_[:]
    if len(masks) < 2 or (verdict != "numbered" and any((mask != by_hand())[rest].any() for mask in masks.values())):
        return f"another image differs: {said}"
    if found == "left out":
        words = [step for step in place.split(".") if not step.isdigit()] + ["class", "pixels", "run", "object 0: it is", "value.", "corners", "rotated"]
        is_named = format.file in said and f"{CHANGED}.png" in said and any(word in said for word in words)
        return "" if verdict == "left out" and is_named and own is None else f"left out: {said}"
    if own is None:
        return "" if verdict == "absent" else f"absent: {said}"
    is_hand, rest = own == by_hand(), ~plane("car")
    fits = {
        "drawn": is_hand.all(),
        "other": is_hand[rest].mean() > 0.5,
        "renamed": is_hand[rest].all() and not np.isin(own[plane("car")], ["car", "background"]).any(),
        "numbered": own[plane("car")].tolist() == ["class_7"] * 25,
    }
    return "" if fits.get(verdict) else f"drawn: {said}"


@pytest.mark.parametrize(("name", "place", "sort"), CELLS)
def test_each_odd_value_has_its_verdict(name: str, place: str, sort: str, tmp_path: Path) -> None:
    values = TEXTS if name.startswith(("CVAT", "YOLO", "table")) else tuple(VALUES)
    found = {value: problem_of(name, place, value, SORTS[sort][value], tmp_path / value.replace(" ", "_")) for value in values}
    wrong = [f"{value}: {SORTS[sort][value]}? {problem}" for value, problem in found.items() if problem]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", FORMATS)
def test_sound_fields_are_drawn_as_by_hand(name: str, tmp_path: Path) -> None:
    assert not problem_of(name, "", "", "drawn", tmp_path)
