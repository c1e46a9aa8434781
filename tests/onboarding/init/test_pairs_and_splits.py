"""`segapp init` pairs the images with their own masks and keeps published splits; two plausible readings are asked."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from segapp.assembly.pairs import build_pairs, split_names
from segapp.config import load_config
from segapp.errors import DataError
from segapp.onboarding.init import InitRequest, InitResult, propose_config
from segapp.onboarding.layout import OpenQuestionError
from segapp.onboarding.tables import Table, paired_lists, read_table, with_listed_splits
from segapp.onboarding.tree import Tree, split_said
from tests.support.drawn_folders import BINARY, draw, draw_image, draw_mask

NAMES = [f"{number:04}" for number in range(12)]
COLORS = np.array([[0, 0, 0], [10, 0, 200], [0, 200, 0], [200, 10, 0]], np.uint8)


def init(root: Path, **request: str) -> tuple[InitResult, dict[str, dict[str, str]]]:
    """Returns what init says, and the mask of every image of each split, as its config or its lists name them."""

    result = propose_config(InitRequest(root, root.with_suffix(".yaml"), **request))
    data = load_config(result.configs[0]).data
    found = {}
    for key, split in zip(("train", "val"), split_names(data), strict=True):
        found[key] = {
            str(pair.image.relative_to(root)): str(pair.mask.relative_to(root))
            for pair in build_pairs(data, split)
            if pair.mask is not None
        }
    return result, found


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerows([header, *rows])


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
@pytest.mark.parametrize("absolute", ["", "/data/of/another/machine/d/"])
def test_table_of_pairs_decides_over_similar_names(suffix: str, absolute: str, tmp_path: Path) -> None:
    root = tmp_path / "d"
    mask_of = {f"raw/{i:04}a.jpg": f"seg/{i * 5 % 8:04}.png" for i in range(8)}
    for image, mask in mask_of.items():
        draw_image(root / image)
        draw_mask(root / mask)
    rows = [(i, absolute + image, absolute + mask) for i, (image, mask) in enumerate(mask_of.items())]
    write_table(root / f"train{suffix}", ["id", "image", "mask"], rows[:6])
    write_table(root / f"val{suffix}", ["id", "image", "mask"], rows[6:])
    _, found = init(root)
    images = list(mask_of)
    assert found["train"] == {image: mask_of[image] for image in images[:6]}
    assert found["val"] == {image: mask_of[image] for image in images[6:]}


def test_split_column_of_a_table_is_kept(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, NAMES, "images/{}.jpg", "masks/{}.png")
    splits = ["train", "valid", "train", "test"] * 3
    rows = [(f"{name}.jpg", f"{name}.png", split) for name, split in zip(NAMES, splits, strict=True)]
    write_table(root / "data.csv", ["filename", "mask", "subset"], rows)
    result, found = init(root)
    for key, word in (("train", "train"), ("val", "valid")):
        wanted = [name for name, split in zip(NAMES, splits, strict=True) if split == word]
        assert found[key] == {f"images/{name}.jpg": f"masks/{name}.png" for name in wanted}
    assert any("6 training images" in line and "3 validation images" in line for line in result.lines)


def pseudo(root: Path) -> None:
    """Names in the lists without the endings of the files, as mmsegmentation has them; the test list repeats some."""
    draw(root, NAMES, "imgs/{}_img.jpg", "labels/{}_lab.png")
    for split, names in (("train", NAMES[:8]), ("val", NAMES[8:]), ("test", NAMES[7:9])):
        (root / "splits").mkdir(exist_ok=True)
        (root / "splits" / f"{split}.txt").write_text("\n".join(names))


def pets(root: Path) -> None:
    names = [f"{kind}_{number}" for kind in ("Abyssinian", "beagle", "pug") for number in range(4)]
    draw(root, names, "images/{}.jpg", "annotations/trimaps/{}.png", np.array([1, 2, 3], np.uint8))
    rows = [f"{name} 1 1 1\n" for name in names]
    (root / "annotations" / "trainval.txt").write_text("".join(rows[:8]))
    (root / "annotations" / "test.txt").write_text("".join(rows[8:]))
    (root / "annotations" / "list.txt").write_text("#Image CLASS-ID SPECIES BREED\n" + "".join(rows))


def davis(root: Path) -> None:
    for scene in ("bear", "bus", "cat", "dog", "fox"):
        draw(root, NAMES[:3], f"JPEGImages/480p/{scene}/{{}}.jpg", f"Annotations/480p/{scene}/{{}}.png")
    for year, train in (("2016", "bear\nbus"), ("2017", "bear\nbus\ncat")):
        folder = root / "ImageSets" / year
        folder.mkdir(parents=True)
        (folder / "train.txt").write_text(train)
        (folder / "val.txt").write_text("dog\nfox")


@pytest.mark.parametrize(
    ("drawn", "num_train", "val"),
    [
        (pseudo, 8, {f"imgs/{name}_img.jpg" for name in NAMES[8:]}),
        (pets, 8, {f"images/pug_{number}.jpg" for number in range(4)}),
        (davis, 6, {f"JPEGImages/480p/{scene}/{name}.jpg" for scene in ("dog", "fox") for name in NAMES[:3]}),
    ],
)
def test_published_lists_are_the_splits(
    drawn: Callable[[Path], None], num_train: int, val: set[str], tmp_path: Path
) -> None:
    root = tmp_path / "d"
    drawn(root)
    result, found = init(root)
    assert set(found["val"]) == val
    assert len(found["train"]) == num_train
    assert "the data have none" not in "\n".join(result.lines)


def test_lists_that_share_an_image_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "d"
    pseudo(root)
    (root / "splits" / "val.txt").write_text("\n".join(NAMES[7:]))
    with pytest.raises(DataError, match=r"1 validation images are also training images, such as imgs/0007_img\.jpg"):
        init(root)


def annotators(root: Path) -> None:
    for name in NAMES:
        draw_image(root / f"images/{name}.jpg")
        for person in ("annotator1", "annotator2"):
            draw_mask(root / "masks" / person / f"{name}.png", BINARY, key=name)  # they agree


def versions(root: Path) -> None:
    for split, names in (("training", NAMES[:8]), ("validation", NAMES[8:])):
        for name in names:
            draw_image(root / split / f"images/{name}.jpg")
            for version in ("v1.2", "v2.0"):
                draw_mask(root / split / version / f"labels/{name}.png")
                draw_mask(root / split / version / f"instances/{name}.png", np.array([256, 700], np.uint16))


def change(root: Path) -> None:
    for name in NAMES:
        draw_image(root / f"A/{name}.png")
        draw_image(root / f"B/{name}.png")
        draw_mask(root / f"label/{name}.png", BINARY)


def chase(root: Path) -> None:
    for name in (f"Image_{number:02}{side}" for number in range(1, 5) for side in "LR"):
        draw_image(root / f"{name}.jpg")
        for person in ("1stHO", "2ndHO"):
            draw_mask(root / f"{name}_{person}.png", BINARY, key=name)


def freiburg(root: Path) -> None:
    for split, names in (("train", NAMES[:8]), ("test", NAMES[8:])):
        for name in names:
            draw_image(root / split / f"rgb/b_{name}_Clipped.jpg")
            draw_image(root / split / f"nir_gray/b_{name}.tif")
            draw_mask(root / split / f"GT_color/b_{name}_mask.png", COLORS)


@pytest.mark.parametrize(
    ("drawn", "names"),
    [
        (annotators, {"masks/annotator1", "masks/annotator2"}),
        (versions, {"v1.2/labels", "v2.0/labels"}),
        (change, {"A -> label", "B -> label"}),
        (chase, {"*_1stHO", "*_2ndHO"}),
        (freiburg, {"rgb -> GT_color", "nir_gray -> GT_color"}),
    ],
)
def test_equally_plausible_readings_are_asked_by_their_folders(
    drawn: Callable[[Path], None], names: set[str], tmp_path: Path
) -> None:
    root = tmp_path / "d"
    drawn(root)
    with pytest.raises(OpenQuestionError, match="answer with --layout") as raised:
        init(root)
    assert {*raised.value.answers} == names
    assert not root.with_suffix(".yaml").exists()
    num_images = len({path.stem for path in root.rglob("*.jpg")}) or len(NAMES)
    for name in names:
        folder, _, mask = name.rpartition(" -> ")
        _, found = init(root, layout=name)
        root.with_suffix(".yaml").unlink()
        pairs = found["train"] | found["val"]
        assert len(pairs) == num_images
        assert all(folder in image for image in pairs)
        assert all(mask.strip("*") in path for path in pairs.values())


def test_both_folders_of_a_set_are_used_if_one_is_trainval(tmp_path: Path) -> None:
    """As SUIM: train_val and TEST are two splits of one reading."""
    root = tmp_path / "d"
    for folder, names in (("train_val", NAMES[:8]), ("TEST", NAMES[8:])):
        draw(root / folder, names, "images/d_r_{}.jpg", "masks/d_r_{}.bmp", COLORS)
    _, found = init(root)
    assert found["train"] == {f"train_val/images/d_r_{n}.jpg": f"train_val/masks/d_r_{n}.bmp" for n in NAMES[:8]}
    assert found["val"] == {f"TEST/images/d_r_{n}.jpg": f"TEST/masks/d_r_{n}.bmp" for n in NAMES[8:]}


def test_word_inside_the_name_is_refused_with_a_list(tmp_path: Path) -> None:
    """As A2D2: `_camera_` and `_label_` inside the name."""
    root = tmp_path / "d"
    for name in [f"{day}_{{}}_{number}" for day in ("1107", "0812") for number in NAMES[:6]]:
        draw_image(root / f"camera/{name.format('camera')}.png")
        draw_mask(root / f"label/{name.format('label')}.png", COLORS)
    with pytest.raises(DataError, match=r"or write train\.txt and val\.txt with an image and its mask a line"):
        init(root)


@settings(max_examples=8)
@given(every=st.integers(2, 7), count=st.integers(24, 60))
def test_sparse_masks_of_a_video_are_paired_with_their_frames(
    every: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = tmp_path_factory.mktemp("video") / "d"
    frames = [f"{number:05}" for number in range(count)]
    for frame in frames:
        draw_image(root / f"frames/{frame}.jpg", (8, 12))
        if int(frame) % every == 0:
            draw_mask(root / f"masks/{frame}.png", size=(8, 12))
    result, found = init(root)
    labelled = frames[::every]
    assert found["train"] | found["val"] == {f"frames/{frame}.jpg": f"masks/{frame}.png" for frame in labelled}
    assert f"{len(labelled)} of {count} images have a mask" in result.lines[0]


def test_sparse_masks_need_not_all_have_a_frame(tmp_path: Path) -> None:
    """Masks of another recording do not make images of the masks, and masks of the frames."""
    root = tmp_path / "d"
    frames = [f"{number:05}" for number in range(48)]
    for frame in frames:
        draw_image(root / f"frames/{frame}.jpg", (8, 12))
    for place in [*(f"train/{frame}" for frame in frames[::4]), *(f"val/other{number}" for number in range(4))]:
        draw_mask(root / f"labels/{place}.png", size=(8, 12))
    result, found = init(root)
    pairs = found["train"] | found["val"]
    assert pairs == {f"frames/{frame}.jpg": f"labels/train/{frame}.png" for frame in frames[::4]}
    assert any(line.startswith("not used: 4 files such as labels/val/other0.png") for line in result.lines)


@pytest.mark.parametrize(
    ("name", "text", "header", "rows"),
    [
        ("a.csv", "image,mask\nx.png,y.png\n", ("image", "mask"), (("x.png", "y.png"),)),
        ("a.csv", "x.png,y.png\nz.png,w.png\n", (), (("x.png", "y.png"), ("z.png", "w.png"))),
        ("a.csv", '"a, b.png",c.png\nd.png,e.png', (), (("a, b.png", "c.png"), ("d.png", "e.png"))),
        ("a.txt", "x.png\ty z.png\n", (), (("x.png", "y z.png"),)),
        ("a.txt", "# comment\nx y\n\nz w\n", (), (("x", "y"), ("z", "w"))),
        ("a.txt", "", None, None),
    ],
)
def test_tables_are_read(name: str, text: str, header: tuple[str, ...] | None, rows: object, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    table = read_table(Tree(tmp_path, (), (name,), leads_outside=False), name)
    assert (table is None) == (rows is None)
    if table is not None:
        assert (table.header, table.rows) == (header, rows)


@given(
    order=st.permutations(range(6)),
    splits=st.lists(st.sampled_from(["train", "val", "test"]), min_size=6, max_size=6),
    absolute=st.booleans(),
)
def test_rows_give_exactly_the_pairs_and_splits_that_they_name(
    order: list[int], splits: list[str], absolute: bool
) -> None:
    images, masks = [f"x/{i}.jpg" for i in range(6)], [f"y/{i}.png" for i in range(6)]
    front = "C:\\sets\\d\\" if absolute else ""
    rows = tuple((front + images[i], front + masks[order[i]], splits[i]) for i in range(6))
    tree = Tree(Path("d"), (*images, *masks), (), leads_outside=False)
    layout = paired_lists(tree, [Table("all.csv", ("image", "label", "split"), rows)])
    assert layout is not None
    assert {(pair.image, pair.mask, pair.split) for pair in layout.pairs} == {
        (images[i], masks[order[i]], splits[i]) for i in range(6)
    }


def test_a_list_does_not_change_the_splits_of_folders() -> None:
    images = [f"images/{split}/{i}.jpg" for split in ("train", "val") for i in range(3)]
    tree = Tree(Path("d"), (*images, *(path.replace("images", "masks") for path in images)), (), leads_outside=False)
    assert paired_lists(tree, []) is None
    from segapp.onboarding.layout import Layout, Pair

    pairs = tuple(Pair(path, path.replace("images", "masks"), path.split("/")[1]) for path in images)
    tables = [Table("train.txt", (), tuple((path,) for path in images[2:]))]
    tables.append(Table("val.txt", (), tuple((path,) for path in images[:2])))
    assert with_listed_splits(tables, Layout("masks", pairs, 0.99)).pairs == pairs


def test_another_file_whose_name_begins_as_a_mask_is_no_mask(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, NAMES, "images/{}.jpg", "masks/{}_zz.png", COLORS)
    draw_mask(root / "masks/0003_zz_older.png", COLORS)
    result, found = init(root)
    assert found["train"] | found["val"] == {f"images/{name}.jpg": f"masks/{name}_zz.png" for name in NAMES}
    assert "not used: masks/0003_zz_older.png" in result.lines


def test_lists_say_the_split_and_not_their_folder(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, NAMES, "images/{}.jpg", "masks/{}.png", COLORS)
    (root / "trainval").mkdir()
    for split, names in (("train", NAMES[:8]), ("val", NAMES[8:])):
        (root / "trainval" / f"{split}.txt").write_text("\n".join(names))
    _, found = init(root)
    assert found["val"] == {f"images/{name}.jpg": f"masks/{name}.png" for name in NAMES[8:]}


def test_words_of_splits() -> None:
    assert [split_said(name) for name in ("train_2017", "trainval", "TEST", "list", "val_train_x")] == [
        "train",
        "train",
        "test",
        None,
        None,
    ]


def test_an_unlikely_reading_is_asked_instead_of_written(tmp_path: Path) -> None:
    """Five of twelve images have no mask, and as many masks have no image."""
    root = tmp_path / "d"
    for name in NAMES:
        draw_image(root / f"images/{name}.png")
        draw_mask(root / ("masks/" + (name if int(name) < 7 else f"other{name}x") + ".png"))
    with pytest.raises(OpenQuestionError, match=r"no reading of .* is likely enough.*--layout masks") as raised:
        init(root)
    (words,) = raised.value.answers.values()
    assert "7 of 12 images have a mask" in words
    assert not root.with_suffix(".yaml").exists()
    _, found = init(root, layout="masks")
    assert found["train"] | found["val"] == {f"images/{name}.png": f"masks/{name}.png" for name in NAMES[:7]}


def test_class_file_of_the_version_of_the_masks_is_read(tmp_path: Path) -> None:
    """As Vistas: a class file for each of two versions of the labels."""
    root = tmp_path / "d"
    versions(root)
    for version, names in (("v1.2", "sky, road, bird"), ("v2.0", "air, street, animal")):
        labels = [{"readable": name, "name": name} for name in names.split(", ")]
        (root / f"config_{version}.json").write_text(json.dumps({"labels": labels}))
    for version, names in (("v1.2", ["sky", "road", "bird"]), ("v2.0", ["air", "street", "animal"])):
        result, _ = init(root, layout=f"{version}/labels")
        assert load_config(result.configs[0]).data.classes == names
        root.with_suffix(".yaml").unlink()


def test_copies_in_another_format_are_not_a_second_set_of_images(tmp_path: Path) -> None:
    """As CVC-ClinicDB: equal images in PNG and TIF folders."""
    root = tmp_path / "d"
    for folder, suffix in (("PNG", "png"), ("TIF", "tif")):
        draw(root, NAMES, f"{folder}/Original/{{}}.{suffix}", f"{folder}/Ground Truth/{{}}.{suffix}", BINARY)
    with pytest.raises(OpenQuestionError) as raised:
        init(root)
    for answer in raised.value.answers:
        _, found = init(root, layout=answer)
        root.with_suffix(".yaml").unlink()
        assert len(found["train"] | found["val"]) == 12
        assert len({image.partition("/")[0] for image in found["train"] | found["val"]}) == 1


def test_numbered_folders_with_the_word_of_a_split_are_scenes(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for number in range(1, 7):
        for name in ("0", "1"):
            case = f"Set_Training_{number:03}"
            draw_image(root / case / f"{case}_{name}.png")
            draw_mask(root / case / f"{case}_{name}_seg.png")
    _, found = init(root)
    pairs = found["train"] | found["val"]
    assert pairs == {image: image.replace(".png", "_seg.png") for image in pairs}
    assert len(pairs) == 12
    assert {path.partition("/")[0] for path in found["train"]}.isdisjoint(
        path.partition("/")[0] for path in found["val"]
    )


def test_masks_for_a_part_of_the_images_are_less_likely(tmp_path: Path) -> None:
    """As SUIM, whose test folder holds masks of single classes too; and depth images are no rivals of color images."""
    root = tmp_path / "d"
    draw(root, NAMES, "images/{}.jpg", "masks/{}.png")
    draw(root, NAMES[:4], "images/{}.jpg", "masks/HD/{}.png", BINARY)
    for name in NAMES:
        draw_image(root / f"depth/{name}.jpg")
    _, found = init(root)
    assert found["train"] | found["val"] == {f"images/{name}.jpg": f"masks/{name}.png" for name in NAMES}


@pytest.mark.parametrize(
    ("mask_px", "told"),
    [
        ((96, 128), r"128x96 pixels, .* has 64x48 \(the same ratio of sides: one was resized\): resize the masks"),
        ((64, 48), r"48x64 pixels, .* has 64x48 \(the EXIF orientation of one is lost\): turn one"),
        ((51, 83), r"83x51 pixels, .* has 64x48 \(another ratio of sides: wrong pair, .*: give each image the mask"),
    ],
)
@pytest.mark.parametrize("mask", ["masks/{}.png", "masks/{}_mask.png", "{}-label.png"])
def test_names_that_agree_unlike_the_sizes_are_said(
    mask: str, mask_px: tuple[int, int], told: str, tmp_path: Path
) -> None:
    for name in ("0031", "0004", "0017"):
        draw_image(tmp_path / "d" / "images" / f"{name}.jpg")
        draw_mask(tmp_path / "d" / mask.format(name), size=mask_px)
    said = "the names of 3 masks agree with the names of their images, the sizes do not: "
    with pytest.raises(DataError, match=f"{said}.*{mask.format('0004')}: the mask has {told}"):
        init(tmp_path / "d")


def test_photos_of_other_sizes_with_equal_names_are_no_masks(tmp_path: Path) -> None:
    for name in ("0031", "0004", "0017"):
        draw_image(tmp_path / "d" / "images" / f"{name}.jpg")
        draw_image(tmp_path / "d" / "thermal" / f"{name}.jpg", (80, 90))
    with pytest.raises(DataError, match="has no images with masks that belong together by their names"):
        init(tmp_path / "d")


def test_one_annotation_file_that_is_a_pointer_is_told_once(tmp_path: Path) -> None:
    for name in ("0031", "0004", "0017"):
        draw_image(tmp_path / "d" / f"{name}.jpg")
    for file in ("a.json", "b.xml"):
        text = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "ab" * 32 + f"\nsize {len(file)}99\n"
        (tmp_path / "d" / file).write_text(text)
    with pytest.raises(DataError, match="a pointer of Git LFS") as caught:
        init(tmp_path / "d")
    assert [str(caught.value).count(file) for file in ("a.json: a pointer", "b.xml: a pointer")] == [1, 1]


@pytest.mark.parametrize(
    ("kind", "cure"),
    [
        ("link", r"a broken link to .*: restore that file, or remove the link\)$"),
        ("frames", r"the mask has several frames: save one frame per file\)$"),
        ("cut", r": save it as PNG of ids\)$"),
    ],
)
def test_masks_that_no_reader_reads_have_one_cure(kind: str, cure: str, tmp_path: Path) -> None:
    draw(tmp_path / "d", ("0031", "0004", "0017"), "images/{}.jpg", "masks/{}.tif")
    for mask in [*(tmp_path / "d" / "masks").iterdir()]:
        data, frame = mask.read_bytes(), Image.open(mask)
        frame.load()
        mask.unlink()
        if kind == "link":
            mask.symlink_to(tmp_path / "gone" / mask.name)
        elif kind == "frames":
            frame.save(mask, save_all=True, append_images=[frame])
        else:
            mask.write_bytes(data[:-500])
    with pytest.raises(DataError, match="none of 3 masks can be read, such as .*" + cure):
        init(tmp_path / "d", layout="masks")
