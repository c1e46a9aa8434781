"""Small files that ask for gigabytes are refused, in 1 GiB of memory and 20 s, and large sound ones are read."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from segapp.errors import ConfigError, DataError
from segapp.onboarding.annotations import find_cvat
from segapp.onboarding.candidates import CONVERTERS
from segapp.onboarding.conversion import write_files
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.tree import survey_tree
from tests.support import drawn_annotations as drawn
from tests.support.drawn_folders import draw_image
from tests.support.hostile_files import packed_zeros, png_bomb
from tests.support.limits import outcome


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def with_bitmap(root: Path, data: bytes) -> None:
    """Replaces the packed bitmap of the second of six images."""
    drawn.supervisely(root)
    path = root / "ds0/ann/0001.jpg.json"
    content = json.loads(path.read_text())
    content["objects"][1]["bitmap"]["data"] = base64.b64encode(data).decode()
    path.write_text(json.dumps(content))


def supervisely(root: Path) -> None:
    """268 million pixels, in 2 kB."""
    with_bitmap(root, zlib.compress(png_bomb(16_384, 16_384), 9))


def supervisely_packed(root: Path) -> None:
    """Two gigabytes of zeros, in 2 MB."""
    with_bitmap(root, packed_zeros(2 * 2**30))


def cvat(root: Path) -> None:
    drawn.cvat(root)
    edited(root / "annotations.xml", 'rle="7,3,1,25" left="14" top="12" width="6" height="6"',
           'rle="0,20000000000" left="0" top="0" width="200000" height="100000"')  # fmt: skip


def yolo(root: Path) -> None:
    drawn.yolo(root)
    (root / "labels" / "train" / "0000.txt").write_text("2000000000 0.1 0.1 0.5 0.1 0.5 0.5\n")


def yaml_aliases(root: Path) -> None:
    drawn.yolo(root)
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    (root / "data.yaml").write_text("\n".join([*lines, "names: *a11"]))


def npy_header(root: Path) -> None:
    """A header of two gigabytes, in a file without blocks on the disk."""
    for name in ("images.npy", "masks.npy"):
        with (root / name).open("wb") as file:
            file.write(b"\x93NUMPY\x02\x00" + (2**31).to_bytes(4, "little"))
            file.truncate(2**31 + 12)


def many_corners(root: Path) -> None:
    """A polygon of 20,001 corners, whose lines cross each other in every row, and leave the image far behind."""
    drawn.labelme(root)
    content = json.loads((root / "0001.json").read_text())
    points = np.random.default_rng(0).uniform(-2e7, 2e7, (20_001, 2)).tolist()
    content["shapes"].insert(0, {"label": "road", "shape_type": "polygon", "points": points})
    (root / "0001.json").write_text(json.dumps(content))


def value_of_mask(root: Path) -> None:
    """A mask with the value 2,000,000,000."""
    import cv2

    for name in drawn.NAMES:
        draw_image(root / "images" / f"{name}.png", (drawn.HEIGHT, drawn.WIDTH))
        mask = np.zeros((drawn.HEIGHT, drawn.WIDTH), np.int32)
        mask[8:, 8:] = 2_000_000_000
        (root / "masks").mkdir(exist_ok=True)
        assert cv2.imwrite(str(root / "masks" / f"{name}.tif"), mask)


BOMBS: dict[Callable[[Path], None], str] = {
    supervisely: "bitmap.data: too large (",
    supervisely_packed: "not a compressed PNG in base64",
    cvat: "a mask of 200000 x 100000 pixels would take 19073 MiB",
    yolo: "the labels: 2000000001 classes, but 8-bit masks hold 255: keep fewer",
    yaml_aliases: "classes: background, class_0, class_1",
    npy_header: "images.npy: its header is too large",
    many_corners: "masks: 6 in",
    value_of_mask: "",
}
"""Function that draws a folder -> what is said about it."""


def converted(root: Path, out: Path) -> list[str]:
    """Examines a folder as `segapp init` does, and draws every mask; returns the problems that were reported."""
    said = []
    try:
        said += propose_config(InitRequest(root, out=out / "a.yaml", force=True)).lines
    except (ConfigError, DataError) as error:
        said.append(str(error))
    tree = survey_tree(root)
    for convert in CONVERTERS.values():
        try:
            found = convert(tree)
            for number, layout in enumerate([found] if hasattr(found, "pairs") else found or ()):
                said += write_files(layout, out / f"{convert.__name__}{number}", root)[1]  # type: ignore[arg-type]
        except (ValueError, DataError) as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("draw", BOMBS)
def test_small_file_asking_for_gigabytes_is_refused_or_drawn(draw: Callable[[Path], None], tmp_path: Path) -> None:
    (root := tmp_path / "d").mkdir()
    draw(root)
    kind, said = outcome(converted, root, tmp_path / "out")
    assert kind == "done", said
    assert any(BOMBS[draw] in line for line in said), said


ENTITIES = {
    "multiplied": '<!ENTITY a0 "0123456789">' + "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 9)),
    "a file": f'<!ENTITY a8 SYSTEM "{Path(__file__).as_uri()}">',
}


@pytest.mark.parametrize("kind", ENTITIES)
def test_xml_with_hostile_entities_is_no_annotation(kind: str, tmp_path: Path) -> None:
    drawn.cvat(tmp_path)
    text = (tmp_path / "annotations.xml").read_text().replace("<name>car</name>", "<name>&a8;</name>")
    (tmp_path / "annotations.xml").write_text(f"<!DOCTYPE annotations [{ENTITIES[kind]}]>{text}")
    with pytest.raises(DataError, match=r"annotations\.xml is not complete XML"):
        find_cvat(survey_tree(tmp_path))
