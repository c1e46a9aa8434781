"""What `segapp init` sees in a folder: links to other places, lists, stray values, and the images of annotations."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path, PurePosixPath

import pytest
from PIL import Image

from segapp.errors import DataError
from segapp.onboarding.class_files import ClassFile
from segapp.onboarding.content import MaskContent, count_pixels
from segapp.onboarding.conversion import Images
from segapp.onboarding.encoding import MaskChoices, binary_classes, is_stray, read_classes
from segapp.onboarding.tables import read_tables
from segapp.onboarding.tree import Tree, split_said, survey_tree


@pytest.mark.parametrize(("suffix", "is_lossy"), [("png", False), ("jpg", True)])
def test_colours_of_a_mask_are_counted_by_hand(suffix: str, is_lossy: bool, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    image = Image.new("RGB", (3, 2), (10, 20, 255))
    image.putpixel((1, 0), (7, 8, 9))
    image.save(path)
    found = count_pixels(path, as_rgb=True)
    assert not isinstance(found, str)
    assert (found[2] == "JPEG") == is_lossy
    if not is_lossy:
        assert found[1] == {(10, 20, 255): 5, (7, 8, 9): 1}


@pytest.mark.parametrize(("link", "images"), [(None, []), ("b.png", ["b.png"]), ("b", ["b/a.png"])])
def test_links_to_other_places_are_noticed(link: str | None, images: list[str], tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"
    for folder in (root, other):
        folder.mkdir()
        (folder / "a.png").write_bytes(b"x")
    (root / "inside.png").symlink_to("a.png")
    if link is not None:
        (root / link).symlink_to(other / "a.png" if link == "b.png" else other)
    tree = survey_tree(root)
    assert tree.leads_outside == (link is not None)
    assert sorted(tree.images) == sorted(["a.png", "inside.png", *images])


def test_lists_of_segmentation_come_before_all_others(tmp_path: Path) -> None:
    """As in VOC, whose Main lists the images of other tasks."""
    folders = ("sets", "VOC/ImageSets/Segmentation", "VOC/ImageSets/Main")
    files = tuple(f"{folder}/{split}.txt" for folder in folders for split in ("train", "val", "trainval"))
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text("a\n")
    found = read_tables(Tree(tmp_path, (), files, leads_outside=False))
    assert list(dict.fromkeys(table.folder for table in found)) == [
        "VOC/ImageSets/Segmentation",
        "sets",
        "VOC/ImageSets/Main",
    ]
    names = [PurePosixPath(table.path).stem for table in found if table.folder == "sets"]
    assert {name: split_said(name) for name in names} == {"train": "train", "trainval": "train", "val": "val"}


def test_table_in_utf_16_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_bytes("image,mask\na.png,b.png\n".encode("utf-16"))
    (tmp_path / "a.csv").write_bytes(b"image,mask\na\xe9.png,b.png\n")  # names are bytes
    assert [table.path for table in read_tables(Tree(tmp_path, (), ("a.csv",), leads_outside=False))] == ["a.csv"]
    with pytest.raises(DataError, match=r"b\.csv is in UTF-16: save the file as UTF-8, or remove it"):
        read_tables(Tree(tmp_path, (), ("a.csv", "b.csv"), leads_outside=False))


@pytest.mark.parametrize(
    ("others", "is_binary"),
    [
        ({}, True),
        ({1: 1, 2: 1, 3: 1}, True),  # a few pixels
        ({1: 4, 2: 4, 3: 3}, False),  # 1, 2, 3 are rather classes
        ({7: 1, 99: 1, 128: 1, 254: 1}, True),  # values that do not count, 0.04 % of the pixels
        ({7: 13, 99: 13, 128: 12, 254: 12}, True),  # 0.5 %
        ({7: 13, 99: 13, 128: 13, 254: 12}, False),  # a twentieth of the object's pixels at most
        (dict.fromkeys(range(101, 116), 1), True),
        (dict.fromkeys(range(101, 116), 40), False),
        (dict.fromkeys(range(60, 220, 10), 6), True),  # smoothed borders
        (dict.fromkeys(range(101, 117), 70), False),
    ],
)
def test_black_and_white_masks_may_hold_stray_values(others: dict[int, int], is_binary: bool) -> None:
    values = Counter({0: 9000 - sum(others.values()), 255: 1000, **others})
    found = binary_classes(
        MaskContent(1, 1, values=values, masks_with=Counter(dict.fromkeys(values, 1))), (), ["a.png"]
    )
    assert (found is not None) == is_binary
    if found is not None:
        strays = others if len(others) < 16 else range(1, 255)
        assert found.label_map == {255: 1, **dict.fromkeys(strays, -1)}


@pytest.mark.parametrize(
    ("others", "share"),
    [(dict.fromkeys(range(60, 220, 10), 40), "6.4%"), (dict.fromkeys(range(10, 250, 10), 50), "12.0%")],
)
def test_smoothed_borders_above_a_hundredth_are_refused(others: dict[int, int], share: str) -> None:
    values = Counter({0: 9000 - sum(others.values()), 255: 1000, **others})
    content = MaskContent(1, 1, values=values, masks_with=Counter(dict.fromkeys(values, 1)))
    with pytest.raises(DataError, match=rf"smoothed or saved with loss: {share} of the pixels .*magick mogrify"):
        read_classes(content, (), ["masks/a.png"], MaskChoices())


def content_of(values: dict[int, int], *, num_all: int = 100) -> MaskContent:
    """Values with their pixels, each in every one of a hundred masks but those of a single pixel."""
    masks_with = {value: 1 if count == 1 else 100 for value, count in values.items()}
    return MaskContent(100, num_all, values=Counter(values), masks_with=Counter(masks_with))


@pytest.mark.parametrize(
    ("values", "num_all", "names", "label_map"),
    [
        ([0, 1], 100, "background object", {}),
        ([0, 1, 2, 255], 100, "class_0 class_1 class_2", {}),
        ([0, 2, 5], 100, "class_0 class_1 class_2 class_3 class_4 class_5", {}),  # at most twice as many as are seen
        ([0, 2, 6], 100, "class_0 class_2 class_6", {0: 0, 2: 1, 6: 2}),
        ([0, 7], 100, "class_0 class_7", {0: 0, 7: 1}),
        ([1, 2, 3], 100, "class_1 class_2 class_3", {1: 0, 2: 1, 3: 2}),
        ([1, 2, 3], 101, "class_0 class_1 class_2 class_3", {}),  # 0 may be in the masks that were not read
        ([1, 3], 100, "class_0 class_1 class_2 class_3", {}),
        ([0, 255, 300], 100, "class_0 class_255 class_300", {0: 0, 255: 1, 300: 2}),
    ],
)
def test_unnamed_ids_are_classes_from_zero(
    values: list[int], num_all: int, names: str, label_map: dict[int, int]
) -> None:
    found = read_classes(content_of(dict.fromkeys(values, 5000), num_all=num_all), (), ["masks/a.png"], MaskChoices())
    assert (found.names, found.label_map) == (tuple(names.split()), label_map)


def test_values_of_few_pixels_in_few_masks_are_ignored() -> None:
    found = read_classes(content_of({0: 9_000_000, 1: 800_000, 2: 4, 99: 1}), (), ["masks/a.png"], MaskChoices())
    assert (found.names, found.label_map) == (("class_0", "class_1", "class_2"), {99: 255})
    assert "stray value 99 is ignored: below 0.001% of the pixels" in found.notes
    content = MaskContent(100, 100, values=Counter({1: 3, 2: 4, 3: 30}), masks_with=Counter({1: 2, 2: 2, 3: 3}))
    assert [is_stray(content, value) for value in (1, 2, 3)] == [True, False, False]
    content.values[9] = 3_000_000
    assert [is_stray(content, value) for value in (1, 2, 3)] == [True, True, False]
    content.masks_with[1] = 3
    assert not is_stray(content, 1)


@pytest.mark.parametrize(
    ("names", "named", "ids", "expected"),
    [
        ("a b c", {}, [0, 1, 2], ("a b c", {})),
        ("a b c", {}, [0, 1], ("a b c", {})),
        ("a b c", {}, [1, 2, 3], ("a b c", {1: 0, 2: 1, 3: 2})),
        ("a b c", {}, [2, 3], ("a b c", {1: 0, 2: 1, 3: 2})),
        ("a b c", {}, [0, 4], None),
        ("a b c d e f g", {}, [0, 1], ("a b c d e f g", {})),
        ("a b c d e f g h", {}, [0, 1], None),  # too many names for two values
        ("a a b", {}, [0, 2], ("a a_2 b", {})),
        ("", {0: "a", 1: "b"}, [0, 1], ("a b", {})),
        ("", {0: "a", 5: "b", 9: "void", 7: "Ignore"}, [0, 5, 7, 9], ("a b", {0: 0, 5: 1, 7: 255, 9: 255})),
        ("", {0: "a", 5: "b", 255: "Ignore"}, [0, 5], ("a b", {0: 0, 5: 1})),
        ("", {0: "void", 1: "b"}, [0, 1], ("void b", {})),
        ("", {1: "a", 2: "b"}, [0, 1], ("background a b", {})),
        ("", {4: "a", 2: "b"}, [0, 2], ("background b a", {0: 0, 2: 1, 4: 2})),
        ("", {0: "a", 1: "b", 65_535: "void", 65_536: "void"}, [0, 1], ("a b", {65_535: 255})),
        ("a void b", {}, [0, 1, 2], ("a b", {0: 0, 2: 1, 1: 255})),
        ("unlabelled a b", {}, [0, 1, 2], ("a b", {1: 0, 2: 1, 0: 255})),
        ("", {0: "unlabeled", 1: "a", 2: "b"}, [0, 1, 2], ("a b", {1: 0, 2: 1, 0: 255})),
        ("background a b", {}, [0, 1, 2], ("background a b", {})),
        ("", {0: "a", 1: "b"}, [0, 2], None),
    ],
)
def test_names_of_a_file_are_taken_where_they_fit(
    names: str, named: dict[int, str], ids: list[int], expected: tuple[str, dict[int, int]] | None
) -> None:
    content = content_of(dict.fromkeys(ids, 5000))
    files = [ClassFile("classes.txt", tuple(names.split()), named), ClassFile("other.txt", tuple("ab" * 20))]
    found = read_classes(content, files, ["masks/a.png"], MaskChoices())
    if expected is None:
        assert re.match("classes.txt.* does not fit", found.notes[0])
        assert all(name.startswith(("class_", "background", "object")) for name in found.names)
    else:
        assert (found.names, found.label_map) == (tuple(expected[0].split()), expected[1])


def test_each_nodata_value_is_ignored_or_a_named_class() -> None:
    content = content_of({0: 9000, 3: 8000, 7: 6000, 9: 5000, 11: 4000})
    content = replace(content, nodata={9: 9.0, 7: 7.0, 11: 11.0})
    files = [ClassFile("a.csv", (), {0: "a", 3: "b"}), ClassFile("b.csv", (), {0: "a", 3: "b", 9: "c"})]
    found = read_classes(content, files, ["masks/a.png"], MaskChoices())
    assert (found.names, found.label_map) == (("a", "b", "c"), {0: 0, 3: 1, 9: 2, 7: 255, 11: 255})
    said = "\n".join(found.notes)
    assert "value 9, nodata of the masks, stays class c: 15.6%" in said
    assert said.count("nodata of the masks, is ignored: ") == 2


@pytest.mark.parametrize(
    ("said", "near", "image"),
    [
        ("x/a.jpg", "", "x/a.jpg"),
        ("a.jpg", "x/a.json", "x/a.jpg"),
        ("C:\\photos\\a.jpg", "y/labels.json", "y/a.jpg"),
        ("a.jpg", "labels.json", None),  # two suit equally
        ("1f2e-b.jpg", "", "y/b.jpg"),  # Label Studio writes its own id in front
        ("https://host.example/b.jpg?size=3", "", "y/b.jpg"),
        ("B", "", "y/b.jpg"),
        ("c.jpg", "", None),
    ],
)
def test_image_that_an_annotation_names_is_found(said: str, near: str, image: str | None, tmp_path: Path) -> None:
    images = Images(Tree(tmp_path, ("x/a.jpg", "y/a.jpg", "y/b.jpg"), (), leads_outside=False))
    assert images.find(said, near) == image
