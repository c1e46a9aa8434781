"""Odd values in every field of every format that init reads: drawn, left out by name, or the folder is refused.

An image has three objects, of which the second of the second image is changed. One of three verdicts is right: the
masks are those drawn by hand; only the changed image is left out, with file, image, object and field; or the folder is
refused in one line with the file. Equal fields have equal verdicts in all formats.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from segapp.errors import DataError
from segapp.onboarding.candidates import find_candidates
from segapp.onboarding.conversion import write_files
from segapp.onboarding.tree import survey_tree
from tests.support.annotation_formats import FORMATS, Annotated, brush, label_studio, save_json
from tests.support.hostile_files import PYTHONS_WORDS

HEIGHT, WIDTH = 33, 47
NAMES = ("0003", "0010", "0017")
CHANGED = NAMES[1]
BOXES = {"road": (4, 3, 20, 15), "car": (8, 6, 12, 10), "sign": (30, 18, 44, 30)}
"""Left, top, right and bottom of the pixels of the objects of every image; car lies on road."""
MISSING = object()


def plane(label: str) -> NDArray[np.bool_]:
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


POLYGON = {"points": "outline", "points.1": "corner", "points.1.0": "number"}
ENDS = {"points": "two corners", "points.1": "one of two corners", "points.1.0": "number"}
LABELME = {"": "element", "label": "label", "shape_type": "kind, or a polygon", "/shapes": "list of objects",
           "/imagePath": "image", "/imageWidth": "side"}  # fmt: skip
SUPERVISELY = {"": "element", "classTitle": "label", "geometryType": "object", "/objects": "list of objects",
               "/size": "size", "/size.height": "side",
               "points": "object", "points.interior": "holes"}  # fmt: skip
STUDIO = {"": "element", "type": "object", "value": "object", "/annotations": "list of annotations",
          "/annotations.1": "annotation", "/annotations.1.result": "list of objects", "/data": "data",
          "/annotations.0.was_cancelled": "flag",
          "original_width": "side", "image_rotation": "rotation", "value.polygonlabels": "object",
          "value.polygonlabels.0": "label"}  # fmt: skip
COCO = {"": "record", "image_id": "id of an image", "category_id": "runs", "area": "area",
        "segmentation": "rings", "//images.1.id": "id of an image", "//images.1.file_name": "image",
        "//images.1.height": "side", "//images.1": "image that is listed", "//categories.1.id": "id of a class",
        "//categories.1.name": "name", "//categories.1": "data", "//categories": "classes"}  # fmt: skip
CVAT = {"label": "text of a label", "z_order": "z_order", "//1.name": "text of an image", "//1.width": "side"}

FIELDS: dict[str, dict[str, str]] = {
    "COCO": COCO | {"segmentation.0": "outline of pairs", "segmentation.0.3": "number"},
    "COCO runs": dict.fromkeys(
        ("segmentation.size", "segmentation.size.0", "segmentation.counts", "segmentation.counts.2"), "runs"),
    "COCO text": {"segmentation.counts": "runs"},
    "labelme": LABELME | POLYGON,
    "labelme box": ENDS,
    "labelme mask": {"mask": "blob", "points": "place", "points.0": "corner of a place", "points.0.0": "number"},
    "Supervisely": SUPERVISELY | {key.replace("points", "points.exterior"): sort for key, sort in POLYGON.items()},
    "Supervisely box": {key.replace("points", "points.exterior"): sort for key, sort in ENDS.items()},
    "Supervisely bitmap": {"bitmap": "object", "bitmap.data": "blob", "bitmap.origin": "object",
                           "bitmap.origin.0": "number"},
    "Label Studio": STUDIO | {f"value.{key}": sort for key, sort in POLYGON.items()},
    "Label Studio box": {f"value.{key}": "number" for key in ("x", "y", "width", "height")},
    "Label Studio brush": {"value.rle": "runs", "value.rle.3": "runs", "value.brushlabels": "object"},
    "CVAT": CVAT | {"points": "outline", "kind": "tag"},
    "CVAT box": dict.fromkeys(("xtl", "ytl", "xbr", "ybr"), "number") | {"rotation": "rotation"},
    "CVAT mask": {"rle": "runs", "left": "number", "top": "number", "width": "runs", "height": "runs"},
    "YOLO": {"0": "number of a class", "3": "number"},
    "table": {"0": "cell of an image", "1": "cell of a class", "2": "cell of runs", "3": "cell of a side"},
}  # fmt: skip
"""Format -> place of a field in the object, from its image with a slash, from the top with two -> sort of the field."""

VALUES: dict[str, Any] = {
    "missing": MISSING, "null": None, "empty": "", "no list": [], "no object": {}, "true": True, "text": "abc",
    "number": 7, "negative": -5, "nan": math.nan, "inf": math.inf, "huge": 1e300, "digits": 10**30, "nested": [[[1]]],
    "short": lambda value: value[:-1], "repeated": lambda value: value * 2,
}  # fmt: skip
TEXTS = ("missing", "empty", "text", "number", "negative", "nan", "inf", "huge", "digits", "short", "repeated")
"""The values of fields that are text in their file."""


def changed(tree: Any, place: list[Any], value: Any) -> bool:
    """Changes a value in place; returns False if it cannot be shortened or repeated."""
    *above, key = place
    for step in above:
        tree = tree[step]
    if callable(value):
        sound = tree[key] if isinstance(tree, list) else tree.get(key)
        if not isinstance(sound, str | list) and value in (VALUES["short"], VALUES["repeated"]):
            return False
        tree[key] = value(sound)
    elif value is not MISSING:
        tree[key] = value
    elif isinstance(tree, list) or key in tree:
        del tree[key]
    return True


def written(root: Path, out: Path) -> tuple[str, list[str], dict[str, NDArray[Any]]]:
    """Returns the verdict, the lines that were said, and the names of the classes of the pixels of each mask."""
    try:
        layout = find_candidates(survey_tree(root))[0]
        kept, problems = write_files(layout, out, root)
    except DataError as error:
        return "refused", [str(error)], {}
    names = np.array([*kept.classes, *["unknown"] * (256 - len(kept.classes))], object)
    masks = {Path(pair.image).stem: names[np.asarray(Image.open(out / pair.mask))] for pair in kept.pairs}
    return "left out" if problems else "drawn", [*problems, *kept.notes[1:]], masks


def verdicts(default: str, **exceptions: str) -> dict[str, str]:
    """Values of a sort of fields -> verdict.

    Besides refused, left out and drawn: "other" (only the object's pixels differ), "renamed" (only its class
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
    "flag": verdicts("refused", drawn=f"true {NO_VALUE}"),
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
    "cell of a class": verdicts("renamed", refused="missing", **{"left out": "empty nan"}),
    "cell of runs": verdicts("left out", refused="missing", other="empty nan"),
    "cell of a side": verdicts("refused", drawn="empty text nan inf negative"),
}
"""Sort of a field -> value -> verdict, in all formats."""
CELLS = [(name, place, sort) for name, fields in FIELDS.items() for place, sort in fields.items()]
FIRST = {cell[2]: cell for cell in reversed(CELLS)}
FEW = ("missing", "null", "text", "huge")
"""The values of fields whose sort another format has already: each program has its own code, of equal verdicts."""


def images_in(root: Path, size: tuple[int, int] = (HEIGHT, WIDTH)) -> Path:
    """Returns a new folder with the images."""
    root.mkdir(parents=True, exist_ok=True)
    for image in NAMES:
        Image.new("RGB", size[::-1]).save(root / f"{image}.jpg")
    return root


def entries() -> list[Annotated]:
    return [Annotated(name, (HEIGHT, WIDTH), {label: plane(label) for label in BOXES}) for name in NAMES]


def problem_of(name: str, place: str, value: Any, verdict: str, folder: Path) -> str:
    """Returns what is wrong with the conversion of a folder with a changed field; an empty text if nothing is."""
    format, root = FORMATS[name], images_in(folder / "d")
    way, file = [CHANGED if step == "{}" else step for step in format.way], format.file.format(CHANGED)
    top = [] if place.startswith("//") else way[:1] if place.startswith("/") else way
    steps = [int(step) if step.isdigit() else step for step in place.strip("/").split(".") if step]
    tree = format.tree(entries())
    if not changed(tree, [*top, *steps], value):
        return ""
    format.save(root, tree)
    found, lines, masks = written(root, folder / "out")
    said = "\n".join(lines)
    if match := PYTHONS_WORDS.search(said):
        return f"says {match[0]!r} in {said}"
    if found == "refused":
        is_named = "\n" not in said and file in said
        return "" if verdict == "refused" and is_named else f"refused: {said}"
    own = masks.pop(CHANGED, None)
    rest = ~plane("car") if verdict == "renamed" and place.startswith("//") else np.s_[:]
    if len(masks) < 2 or (verdict != "numbered" and any((mask != by_hand())[rest].any() for mask in masks.values())):
        return f"another image differs: {said}"
    if found == "left out":
        also = ("class", "pixels", "run", "it is", "value.", "corners", "rotated", "not read", "no area", "shares")
        words = [step for step in place.split(".") if not step.isdigit()]
        is_named = file in said and f"{CHANGED}.jpg" in said and any(word in said for word in (*words, *also))
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


@pytest.mark.parametrize(
    ("name", "place", "sort"), CELLS, ids=[f"{name}-{place or 'object'}" for name, place, _ in CELLS]
)
def test_each_odd_value_has_its_verdict(name: str, place: str, sort: str, tmp_path: Path) -> None:
    values = TEXTS if name.startswith(("CVAT", "YOLO", "table")) else tuple(VALUES)
    is_first = FIRST[sort] == (name, place, sort)
    wrong = {
        value: f"{SORTS[sort][value]}? {problem}"
        for value in values
        if (is_first or value in FEW)
        and (problem := problem_of(name, place, VALUES[value], SORTS[sort][value], tmp_path / value.replace(" ", "_")))
    }
    assert not wrong, "\n".join(f"{value}: {problem}" for value, problem in wrong.items())


def in_shares(one: dict[str, Any]) -> dict[str, Any]:
    """The outline of an object of the changed image in shares of the sides."""
    ring = np.array(one["segmentation"][0]) / np.tile([WIDTH, HEIGHT], 4)
    return one | {"segmentation": [ring.tolist()]} if one["image_id"] == 13 else one


CASES: dict[str, tuple[str, str, Any, str]] = {
    # fields of an object
    "a circle of labelme": ("labelme", "shape_type", "circle", "left out"),
    "points of labelme": ("labelme", "shape_type", "points", "other"),
    "a polyline of CVAT": ("CVAT", "kind", "polyline", "left out"),
    "points of CVAT": ("CVAT", "kind", "points", "other"),
    "a line of Supervisely": ("Supervisely", "geometryType", "line", "left out"),
    "a point of Supervisely": ("Supervisely", "geometryType", "point", "other"),
    "key points of Label Studio": ("Label Studio", "type", "keypointlabels", "other"),
    "an outline without a label": ("Label Studio", "type", "polygon", "left out"),
    "two labels": ("Label Studio", "value.polygonlabels", ["car", "road"], "left out"),
    "labels of any shape": ("Label Studio", "", lambda one: one | {"type": "labels", "value": {
        **one["value"], "labels": ["car"]}}, "drawn"),
    "a stroke of any shape": ("Label Studio brush", "", lambda one: one | {"type": "labels", "value": {
        **one["value"], "labels": ["car"]}}, "drawn"),
    "an ellipse": ("Label Studio", "", lambda one: one | {"type": "ellipselabels", "value": {
        "ellipselabels": ["car"], "x": 5, "y": 5, "radiusX": 2, "radiusY": 3}}, "left out"),
    "a mask of CVAT that is rotated": ("CVAT mask", "rotation", "30.0", "left out"),
    "a box of CVAT that is not rotated": ("CVAT box", "rotation", "0.00", "drawn"),
    "a rotated box": ("Label Studio box", "value.rotation", 5, "left out"),
    "a rotated image": ("Label Studio", "image_rotation", 90, "left out"),
    "a region of another size": ("Label Studio", "original_height", HEIGHT + 1, "left out"),
    "a box from the right": ("labelme box", "points", lambda ends: ends[::-1], "drawn"),
    "four corners of a box": ("Supervisely box", "points.exterior", [[8, 6], [12, 6], [12, 10], [8, 10]], "left out"),
    "a flat outline": ("labelme", "points", lambda corners: [*chain(*corners)], "drawn"),
    "corners with a third number": ("Supervisely", "points.exterior", lambda all: [[*one, 7] for one in all], "drawn"),
    "pairs in COCO": ("COCO", "segmentation.0", lambda flat: [flat[i : i + 2] for i in range(0, 8, 2)], "drawn"),
    "numbers as text": ("COCO", "segmentation.0", lambda flat: [str(side) for side in flat], "drawn"),
    "a flat segmentation": ("COCO", "segmentation", lambda rings: rings[0], "left out"),
    "an empty ring": ("COCO", "segmentation", [[]], "left out"),
    "three equal corners": ("COCO", "segmentation.0", [9, 8, 9, 8, 9, 8], "left out"),
    "a box without a width": ("CVAT box", "xbr", 8, "left out"),
    "a box without a height": ("Label Studio box", "value.height", 0, "left out"),
    "shares in COCO": ("COCO", "//annotations", lambda all: [*map(in_shares, all)], "left out"),
    "shares in Label Studio": ("Label Studio", "/annotations.1.result", lambda all: [one | {"value": {**one["value"],
        "points": [[x / 100, y / 100] for x, y in one["value"]["points"]]}} for one in all], "left out"),
    "a corner that is far": ("labelme", "points.1.0", 2**29, "left out"),
    "runs of no pixel": ("COCO runs", "segmentation.counts", [HEIGHT * WIDTH], "left out"),
    "a number of too many letters": ("COCO text", "segmentation.counts", lambda text: (
        f"{text[0]}{chr(ord(text[1]) + 32)}{'P' * 11}1{text[2:]}"), "left out"),
    "runs of an unknown letter": ("COCO text", "segmentation.counts", lambda text: "~" + text, "left out"),
    "negative sides": ("CVAT mask", "", lambda one: one | {"width": -5, "height": -5}, "left out"),
    "a fraction of a pixel": ("Supervisely bitmap", "bitmap.origin", [8.5, 6], "left out"),
    "a box of four numbers": ("YOLO", "", lambda line: line[:5], "left out"),
    "a box with its confidence": ("YOLO", "", lambda line: line[:6], "left out"),
    "a class with a fraction": ("YOLO", "0", 1.5, "left out"),
    "a run of no pixel": ("table", "2", "601 0", "left out"),
    "a run of no pixel among others": ("table", "2", lambda text: f"{text} 1500 0", "left out"),
    "runs that overlap": ("table", "2", lambda text: f"{text} {text}", "drawn"),
    "a run that begins at 0": ("table", "2", "7 2 0 3", "left out"),
    # fields of an image
    "an id as text": ("COCO", "//images.1.id", "13", "drawn"),
    "an id with a fraction of 0": ("COCO", "image_id", 13.0, "drawn"),
    "an id with a fraction": ("COCO", "image_id", 13.5, "refused"),
    "sides as text": ("labelme", "/imageWidth", f" {WIDTH}.0", "drawn"),
    "another ratio": ("CVAT", "//1.width", WIDTH + 9, "left out"),
    "canceled as text": ("Label Studio", "/annotations.1.was_cancelled", "false", "drawn"),
    "a caption before the image": ("Label Studio", "/data", lambda data: {"caption": "a car"} | data, "drawn"),
    "a caption that is a name": ("Label Studio", "/data", lambda data: {
        "caption": NAMES[2], "photo": data["image"]}, "drawn"),
    "a logo before the image": ("Label Studio", "/data", lambda data: {"img": "logo.png", "a": data["image"]}, "drawn"),
    "a caption next to a lost image": ("Label Studio", "/data", {"text": "0003 a", "image": "9.jpg"}, "absent"),
    "all annotations canceled": ("Label Studio", "/annotations.1.was_cancelled", True, "absent"),
    "rows that say two sizes": ("table", "3", HEIGHT + 1, "refused"),
    # categories and files
    "two ids of one name": ("COCO", "//categories", lambda all: [*all, {"id": 30, "name": "car"}], "refused"),
    "categories by name": ("COCO", "//categories", {"road": 5, "car": 9, "sign": 13}, "refused"),
    "images by name": ("COCO", "//images", {"a": 1}, "refused"),
    "a task that is a number": ("Label Studio", "//1", 7, "refused"),
    "a row with a cell more": ("table", "", lambda row: [*row, "7"], "refused"),
}  # fmt: skip
"""Format, place, value and verdict."""


@pytest.mark.parametrize("case", CASES)
def test_case_of_a_field_has_its_verdict(case: str, tmp_path: Path) -> None:
    name, place, value, verdict = CASES[case]
    assert not problem_of(name, place, value, verdict, tmp_path)


@pytest.mark.parametrize("share", [0.5, 0.02])
def test_text_that_pycocotools_writes_is_its_plane(share: float, tmp_path: Path) -> None:
    """Planes of noise, whose runs are short or long, at three sizes."""
    masks = pytest.importorskip("pycocotools.mask")
    for number, size in enumerate([(7, 5), (HEIGHT, WIDTH), (301, 97)]):
        wanted = np.random.default_rng(number).random(size) < share
        wanted[3, 2] = True
        tree = FORMATS["COCO text"].tree([Annotated(name, size, {"car": wanted}) for name in NAMES])
        for one in tree["annotations"]:
            one["segmentation"]["counts"] = masks.encode(np.asfortranarray(wanted.astype(np.uint8)))["counts"].decode()
        save_json("instances.json")(root := images_in(tmp_path / f"{number}", size), tree)
        for mask in written(root, tmp_path / f"out{number}")[2].values():
            np.testing.assert_array_equal(mask == "car", wanted)


@pytest.mark.parametrize("end", [(8, 10), (12, 6)])
def test_supervisely_box_of_one_line_has_its_pixels(end: tuple[int, int], tmp_path: Path) -> None:
    format, root = FORMATS["Supervisely box"], images_in(tmp_path / "d")
    tree = format.tree(entries())
    assert changed(tree, [CHANGED, *format.way[1:], "points", "exterior"], [[8, 6], [*end]])
    format.save(root, tree)
    _, lines, masks = written(root, tmp_path / "out")
    expected = by_hand({"car": "road"})
    expected[6 : end[1] + 1, 8 : end[0] + 1] = "car"
    assert (masks[CHANGED] == expected).all(), lines


@pytest.mark.parametrize("is_one_file", [True, False])
def test_objects_of_several_entries_of_an_image_are_all_drawn(is_one_file: bool, tmp_path: Path) -> None:
    """The car of each image is in a second file, or a second entry with an id of its own."""
    tree = FORMATS["COCO"].tree(entries())
    cars = [one | {"image_id": one["image_id"] + 500} for one in tree["annotations"] if one["category_id"] == 9]
    again = [one | {"id": one["id"] + 500} for one in tree["images"]]
    rest = [one for one in tree["annotations"] if one["category_id"] != 9]
    if is_one_file:
        parts = [tree | {"annotations": rest + cars, "images": tree["images"] + again}]
    else:
        parts = [tree | {"annotations": rest}, tree | {"annotations": cars, "images": again}]
    for number, part in enumerate(parts):
        save_json(f"part{number}.json")(root := images_in(tmp_path / "d"), part)
    _, lines, masks = written(root, tmp_path / "out")
    assert sorted(masks) == [*NAMES]
    assert all((mask == by_hand()).all() for mask in masks.values())
    assert "3 images are in several entries, such as 0003.jpg: the objects of all are drawn" in lines
    again[1]["height"] = HEIGHT + 9
    save_json("part0.json")(root, parts[0])
    save_json(f"part{len(parts) - 1}.json")(root, parts[-1])
    found, lines, masks = written(root, tmp_path / "again")
    assert (found, sorted(masks)) == ("left out", [NAMES[0], NAMES[2]])
    assert "of part" in lines[0]
    assert "it was drawn on 47 x 42 pixels" in lines[0]


@pytest.mark.parametrize("name", ["COCO", "YOLO", "labelme", "Label Studio", "CVAT", "Supervisely", "table"])
def test_void_and_background_have_one_rule_in_all_formats(name: str, tmp_path: Path) -> None:
    """The sign is ignored, and the car, which lies on the road, is background by two names."""
    format, root = FORMATS[name], images_in(tmp_path / "d")
    renamed = {"road": "road", "car": "Background", "sign": "Unlabeled"}
    planes = {renamed[label]: plane(label) for label in BOXES} | {"_background_": plane("car")}
    format.write(root, [one._replace(planes=planes) for one in entries()])
    (root / "data.yaml").write_text(f"names: {[*planes]}")
    layout = find_candidates(survey_tree(root))[0]
    assert layout.classes == ("background" if name == "table" else "Background", "road") or name == "table"
    kept, _ = write_files(layout, tmp_path / "out", root)
    for pair in kept.pairs:
        mask = np.asarray(Image.open(tmp_path / "out" / pair.mask))
        assert (mask[plane("sign")] == 255).all()
        assert (mask[plane("car")] == 0).all()
        assert (mask[plane("road") & ~plane("car")] == 1).all()


@pytest.mark.parametrize("name", ["labelme", "Label Studio", "CVAT", "Supervisely"])
def test_annotations_without_objects_are_one_clear_error(name: str, tmp_path: Path) -> None:
    FORMATS[name].write(root := images_in(tmp_path / "d"), [one._replace(planes={}) for one in entries()])
    found, lines, _ = written(root, tmp_path / "out")
    assert found == "refused"
    assert "cannot be read: there are no objects in its 3 images; annotate some" in lines[0]


@pytest.mark.parametrize(("least", "most", "is_read"), [(0.1, 0.9, False), (0.1, 1.9, True)])
def test_shares_are_told_by_all_objects_in_percent(least: float, most: float, is_read: bool, tmp_path: Path) -> None:
    """Of two boxes on 300 x 700 pixels, whose corners lie beyond the first pixel, the second one decides."""
    sides = (300, 700)
    tree = FORMATS["Label Studio box"].tree(
        [Annotated(name, sides, {"car": np.eye(2), "road": np.eye(2)}) for name in NAMES]
    )
    for task in tree:
        for region, end in zip(task["annotations"][1]["result"], (most, 0.5), strict=True):
            region["value"] |= {"x": least, "y": least, "width": end - least, "height": end - least}
    save_json("tasks.json")(root := images_in(tmp_path / "d", sides), tree)
    save_json("colors.json")(root, ["red", 3])
    found, lines, _ = written(root, tmp_path / "out")
    assert found == ("drawn" if is_read else "refused"), lines
    assert ("look like shares of the sides, not percent" in " ".join(lines)) is not is_read


@pytest.mark.parametrize("number", ["1.0", "1.00"])
def test_class_with_a_fraction_of_0_in_a_table_is_one_class(number: str, tmp_path: Path) -> None:
    tree = FORMATS["table"].tree(entries())
    for row in tree[1:]:
        row[1] = {"road": "7", "car": "1", "sign": number}[row[1]]
    FORMATS["table"].save(root := images_in(tmp_path / "d"), tree)
    _, _, masks = written(root, tmp_path / "out")
    wanted = by_hand({"road": "class_7", "car": "class_1", "sign": "class_1"})
    assert all((mask == wanted).all() for mask in masks.values())


NAMED: dict[str, tuple[str, str, str]] = {
    "null in a list": ("names: [road, null, sign]", "road class_1 sign", "the name of 1 is null, not text"),
    "null by id": ("names: {0: road, 1: null, 2: sign}", "road class_1 sign", "the name of 1 is null, not text"),
    "objects": ("names: [{name: road}, {name: car}, {name: sign}]", "class_0 class_1 class_2",
                "data.yaml is not used: the name of 0 is an object, not text"),
    "a text": ("names: car", "class_0 class_1 class_2", 'the list of names is "car", not a list'),
    "nan": ("names: [road, nan, .nan]", "road class_1 class_2", 'the name of 1 is "nan", not a name'),
    "empty": ("names: [road, car, '']", "road car class_2", 'the name of 2 is "", not a name'),
}  # fmt: skip
"""Text of data.yaml, names of the classes, and what is said."""


@pytest.mark.parametrize("case", NAMED)
def test_name_that_is_missing_is_replaced_and_noted(case: str, tmp_path: Path) -> None:
    FORMATS["YOLO"].write(root := images_in(tmp_path / "d"), entries())
    text, names, said = NAMED[case]
    (root / "data.yaml").write_text(text)
    for path in root.glob("*.txt"):
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte order mark, as Windows writes it
    _, lines, masks = written(root, tmp_path / "out")
    wanted = by_hand(dict(zip(BOXES, names.split(), strict=True)))
    assert all((mask == wanted).all() for mask in masks.values())
    assert sorted(masks) == [*NAMES]
    assert any("data.yaml" in line and said in line for line in lines), lines


def test_repeated_class_name_is_refused_with_its_file(tmp_path: Path) -> None:
    FORMATS["YOLO"].write(root := images_in(tmp_path / "d"), entries())
    (root / "data.yaml").write_text("names: [road, car, road, car]")
    assert written(root, tmp_path / "out")[:2] == (
        "refused",
        [f"{root}: data.yaml: two classes are named road: rename one of them"],
    )


def saved_as(text: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "empty": saved_as(b""),
    "of zeros": saved_as(bytes(99)),
    "in Latin-1": saved_as(b'{"\xe4": 1'),
    "nested": saved_as(b'{"a":' * 99_999),
    "a number of 5000 digits": saved_as(b'{"a": ' + b"9" * 5000 + b"}"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", ["COCO", "labelme", "Supervisely", "Label Studio", "CVAT", "table", "YOLO"])
def test_damaged_file_is_refused_by_name(name: str, damage: str, tmp_path: Path) -> None:
    """A line of YOLO may be complete without its end."""
    format, root = FORMATS[name], images_in(tmp_path / "d")
    format.write(root, entries())
    DAMAGES[damage](root / format.file.format(CHANGED))
    found, lines, masks = written(root, tmp_path / "out")
    assert not PYTHONS_WORDS.search("\n".join(lines)), lines
    if name == "YOLO" and damage == "empty":
        assert (masks[CHANGED] == "background").all()
    elif name == "YOLO":
        assert (found, CHANGED in masks) == ("left out", False) or damage == "cut off"
    else:
        assert found == "refused"
        assert format.file.format(CHANGED) in lines[0]


def test_brush_strokes_lie_on_each_other_in_their_order(tmp_path: Path) -> None:
    """Three strokes of three labels, of which each covers a part of the one before, in several encodings."""
    rng = np.random.default_rng(3)
    strokes = {label: plane(label) | (rng.random((HEIGHT, WIDTH)) < 0.2) for label in BOXES}
    wanted = np.full((HEIGHT, WIDTH), "background", object)
    for label, stroke in strokes.items():
        wanted[stroke] = label
    for number, (name, options) in enumerate(zip(NAMES, ENCODINGS, strict=True)):
        tree = label_studio("brushlabels", lambda own, options=options: {"rle": brush(own.plane, **options)})
        root = images_in(tmp_path / name)
        tasks = tree([Annotated(image, (HEIGHT, WIDTH), strokes if image > NAMES[0] else {}) for image in NAMES])
        for task in tasks[1:]:
            task["annotations"].insert(0, {"result": []})
        save_json("tasks.json")(root, tasks)
        found, lines, masks = written(root, tmp_path / "out" / name)
        said = "the first annotation of 2 tasks is empty, such as of task 1: the first one with objects is used"
        assert (found, lines) == ("drawn", [f"tasks.json: {said}"]), number
        assert (masks.pop(NAMES[0]) == "background").all()
        for mask in masks.values():
            np.testing.assert_array_equal(mask, wanted)


ENCODINGS: list[dict[str, Any]] = [{}, {"color": (200, 0, 7, 90)}, {"widths": (1, 2, 5, 7), "width": 11}]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda code: code[:-9], "is cut off: its .* bytes end before its last pixel"),
        (lambda code: [*code, 0, 1], "continues after its last pixel"),
        (lambda code: [*code[:3], code[3] - 4, *code[4:]], "has .* values, not 4 for each of 47 x 33 pixels"),
        (lambda code: [*code[:9], 256, *code[10:]], "not a list of bytes"),
        (lambda code: code[:6] + [255] * len(code), "continues after its last pixel"),
        (lambda _: brush(plane("car"), color=(255, 255, 255, 0)), "has no pixel of the object"),
    ],
)
def test_brush_stroke_that_is_damaged_is_left_out(change: Any, problem: str, tmp_path: Path) -> None:
    root = images_in(tmp_path / "d")
    tree = FORMATS["Label Studio brush"].tree(entries())
    value = tree[1]["annotations"][1]["result"][1]["value"]
    value["rle"] = change(value["rle"])
    save_json("tasks.json")(root, tree)
    found, lines, masks = written(root, tmp_path / "out")
    assert (found, sorted(masks)) == ("left out", [NAMES[0], NAMES[2]])
    assert re.search(rf"tasks\.json: image \S*{CHANGED}\.jpg: .*object 1: value\.rle .*{problem}", lines[0]), lines


SIBLINGS = {
    "annotations.xml": ('<annotations><track id="0" label="car"/></annotations>', "CVAT for images 1.1"),
    "both.xml": (
        '<annotations><image name="0003.jpg"><box label="car"/></image><track id="0" label="car"/></annotations>',
        "tracks of CVAT for video",
    ),
    "voc/0003.xml": ("<annotation><object><bndbox><xmin>4</xmin></bndbox></object></annotation>", "Pascal VOC"),
    "0003.txt": ("0 0.5 0.5 0.25 0.25\n1 0.25 0.5 0.25 0.25\n", "boxes of YOLO have no outlines"),
    "panoptic.json": ('{"annotations": [{"segments_info": []}]}', "panopticapi"),
    "boxes.json": ('{"images": [], "annotations": [{"bbox": [1, 2, 3, 4]}], "categories": []}', "boxes and keypoints"),
    "default.json": ('{"dm_format_version": "1.0", "items": []}', "datum convert"),
    "via.json": ('{"0003.jpg1": {"regions": [{"shape_attributes": {}}]}}', "export it as COCO"),
    "min.json": ('[{"image": "0003.jpg", "label": [{"polygonlabels": ["car"]}]}]', "JSON-MIN"),
    "task-3-annotation-7-by-1-tag-car-0.png": (None, "export JSON"),
}


@pytest.mark.parametrize("file", SIBLINGS)
def test_annotations_that_are_not_read_are_named(file: str, tmp_path: Path) -> None:
    images_in(tmp_path)
    content, words = SIBLINGS[file]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    if content is None:
        Image.new("L", (WIDTH, HEIGHT), 255).save(tmp_path / file)
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(DataError, match=words) as caught:
        find_candidates(survey_tree(tmp_path))
    assert file in str(caught.value)
