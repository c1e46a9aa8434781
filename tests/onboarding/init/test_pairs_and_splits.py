"""`segapp init` pairs the images with their own masks and keeps published splits; two plausible readings are asked."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from segapp.assembly.pairs import build_pairs, split_names
from segapp.config import load_config
from segapp.errors import DataError
from segapp.onboarding.init import InitRequest, InitResult, propose_config
from segapp.onboarding.layout import Layout, OpenQuestionError, Pair
from segapp.onboarding.tables import Table, paired_lists, read_table, with_listed_splits
from segapp.onboarding.tree import Tree
from tests.support.drawn_folders import draw, draw_image, draw_mask

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


@pytest.mark.parametrize(("suffix", "absolute"), [(".csv", ""), (".tsv", "/data/of/another/machine/d/")])
def test_table_of_pairs_decides_over_similar_names(suffix: str, absolute: str, tmp_path: Path) -> None:
    root = tmp_path / "d"
    mask_of = {f"raw/{i:04}a.jpg": f"seg/{i * 5 % 8:04}.png" for i in range(8)}
    for image, mask in mask_of.items():
        draw_image(root / image)
        draw_mask(root / mask)
    rows = [f"{i},{absolute}{image},{absolute}{mask}" for i, (image, mask) in enumerate(mask_of.items())]
    for split, own in (("all", rows[5:7]), ("train", rows[:6]), ("val", rows[6:])):
        text = "\n".join(["id,image,mask", *own])
        (root / f"{split}{suffix}").write_text(text if suffix == ".csv" else text.replace(",", "\t"))
    _, found = init(root)
    images = list(mask_of)
    assert found["train"] == {image: mask_of[image] for image in images[:6]}
    assert found["val"] == {image: mask_of[image] for image in images[6:]}


def test_lists_that_share_an_image_are_refused(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, NAMES, "imgs/{}_img.jpg", "labels/{}_lab.png")
    for split, names in (("train", NAMES[7::-1]), ("val", NAMES[6:])):
        (root / f"{split}.txt").write_text("\n".join(names))
    with pytest.raises(DataError, match=r"2 validation images are also training images, such as imgs/0006_img\.jpg"):
        init(root)


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
    assert any(line.startswith("splits: only train has images with masks: ") for line in result.lines)
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
    before = [f"w/{i}.jpg" for i in range(6)]
    front = "C:\\sets\\d\\" if absolute else ""
    files = [(before[i], before[5 - i], images[i], masks[order[i]], masks[i]) for i in range(6)]
    rows = tuple((*(front + file for file in files[i]), splits[i], f"s{i}" if i else "", f"p{i}") for i in range(6))
    tree = Tree(Path("d"), (*images, *masks, *before), (), leads_outside=False)
    head = ("before", "file", "image", "label", "mask", "split", "site", "the_patient")
    layout = paired_lists(tree, [Table("all.csv", head, rows)])
    assert layout is not None
    assert {(pair.image, pair.mask, pair.split, pair.group) for pair in layout.pairs} == {
        (images[i], masks[order[i]], splits[i], f"p{i}") for i in range(6)
    }


def test_a_list_does_not_change_the_splits_of_folders() -> None:
    images = [f"images/{split}/{i}.jpg" for split in ("train", "val") for i in range(3)]
    tree = Tree(Path("d"), (*images, *(path.replace("images", "masks") for path in images)), (), leads_outside=False)
    assert paired_lists(tree, []) is None
    pairs = tuple(Pair(path, path.replace("images", "masks"), path.split("/")[1]) for path in images)
    tables = [Table("train.txt", (), tuple((path,) for path in images[2:]))]
    tables.append(Table("val.txt", (), tuple((path,) for path in images[:2])))
    assert with_listed_splits(tables, Layout("masks", pairs, 0.99)).pairs == pairs


def test_number_in_a_list_that_fits_two_images_is_unused() -> None:
    pairs = tuple(Pair(f"images/{stem}.jpg", f"masks/{stem}.png") for stem in ("01", *map(str, range(1, 13))))
    tables = [
        Table("old/train.txt", (), (("12",), ("3",))),
        Table("train.txt", (), tuple((f"{i:03}",) for i in range(1, 11))),
        Table("val.txt", (), (("11",), ("012",))),
    ]
    divided = with_listed_splits(tables, Layout("masks", pairs, 0.99))
    splits = {pair.image: pair.split for pair in divided.pairs}
    assert splits == {f"images/{i}.jpg": "train" if i < 11 else "val" for i in range(2, 13)}
    assert "1 of its 10 lines name no image with a mask, such as 001: the others are used" in divided.notes[0]


def test_another_file_whose_name_begins_as_a_mask_is_no_mask(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, NAMES, "images/{}.jpg", "masks/{}_zz.png", COLORS)
    draw_mask(root / "masks/0003_zz_older.png", COLORS)
    result, found = init(root)
    assert found["train"] | found["val"] == {f"images/{name}.jpg": f"masks/{name}_zz.png" for name in NAMES}
    assert "not used: masks/0003_zz_older.png" in result.lines


def test_an_unlikely_reading_is_asked_instead_of_written(tmp_path: Path) -> None:
    """Five of twelve images have no mask, and as many masks have no image; the older masks have even fewer."""
    root = tmp_path / "d"
    for name in NAMES:
        draw_image(root / f"images/{name}.png")
        for folder, num_pairs in (("masks", 7), ("older/labels", 6)):
            draw_mask(root / folder / f"{name if int(name) < num_pairs else f'other{name}x'}.png")
    with pytest.raises(OpenQuestionError, match=r"no reading .* likely enough.*--layout 'images -> masks'") as raised:
        init(root)
    words, _, _ = raised.value.answers.values()
    assert "7 of 12 images have a mask" in words
    assert not root.with_suffix(".yaml").exists()
    _, found = init(root, layout="images -> masks")
    assert found["train"] | found["val"] == {f"images/{name}.png": f"masks/{name}.png" for name in NAMES[:7]}


def test_numbered_folders_with_the_word_of_a_split_are_scenes(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for number in range(1, 7):
        for name in ("0", "1"):
            case = f"Set_Training_{number:03}"
            draw_image(root / case / f"v{name}" / f"{case}.png")
            draw_mask(root / case / f"v{name}" / f"{case}_seg.png")
    _, found = init(root)
    pairs = found["train"] | found["val"]
    assert pairs == {image: image.replace(".png", "_seg.png") for image in pairs}
    assert len(pairs) == 12
    assert {path.partition("/")[0] for path in found["train"]}.isdisjoint(
        path.partition("/")[0] for path in found["val"]
    )


@pytest.mark.parametrize(
    ("mask", "mask_px", "told"),
    [
        (
            "masks/{}.png",
            (96, 128),
            r"128x96 pixels, .* has 64x48 \(the same ratio of sides: one was resized\): resize",
        ),
        (
            "masks/{}_mask.png",
            (64, 48),
            r"48x64 pixels, .* has 64x48 \(the EXIF orientation of one is lost\): turn one",
        ),
        ("{}-label.png", (51, 83), r"83x51 pixels, .* has 64x48 \(another ratio of sides: wrong pair, .*: give each"),
    ],
)
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
