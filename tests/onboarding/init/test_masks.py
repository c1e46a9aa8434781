"""What `segapp init` believes that masks hold: unlabeled pixels, instances, noise, opacity; its questions."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from PIL import Image

from segapp.errors import ConfigError, DataError
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.layout import OpenQuestionError
from tests.support.drawn_folders import SIZE, draw, draw_image, proposed, samples_read, save, targets_read

NAMES = [f"{number:04}" for number in range(10)]


def drawn(root: Path, mask: Any, names: list[str] = NAMES, target: str = "masks/{}.png") -> None:
    """Draws images, and the mask that `mask(number)` returns for each, moved to the right by 5 pixels a number."""
    for number, name in enumerate(names):
        draw_image(root / "images" / f"{name}.jpg")
        save(root / target.replace("{}", name), moved(mask(number), number))


def moved(mask: np.ndarray, number: int) -> np.ndarray:
    return np.roll(mask, 5 * number, axis=1)


def striped(values: list[int], widths: list[int], dtype: type = np.uint8) -> np.ndarray:
    """A mask of stripes of some values with given widths; the first one fills the rest."""
    row = np.full(SIZE[1], values[0], dtype)
    at = 0
    for value, width in zip(values[1:], widths, strict=True):
        row[at : at + width] = value
        at += width
    return np.tile(row, (SIZE[0], 1))


def test_unlabelled_is_ignored_unless_it_is_asked_for(tmp_path: Path) -> None:
    drawn(tmp_path / "d", lambda number: striped([0, 1, 2], [20, 16]))
    (tmp_path / "d" / "classes.json").write_text('{"0": "ground", "1": "road", "2": "No_Data"}')
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (config.data.classes, config.data.label_map) == (["ground", "road"], {2: 255})
    said = "No_Data (value 2) is ignored: 25.0% of the pixels; --unlabelled class makes it a class"
    assert said in " ".join(result.lines)
    assert said in (tmp_path / "made.yaml").read_text()
    config, _, _ = proposed(tmp_path / "d", tmp_path / "made.yaml", unlabelled="class", force=True)
    assert (config.data.classes, config.data.label_map) == (["ground", "road", "No_Data"], None)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("values", "nodata", "names", "expected", "label_map", "said"),
    [
        ([0, 1, 15], 15, None, ["background", "object"], {15: 255}, "value 15, nodata of the masks, is ignored: 25.0%"),
        ([0, 1, 2], 0, None, ["class_1", "class_2"], {1: 0, 2: 1, 0: 255}, "value 0, nodata of the masks, is ignored"),
        ([0, 1, 255], 0, None, ["background", "object"], None, "value 0, nodata of the masks, stays class background"),
        ([0, 255, 9], 9, None, ["background", "object"], {255: 1, 9: -1}, "value 9, nodata of the masks, is ignored"),
        ([0, 1, 2], 0, "a\nb\n", ["a", "b"], {1: 0, 2: 1, 0: 255}, "value 0, nodata of the masks, is ignored: 43.8%"),
        ([0, 255, 255], 0, None, ["background", "object"], {255: 1}, "value 0, nodata of the masks, stays class backg"),
        ([0, 1, -9999], -9999, None, ["background", "object"], None, "nodata of the masks (-9999) is ignored: 25.0%"),
        ([0, 1, 2], 0, "land\na\nb\n", ["land", "a", "b"], None, "value 0, nodata of the masks, stays class land: 43"),
    ],
)  # fmt: skip
def test_nodata_of_masks_is_ignored_if_two_classes_remain(
    values: list[int], nodata: int, names: str | None, expected: list[str], label_map: dict[int, int] | None, said: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    for number, name in enumerate(NAMES[:6]):
        draw_image(tmp_path / "d" / "images" / f"{name}.jpg")
        mask = moved(striped(values, [20, 16], np.float32 if min(values) < 0 else np.uint8), number)
        (tmp_path / "d" / "masks").mkdir(exist_ok=True)
        tags = [(42113, "s", 0, str(nodata), True)]
        tifffile.imwrite(tmp_path / "d" / "masks" / f"{name}.tif", mask, extratags=tags)
    if names is not None:
        (tmp_path / "d" / "classes.txt").write_text(names)
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (config.data.classes, config.data.label_map) == (expected, label_map)
    assert said in " ".join(result.lines)
    assert f"# note: {said}" in (tmp_path / "made.yaml").read_text()
    ignored = 255 if config.data.ignore_index is None else config.data.ignore_index
    to_class = {one: values.index(one) if label_map is None else label_map.get(one, one) for one in values}
    to_class |= {nodata: to_class[nodata] if "stays" in said else ignored, **({255: 255} if values[1] == 1 else {})}
    for name, target in targets_read(config).items():
        drawn_ids = tifffile.imread(tmp_path / "d" / "masks" / f"{Path(name).stem}.tif")
        np.testing.assert_array_equal(target, np.vectorize(to_class.__getitem__)(drawn_ids.astype(int)))


def test_nodata_that_is_an_ignored_color_is_there_once(tmp_path: Path) -> None:
    colors = np.array([[0, 0, 0], [9, 80, 7], [200, 30, 60]], np.uint8)
    (tmp_path / "d" / "masks").mkdir(parents=True)
    for number, name in enumerate(NAMES[:6]):
        draw_image(tmp_path / "d" / "images" / f"{name}.jpg")
        mask = colors[moved(striped([0, 1, 2], [20, 16]), number)]
        tags = [(42113, "s", 0, "0", True)]
        tifffile.imwrite(tmp_path / "d" / "masks" / f"{name}.tif", mask, photometric="rgb", extratags=tags)
    (tmp_path / "d" / "class_dict.csv").write_text("name,r,g,b\nunlabeled,0,0,0\ngrass,9,80,7\nroof,200,30,60\n")
    config, _, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (config.data.classes, config.data.palette) == (["grass", "roof"], [(9, 80, 7), (200, 30, 60), (0, 0, 0)])
    for name, target in targets_read(config).items():
        np.testing.assert_array_equal(target, moved(striped([255, 0, 1], [20, 16]), int(name)))


@pytest.mark.parametrize(("zero", "classes"), [(40, ["background", "a", "b"]), (0, ["a", "b"])])
def test_value_0_that_fills_half_or_is_absent_is_not_asked(zero: int, classes: list[str], tmp_path: Path) -> None:
    drawn(tmp_path / "d", lambda number: striped([1, 0, 2], [zero, 10]))
    (tmp_path / "d" / "classes.txt").write_text("a\nb\n")
    assert proposed(tmp_path / "d", tmp_path / "made.yaml")[0].data.classes == classes


def test_names_stay_if_a_few_pixels_have_none(tmp_path: Path) -> None:
    def mask(number: int) -> np.ndarray:
        pixels = striped([0, 1, 2], [20, 16])
        if number == 3:
            pixels[:2] = 40
        return pixels

    drawn(tmp_path / "d", mask)
    (tmp_path / "d" / "classes.csv").write_text("id,name\n0,ground\n1,road\n2,car\n")
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (config.data.classes, config.data.label_map) == (["ground", "road", "car"], {40: 255})
    assert "value 40 has no name in classes.csv and is ignored: 0.417% of the pixels" in " ".join(result.lines)


@pytest.mark.parametrize(
    ("values", "file", "text", "said", "answers"),
    [
        ([1, 0, 2], "classes.txt", "sky\nroad\n", "value 0 has no name in classes.txt and is 31.2%",
         {"ignore": (["sky", "road"], {1: 0, 2: 1, 0: 255}), "class": (["background", "sky", "road"], None)}),
        ([0, 1, 40], "classes.csv", "id,name\n0,ground\n1,road\n", "value 40 has no name in classes.csv and is 25.0%",
         {"class": (["ground", "road", "class_40"], {0: 0, 1: 1, 40: 2}), "ignore": (["ground", "road"], {40: 255})}),
    ],
)  # fmt: skip
def test_frequent_values_without_a_name_are_asked(
    values: list[int], file: str, text: str, said: str, answers: dict[str, Any], tmp_path: Path
) -> None:
    drawn(tmp_path / "d", lambda number: striped(values, [20, 16]))
    (tmp_path / "d" / file).write_text(text)
    with pytest.raises(OpenQuestionError, match=rf"{said}.*--unlabelled ignore"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    for answer, (classes, label_map) in answers.items():
        config, _, _ = proposed(tmp_path / "d", tmp_path / f"{answer}.yaml", unlabelled=answer)
        assert (config.data.classes, config.data.label_map) == (classes, label_map)


def test_instances_of_classes_are_refused_with_a_command(tmp_path: Path) -> None:
    """As Cityscapes' instanceIds: 7 is road, 26001 a car."""
    drawn(tmp_path / "d", lambda number: striped([7, 26001, 26500, 8], [20, 10, 12], np.uint16))
    said = r"4 values up to 26500, which look like class x 1000.*np\.where\(ids < 1000, ids, ids // 1000\)"
    with pytest.raises(DataError, match=said):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


def test_numbered_instances_are_refused_unless_they_are_ids(tmp_path: Path) -> None:
    def mask(number: int) -> np.ndarray:
        count = 4 + number
        return striped([0, *range(1, count + 1)], [3] * count)

    drawn(tmp_path / "d", mask)
    with pytest.raises(DataError, match=r"values 1 to n, n from 4 to 13.*\(ids > 0\).*add --masks ids"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    assert len(proposed(tmp_path / "d", tmp_path / "made.yaml", masks="ids")[0].data.classes or []) == 14
    with pytest.raises(ConfigError, match="--masks things: choose ids"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", masks="things"))


def test_ids_that_went_through_jpeg_are_refused(tmp_path: Path) -> None:
    def mask(number: int) -> np.ndarray:
        pixels = striped([0, 85, 170], [20, 16])
        pixels[10 : 30 + number, 13:43] = 170
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=40)
        return np.asarray(Image.open(buffer))

    drawn(tmp_path / "d", mask)
    with pytest.raises(DataError, match=r"hold 148 values without names.*magick mogrify.*--masks ids"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


@pytest.mark.parametrize(
    ("value", "said"), [(7, "10 masks that were read contain only one value: value 7: label"), (255, "every pixel")]
)
def test_masks_of_one_value_are_refused_in_words(value: int, said: str, tmp_path: Path) -> None:
    drawn(tmp_path / "d", lambda number: np.full(SIZE, value, np.uint8))
    with pytest.raises(DataError, match=said):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    assert not (tmp_path / "made.yaml").exists()


def test_trimaps_of_pets_have_names_and_a_note_on_the_border(tmp_path: Path) -> None:
    draw(tmp_path / "d", NAMES, "images/{}.jpg", "annotations/trimaps/{}.png", np.array([1, 2, 3], np.uint8))
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert (config.data.classes, config.data.label_map) == (["pet", "background", "border"], {1: 0, 2: 1, 3: 2})
    assert "3 is the border of the pet" in " ".join(result.lines)


def test_validation_on_the_test_images_is_said_or_replaced(tmp_path: Path) -> None:
    for split, names in (("train", NAMES[:8]), ("test", NAMES[8:])):
        draw(tmp_path / "d", names, f"{split}/images/{{}}.jpg", f"{split}/masks/{{}}.png")
    config, result, names = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert names["val"] == ["0008.jpg", "0009.jpg"]
    said = "the best checkpoint is chosen on the test images, for lack of a val split; --val-share SHARE of segapp init"
    assert f"val_split: test - {said}" in " ".join(result.lines)
    assert said in (tmp_path / "made.yaml").read_text()
    config, result, names = proposed(tmp_path / "d", tmp_path / "made.yaml", val_share=0.25, force=True)
    assert (len(names["train"]), len(names["val"])) == (6, 2)
    assert not {"0008.jpg", "0009.jpg"} & {*names["train"], *names["val"]}
    assert "2 test images are left for segapp eval" in " ".join(result.lines)
    assert config.data.list_dir is not None
    listed = (Path(config.data.list_dir) / "test.txt").read_text()
    assert [line.split("\t")[0][-8:] for line in listed.splitlines()] == ["0008.jpg", "0009.jpg"]


@pytest.mark.parametrize("folds", [None, 2])
def test_test_images_next_to_others_are_left_for_evaluation(tmp_path: Path, folds: int | None) -> None:
    """The lists of a config have them too, so `segapp eval --split test` finds them."""
    splits = {"train": NAMES[:5], "val": NAMES[5:7], "test": NAMES[7:]}
    for split, names in splits.items():
        draw(tmp_path / "d", names, f"{split}-{{}}.jpg", f"{split}-{{}}_mask.png")
    rows = [f"{split}-{name}.jpg,{split}-{name}_mask.png,{split}" for split, names in splits.items() for name in names]
    (tmp_path / "d" / "all.csv").write_text("\n".join(["image,mask,split", *rows]))
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml", folds=folds)
    assert config.data.list_dir is not None
    found = {
        path.stem: [line.split("\t")[0][-8:-4] for line in path.read_text().splitlines()]
        for path in Path(config.data.list_dir).iterdir()
    }
    assert found.pop("test") == NAMES[7:]
    if folds is None:
        assert found == {"train": NAMES[:5], "val": NAMES[5:7]}
        assert "3 test images are left for segapp eval" in " ".join(result.lines)
    else:
        assert [sorted(found[f"fold{n}-train"] + found[f"fold{n}-val"]) for n in (0, 1)] == [NAMES[:7]] * 2


def test_value_255_that_fills_half_of_the_masks_is_asked(tmp_path: Path) -> None:
    drawn(tmp_path / "d", lambda number: striped([255, 0, 1], [12, 10]))
    with pytest.raises(OpenQuestionError, match=r"value 255 is 65.6% of the pixels: unlabeled or a class"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    config, _, _ = proposed(tmp_path / "d", tmp_path / "made.yaml", unlabelled="class")
    assert config.data.classes == ["class_0", "class_1", "class_255"]
    for name, read in targets_read(config).items():
        np.testing.assert_array_equal(read, moved(striped([2, 0, 1], [12, 10]), int(name)))


def test_ignored_value_that_a_file_names_is_said_once(tmp_path: Path) -> None:
    drawn(tmp_path / "d", lambda number: striped([0, 1, 255], [20, 4]))
    (tmp_path / "d" / "classes.csv").write_text("id,name\n0,sky\n1,road\n255,void\n")
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["sky", "road"]
    assert len([line for line in result.lines if "255" in line]) == 1


def test_nan_in_float_masks_is_ignored(tmp_path: Path) -> None:
    wanted = striped([0, 1, 255], [12, 10])
    stored = np.where(wanted == 255, np.nan, wanted).astype(np.float32)
    drawn(tmp_path / "d", lambda number: stored, target="masks/{}.tif")
    config, _, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["background", "object"]
    for name, read in targets_read(config).items():
        np.testing.assert_array_equal(read, moved(wanted, int(name)))


def test_value_that_is_too_large_for_an_id_is_refused(tmp_path: Path) -> None:
    large = striped([0, 1, 70_003], [12, 16], np.int32)
    drawn(tmp_path / "d", lambda number: large if number == 3 else large % 70_003, target="masks/{}.tif")
    with pytest.raises(DataError, match=r"the masks hold the value 70003, and ids are 0 to 65535"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


@pytest.mark.parametrize(
    ("kind", "valid_area"),
    [("all", "*"), ("far", "*"), ("gap", None), ("inverted", None), ("objects", None), ("unlike", None)],
)
def test_fields_of_view_are_used_if_each_image_has_one(kind: str, valid_area: str | None, tmp_path: Path) -> None:
    rows, columns = np.ogrid[: SIZE[0], : SIZE[1]]

    def field(number: int) -> np.ndarray:
        row, column = (23, 30) if kind == "inverted" else (21 + number % 5, 36 - 2 * number)
        if kind == "far":  # cut off by the border of the image
            row, column = 17 + 2 * (number % 5), 36 - 2 * number
        inside = (rows - row) ** 2 + (columns - column) ** 2 < 21**2
        if kind == "unlike":
            inside &= columns < column + (5, 14, 9)[number % 3]
        if kind == "objects":
            inside &= (rows + columns + 7 * number) % 29 < 20
        return np.where(inside != (kind == "inverted"), np.uint8(255), np.uint8(0))

    drawn(tmp_path / "d", lambda number: moved(striped([0, 255], [9]), number), target="labels/{}.png")
    drawn(tmp_path / "d", lambda number: moved(field(number), -number), target="fov/{}.png")
    if kind == "gap":
        (tmp_path / "d/fov/0004.png").unlink()
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    print(*result.lines, sep="\n")
    assert config.data.valid_area == valid_area
    assert any("data.valid_area" in line and "fov" in line for line in result.lines) == (kind != "objects")
    assert any(line.startswith("not used: ") and "fov/" in line for line in result.lines) == (valid_area is None)
    if not valid_area:
        return
    trained = []
    for split, image, _, target in samples_read(config):
        np.testing.assert_array_equal(target == config.data.ignore_index, field(NAMES.index(image.stem)) == 0)
        trained += [target[target != config.data.ignore_index]] if split == "train" else []
    share = float((np.concatenate(trained) == 1).mean())
    assert f"object {share:.2%}" in " ".join((tmp_path / "made.yaml").read_text().split())
