"""Prediction: sizes and names kept, label ids, pictures, unreadable files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from segapp.datasets.layouts.formats import class_scheme
from segapp.errors import DataError
from segapp.inference.predict.outputs import colorize, label_id_table
from segapp.inference.predict.reading import find_images
from tests.support.runs import merged, segapp, train


@pytest.fixture(scope="module")
def trained(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("predict")
    config = merged(
        {
            "name": "tiny",
            "data": {"format": "folder", "root": str(tiny_root), "classes": ["ground", "box", "disc"], "workers": 0},
            "model": {"name": "lraspp", "encoder": "mobilenet_v3_small"},
            "train": {"epochs": 1, "batch_size": 2},
            "log": {"tensorboard": False},
        },
        data={"crop_px": [32, 32]},
    )
    assert train(config, folder / "run") == 0
    return folder


def test_predict_keeps_names_and_goes_on_after_a_damaged_file(trained: Path) -> None:
    source = trained / "photos"
    (source / "deep").mkdir(parents=True)
    sizes = {"a": (37, 53), "deep/b": (64, 48), "c": (20, 90)}
    for name, (height, width) in sizes.items():
        cv2.imwrite(str(source / f"{name}.png"), np.full((height, width, 3), 90, np.uint8))
    (source / "broken.jpg").write_bytes(b"\xff\xd8 this is no picture")
    result = segapp("predict", "run", source, "--out", "out", cwd=trained)
    assert result.returncode == 3
    assert "broken.jpg" in result.stderr
    assert "Traceback" not in result.stderr
    for name, size in sizes.items():
        labels = cv2.imread(str(trained / "out" / "labels" / f"{name}.png"), cv2.IMREAD_UNCHANGED)
        assert labels.shape == size
        assert labels.max() < 3
        for kind in ("color", "overlay"):
            assert cv2.imread(str(trained / "out" / kind / f"{name}.png")).shape == (*size, 3)
    color = cv2.imread(str(trained / "out" / "color" / "a.png"))[..., ::-1]
    labels = cv2.imread(str(trained / "out" / "labels" / "a.png"), cv2.IMREAD_UNCHANGED)
    scheme = class_scheme("folder", classes=["ground", "box", "disc"])
    assert np.array_equal(color, np.array(scheme.palette, np.uint8)[labels])
    image = np.full((37, 53, 3), 90, np.uint8)
    overlay = cv2.imread(str(trained / "out" / "overlay" / "a.png"))[..., ::-1]
    assert np.abs(overlay.astype(int) - (image.astype(int) + color.astype(int)) / 2).max() <= 1


def test_glob_keeps_folders_after_its_first_wildcard(tmp_path: Path) -> None:
    for name in ("in/a/x.png", "in/b/x.png", "in/b/deep/y.jpg", "in/b/notes.txt", "in/clip.MP4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert [image.name for image in find_images([tmp_path / "in" / "*" / "x.png"])[0]] == ["a/x", "b/x"]
    everything, notes = find_images([tmp_path / "in" / "**" / "*"])
    assert {image.name for image in everything} == {"a/x", "b/x", "b/deep/y"}
    assert "2 files of other kinds" in notes[0]
    assert "save the frames of videos with ffmpeg -i VIDEO frames/%06d.png" in notes[0]
    with pytest.raises(DataError, match="is a pattern that matches no image"):
        find_images([tmp_path / "*.gif"])


def test_two_images_of_one_stem_get_different_names(tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg", "b.png"):
        (tmp_path / name).write_bytes(b"")
    found = find_images([tmp_path, tmp_path / "b.png"])[0]
    assert sorted(image.name for image in found) == ["a.jpg", "a.png", "b"]
    assert len({image.name for image in found}) == 3


def test_no_matching_image_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no image"):
        find_images([tmp_path])
    with pytest.raises(DataError, match="neither a file nor a folder"):
        find_images([tmp_path / "missing.png"])


def test_label_ids_are_those_of_cityscapes() -> None:
    table = label_id_table(class_scheme("cityscapes"))
    assert table.tolist() == [7, 8, 11, 12, 13, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 31, 32, 33]


def test_colour_outputs_use_the_palette() -> None:
    scheme = class_scheme("cityscapes")
    labels = np.array([[0, 10], [13, 18]], np.uint8)
    assert colorize(labels, scheme).tolist() == [[[128, 64, 128], [70, 130, 180]], [[0, 0, 142], [119, 11, 32]]]


def test_checkpoint_file_predicts_without_its_run(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.pt"
    copy.write_bytes((trained / "run" / "checkpoints" / "best.pt").read_bytes())
    cv2.imwrite(str(tmp_path / "x.png"), np.zeros((40, 40, 3), np.uint8))
    result = segapp(
        *("predict", copy, tmp_path / "x.png", "--out", tmp_path / "out", "--tta", "--slide"),
        *("--save", "labels,probabilities", "--batch", "2"),
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert "1 images of 1 files written" in result.stdout
    assert "images/s" in result.stdout
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["labels", "probabilities"]
    labels = cv2.imread(str(tmp_path / "out" / "labels" / "x.png"), cv2.IMREAD_UNCHANGED)
    with np.load(tmp_path / "out" / "probabilities" / "x.npz") as stored:
        assert stored["classes"].tolist() == ["ground", "box", "disc"]
        assert stored["probabilities"].shape == (40, 40, 3)
        assert np.array_equal(stored["probabilities"].argmax(-1), labels)
        assert np.abs(stored["probabilities"].astype(int).sum(-1) - 65_535).max() <= 2
    assert "is in no manifest" in result.stderr


@pytest.mark.parametrize(("option", "value"), [("--save", "labels,colour"), ("--batch", "0"), ("--batch", "many")])
def test_unknown_predict_option_is_refused(trained: Path, option: str, value: str) -> None:
    result = segapp("predict", "run", ".", "--out", "refused", option, value, cwd=trained)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {option} ")


def test_class_scheme_is_checked_against_the_checkpoint(trained: Path, tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "no.pt").write_bytes(b"PK nonsense")
    result = segapp("eval", tmp_path / "no.pt", cwd=tmp_path)
    assert result.returncode == 4
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr
