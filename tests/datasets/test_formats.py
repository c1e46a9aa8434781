"""Pairs of layouts on disk, and train ids of file ids against the publishers' tables."""

import ast
import os
import pickle
import re
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from segapp.datasets.files import ImagePair, shared_images
from segapp.datasets.layouts.formats import DATASETS, DataLocation, class_scheme, find_pairs
from segapp.datasets.layouts.schemes import bit_palette
from segapp.errors import ConfigError, DataError
from tests.support.drawn_folders import touch

# --- layouts

CITY = ("leftImg8bit/train/{0}/{0}_0_19_leftImg8bit.png", "gtFine/train/{0}/{0}_0_19_gtFine_{1}")
CITY_LISTS = [CITY[0].format(city) for city in ("zurich", "aachen", "bonn")] + [
    *(CITY[1].format("zurich", kind) for kind in ("color.png", "instanceIds.png", "labelIds.png", "polygons.json")),
    *(CITY[1].format("aachen", kind) for kind in ("labelTrainIds.png", "labelIds.png")),
    CITY[1].format("bonn", "labelTrainIds.png"),
]
COMPOSED, DECOMPOSED = (unicodedata.normalize(form, "caf\u00e9") for form in ("NFC", "NFD"))


@pytest.mark.parametrize(
    ("format", "split", "files", "options", "expected"),
    [
        (
            "cityscapes", "train", CITY_LISTS, {},
            {f"{city}/{city}_0_19_leftImg8bit": CITY[1].format(city, kind) for city, kind in (
                ("aachen", "labelIds.png"), ("bonn", "labelTrainIds.png"), ("zurich", "labelIds.png"))},
        ),
        (
            "camvid", "train",
            ["train/b.JPG", "train/a.png", "trainannot/a.png", "trainannot/b.png", "train/Thumbs.db", "train/._a.png",
             "train/.hidden.png"], {}, {"a": "trainannot/a.png", "b": "trainannot/b.png"},
        ),
        (
            "voc", "val",
            [*(f"VOCdevkit/VOC2012/JPEGImages/2007_{i}.jpg" for i in (32, 33, 9)),
             *(f"VOCdevkit/VOC2012/SegmentationClass/2007_{i}.png" for i in (32, 33)),
             ("VOCdevkit/VOC2012/ImageSets/Segmentation/val.txt", b"2007_33\n2007_32\n")],
            {}, {f"2007_{i}": f"VOCdevkit/VOC2012/SegmentationClass/2007_{i}.png" for i in (32, 33)},
        ),
        *(
            ("ade20k", split, ["images/training/A_1.jpg", "annotations/training/A_1.png"], {},
             {"A_1": "annotations/training/A_1.png"}) for split in ("train", "training")
        ),
        (
            "folder", "train",
            ["images/train/a/1.tif", *(f"masks/train/a/1.{ending}" for ending in ("bmp", "jpg", "png", "tif")),
             "images/val/2.jpg", "masks/val/2.png"], {}, {"a/1": "masks/train/a/1.png"},
        ),
        (
            "folder", "val",
            ["img/1.jpg", "img/2.jpg", "img/s/3.jpg", "img/s/3.webp", "mask/1.png", "mask/2.png", "mask/s/3.png",
             ("train.txt", b"2\n"), ("val.txt", b"\xef\xbb\xbf# validation\r\ns/3.jpg\r\n\r\n1\r\n")],
            {"image_dir": "img", "mask_dir": "mask"}, {"1": "mask/1.png", "s/3": "mask/s/3.png"},
        ),
        (
            "folder", "train", [f"all/train/{i}_{kind}.png" for i in (2, 10, 1) for kind in ("img", "seg")],
            {"image_dir": "all", "mask_dir": "all/{split}", "image_suffix": "_img.png", "mask_suffix": "_seg.png"},
            {f"{i}_img": f"all/train/{i}_seg.png" for i in ("10", "1", "2")},
        ),
        (
            "folder", "train",
            [f"images/train/{COMPOSED}.JPG", f"masks/train/{DECOMPOSED}.png", "images/train/Frame1.jpg",
             "masks/train/frame1.PNG", "masks/train/without.png"],
            {}, {"Frame1": "masks/train/frame1.PNG", COMPOSED: f"masks/train/{DECOMPOSED}.png"},
        ),
        (
            "list", "train",
            [("train.txt", b"x/two words.jpg\ty/two words.png\n# comment\n\nx/1.jpg y/2.png\n"), "x/1.jpg", "y/2.png",
             "x/two words.jpg", "y/two words.png"], {}, {"x/1": "y/2.png", "x/two words": "y/two words.png"},
        ),
    ],
)  # fmt: skip
def test_images_and_masks_of_a_layout_are_paired(
    format: str, split: str, files: list[Any], options: dict[str, str], expected: dict[str, str], tmp_path: Path
) -> None:
    for each in files:
        name, content = (each, b"x") if isinstance(each, str) else each
        touch(tmp_path, name)
        (tmp_path / name).write_bytes(content)
    pairs = find_pairs(DataLocation(format, tmp_path, **options), split)
    assert {pair.name: str((pair.mask or tmp_path).relative_to(tmp_path)) for pair in pairs} == expected
    assert [pair.name for pair in pairs] == list(expected)
    assert all(pair.image.is_file() for pair in pairs)
    assert not any(pair.image.suffix == ".webp" for pair in pairs), "the list names another file of this name"


LAYOUTS = {
    "cityscapes": ("leftImg8bit/train/a/1_leftImg8bit.png", "gtFine/train/a/1_gtFine_labelIds.png"),
    "camvid": ("train/1.png", "trainannot/1.png"),
    "voc": ("JPEGImages/1.jpg", "SegmentationClass/1.png", "ImageSets/Segmentation/train.txt"),
    "ade20k": ("ADEChallengeData2016/images/training/1.jpg", "ADEChallengeData2016/annotations/training/1.png"),
    "folder": ("images/train/a/1.jpg", "masks/train/a/1.png"),
    "list": ("all/1.jpg", "all/1.png", "train.txt"),
}


@pytest.mark.parametrize("format", LAYOUTS)
def test_linked_root_is_read_and_links_leaving_it_are_refused(tmp_path: Path, format: str) -> None:
    root, disk = tmp_path / "root", tmp_path / "disk"
    touch(disk, *LAYOUTS[format])
    for name in LAYOUTS[format][2:]:
        (disk / name).write_text("1\n" if format == "voc" else "all/1.jpg all/1.png\n")
    root.symlink_to(disk)
    assert len(find_pairs(DataLocation(format, root), "train")) == 1
    for name in LAYOUTS[format]:
        for leaving in (Path(name), *Path(name).parents[:-1]):  # the file, and every folder above it
            (disk / leaving).rename(tmp_path / "away")
            (disk / leaving).symlink_to(tmp_path / "away")
            with pytest.raises(DataError, match=r"allow_outside_root: true"):
                find_pairs(DataLocation(format, root), "train")
            assert len(find_pairs(DataLocation(format, root, allow_outside_root=True), "train")) == 1
            (disk / leaving).unlink()
            (tmp_path / "away").rename(disk / leaving)


def test_link_out_of_root_is_named_before_it_is_searched(tmp_path: Path) -> None:
    touch(tmp_path, "1.jpg", "1.png", "root/images/train/2.jpg", "root/masks/train/2.png")
    (tmp_path / "root/images/train/1.jpg").symlink_to(tmp_path / "1.jpg")
    (tmp_path / "root/masks/train/1.png").symlink_to(tmp_path / "1.png")
    said = rf"images/train/1\.jpg is outside data.root .*, at {tmp_path}/1\.jpg, and so are 1 more: use a root"
    with pytest.raises(DataError, match=said):
        find_pairs(DataLocation("folder", tmp_path / "root"), "train")
    (tmp_path / "root/images/train/all").symlink_to("/")
    with pytest.raises(DataError, match=r"images/train/all is outside data.root .*, at /: "):
        find_pairs(DataLocation("folder", tmp_path / "root"), "train")


# --- what is missing is named


@pytest.mark.parametrize("format", sorted(DATASETS))
def test_missing_root_error_names_layout_and_source(format: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nowhere does not exist") as error:
        find_pairs(DataLocation(format, tmp_path / "nowhere"), "train")
    assert DATASETS[format].expected in str(error.value)
    assert DATASETS[format].source in str(error.value)
    with pytest.raises(DataError, match="expects"):
        find_pairs(DataLocation(format, tmp_path), "train")


@pytest.mark.parametrize(
    ("files", "options", "said"),
    [
        (["images/train/1.jpg", "images/valid/1.jpg"], {}, r"images/val does not exist .*holds train, valid"),
        (
            ["images/val/0.npy", "images/val/7.npy", "images/val/a.md", "masks/val/0.png"],
            {},
            r"no image below .*holds 2 \*\.npy, 1 \*\.md",
        ),
        (["images/val/0.npy", "masks/val/0.png"], {"image_suffix": ".tif"}, r"no \*\.tif below"),
        (
            ["images/val/1.jpg", "images/val/2.jpg", *(f"masks/val/{n}.png" for n in ("1", "2_labels", "0_labels"))],
            {},
            r"1 of 2 images have no mask.*2\.jpg; 2 masks have no image \(0_labels, 2_labels\)",
        ),
        (["images/val/1.jpg", "images/val/1.png", "masks/val/1.png"], {}, "have the same name"),
        (["all/val/1.png"], {"image_dir": "all", "mask_dir": "all"}, "its own mask"),
        (["images/1.jpg", "masks/1.png"], {}, r"val\.txt: 1 of the names in it have no image below .*\(2\)"),
    ],
)
def test_folder_without_its_pairs_is_refused(
    files: list[str], options: dict[str, str], said: str, tmp_path: Path
) -> None:
    touch(tmp_path, *files)
    if "txt" in said:
        (tmp_path / "val.txt").write_text("1\n2\n")
    with pytest.raises(DataError, match=said):
        find_pairs(DataLocation("folder", tmp_path, **options), "val")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("only-one.jpg\n", "is not an image and a mask"),
        ("a.jpg b.png c.png\n", "is not an image and a mask"),
        (". b.png\n", "is a folder"),
        ("a.jpg b.png\na.jpg b.png\n", "listed twice"),
        ("# nothing\n", "lists no pair"),
    ],
)
def test_bad_list_file_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        find_pairs(DataLocation("list", tmp_path), "train")
    (tmp_path / "train.txt").unlink()
    touch(tmp_path, "val.txt", "trian.txt")
    with pytest.raises(DataError, match=r"train\.txt cannot be read .*did you mean trian\.txt"):
        find_pairs(DataLocation("list", tmp_path), "train")
    os.mkfifo(tmp_path / "train.txt")
    with pytest.raises(DataError, match="not a regular file"):
        find_pairs(DataLocation("list", tmp_path), "train")


def test_list_below_the_working_folder_may_not_leave_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.txt").write_text("../a.jpg b.png\n")
    with pytest.raises(DataError, match=r"is outside data\.root"):
        find_pairs(DataLocation("list", "."), "train")
    Path("train.txt").write_text("x/../a.jpg b.png\n")
    (pair,) = find_pairs(DataLocation("list", "."), "train")
    assert pair.name == "a"


def test_unknown_format_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"'kitti' is not known: use one of cityscapes"):
        find_pairs(DataLocation("kitti", "."), "train")


# --- classes


def test_cityscapes_matches_the_official_label_table() -> None:
    labels = pytest.importorskip("cityscapesscripts.helpers.labels").labels
    scheme = class_scheme("cityscapes")
    for label in labels:
        if label.id >= 0:
            expected = 255 if label.trainId in {255, -1} else label.trainId
            assert scheme.table[label.id] == expected, label.name
    trained = sorted((x for x in labels if 0 <= x.trainId < 255), key=lambda x: x.trainId)
    assert scheme.names == tuple(x.name for x in trained)
    assert scheme.palette == tuple(x.color for x in trained)
    assert scheme.file_ids == tuple(x.id for x in trained)


def test_published_class_tables_and_colours() -> None:
    sizes = {name: class_scheme(name).num_classes for name in ("cityscapes", "camvid", "voc", "ade20k")}
    assert sizes == {"cityscapes": 19, "camvid": 11, "voc": 21, "ade20k": 150}
    ade, voc = class_scheme("ade20k"), class_scheme("voc")
    assert (ade.table[0], ade.table[1], ade.table[150], ade.file_ids[0]) == (255, 0, 149, 1)
    assert (ade.names[0], ade.names[12], ade.names[149]) == ("wall", "person", "flag")
    assert class_scheme("camvid").table[11] == 255
    published = {0: (0, 0, 0), 1: (128, 0, 0), 2: (0, 128, 0), 6: (0, 128, 128), 15: (192, 128, 128), 20: (0, 64, 128)}
    assert {number: voc.palette[number] for number in published} == published
    assert voc.names[15] == "person"
    assert bit_palette(256)[255] == (224, 224, 192)


def test_generated_palette_is_distinct_and_without_black() -> None:
    palette = class_scheme("folder", classes=[str(i) for i in range(300)]).palette
    assert len(set(palette)) == 300
    assert (0, 0, 0) not in palette


@pytest.mark.parametrize("ignore_index", [255, -1, 1000])
def test_tables_follow_the_label_map_for_every_id(ignore_index: int) -> None:
    """An id stands for itself unless it is mapped; the file id of a class is the smallest that is mapped to it."""
    label_map = {0: 2, 9: 1, 7: 1, 3: ignore_index, 65_535: 0, 40_000: 2}
    scheme = class_scheme("folder", classes=list("abcd"), label_map=label_map, ignore_index=ignore_index)
    unknown = -32_768
    itself = {1: 1, 2: 2, 255: unknown, 1000: unknown, 4: unknown, 65_534: unknown, ignore_index: ignore_index}
    expected = {file_id: value for file_id, value in (itself | label_map).items() if file_id >= 0}
    assert {file_id: scheme.table[file_id] for file_id in expected} == expected
    assert scheme.file_ids == (65_535, 7, 0, 3)
    assert pickle.loads(pickle.dumps(scheme)) == scheme


@pytest.mark.parametrize(
    ("num_classes", "ignore_index", "dtype"),
    [
        *((5, each, "uint8") for each in (255, 254, 5)), (254, 255, "uint8"), (254, 254, "uint8"),
        *((5, each, "int16") for each in (-1, 256, 32_767, -32_767)), (255, 255, "int16"), (256, -1, "int16"),
        (300, 1000, "int16"),
    ],
)  # fmt: skip
def test_target_types_hold_all_ids(num_classes: int, ignore_index: int, dtype: str) -> None:
    names = [str(i) for i in range(num_classes)]
    assert class_scheme("folder", classes=names, ignore_index=ignore_index).dtype.name == dtype
    assert class_scheme("folder", classes=names).ignore_index == (255 if num_classes < 256 else -1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs classes"),
        ({"classes": ["b", "a", "c", "a", "b"]}, "'b' is listed twice"),
        ({"classes": ["a"], "ignore_index": 32_768}, "within -32767..32767"),
        ({"classes": ["a"], "ignore_index": -32_768}, "within -32767..32767"),
        ({"classes": ["a", "b"], "label_map": {7: 2}}, "7 -> 2 is not a class id"),
        ({"classes": ["a", "b"], "label_map": {-1: 0}}, "no mask can contain the id -1"),
        ({"classes": ["a", "b"], "palette": [[1, 2, 3]]}, "1 colors for 2 classes"),
        ({"classes": ["a", "b"], "rgb": True}, "need a palette"),
        (
            {"classes": ["a", "b", "c", "d"], "rgb": True, "palette": [[2, 2, 2], [1, 1, 1], [1, 1, 1], [2, 2, 2]]},
            r"\[2, 2, 2\] is used for two classes",
        ),
    ],
)
def test_inconsistent_class_schemes_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        class_scheme("folder", **options)


@pytest.mark.parametrize("ignored", [0, 1, 2])
@pytest.mark.parametrize("is_named", [False, True])
def test_ignored_class_is_answered_with_a_map_that_works(ignored: int, is_named: bool) -> None:
    """Ids of masks around the ignored one, of unequal areas; it has a name of its own in data.classes, or none."""
    names, areas = ["road", "car", "sky"], [5, 11, 2, 7][: 3 if is_named else 4]
    with pytest.raises(ConfigError) as caught:
        class_scheme("folder", classes=names, ignore_index=ignored)
    way = str(caught.value).partition(": ")[2].split("; ")[is_named]
    assert way.startswith(f"to ignore {names[ignored]}, remove it from data.classes and set " if is_named else "if it")
    label_map, value = re.findall(r"data.label_map: ({.*}) and data.ignore_index: (\d+)$", way)[0]
    kept = [name for name in names if not (is_named and name == names[ignored])]
    scheme = class_scheme("folder", classes=kept, label_map=ast.literal_eval(label_map), ignore_index=int(value))
    targets = scheme.table[np.repeat(np.arange(len(areas)), areas)]
    counts = [int((targets == each).sum()) for each in (*range(len(kept)), 255)]
    assert counts == [area for each, area in enumerate(areas) if each != ignored] + [areas[ignored]]


@pytest.mark.parametrize(
    ("format", "options", "says"),
    [
        ("camvid", {}, "is a class of the format: leave data.ignore_index out, which is 255 then"),
        ("folder", {"classes": ["a", "b"], "label_map": {0: 0, 7: 1}}, "id of the class b: use data.ignore_index: 255"),
        (
            "list",
            {"classes": ["a", "b", "c"], "label_map": {9: 1, 7: 2}},
            "_map: {0: 0, 1: 255, 2: 1, 9: 255, 7: 1} and",
        ),
        ("folder", {"classes": [str(i) for i in range(255)]}, "and data.ignore_index: 255"),
        ("folder", {"classes": [str(i) for i in range(256)]}, "and data.ignore_index: -1"),
    ],
)
def test_ignored_class_of_a_format_or_map_is_answered(format: str, options: dict, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        class_scheme(format, ignore_index=1, **options)


def test_own_classes_of_a_published_format_need_a_label_map() -> None:
    with pytest.raises(ConfigError, match="give label_map too"):
        class_scheme("cityscapes", classes=["flat", "other"])
    scheme = class_scheme("cityscapes", classes=["flat", "other"], label_map={7: 0, 8: 0, 11: 1, 0: 255})
    assert scheme.file_ids == (7, 11)
    assert scheme.train_id_suffix is None


def test_label_map_of_colors_names_positions_of_the_palette() -> None:
    """Of a class, or of a color that is ignored."""
    colors = {"classes": ["a", "b"], "palette": [[9, 0, 0], [0, 9, 0], [0, 0, 9]], "rgb": True}
    assert class_scheme("folder", label_map={2: 0, 0: 1, 1: 255}, **colors).palette == ((0, 0, 9), (9, 0, 0))
    for label_map in ({3: 0, 0: 1}, {0: 0, 1: 1, 7: 255}):
        with pytest.raises(ConfigError, match=r"[37] is the position of no color: data.palette has 3 colors, from 0"):
            class_scheme("folder", label_map=label_map, **colors)


def test_folder_named_by_the_user_never_serves_two_splits(tmp_path: Path) -> None:
    touch(tmp_path, "img/train/1.jpg", "img/train/2.jpg", "mask/1.png", "mask/2.png")
    location = DataLocation("folder", tmp_path, image_dir="img", mask_dir="mask")
    assert [pair.name for pair in find_pairs(location, "train")] == ["1", "2"]  # masks of all splits in one folder
    with pytest.raises(DataError, match=r"img/val does not exist \(.*img holds train\)"):
        find_pairs(location, "val")
    with pytest.raises(DataError, match="img/vla does not exist"):  # a typo in data.val_split
        find_pairs(location, "vla")


@pytest.mark.parametrize("folder", ["masks/{class}/train", "masks/{class}"], ids=["split", "all splits"])
def test_masks_of_a_class_may_be_in_folders_of_splits(folder: str, tmp_path: Path) -> None:
    touch(tmp_path, "images/train/a.jpg")
    for name in ("crack", "moss"):
        touch(tmp_path, f"{folder.replace('{class}', name)}/a.png")
    location = DataLocation("folder", tmp_path, mask_dir="masks/{class}", mask_classes=("crack", "moss"))
    (pair,) = find_pairs(location, "train")
    assert pair.masks == tuple(tmp_path / folder.replace("{class}", name) / "a.png" for name in ("crack", "moss"))


def test_shared_images_are_found_under_every_name(tmp_path: Path) -> None:
    touch(tmp_path, "a/1.jpg", "a/2.jpg")
    (tmp_path / "b").symlink_to(tmp_path / "a")
    os.link(tmp_path / "a" / "2.jpg", tmp_path / "3.jpg")
    first = [ImagePair(tmp_path / "a" / name, tmp_path / "m.png", name) for name in ("1.jpg", "2.jpg")]
    second = [ImagePair(path, tmp_path / "m.png", "x") for path in (tmp_path / "b/1.jpg", tmp_path / "3.jpg")]
    assert shared_images(first, second) == [tmp_path / "b/1.jpg", tmp_path / "3.jpg"]
    assert shared_images(first[:1], second[1:]) == []
    assert shared_images(first, [*second, ImagePair(tmp_path / "lost.jpg", None, "lost"), first[0]]) == [
        *(pair.image for pair in second), first[0].image
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("data/photso", r"did you mean .*data/photos\? format folder expects"),
        ("dta/photos", r"did you mean .*/data\? format folder expects"),
        ("elsewhere/deep", r"there is no elsewhere in /.*: check data\.root and the current folder; format folder"),
    ],
)
def test_missing_root_names_the_nearest_folder(asked: str, said: str, tmp_path: Path) -> None:
    for name in ("phot", "photos", "masks"):
        (tmp_path / "data" / name).mkdir(parents=True)
    with pytest.raises(DataError, match=said):
        find_pairs(DataLocation("folder", str(tmp_path / asked)), "train")


@pytest.mark.parametrize(
    ("masks", "suffix", "said"),
    [
        (("a.png", "a1.png"), "_mask.png", r"searched by _mask\.png: set data\.mask_suffix: \.png;"),
        (("a_gt.tif", "a1_gt.tif"), ".png", r"searched by \.png: set data\.mask_suffix: _gt\.tif;"),
        (("x.png",), "_mask.png", r"such as _mask\.png; there are x\.png;"),
    ],
)
def test_other_ending_of_masks_is_named(masks: tuple[str, ...], suffix: str, said: str, tmp_path: Path) -> None:
    touch(tmp_path, "images/train/a.jpg", "images/train/a1.jpg", *(f"masks/train/{mask}" for mask in masks))
    with pytest.raises(DataError, match=said):
        find_pairs(DataLocation("folder", str(tmp_path), mask_suffix=suffix), "train")


def test_masks_of_a_list_lie_next_to_the_root_as_it_is_named(tmp_path: Path) -> None:
    """The root is a link, whose target has other folders next to it."""
    touch(tmp_path, "disk/data/all/1.jpg", "disk/drawn/a.png", "named/drawn/a.png")
    (tmp_path / "disk/data/train.txt").write_text("all/1.jpg a.png\n")
    (tmp_path / "named/data").symlink_to(tmp_path / "disk/data")
    for mask_dir in ("../drawn", str(tmp_path / "named/drawn")):
        (pair,) = find_pairs(DataLocation("list", tmp_path / "named/data", mask_dir=mask_dir), "train")
        assert (pair.image, pair.mask) == (tmp_path / "named/data/all/1.jpg", tmp_path / "named/drawn/a.png")
    (tmp_path / "named/drawn/a.png").unlink()
    (tmp_path / "named/drawn/a.png").symlink_to(tmp_path / "disk/drawn/a.png")
    with pytest.raises(DataError, match=r"a\.png is a link out of data\.mask_dir"):
        find_pairs(DataLocation("list", tmp_path / "named/data", mask_dir="../drawn"), "train")
