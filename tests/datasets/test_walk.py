"""Files of a folder are listed once, by one rule, and names that look alike are equal."""

import ast
import json
import os
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from segapp.datasets.files import ImagePair, check_pairs, read_header
from segapp.datasets.layouts.formats import DataLocation, class_scheme, find_pairs
from segapp.datasets.walk import on_disk, walk
from segapp.errors import ConfigError, DataError
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.tree import survey_tree
from tests.support.drawn_folders import draw_image, draw_mask, touch

NAMES = ["Straße Köln", "été (1)", "naïve,x", "ünï", "plain", "img [2]", "Ångström", "o'neil", "100%", "ñ;colon", "b"]


def nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def test_walk_lists_each_file_once_and_leaves_hidden_ones(tmp_path: Path) -> None:
    touch(tmp_path, "d/z/x.png", "d/z/._x.png", "d/z/Thumbs.db", "d/b.PNG", "d/c/notes.txt", "d/.cache/y.png")
    touch(tmp_path, "d/c/__MACOSX/x.png", "d/out/labels/b.png", "d/runs/one/run.json", "d/runs/one/samples/s.png")
    (tmp_path / "d/again").symlink_to("z")  # listed before z, and its files are those of z
    (tmp_path / "d/c/latest").symlink_to("../z")
    (tmp_path / "d/c/up").symlink_to("../..")
    (tmp_path / "d/ring").symlink_to("ring")
    (tmp_path / "d/lost.png").symlink_to("nowhere")
    found = list(walk(tmp_path / "d", [os.path.realpath(tmp_path / "d/out")]))
    files = [folder.below + name for folder in found for name in folder.files]
    assert files == ["b.PNG", "lost.png", "ring", "c/notes.txt", "z/x.png"]
    hidden = [folder.below + name for folder in found for name in folder.hidden]
    assert hidden == [".cache/", "c/__MACOSX/", "runs/one/run.json", "z/._x.png", "z/Thumbs.db"]
    assert [name for folder in found for name in folder.links] != []
    assert all(os.path.realpath(folder.path) == folder.real for folder in found)


def test_folder_that_cannot_be_listed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "images/train/1.png", "images/train/locked/2.png", "masks/train/1.png", "masks/train/locked/2.png")
    real, refused = os.scandir, []

    def scandir(path: str) -> object:
        if "locked" in os.fspath(path):
            refused.append(path)
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    for read in (lambda: survey_tree(tmp_path), lambda: find_pairs(DataLocation("folder", tmp_path), "train")):
        with pytest.raises(DataError, match=r"locked: the folder cannot be listed \(Permission denied\): .*chmod \+rx"):
            read()
    assert len(refused) == 2


@pytest.mark.parametrize("make", [nfc, nfd], ids=["disk in NFC", "disk in NFD"])
def test_path_is_found_in_the_other_form(make: object, tmp_path: Path) -> None:
    other = nfd if make is nfc else nfc
    touch(tmp_path, make("Köln/été.png"), "plain.png")
    assert on_disk(tmp_path / other("Köln/été.png")) == tmp_path / make("Köln/été.png")
    assert on_disk(tmp_path / other("Köln/là.png")).name == other("là.png")
    touch(tmp_path, other("Köln/été.png"))
    assert on_disk(tmp_path / other("Köln/été.png")) == tmp_path / other("Köln/été.png")


def test_folder_of_masks_is_found_in_the_other_form(tmp_path: Path) -> None:
    """Two images whose names look alike do not share a mask."""
    touch(tmp_path, f"{nfd('Übung')}/train/{nfd('Köln')}/1.png", f"{nfd('Masken ä')}/train/{nfc('Köln')}/1.png")
    place = DataLocation("folder", tmp_path, image_dir=nfc("Übung"), mask_dir=nfc("Masken ä"))
    assert [(nfc(p.name), p.mask.exists()) for p in find_pairs(place, "train") if p.mask] == [("Köln/1", True)]
    touch(tmp_path, f"images/train/{nfc('é')}.png", f"images/train/{nfd('é')}.png", f"masks/train/{nfd('é')}.png")
    with pytest.raises(DataError, match=r"have one mask, .*: give each its own mask"):
        find_pairs(DataLocation("folder", tmp_path), "train")


def listed(root: Path, split: str) -> set[tuple[str, ...]]:
    text = (root.with_name(f"{root.name}-lists") / f"{split}.txt").read_text()
    return {tuple(line.split("\t")) for line in text.splitlines()}


@pytest.mark.parametrize("source", ["lists", "annotations"])
def test_init_pairs_names_in_other_forms_and_keeps_their_bytes(source: str, tmp_path: Path) -> None:
    root, forms = tmp_path / "d", [(nfc, nfd), (nfd, nfc), (nfd, nfd)]
    on = {name: forms[number % 3] for number, name in enumerate(NAMES)}
    images = [on[name][0](f"images/{name}.png") for name in NAMES]
    for image in images:
        draw_image(root / image, (30, 40))
    if source == "annotations":
        box = {"category_id": 3, "segmentation": [[2, 2, 20, 2, 20, 11, 2, 11]], "iscrowd": 0, "area": 162}
        objects = [{"id": i, "image_id": i, "bbox": [2, 2, 18, 9], **box} for i in range(len(NAMES))]
        size = {"width": 40, "height": 30}
        told = [{"id": i, "file_name": on[name][1](f"{name}.png"), **size} for i, name in enumerate(NAMES)]
        content = {"images": told, "categories": [{"id": 3, "name": "box"}], "annotations": objects}
        (root / "annotations.json").write_text(json.dumps(content))
    else:
        for name in NAMES:
            draw_mask(root / on[name][1](f"masks/{name}.png"), size=(30, 40))
        (root / "train.txt").write_text("\n".join(on[name][1](name) for name in NAMES[::3]))
        (root / "val.txt").write_text("\n".join(map(nfd, set(NAMES) - {*NAMES[::3]})))
    propose_config(InitRequest(root, root.with_suffix(".yaml")))
    train, val = listed(root, "train"), listed(root, "val")
    assert {image for image, _ in train | val} == set(images)
    if source == "lists":
        assert {mask for _, mask in train | val} == {on[name][1](f"masks/{name}.png") for name in NAMES}
        assert {image for image, _ in train} == set(images[::3])


def test_labels_that_look_alike_are_one_class(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for number, label in enumerate([nfc("Bäume"), nfd("Bäume"), "Ast", nfd("Bäume"), nfc("Bäume"), "Ast"]):
        draw_image(root / f"{number}.png", (30, 40))
        box = {"label": label, "shape_type": "polygon", "points": [[2, 2], [20, 2], [20, 11 + number], [2, 11]]}
        content = {"shapes": [box], "imagePath": f"{number}.png", "imageHeight": 30, "imageWidth": 40}
        (root / f"{number}.json").write_text(json.dumps(content))
    result = propose_config(InitRequest(root, root.with_suffix(".yaml")))
    assert any(line.startswith(f"classes: background, Ast, {nfc('Bäume')} (") for line in result.lines)
    masks = [np.array(Image.open(root.with_name("d-masks") / f"{number}.png")) for number in range(6)]
    assert [int(mask.max()) for mask in masks] == [2, 2, 1, 2, 2, 1]
    with pytest.raises(ConfigError, match="is listed twice"):
        class_scheme("list", classes=[nfc("Bäume"), "Ast", nfd("Bäume")])


def test_pointer_of_git_lfs_is_named_with_its_cure(tmp_path: Path) -> None:
    image, mask = tmp_path / "a.png", tmp_path / "b.png"
    draw_image(image)
    mask.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"a" * 64 + b"\nsize 12345\n")
    with pytest.raises(DataError, match=r"b\.png: a pointer of Git LFS, .*: run git lfs pull"):
        check_pairs([ImagePair(image, mask, "a")])


def test_broken_link_is_named_with_its_target(tmp_path: Path) -> None:
    for target, cure in (("../gone/p05.png", "restore that file"), ("../.git/annex/objects/x.png", "git annex get")):
        path = tmp_path / f"{len(cure)}.png"
        path.symlink_to(target)
        with pytest.raises(DataError, match=rf"a broken link to {target}, .*{cure}"):
            read_header(path)


PLUG_IN = """
from PIL import Image, ImageFile
class Heif(ImageFile.ImageFile):
    format = "HEIF"
    def _open(self):
        self._size, self._mode, self.tile = (2, 1), "RGB", [("raw", (0, 0, 2, 1), 4, "RGB")]
def register_heif_opener():
    Image.register_open("HEIF", Heif, lambda start: start[:4] == b"HEIF")
"""

READ = """
from pathlib import Path
from segapp.datasets.images.reading import read_image
from segapp.onboarding.tree import survey_tree
print({path: read_image(Path(path)).tolist() for path in sorted(survey_tree(Path()).images)})
"""


def test_photos_of_phones_are_read_with_their_plug_in(tmp_path: Path) -> None:
    """Without it they are named: tests/inference/test_predict_inputs.py."""
    for name in ("b.heic", "c.HEIF"):
        Path(name).write_bytes(b"HEIF" + bytes([1, 2, 3, 4, 5, 6]))
    (tmp_path / "pillow_heif.py").write_text(PLUG_IN)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True, env=environment, check=True)
    pixels = [[[1, 2, 3], [4, 5, 6]]]
    assert ast.literal_eval(done.stdout) == {"b.heic": pixels, "c.HEIF": pixels}
