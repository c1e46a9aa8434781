"""`segapp init` on masks that say their classes twice: palettes, class files, mixed kinds, two scales, two places."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segapp.assembly.pairs import build_pairs
from segapp.datasets.files import ImagePair
from segapp.errors import DataError
from segapp.onboarding.content import read_contents
from segapp.onboarding.encoding import Classes, MaskChoices, read_classes
from segapp.onboarding.layout import OpenQuestionError
from tests.support.drawn_folders import proposed, targets_read
from tests.support.drawn_folders import save as save_pixels

BLACK, RED, BLUE = (0, 0, 0), (255, 0, 0), (0, 0, 255)
COLORS = [BLACK, RED, BLUE]
ORDERS = [[0, 1, 2], [0, 2, 1], [2, 1, 0]]
Saver = Callable[[int, np.ndarray, Path], None]


def classes_of(number: int) -> np.ndarray:
    rng = np.random.default_rng(number)
    mask = np.zeros((41, 57), np.uint8)
    mask[5 : 9 + number % 5, rng.integers(0, 20) : 35] = 1
    mask[30:39, 3 : 20 + number] = 2
    return mask


def indexed(number: int, mask: np.ndarray, path: Path, order: list[int] | None = None) -> None:
    order = order or ORDERS[number % 3]
    image = Image.fromarray(np.argsort(order).astype(np.uint8)[mask], "P")
    image.putpalette([value for one in order for value in COLORS[one]] + [0] * (768 - 3 * len(order)))
    image.save(path)


def colored(_: int, mask: np.ndarray, path: Path) -> None:
    Image.fromarray(np.array(COLORS, np.uint8)[mask]).save(path)


def gray(_: int, mask: np.ndarray, path: Path) -> None:
    Image.fromarray(mask).save(path)


def folder(root: Path, save: Saver) -> Path:
    (root / "masks").mkdir(parents=True)
    for number in range(11):
        pixels = np.random.default_rng(number).integers(0, 255, (41, 57, 3), np.uint8)
        save_pixels(root / "images" / f"{number * 7 % 11:02}.png", pixels)
        save(number, classes_of(number), root / "masks" / f"{number * 7 % 11:02}.png")
    return root


def read_as(root: Path, out: Path, **request: Any) -> tuple[Any, dict[int, np.ndarray]]:
    config, _, _ = proposed(root, out, group=".+", **request)
    return config, {int(stem) * 8 % 11: mask for stem, mask in targets_read(config).items()}


def classes_of_masks(root: Path, **choices: Any) -> Classes:
    """Return the classes that init finds in the masks, without a config."""
    contents = read_contents([ImagePair(mask, mask, mask.stem) for mask in sorted((root / "masks").iterdir())])
    return read_classes(contents, (), ["d/masks/00.png"], MaskChoices(**choices))


def assert_read(codes: list[int], masks: dict[int, np.ndarray]) -> None:
    """The train ids of every mask, with the class that each means, are its classes."""
    assert len(masks) == 11
    for number, mask in masks.items():
        np.testing.assert_array_equal(np.array(codes)[mask], classes_of(number))


def test_palettes_that_disagree_are_asked_and_both_answers_hold(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", indexed)
    with pytest.raises(
        OpenQuestionError, match=r"the palettes disagree: .* in .*masks/\d\d.png .* in .*masks/\d\d.png"
    ) as asked:
        proposed(root, tmp_path / "made.yaml", group=".+")
    assert (asked.value.option, list(asked.value.answers)) == ("--masks", ["colors", "ids"])
    config, masks = read_as(root, tmp_path / "colors.yaml", masks="colors")
    assert config.data.rgb_masks is True
    assert_read([COLORS.index(tuple(color)) for color in config.data.palette], masks)
    config, masks = read_as(root, tmp_path / "ids.yaml", masks="ids")
    assert config.data.rgb_masks is False
    for number, mask in masks.items():
        np.testing.assert_array_equal(np.array(ORDERS[number % 3])[mask], classes_of(number))


def test_a_palette_that_disagrees_in_a_later_file_is_asked(tmp_path: Path) -> None:
    """The file with another palette is the seventh of eleven by name, and the only one."""
    root = folder(tmp_path / "d", lambda n, mask, path: indexed(n, mask, path, ORDERS[1 if path.stem == "06" else 0]))
    with pytest.raises(OpenQuestionError, match=r"the palettes disagree: .*/06\.png"):
        proposed(root, tmp_path / "made.yaml", group=".+")


def test_palettes_that_agree_are_ids(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", lambda number, mask, path: indexed(number, mask, path, [1, 2, 0]))
    config, masks = read_as(root, tmp_path / "made.yaml")
    assert config.data.rgb_masks is None
    assert_read([1, 2, 0], masks)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("class_dict.csv", "name,r,g,b\nground,0,0,0\nsky,0,0,255\ncar,255,0,0\n"),
        ("classes.csv", "id,name,r,g,b\n0,ground,0,0,0\n1,sky,0,0,255\n2,car,255,0,0\n"),
    ],
)
def test_a_class_file_that_contradicts_the_palettes_is_asked(name: str, text: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "d", lambda number, mask, path: indexed(number, mask, path, ORDERS[0]))
    (root / name).write_text(text)
    with pytest.raises(
        OpenQuestionError, match=rf"{name} names 1 sky, and its color in .*masks/\d\d.png car: .*--masks"
    ):
        proposed(root, tmp_path / "made.yaml", group=".+")
    config, masks = read_as(root, tmp_path / "colors.yaml", masks="colors")
    names = np.array(config.data.classes)
    assert (names[masks[4]] == np.array(["ground", "car", "sky"])[classes_of(4)]).all()
    agreed = text.replace("0,0,255", "x").replace("255,0,0", "0,0,255").replace("x", "255,0,0")
    (root / name).write_text(agreed)
    config, masks = read_as(root, tmp_path / "agreed.yaml")
    assert (np.array(config.data.classes)[masks[4]] == np.array(["ground", "sky", "car"])[classes_of(4)]).all()
    assert config.data.rgb_masks is None


def test_masks_of_indices_and_of_rgb_are_read_by_color(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", lambda *mask: (indexed if mask[0] % 4 else colored)(*mask))
    config, masks = read_as(root, tmp_path / "made.yaml")
    assert_read([COLORS.index(tuple(color)) for color in config.data.palette], masks)


@pytest.mark.parametrize(("others", "request_"), [(colored, {}), (indexed, {"masks": "colors"})])
def test_masks_of_ids_next_to_colors_are_refused(others: Saver, request_: dict[str, str], tmp_path: Path) -> None:
    root = folder(tmp_path / "d", lambda *mask: (others if mask[0] % 4 else gray)(*mask))
    with pytest.raises(
        DataError, match=r"^3 masks hold ids, such as .*masks/\d\d.png, and 8 hold colors, such as "
    ) as raised:
        proposed(root, tmp_path / "made.yaml", group=".+", **request_)
    said = Path(str(raised.value).split("such as ")[1].split(",")[0])
    assert Image.open(said).mode == "L"


def striped(mask: np.ndarray) -> np.ndarray:
    """Return the mask with a third class at its left edge."""
    return np.where(np.arange(57) < 3, np.uint8(3), mask)


def voided(mask: np.ndarray, factor: int) -> np.ndarray:
    """Return the mask times a factor, with ignored pixels at its left edge."""
    return np.where(np.arange(57) < 3, np.uint8(255), mask * np.uint8(factor))


@pytest.mark.parametrize(
    ("few", "most", "words"),
    [
        (lambda m: (m > 0) * np.uint8(1), lambda m: (m > 0) * np.uint8(255), "8 .* value 255, .* 3 .* value 1,"),
        (lambda m: m.astype(np.uint16) * 257, lambda m: m, "3 masks hold value 257, 514, .* 8 hold value 1, 2,"),
        (lambda m: (m > 0) * np.uint16(65535), lambda m: (m > 0) * np.uint8(255), "3 .* 65535, .* 8 hold value 255,"),
        (lambda m: (m > 0) * np.uint16(65535), lambda m: (m > 0) * np.uint8(1), "3 .* 65535, .* 8 .* 1, .* by 65535;"),
        (lambda m: (m > 0) * np.uint16(514), lambda m: m, "3 masks hold value 514, .* 8 hold value 1, 2, .* by 257;"),
        (lambda m: m * np.uint8(127), lambda m: m, "3 masks hold value 127, 254, .* 8 .* 1, 2, .* by 127;"),
        (lambda m: m, lambda m: np.array([0, 128, 255], np.uint8)[m], "128, 255, .* 3 .* 1, 2, .* by 127.5;"),
        (lambda m: striped(m) * np.uint8(85), striped, "3 .* 85, 170, 255, .* 8 .* 1, 2, 3, .* by 85;"),
        (lambda m: voided(m, 16), lambda m: voided(m, 1), "3 .* value 16, 32, .* 8 .* 1, 2, .* by 16;"),
        (lambda m: m * 16 + m // 2 * 48, lambda m: m + m // 2 * 3, "3 .* 16, 80, .* 8 .* 1, 5, .* by 16;"),
        (lambda m: m * np.uint8(90), striped, "3 .* value 90, 180, .* 8 .* 1, 2, 3, .* by 90;"),
    ],
)
def test_masks_of_two_scales_are_refused(few: Any, most: Any, words: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "d", lambda n, m, path: Image.fromarray((most if n % 4 else few)(m)).save(path))
    with pytest.raises(DataError, match=words) as raised:
        classes_of_masks(root)
    for listed, path in re.findall(r"hold value ([\d, ]+), such as ([^,]+),", str(raised.value)):
        assert {*np.unique(np.asarray(Image.open(path))).tolist()} - {0, 255} == {*map(int, listed.split(", "))} - {255}
    assert classes_of_masks(root, masks="ids", unlabelled="class").names


@pytest.mark.parametrize(
    ("high", "names"), [(255, ["background", "object"]), (257, ["class_0", "class_1", "class_257"])]
)
def test_values_next_to_each_other_are_no_two_scales(high: int, names: list[str], tmp_path: Path) -> None:
    """Some masks hold 1 and 255, which is ignored as in VOC, or 1 and 257, although others have only one of both."""

    def save(number: int, mask: np.ndarray, path: Path) -> None:
        values = ([0, 1, 1], [0, 1, high], [0, high, high])[number % 3]
        Image.fromarray(np.array(values, np.uint8 if high == 255 else np.uint16)[mask]).save(path)

    config, masks = read_as(folder(tmp_path / "d", save), tmp_path / "made.yaml")
    assert config.data.classes == names
    last = 255 if high == 255 else 2
    found = {number: {*np.unique(masks[number]).tolist()} for number in (0, 4, 8)}
    assert found == {0: {0, 1}, 4: {0, 1, last}, 8: {0, last}}


@pytest.mark.parametrize(
    "values",
    [
        ([0, 1, 1], [0, 2, 2], [0, 3, 3]),  # one class in each mask
        ([0, 1, 2], [0, 15, 30], [0, 1, 1]),  # the factor is small
        ([0, 1, 2], [0, 90, 200], [0, 2, 2]),  # no factor
        ([0, 1, 2], [0, 50, 100], [0, 2, 50]),  # a mask holds both
        ([0, 1, 2], [0, 20, 40], [0, 37, 37]),  # the ids go on beyond the factor
        ([0, 5, 9], [0, 60, 120], [0, 9, 5]),  # other ids than 1 and 2
        ([0, 60, 120], [0, 180, 240], [0, 60, 60]),  # levels of one scale
    ],
)
def test_classes_of_different_images_are_no_two_scales(values: Any, tmp_path: Path) -> None:
    """Classes need not occur together; every third mask has other ones."""

    def save(number: int, mask: np.ndarray, path: Path) -> None:
        Image.fromarray(np.array(values[number % 3], np.uint8)[mask]).save(path)

    root = folder(tmp_path / "d", save)
    names = classes_of_masks(root).names
    stored = sorted({value for own in values for value in own})
    named = [*range(max(stored) + 1)] if len(names) == max(stored) + 1 else stored
    assert names == tuple(f"class_{value}" for value in named)


@pytest.mark.parametrize("has_white", [True, False])
def test_black_and_white_next_to_colors(has_white: bool, tmp_path: Path) -> None:
    colors = np.array([BLACK, (255, 255, 255) if has_white else BLUE, RED], np.uint8)
    root = folder(
        tmp_path / "d", lambda n, m, path: Image.fromarray(colors[m] if n % 4 else (m == 1) * np.uint8(255)).save(path)
    )
    if not has_white:
        with pytest.raises(DataError, match=r"^3 masks hold ids"):
            proposed(root, tmp_path / "made.yaml", group=".+")
        return
    config, masks = read_as(root, tmp_path / "made.yaml")
    assert config.data.palette == [BLACK, RED, (255, 255, 255)]
    np.testing.assert_array_equal(masks[8], (classes_of(8) == 1) * np.uint8(2))


@pytest.mark.parametrize(("num_known", "words"), [(9, "the others are used"), (6, "the list is not used")])
def test_lines_of_a_list_without_an_image_are_said(num_known: int, words: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "d", gray)
    known = ["03", "00", "07", "10", "01", "05", "02", "08", "09"][:num_known]
    (root / "train.txt").write_text("\n".join([*known, *[f"x{number}" for number in range(10 - num_known)]]) + "\n")
    (root / "val.txt").write_text("04\n06\n")
    config, result, _ = proposed(root, tmp_path / "made.yaml")
    missing = 10 - num_known
    assert f"note: train.txt: {missing} of its 10 lines name no image with a mask, such as x0: {words}" in result.lines
    trained = {pair.image.stem for pair in build_pairs(config.data, "train")}
    assert (trained == {*known}) == (num_known == 9)
    (root / "train.txt").write_text("\n".join(known) + "\n")
    _, result, _ = proposed(root, tmp_path / "made.yaml", force=True)
    assert not any("lines name no image" in line for line in result.lines)


def test_class_files_that_disagree_are_said(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", gray)
    (root / "dataset.json").write_text('{"labels": {"ground": 0, "sky": 1, "car": 2}, "numTraining": 17}')
    (root / "classes.txt").write_text("Ground\ncar\nsky\n")
    (root / "obj.names").write_text("ground\nsky\npig\n")
    config, result, _ = proposed(root, tmp_path / "made.yaml", group=".+")
    assert config.data.classes == ["ground", "sky", "car"]
    notes = [line for line in result.lines if line.startswith("note: ")]
    assert notes == [
        "note: dataset.json says numTraining 17, and 11 images have masks",
        "note: classes.txt names value 1 car, but dataset.json is used: sky; remove the wrong file",
        "note: obj.names names value 2 pig, but dataset.json is used: car; remove the wrong file",
    ]
    (root / "dataset.json").write_text('{"labels": {"ground": 0, "sky": 1, "car": 2}, "numTraining": 11}')
    for file in ("classes.txt", "obj.names"):
        (root / file).write_text("Ground\nsky\nCar\n")
    _, result, _ = proposed(root, tmp_path / "made.yaml", group=".+", force=True)
    assert not [line for line in result.lines if line.startswith("note: ")]


def test_files_of_yolo_that_disagree_are_said(tmp_path: Path) -> None:
    """Only class 0 is drawn; the files disagree about 1 and 2, and one has a fourth name."""
    root = folder(tmp_path / "d", gray)
    shutil.rmtree(root / "masks")
    (root / "labels").mkdir()
    for image in (root / "images").iterdir():
        (root / "labels" / f"{image.stem}.txt").write_text("0 0.1 0.1 0.6 0.1 0.6 0.7\n")
    (root / "classes.txt").write_text("Cat\ncow\ndog\nhen\n")
    (root / "data.yaml").write_text("nc: 5\nnames: [cat, dog, cow]\n")
    (root / "obj.names").write_text("cat\ndog\npig\n")
    config, result, _ = proposed(root, tmp_path / "made.yaml", group=".+")
    assert config.data.classes == ["background", "cat", "dog", "cow"]
    assert [line for line in result.lines if line.startswith("note: ")][1:] == [
        "note: data.yaml says nc 5, and has 3 names",
        "note: classes.txt names value 1 cow, but data.yaml is used: dog; remove the wrong file",
        "note: obj.names names value 2 pig, but data.yaml is used: cow; remove the wrong file",
    ]
    for file in ("classes.txt", "obj.names"):
        (root / file).write_text("Cat\ndog\ncow\nhen\n")
    (root / "data.yaml").write_text("nc: 3\nnames: {0: cat, 1: dog, 2: cow}\n")
    _, result, _ = proposed(root, tmp_path / "made.yaml", group=".+", force=True)
    assert len([line for line in result.lines if line.startswith("note: ")]) == 1
