"""`segapp init` on masks that say their classes twice: palettes, class files, mixed kinds, two scales, two places."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segapp.assembly.pairs import build_pairs
from segapp.errors import DataError
from segapp.onboarding.layout import OpenQuestionError
from tests.onboarding.init.test_masks import trained_masks
from tests.support.drawn_folders import proposed

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
    for part in ("images", "masks"):
        (root / part).mkdir(parents=True)
    for number in range(11):
        pixels = np.random.default_rng(number).integers(0, 255, (41, 57, 3), np.uint8)
        Image.fromarray(pixels).save(root / "images" / f"{number * 7 % 11:02}.png")
        save(number, classes_of(number), root / "masks" / f"{number * 7 % 11:02}.png")
    return root


def read_as(root: Path, out: Path, **request: Any) -> tuple[Any, dict[int, np.ndarray]]:
    config, _, _ = proposed(root, out, group=".+", **request)
    return config, {int(stem) * 8 % 11: mask for stem, mask in trained_masks(config).items()}


def test_palettes_that_disagree_are_asked_and_both_answers_hold(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", indexed)
    with pytest.raises(
        OpenQuestionError, match=r"the palettes disagree: .* in .*masks/\d\d.png .* in .*masks/\d\d.png"
    ) as asked:
        proposed(root, tmp_path / "made.yaml", group=".+")
    assert (asked.value.option, list(asked.value.answers)) == ("--masks", ["colors", "ids"])
    config, masks = read_as(root, tmp_path / "colors.yaml", masks="colors")
    assert config.data.rgb_masks is True
    found = [COLORS.index(tuple(color)) for color in config.data.palette]
    for number, mask in masks.items():
        np.testing.assert_array_equal(np.array(found)[mask], classes_of(number))
    config, masks = read_as(root, tmp_path / "ids.yaml", masks="ids")
    assert config.data.rgb_masks is False
    for number, mask in masks.items():
        np.testing.assert_array_equal(np.array(ORDERS[number % 3])[mask], classes_of(number))


@pytest.mark.parametrize("order", ORDERS)
def test_palettes_that_agree_are_ids(order: list[int], tmp_path: Path) -> None:
    root = folder(tmp_path / "d", lambda number, mask, path: indexed(number, mask, path, order))
    config, masks = read_as(root, tmp_path / "made.yaml")
    assert config.data.rgb_masks is None
    for number, mask in masks.items():
        np.testing.assert_array_equal(np.array(order)[mask], classes_of(number))


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
    found = [COLORS.index(tuple(color)) for color in config.data.palette]
    for number, mask in masks.items():
        np.testing.assert_array_equal(np.array(found)[mask], classes_of(number))


@pytest.mark.parametrize(("others", "request_"), [(colored, {}), (indexed, {"masks": "colors"})])
def test_masks_of_ids_next_to_colors_are_refused(others: Saver, request_: dict[str, str], tmp_path: Path) -> None:
    root = folder(tmp_path / "d", lambda *mask: (others if mask[0] % 4 else gray)(*mask))
    with pytest.raises(
        DataError, match=r"^3 masks hold ids, such as .*masks/\d\d.png, and 8 hold colors, such as "
    ) as raised:
        proposed(root, tmp_path / "made.yaml", group=".+", **request_)
    said = Path(str(raised.value).split("such as ")[1].split(",")[0])
    assert Image.open(said).mode == "L"


@pytest.mark.parametrize(
    ("few", "most", "words"),
    [
        (
            lambda m: (m > 0) * np.uint8(1),
            lambda m: (m > 0) * np.uint8(255),
            "8 masks hold value 255, .* 3 hold value 1,",
        ),
        (lambda m: m.astype(np.uint16) * 257, lambda m: m, "3 masks hold value 257, 514, .* 8 hold value 1, 2,"),
        (lambda m: (m > 0) * np.uint16(65535), lambda m: (m > 0) * np.uint8(255), "3 .* 65535, .* 8 hold value 255,"),
    ],
)
def test_masks_of_two_scales_are_refused(few: Any, most: Any, words: str, tmp_path: Path) -> None:
    root = folder(tmp_path / "d", lambda n, m, path: Image.fromarray((most if n % 4 else few)(m)).save(path))
    with pytest.raises(DataError, match=words) as raised:
        proposed(root, tmp_path / "made.yaml", group=".+")
    high, low = (np.asarray(Image.open(part.split(",")[0])).max() for part in str(raised.value).split("such as ")[1:])
    assert high in (255, 514, 65535)
    assert low < high
    assert proposed(root, tmp_path / "made.yaml", group=".+", masks="ids")[0].data.classes


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


@pytest.mark.parametrize("has_white", [True, False])
def test_black_and_white_next_to_colors(has_white: bool, tmp_path: Path) -> None:
    colors = np.array([BLACK, (255, 255, 255) if has_white else BLUE, RED], np.uint8)
    root = folder(
        tmp_path / "d",
        lambda n, m, path: Image.fromarray(colors[m] if n % 4 else (m == 1) * np.uint8(255)).save(path),
    )
    if not has_white:
        with pytest.raises(DataError, match=r"^3 masks hold ids"):
            proposed(root, tmp_path / "made.yaml", group=".+")
        return
    config, masks = read_as(root, tmp_path / "made.yaml")
    assert config.data.palette == [BLACK, RED, (255, 255, 255)]
    np.testing.assert_array_equal(masks[8], (classes_of(8) == 1) * np.uint8(2))


def test_masks_of_several_frames_are_refused(tmp_path: Path) -> None:
    root = folder(tmp_path / "d", gray)
    for path in sorted((root / "masks").iterdir()):
        image = Image.open(path)
        path.unlink()
        image.save(path.with_suffix(".tif"), save_all=True, append_images=[image, image])
    with pytest.raises(DataError, match=r"masks/00.tif \(the mask has several frames"):
        proposed(root, tmp_path / "made.yaml", group=".+")


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
    config, result, _ = proposed(root, tmp_path / "made.yaml", group=".+")
    assert config.data.classes == ["ground", "sky", "car"]
    notes = [line for line in result.lines if line.startswith("note: ")]
    assert notes == [
        "note: dataset.json says numTraining 17, and 11 images have masks",
        "note: classes.txt names value 1 car, but dataset.json is used: sky; remove the wrong file",
    ]
    (root / "dataset.json").write_text('{"labels": {"ground": 0, "sky": 1, "car": 2}, "numTraining": 11}')
    (root / "classes.txt").write_text("Ground\nsky\nCar\n")
    _, result, _ = proposed(root, tmp_path / "made.yaml", group=".+", force=True)
    assert not [line for line in result.lines if line.startswith("note: ")]
