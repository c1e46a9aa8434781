"""`init` writes only into folders and files that segapp made for this user, and through no link."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from segapp.errors import ConfigError, StorageError
from segapp.onboarding.init import InitRequest, propose_config
from tests.support import drawn_annotations as drawn


def elsewhere(root: Path) -> Path:
    (root / "elsewhere").mkdir(exist_ok=True)
    return root / "elsewhere"


def foreign(path: Path, content: bytes = b"mine") -> Path:
    """Writes a file that segapp did not make."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def png() -> bytes:
    file = io.BytesIO()
    Image.new("L", (8, 8)).save(file, "PNG")
    return file.getvalue()


def link_below(root: Path) -> None:
    (root / "made-masks").mkdir()
    (root / "made-masks/train").symlink_to(elsewhere(root))


def link_of_a_file(root: Path) -> None:
    (root / "made-masks/images").mkdir(parents=True)
    (root / "made-masks/images/0000.png").symlink_to(foreign(elsewhere(root) / "kept.png"))


def pipe(root: Path) -> None:
    (root / "made-masks").mkdir()
    os.mkfifo(root / "made-masks/a.png")


def other_user(root: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    (root / "made-masks").mkdir()
    os.chown(root / "made-masks", 12345, 12345)


PLANTED: dict[str, tuple[Callable[[Path], object], str]] = {
    "link": (lambda root: (root / "made-masks").symlink_to(elsewhere(root)),
             "made-masks is a link, and segapp does not write through links: remove .*made-masks, or choose another"),
    "dangling link": (lambda root: (root / "made-masks").symlink_to(elsewhere(root) / "new"), "made-masks is a link"),
    "link below": (link_below, "made-masks/train is a link"),
    "link of a file": (link_of_a_file, "made-masks/images/0000.png is a link"),
    "other file": (lambda root: foreign(root / "made-masks/notes.txt"),
                   "made-masks/notes.txt was not written by segapp"),
    "own mask": (lambda root: foreign(root / "made-masks/images/0000.png", png()),
                 "made-masks/images/0000.png was not written by segapp"),
    "pipe": (pipe, "made-masks/a.png was not written by segapp"),
    "link of lists": (lambda root: (root / "made-lists").symlink_to(elsewhere(root)), "made-lists is a link"),
    "other lists": (lambda root: foreign(root / "made-lists/photo.jpg"),
                    "made-lists/photo.jpg was not written by segapp"),
    "link of the config": (lambda root: (root / "made.yaml").symlink_to(elsewhere(root) / "a.yaml"),
                           "made.yaml exists: choose another --out, or add --force"),
    "other user": (other_user, "made-masks belongs to another user"),
}  # fmt: skip


def contents(root: Path) -> dict[str, bytes | None]:
    places = [path for name in ("elsewhere", "made-masks", "made-lists") for path in (root / name).rglob("*")]
    return {str(path): path.read_bytes() if path.is_file() else None for path in places}


@pytest.mark.parametrize("kind", PLANTED)
def test_what_segapp_did_not_make_is_refused_by_name(kind: str, tmp_path: Path) -> None:
    drawn.labelme(tmp_path / "d") if kind == "link below" else drawn.cvat(tmp_path / "d")
    plant, message = PLANTED[kind]
    plant(tmp_path)
    before = contents(tmp_path)
    request = InitRequest(tmp_path / "d", tmp_path / "made.yaml", force=kind != "link of the config")
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
