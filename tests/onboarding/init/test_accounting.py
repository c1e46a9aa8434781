"""Every file of a data folder is in the account of `segapp init` and of `segapp check`: used, or not used and why."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp.commands.check import check_data
from segapp.config import RunConfig, load_config
from segapp.onboarding.accounting import Uses, account_for
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.tree import Tree, survey_tree
from tests.support.drawn_folders import draw, draw_image, draw_mask

NAMES = [f"{number:04}" for number in range(12)]
PARTS = ("images", "masks", "train", "val", "depth", "a", "labels")
FILES = ("0.jpg", "0.png", "0_mask.png", "1.jpg", "train.txt", "x.csv", "note.md", "boxes.json", "c.npy")


def num_accounted(lines: Sequence[str]) -> int:
    """Returns the sum of the first numbers of the lines of an account."""
    heads = [re.match(r"(\d+) (?!more)[a-z ]+: .* not used$", line) for line in lines]
    return sum(int(head[1]) for head in heads if head)


def checked(config: RunConfig, *, as_json: bool) -> str:
    """Returns what `segapp check` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        check_data(config, as_json=as_json, html_file=None)
    return out.getvalue()


@given(
    paths=st.lists(
        st.tuples(st.lists(st.sampled_from(PARTS), max_size=3), st.sampled_from(FILES)), min_size=1, max_size=30
    ),
    data=st.data(),
)
def test_each_file_is_counted_once(paths: list[tuple[list[str], str]], data: st.DataObject) -> None:
    files = sorted({"/".join([*folders, name]) for folders, name in paths})
    images = tuple(path for path in files if path.endswith((".jpg", ".png")))
    others = tuple(path for path in files if path.endswith((".txt", ".csv", ".json")))
    rest = tuple(path for path in files if path.endswith((".md", ".npy")))
    use = {path: data.draw(st.sampled_from(["training", "validation", "mask", "source", None])) for path in files}
    uses = Uses(
        {split: [path for path in images if use[path] == split] for split in ("training", "validation")},
        [path for path in images if use[path] == "mask"],
        [path for path in (*others, *rest) if use[path] == "source"],
    )
    account = account_for(Tree(Path("d"), images, others, leads_outside=False, rest=rest), uses)
    unused = [path for group in account.unused for path in group.paths]
    assert len(unused) == len(set(unused))
    used = {path for split in uses.images.values() for path in split} | {*uses.masks, *uses.sources}
    assert set(unused) == set(files) - used
    assert sum(count for kind in account.used.values() for count in kind.values()) == len(used)
    assert num_accounted(account.lines) == len(files)
    assert all(group.reason for group in account.unused)


STRAYS = {
    "orphan mask": ("masks/train/zzz.png", "1 mask masks/train/zzz.png"),
    "image without mask": ("images/train/lonely.jpg", "1 image images/train/lonely.jpg: no mask belongs to it"),
    "test image": ("images/test/t.jpg", "1 image images/test/t.jpg: of the test split"),
    "depth": ("depth/0000.png", "1 other picture depth/0000.png: its folder or name says"),
    "list": ("other.txt", "1 list other.txt: "),
    "table": ("sheet.csv", "1 table sheet.csv: "),
    "sidecar": ("meta/info.json", "1 sidecar meta/info.json: "),
    "other": ("README.md", "1 file of another kind README.md: files of this kind are not read"),
}


@settings(max_examples=12)
@given(strays=st.sets(st.sampled_from(sorted(STRAYS))))
def test_init_and_check_account_for_every_file(strays: set[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("data") / "d"
    for split, names in (("train", NAMES[:8]), ("val", NAMES[8:])):
        draw(root, names, f"images/{split}/{{}}.jpg", f"masks/{split}/{{}}.png")
    for stray in strays:
        path = root / STRAYS[stray][0]
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".png" and "mask" in stray:
            draw_mask(path)
        elif path.suffix in (".jpg", ".png"):
            draw_image(path)
        else:
            path.write_text("{}" if path.suffix == ".json" else "x;y\n1;2\n")
    num_files = sum(path.is_file() for path in root.rglob("*"))
    result = propose_config(InitRequest(root, root.with_suffix(".yaml")))
    assert num_accounted(result.lines) == num_files
    num_images = 12 + len(strays & {"image without mask", "test image"})
    assert f"{num_images} images: 8 training, 4 validation, {num_images - 12} not used" in result.lines
    for stray in strays:
        assert any(STRAYS[stray][1] in line for line in result.lines), (stray, result.lines)
    config = load_config(result.configs[0])
    printed = checked(config, as_json=False).splitlines()
    if "image without mask" in strays:  # an error: its split is not used
        return
    assert num_accounted(printed) == num_files
    files = json.loads(checked(config, as_json=True))["files"]
    assert {path for group in files["not_used"] for path in group["files"]} == {STRAYS[stray][0] for stray in strays}


def test_readings_that_are_not_chosen_are_named(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, NAMES, "images/{}.jpg", "masks/{}.png")
    draw(root, NAMES, "images/{}.jpg", "instances/{}.png", np.array([256, 700], np.uint16))
    result = propose_config(InitRequest(root, tmp_path / "made.yaml"))
    assert any(
        re.search(r"12 other pictures such as instances/0000\.png: of another reading: --layout instances", line)
        for line in result.lines
    )


def test_hidden_files_are_not_counted_and_all_others_are(tmp_path: Path) -> None:
    for name in ("a.jpg", "b.PNG", ".hidden.png", "c.txt", "d", "e.weird", ".git/f.png", "__MACOSX/g.png"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x")
    tree = survey_tree(tmp_path)
    assert (tree.images, tree.others, tree.rest) == (("a.jpg", "b.PNG"), ("c.txt",), ("d", "e.weird"))


def test_masks_of_a_split_without_images_are_named(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, NAMES, "imgs/train/{}.jpg", "labels/train/{}.png")
    for number in range(4):
        draw_mask(root / f"labels/val/v{number}.png")
    lines = propose_config(InitRequest(root, tmp_path / "made.yaml")).lines
    assert any(
        line.startswith("splits: only train has images with masks: 10 training and 2 validation") for line in lines
    )
    assert "16 masks: 12 used, 4 not used" in lines
    assert "not used: 4 masks such as labels/val/v0.png: no image belongs to it: the val split has none" in lines
