"""`init` writes only into folders and files that segapp made for this user, and through no link."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from segapp.errors import ConfigError, StorageError
from segapp.onboarding.init import InitRequest, propose_config
from tests.support import drawn_annotations as drawn


def elsewhere(root: Path) -> Path:
    (root / "elsewhere").mkdir(exist_ok=True)
    return root / "elsewhere"


def link(root: Path) -> str:
    (root / "made-masks").symlink_to(elsewhere(root))
    return "made-masks is a link, and segapp does not write through links: remove .*made-masks, or choose another --out"


def dangling_link(root: Path) -> str:
    (root / "made-masks").symlink_to(elsewhere(root) / "new")
    return "made-masks is a link"


def link_below(root: Path) -> str:
    (root / "made-masks").mkdir()
    (root / "made-masks" / "train").symlink_to(elsewhere(root))
    return "made-masks/train is a link"


def link_of_a_file(root: Path) -> str:
    (elsewhere(root) / "kept.png").write_bytes(b"kept")
    (root / "made-masks" / "images").mkdir(parents=True)
    (root / "made-masks" / "images" / "0000.png").symlink_to(elsewhere(root) / "kept.png")
    return "made-masks/images/0000.png is a link"


def other_content(root: Path) -> str:
    (root / "made-masks").mkdir()
    (root / "made-masks" / "notes.txt").write_text("mine")
    return "made-masks/notes.txt was not written by segapp"


def own_mask(root: Path) -> str:
    from PIL import Image

    (root / "made-masks" / "images").mkdir(parents=True)
    Image.new("L", (8, 8)).save(root / "made-masks" / "images" / "0000.png")
    return "made-masks/images/0000.png was not written by segapp"


def pipe(root: Path) -> str:
    (root / "made-masks").mkdir()
    os.mkfifo(root / "made-masks" / "a.png")
    return "made-masks/a.png was not written by segapp"


def link_of_lists(root: Path) -> str:
    (root / "made-lists").symlink_to(elsewhere(root))
    return "made-lists is a link"


def other_lists(root: Path) -> str:
    (root / "made-lists").mkdir()
    (root / "made-lists" / "photo.jpg").write_bytes(b"mine")
    return "made-lists/photo.jpg was not written by segapp"


def config_link(root: Path) -> str:
    (root / "made.yaml").symlink_to(elsewhere(root) / "a.yaml")
    return "made.yaml exists: choose another --out, or add --force"


def other_user(root: Path) -> str:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    (root / "made-masks").mkdir()
    os.chown(root / "made-masks", 12345, 12345)
    return "made-masks belongs to another user"


def contents(root: Path) -> dict[str, bytes | None]:
    places = [path for name in ("elsewhere", "made-masks", "made-lists") for path in (root / name).rglob("*")]
    return {str(path): path.read_bytes() if path.is_file() else None for path in places}


@pytest.mark.parametrize(
    "plant",
    [
        link, dangling_link, link_below, link_of_a_file, other_content, own_mask, pipe, link_of_lists, other_lists,
        config_link, other_user,
    ],
)  # fmt: skip
def test_what_segapp_did_not_make_is_refused_by_name(plant: Callable[[Path], str], tmp_path: Path) -> None:
    drawn.labelme(tmp_path / "d") if plant is link_below else drawn.cvat(tmp_path / "d")
    message = plant(tmp_path)
    before = contents(tmp_path)
    request = InitRequest(tmp_path / "d", tmp_path / "made.yaml", force=plant is not config_link)
    with pytest.raises(ConfigError, match=message):
        propose_config(request)
    assert contents(tmp_path) == before


def test_folder_that_is_a_link_may_be_named_by_the_user(tmp_path: Path) -> None:
    drawn.cvat(tmp_path / "d")
    (tmp_path / "link").symlink_to(elsewhere(tmp_path))
    request = InitRequest(tmp_path / "d", tmp_path / "link" / "made.yaml")
    propose_config(request)
    assert (tmp_path / "elsewhere" / "made-masks" / "images" / "0000.png").is_file()
    (tmp_path / "elsewhere" / "made-masks" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "elsewhere" / "made-masks" / "images" / "0001.png").write_bytes(b"")  # after a power cut
    propose_config(InitRequest(tmp_path / "d", tmp_path / "link" / "made.yaml", force=True))
    assert (tmp_path / "elsewhere" / "made-masks" / "images" / "0001.png").stat().st_size


def test_config_that_is_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    drawn.cvat(tmp_path / "d")
    (elsewhere(tmp_path) / "a.yaml").write_text("mine")
    for name in ("made.yaml", ".made.yaml.partial"):
        (tmp_path / name).symlink_to(elsewhere(tmp_path) / "a.yaml")
    with pytest.raises(StorageError, match=r"made\.yaml cannot be written: File exists"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", force=True))
    (tmp_path / ".made.yaml.partial").unlink()
    propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", force=True))
    assert (tmp_path / "elsewhere" / "a.yaml").read_text() == "mine"
    assert not (tmp_path / "made.yaml").is_symlink()
