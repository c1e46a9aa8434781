"""Class names that `segapp init` finds: files beside the data, published palettes, and what it does with neither."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from segapp.datasets.layouts.schemes import PUBLISHED
from segapp.errors import DataError
from segapp.onboarding.class_files import PALETTES, recognise
from tests.support.drawn_folders import IDS, SIZE, draw, proposed, save

NAMES = [f"{number:04}" for number in range(6)]
COLORS = np.array([[0, 0, 0], [200, 0, 10], [10, 60, 250]], np.uint8)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("labels.txt", "0: ground\n1: road\n2: car\n"),
        ("obj.names", "ground\nroad\ncar"),
        ("train/_classes.csv", "Pixel Value, Class\n0, ground\n1, road\n2, car\n"),
        ("data.yaml", "names: [ground, road, car]\nnc: 3\n"),
        ("data.yaml", "names:\n  0: ground\n  1: road\n  2: car\n"),
        ("dataset.json", json.dumps({"labels": {"ground": 0, "road": 1, "car": 2}, "file_ending": ".png"})),
        ("dataset.json", json.dumps({"labels": {"0": "ground", "1": "road", "2": "car"}})),
        ("categories.json", json.dumps([{"id": i, "name": n} for i, n in ((2, "car"), (0, "ground"), (1, "road"))])),
    ],
)
def test_names_beside_masks_of_ids_are_read(file: str, text: str, tmp_path: Path) -> None:
    draw(tmp_path / "d", NAMES, "images/{}.jpg", "masks/{}.png", IDS)
    (tmp_path / "d" / file).parent.mkdir(exist_ok=True)
    (tmp_path / "d" / file).write_text(text)
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["ground", "road", "car"]
    assert f"from {file}" in " ".join(result.lines)
    assert "13 files: 13 used, 0 not used" in result.lines


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("class_dict.csv", "name,r,g,b\nroad,200,0,10\nground,0,0,0\ncar,10,60,250\n"),
        ("class_dict.csv", "r,g,b,name\n200,0,10,road\n0,0,0,ground\n10,60,250,car\n"),
        ("labelmap.txt", "# label:color_rgb:parts:actions\nroad:200,0,10::\nground:0,0,0::\ncar:10,60,250::\n"),
        ("label_colors.txt", "200 0 10\troad\n0 0 0\tground\n10 60 250\tcar\n"),
        ("annotation-colormap.txt", "0 road 200 0 10\n1 ground 0 0 0\n2 car 10 60 250\n"),
        ("config.json", json.dumps({"labels": [{"readable": "road", "color": [200, 0, 10]},
            {"readable": "ground", "color": [0, 0, 0]}, {"readable": "car", "color": [10, 60, 250]}]})),
    ],
)  # fmt: skip
def test_names_beside_coloured_masks_are_read(file: str, text: str, tmp_path: Path) -> None:
    draw(tmp_path / "d", NAMES, "images/{}.jpg", "masks/{}.png", COLORS)
    (tmp_path / "d" / file).write_text(text)
    config, _, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == ["road", "ground", "car"]
    assert config.data.palette == [(200, 0, 10), (0, 0, 0), (10, 60, 250)]


def test_palettes_are_told_apart_by_their_colours() -> None:
    for palette in PALETTES:
        assert len(palette.names) == len(palette.colors)
        assert recognise(palette.colors, "") is palette, palette.title
    assert recognise(PUBLISHED["voc"].colors[:6], "VOC2012/SegmentationClass/a.png") is PUBLISHED["voc"]
    assert recognise(PUBLISHED["ade20k"].colors[:12], "") is PUBLISHED["ade20k"]
    primary = [(255, 0, 0), (0, 0, 255), (255, 255, 0), (255, 0, 255)]  # ADE20K and SUIM have all four
    assert recognise(primary, "masks/a.png") is None
    assert recognise(primary, "ade20k/SUIM/masks/a.png") is PUBLISHED["suim"]
    assert recognise([(0, 0, 0), (1, 2, 3), (200, 100, 0), (9, 9, 9)], "") is None


def test_a_grey_photograph_is_no_mask(tmp_path: Path) -> None:
    root = tmp_path / "d"
    draw(root, NAMES, "images/{}.jpg", "masks/{}.png", IDS)
    for name in NAMES:
        save(root / "depth" / f"{name}.png", np.random.default_rng(int(name)).integers(0, 255, SIZE, np.uint8))
    config, _, _ = proposed(root, tmp_path / "made.yaml")
    assert config.data.classes == ["class_0", "class_1", "class_2"]


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("classes.txt", "ground\r\nStraße\r\ncar\r\n".encode("cp1252"), "line 2 is not in UTF-8 (byte 0xdf)"),
        ("labels.csv", "id,name\n0,ground\n1,road\n2,café\n".encode("latin-1"), "line 4 is not in UTF-8 (byte 0xe9)"),
        ("obj.names", "ground\nroad\ncar\n".encode("utf-16-le"), "line 1 has a NUL byte"),
        ("id2label.json", '{"0": "ground", "1": "road", "2": "car"}'.encode("utf-16"), "line 1 is in UTF-16"),
    ],
)
def test_class_file_in_another_encoding_is_refused(file: str, content: bytes, problem: str, tmp_path: Path) -> None:
    draw(tmp_path / "d", NAMES, "images/{}.jpg", "masks/{}.png", IDS)
    (tmp_path / "d" / file).write_bytes(content)
    with pytest.raises(DataError) as caught:
        proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert str(caught.value) == f"{file}: {problem}: save the file as UTF-8, or remove it"
    assert not (tmp_path / "made.yaml").exists()


@pytest.mark.parametrize(
    ("file", "text", "names", "said"),
    [
        ("classes.txt", "\ufeffground\r\nStraße\r\ncar\r\n", "ground Straße car", ""),  # a byte order mark
        ("classes.csv", "id,name\n0.0,ground\n1.0,road\n2.0,car\n", "ground road car", ""),
        ("classes.csv", ";id;name\n7;0;ground\n;1;road\n9;2;car\n", "ground road car", ""),
        ("classes.csv", "id,name\n0,ground\n1,\n2,nan\n", "ground class_1 class_2", 'the name of 1 is ""'),
        ("classes.csv", "id,name\n1,ground\n0,sky\n1,road\n0,car\n", None, "not used: 1 is the id of two names"),
        ("classes.csv", "id,name\n0,ground\nx,road\n2,car\n", None, 'the id of entry 1 is "x", not a number'),
        ("classes.csv", "name,r,g,b\nground,0,0,0\nroad,300,0,0\n", None, "the color 300 0 0 is not from 0 to 255"),
        ("id2label.json", '{"0": "ground", "1": null, "2": "car"}', "ground class_1 car", "the name of 1 is null"),
        ("classes.json", '["ground", null, "car"]', "ground class_1 car", "the name of 1 is null"),
    ],
)
def test_odd_class_file_is_read_or_said(file: str, text: str, names: str | None, said: str, tmp_path: Path) -> None:
    draw(tmp_path / "d", NAMES, "images/{}.jpg", "masks/{}.png", IDS)
    (tmp_path / "d" / file).write_bytes(text.encode())
    config, result, _ = proposed(tmp_path / "d", tmp_path / "made.yaml")
    assert config.data.classes == (names or "class_0 class_1 class_2").split()
    assert any(file in line and said in line for line in result.lines)
