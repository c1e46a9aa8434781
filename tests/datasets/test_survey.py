"""What `segapp init` sees in a folder: links to other places, and the images that annotations name."""

from __future__ import annotations

from pathlib import Path

import pytest

from segapp.datasets.convert.sources import Images
from segapp.datasets.survey.lists import list_files
from segapp.datasets.survey.tree import Tree, survey_tree


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
    found = list_files(Tree(tmp_path, (), files, leads_outside=False))
    assert list(found) == ["VOC/ImageSets/Segmentation", "sets", "VOC/ImageSets/Main"]
    assert found["sets"] == {"train": "sets/train.txt", "val": "sets/val.txt"}


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
