"""Sizes in annotations: objects are scaled to the image, turned with its EXIF orientation, or refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segapp.config import load_config
from segapp.errors import DataError
from segapp.onboarding.init import InitRequest, propose_config
from tests.support.annotation_formats import FORMATS, Annotated, Drawn, coco, save_json
from tests.support.drawn_folders import exif_of, save, targets_read, with_orientation

SIZE = (45, 67)  # height and width of the upright images
Box = tuple[int, int, int, int]
BOXES: dict[str, Box] = {
    "0007": (3, 2, 21, 11),
    "0012": (40, 20, 66, 44),
    "0003": (5, 24, 19, 43),
    "0020": (33, 3, 60, 9),
}
"""Left, top, right and bottom of the object of each image, upright; the pixels right and bottom do not belong to it."""


def truth(name: str) -> np.ndarray[Any, Any]:
    mask = np.zeros(SIZE, np.uint8)
    left, top, right, bottom = BOXES[name]
    mask[top:bottom, left:right] = 1
    return mask


Seen = tuple[str, tuple[Any, Any], np.ndarray[Any, Any]]
"""Name, height and width as the annotation says them, and the object (H, W) in the pixels that were annotated."""


def seen(name: str, factor: int, orientation: int = 1, said: tuple[Any, Any] | None = None) -> Seen:
    raw = with_orientation(truth(name), orientation)
    mask = np.kron(raw, np.ones((factor, factor), np.uint8))
    return name, said or mask.shape, mask


def annotated(entries: list[Seen]) -> list[Annotated]:
    return [Annotated(name, said, {"box": mask}, max(mask.shape) // max(SIZE)) for name, said, mask in entries]


def writer(kind: str) -> Callable[[Path, list[Seen]], None]:
    """Returns a function that writes entries in a format."""
    return lambda root, entries: FORMATS[kind].write(root, annotated(entries))


def converted(
    tmp_path: Path, write: Any, entries: list[tuple[Seen, int]], **request: Any
) -> tuple[dict[str, Any], str]:
    """Returns the target of each image as training reads it, and the lines of init."""
    (root := tmp_path / "d").mkdir()
    for (name, _, _), orientation in entries:
        pixels = np.repeat(truth(name)[..., None] * 130 + 60, 3, axis=2)
        save(root / f"{name}.jpg", with_orientation(pixels, orientation), exif=exif_of(orientation))
    write(root, [own for own, _ in entries])
    result = propose_config(InitRequest(root, tmp_path / "made.yaml", group=".+", **request))
    return targets_read(load_config(result.configs[0])), "\n".join(result.lines)


def assert_true(targets: dict[str, Any], names: Any = BOXES) -> None:
    assert targets.keys() == set(names)
    for name, target in targets.items():
        np.testing.assert_array_equal(target, truth(name), err_msg=name)


@pytest.mark.parametrize("kind", sorted(FORMATS.keys() - {"YOLO"}))  # its lines say no size
def test_objects_are_scaled_and_turned_as_the_sizes_say(kind: str, tmp_path: Path) -> None:
    """Three factors; a photo annotated as stored, one annotated upright, and two without an orientation."""
    entries = [(seen("0012", 3), 1), (seen("0007", 2, 6), 6), (seen("0020", 1), 8), (seen("0003", 2), 1)]
    targets, said = converted(tmp_path, writer(kind), entries)
    assert_true(targets)
    place = "img/" if "Supervisely" in kind else ""
    assert f"3 of 4 images were annotated at another size, such as {place}0" in said
    before = "1 of 4 photos have the size of their mask or annotation only before their EXIF orientation is applied"
    assert f"{before}, such as {place}0007.jpg" in said
    assert "taken to be drawn" not in said  # every size tells


def test_error_of_an_only_image_names_the_others(tmp_path: Path) -> None:
    """Only the third of four entries has the ratio of its image."""
    entries = [(seen(name, 1, said=None if name == "0003" else (48 + i, 67)), 1) for i, name in enumerate(BOXES)]
    with pytest.raises(DataError, match=r"only one entry of .* can be converted: ") as caught:
        converted(tmp_path, writer("CVAT"), entries)
    said = str(caught.value)
    for i, name in enumerate(BOXES):
        assert (f"{name}.jpg has 67 x 45 pixels, but was annotated at 67 x {48 + i}" in said) == (name != "0003")
    assert "gdal_retile" not in said


def test_later_errors_name_the_images_that_were_left_out(tmp_path: Path) -> None:
    """Two entries can be drawn; all others of eight were annotated at another ratio, and five of these are named."""
    names = [f"{number:02}" for number in (7, 3, 8, 1, 5, 2, 9, 4)]
    (root := tmp_path / "d").mkdir()
    for name in names:
        Image.new("RGB", SIZE[::-1], (200, 90, 10)).save(root / f"{name}.jpg")
    writer("COCO")(root, [(name, SIZE if name in ("01", "09") else (48, 67), truth("0007")) for name in names])
    with pytest.raises(DataError, match="2 images in one group") as caught:
        propose_config(InitRequest(root, tmp_path / "made.yaml", group="^"))
    said = str(caught.value)
    for name in ("07", "03", "08", "05", "02"):
        assert f"{name}.jpg has 67 x 45 pixels, but was annotated at 67 x 48" in said
    assert said.endswith("left out: and 1 more")


def test_only_image_that_is_there_is_told_from_the_missing(tmp_path: Path) -> None:
    def write(root: Path, entries: list[Seen]) -> None:
        writer("COCO")(root, entries)
        for name in BOXES.keys() - {"0012"}:
            (root / f"{name}.jpg").unlink()

    with pytest.raises(DataError, match=r"0012\.jpg is the only image.* 1 of 4 entries of COCO name an image that is"):
        converted(tmp_path, write, plain(), layout="coco")


def test_sizes_may_be_text_fractions_or_missing(tmp_path: Path) -> None:
    """Without a size an object is drawn as it is, which is said if others are scaled."""
    entries = [
        (seen("0012", 2, said=("90", " 134.0")), 1), (seen("0007", 1, said=(0, 0)), 1),
        (seen("0020", 1, said=(None, 67)), 1), (seen("0003", 3, said=(135.2, 200.9)), 1),
    ]  # fmt: skip
    targets, said = converted(tmp_path, writer("COCO"), entries)
    assert_true(targets)
    assert "2 of 4 images were annotated at another size, such as 0012.jpg (134 x 90, now 67 x 45 pixels)" in said
    assert "2 of 4 images have no size in their annotation, such as 0007.jpg" in said


def test_all_objects_outside_their_image_are_said(tmp_path: Path) -> None:
    entries = [(seen(name, 3 if name < "0012" else 1, said=("", "")), 1) for name in BOXES]
    targets, said = converted(tmp_path, writer("COCO"), entries)
    assert "1 of 4 images have objects that leave them, such as 0003.jpg (up to 2.9 times its side)" in said
    np.testing.assert_array_equal(targets["0020"], truth("0020"))
    assert "no size" not in said  # nothing else was scaled


@pytest.mark.parametrize(("choice", "drawn"), [(None, 1), ("upright", 1), ("raw", 3)])
def test_half_turn_is_assumed_and_an_option_changes_it(choice: str | None, drawn: int, tmp_path: Path) -> None:
    entries = [(seen(name, 1, drawn if number < 3 else 1), 3 if number < 3 else 1) for number, name in enumerate(BOXES)]
    targets, said = converted(tmp_path, writer("COCO"), entries, mask_orientation=choice)
    assert_true(targets)
    assumed = "3 of 4 photos have an EXIF orientation; masks are taken to be drawn on the upright photo"
    assert (assumed in said) == (choice is None)
    assert ("compare 0007.jpg with its mask" in said and "add --mask-orientation raw" in said) == (choice is None)
    is_set = 'mask_orientation: "upright"' in (tmp_path / "made.yaml").read_text()  # of the masks that were drawn
    assert is_set == (choice is not None)


def test_smaller_annotations_are_scaled_up_along_their_lines(tmp_path: Path) -> None:
    """At a third of the size, the corners lie between pixels."""

    def write(root: Path, entries: list[Seen]) -> None:
        tree = coco(lambda own: [[side for x, y in own.outer for side in (x / 67 * 22, y / 3)]])
        save_json("instances.json")(root, tree([one._replace(sides=(15, 22)) for one in annotated(entries)]))

    targets, said = converted(tmp_path, write, plain())
    assert_true(targets)
    assert "4 of 4 images were annotated at another size, such as 0007.jpg (22 x 15, now 67 x 45 pixels)" in said


def test_runs_of_another_size_than_their_entry_are_refused(tmp_path: Path) -> None:
    entries = plain()
    entries[1] = (("0012", SIZE, seen("0012", 2)[2]), 1)
    targets, said = converted(tmp_path, writer("COCO runs"), entries)
    assert_true(targets, BOXES.keys() - {"0012"})
    assert "object 0: segmentation.size: run lengths of 134 x 90 pixels for an image of 67 x 45" in said


# --- ids, names and counts that contradict each other


def coco_with(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path, list[Seen]], None]:
    """Returns a function that writes COCO's file with a change."""

    def write(root: Path, entries: list[Seen]) -> None:
        writer("COCO")(root, entries)
        content = json.loads((root / "instances.json").read_text())
        change(content)
        (root / "instances.json").write_text(json.dumps(content))

    return write


def plain() -> list[tuple[Seen, int]]:
    return [(seen(name, 1), 1) for name in BOXES]


def test_ids_of_coco_agree_as_text_and_lost_ones_are_counted(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        kinds: list[Callable[[int], Any]] = [str, float, lambda _: 777, lambda _: 999]
        for one in content["annotations"]:
            one["image_id"] = kinds[one["image_id"] // 3 - 3](one["image_id"])

    targets, said = converted(tmp_path, coco_with(change), plain())
    for name in ("0007", "0012"):
        np.testing.assert_array_equal(targets[name], truth(name))
    assert not targets["0003"].any()
    assert not targets["0020"].any()
    assert "2 of 4 annotations of instances.json belong to no image, such as image_id 999: they are not drawn" in said


def test_images_of_coco_with_one_id_are_refused(tmp_path: Path) -> None:
    write = coco_with(lambda content: content["images"][3].update(id=str(content["images"][1]["id"])))
    with pytest.raises(DataError, match=r"instances\.json: 0012\.jpg and 0020\.jpg have the same id 13"):
        converted(tmp_path, write, plain())


def test_category_with_two_names_is_refused_with_both_files(tmp_path: Path) -> None:
    def write(root: Path, entries: list[Seen]) -> None:
        for split, own, names in (("val", entries[:1], ["car", "box"]), ("train", entries[1:], ["box", "car"])):
            categories = [{"id": 5 + i, "name": name} for i, name in enumerate(names)]
            coco_with(lambda content, own=categories: content.update(categories=own))(root, own)  # type: ignore[misc]
            (root / "instances.json").rename(root / f"{split}.json")

    with pytest.raises(DataError, match=r"category 5 is box in train\.json and car in val\.json"):
        converted(tmp_path, write, plain())


def test_labels_and_counts_of_cvat_are_compared(tmp_path: Path) -> None:
    def write(root: Path, entries: list[Seen]) -> None:
        writer("CVAT")(root, entries)
        labels = "<labels><label><name>boxes</name></label></labels>"
        head = f"<meta><task><size>2</size>{labels}</task><task><size>7</size>{labels}</task></meta>"
        text = (root / "annotations.xml").read_text().replace('"box"', '"ax"', 1)
        (root / "annotations.xml").write_text(text.replace("<annotations>", f"<annotations>{head}"))

    _, said = converted(tmp_path, write, plain())
    assert "annotations.xml: its list of labels lacks ax, box: rename them if they are misspelled" in said
    assert "annotations.xml: 4 images of 9 are in it" in said


def test_names_of_yolo_that_are_too_few_are_said(tmp_path: Path) -> None:
    def write(root: Path, entries: list[Seen]) -> None:
        for number, (name, (height, width), mask) in enumerate(entries):
            corners = " ".join(f"{(x + 0.5) / width} {(y + 0.5) / height}" for x, y in Drawn(mask, 1).inner)
            (root / f"{name}.txt").write_text(f"{(0, 4, 0, 2)[number]} {corners}")
        (root / "data.yaml").write_text("names: [box, car, tree]")
        (root / "classes.txt").write_text("box\ncar\n")

    targets, said = converted(tmp_path, write, plain())
    assert "class_4 (replace with their names; data.yaml names only 3)" in said
    assert [int(targets[name].max()) for name in BOXES] == [1, 5, 1, 3]
