"""Tables of run lengths: training reads the drawing, pixel by pixel; orders, classes, empty rows, several tables."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from segapp.errors import ConfigError
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.layout import OpenQuestionError
from segapp.onboarding.pieces import decode_starts
from tests.support.drawn_folders import draw_image, proposed, seeded, targets_read

TALL, WIDE = (48, 64), (40, 96)


def runs_of(plane: NDArray[np.bool_], order: Literal["C", "F"] = "F", first: int = 1) -> str:
    """Runs of a plane: where its pixels change."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], plane.ravel(order), [0]])))
    return " ".join(f"{start + first} {end - start}" for start, end in zip(edges[::2], edges[1::2], strict=True))


def disk(name: str, size: tuple[int, int] = TALL) -> NDArray[np.bool_]:
    """A disk whose place depends on the name."""
    random = seeded(name)
    y, x = random.integers(14, size[0] - 14), random.integers(14, size[1] - 14)
    rows, columns = np.ogrid[: size[0], : size[1]]
    return np.asarray((rows - y) ** 2 + (columns - x) ** 2 <= random.integers(5, 12) ** 2)


def table(path: Path, head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(",".join(f'"{cell}"' for cell in row) for row in (head, *rows)))


NAMES = [f"{number:04}" for number in range(10)]


@given(st.integers(1, 12), st.integers(1, 12), st.data(), st.sampled_from("CF"), st.sampled_from([0, 1]))
def test_decoded_runs_are_the_plane_that_a_loop_encoded(
    height: int, width: int, data: st.DataObject, order: Any, first: int
) -> None:
    bits = data.draw(st.lists(st.booleans(), min_size=height * width, max_size=height * width))
    plane = np.array(bits).reshape(height, width)
    assert (decode_starts(runs_of(plane, order, first), height, width, first, order) == plane).all()


def test_severstal_rows_are_classes_and_no_row_is_background(tmp_path: Path) -> None:
    root, wanted, rows = tmp_path / "d", {}, []
    for number, name in enumerate(NAMES):
        draw_image(root / "train_images" / f"{name}.jpg", WIDE)
        wanted[name] = np.zeros(WIDE, np.uint8)
        for defect in ([], [3], [1, 4])[number % 3]:
            plane = disk(f"{name}{defect}", WIDE) & (wanted[name] == 0)
            wanted[name][plane] = {1: 1, 3: 2, 4: 3}[defect]
            rows.append(("none", f"{name}.jpg", str(defect), runs_of(plane), f"group {defect}"))
    draw_image(root / "test_images" / "9999.jpg", WIDE)
    table(root / "train.csv", ["mask", "ImageId", "ClassId", "EncodedPixels", "Category"], rows)
    table(root / "sample_submission.csv", ["ImageId", "EncodedPixels", "ClassId"], [("9999.jpg", "1 9", "1")])
    config, result, _ = proposed(root, tmp_path / "made.yaml")
    assert config.data.classes == ["background", "class_1", "class_3", "class_4"]
    read = targets_read(config)
    assert sorted(read) == NAMES
    for name, mask in wanted.items():
        assert (read[name] == mask).all()
    lines = "\n".join(result.lines)
    assert "4 images without a row, such as train_images/0000.jpg, are background" in lines
    assert "pixels are numbered by columns from 1" in lines


def test_run_lengths_of_a_large_image_are_read(tmp_path: Path) -> None:
    limit, size = csv.field_size_limit(), (220, 200)
    planes = {name: disk(name, size) for name in NAMES[:4]}
    planes["0003"] = np.broadcast_to(np.arange(size[0])[:, None] % 2 == 0, size)  # each pixel is a run
    for name in planes:
        draw_image(tmp_path / "d" / "images" / f"{name}.jpg", size)
    rows = [(f"{name}.jpg", "1", runs_of(plane)) for name, plane in planes.items()]
    assert len(rows[3][2]) > limit
    table(tmp_path / "d" / "train.csv", ["ImageId", "ClassId", "EncodedPixels"], rows)
    read = targets_read(proposed(tmp_path / "d", tmp_path / "made.yaml", layout="rle-columns")[0])
    for name, plane in planes.items():
        np.testing.assert_array_equal(read[name], plane)
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize(
    ("head", "order", "ending"),
    [(("img", "rle_mask"), "C", ".jpg"), (("id", "rle_mask"), "F", ""), (("file", "rle"), "C", ".jpg")],
    ids=["Carvana", "TGS", "any image column"],
)
def test_order_of_the_pixels_is_that_of_smooth_shapes(
    head: tuple[str, str], order: Any, ending: str, tmp_path: Path
) -> None:
    root = tmp_path / "d"
    for name in NAMES:
        draw_image(root / "train" / f"{name}.jpg")
    table(root / "train.csv", head, [(f"{name}{ending}", runs_of(disk(name), order)) for name in NAMES])
    config, result, _ = proposed(root, tmp_path / "made.yaml")
    assert config.data.classes == ["background", "object"]
    for name, target in targets_read(config).items():
        assert (target == disk(name)).all()
    assert "times as ragged" in "\n".join(result.lines)


def test_order_that_nothing_tells_is_asked(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for name in NAMES:
        draw_image(root / "images" / f"{name}.png", (48, 48))
    rows = [(f"{name}.png", runs_of(disk(name, (48, 48)), "C", 0)) for name in NAMES]
    rows[0] = (rows[0][0], "0 4 48 4 96 4")
    table(root / "train.csv", ("file", "rle"), rows)
    request = InitRequest(root, tmp_path / "made.yaml")
    with pytest.raises(OpenQuestionError, match="shapes of square images do not tell") as caught:
        propose_config(request)
    assert sorted(caught.value.answers) == ["rle-columns", "rle-rows"]
    config, _, _ = proposed(root, tmp_path / "made.yaml", layout="rle-rows")
    read = targets_read(config)
    assert (read["0005"] == disk("0005", (48, 48))).all()
    assert np.argwhere(read["0000"]).tolist() == [[row, column] for row in range(3) for column in range(4)]


def test_rows_of_an_image_are_united(tmp_path: Path) -> None:
    root, rows = tmp_path / "d", [(f"{NAMES[0]}.jpg", "")]
    for name in [*NAMES, "0010"]:
        draw_image(root / "train_v2" / f"{name}.jpg")
    for name in NAMES[1:]:
        rows += [(f"{name}.jpg", ship and runs_of(disk(f"{name}{ship}"))) for ship in ("", "a", "b")]
    for number, own in enumerate((rows[:9], rows[9:])):  # one ship of an image is in the other table
        table(root / f"train_ship_segmentations_v{number}.csv", ("ImageId", "EncodedPixels"), own)
    config, result, _ = proposed(root, tmp_path / "made.yaml")
    read = targets_read(config)
    assert sorted(read) == NAMES
    assert not read["0000"].any()
    for name in NAMES[1:]:
        assert (read[name] == (disk(f"{name}a") | disk(f"{name}b"))).all()
    assert "1 images without a row, such as train_v2/0010.jpg, are not used" in "\n".join(result.lines)
    assert "10 images in tables of run lengths, such as train_ship_segmentations_v0.csv" in "\n".join(result.lines)


def test_overlapping_classes_are_refused(tmp_path: Path) -> None:
    for name in NAMES:
        draw_image(tmp_path / "d" / "train_images" / f"{name}.jpg")
    shifts = (("Fish", 0), ("Sugar", 3), ("Gravel", 60))
    rows = [(f"{name}.jpg", kind, runs_of(np.roll(disk(name), by, 1))) for name in NAMES for kind, by in shifts]
    table(tmp_path / "d" / "train.csv", ("Image", "Label", "EncodedPixels"), rows)
    with pytest.raises(ConfigError, match="of the labeled pixels belong to several classes: list a mask for each"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


def test_row_that_leaves_its_image_is_named(tmp_path: Path) -> None:
    root = tmp_path / "d"
    for name in NAMES:
        draw_image(root / "images" / f"{name}.jpg")
    rows = [(f"{name}.jpg", runs_of(disk(name))) for name in NAMES]
    rows[3] = (rows[3][0], "3000 500")
    table(root / "t.csv", ("id", "rle"), rows)
    _, result, names = proposed(root, tmp_path / "made.yaml")
    assert "t.csv: image images/0003.jpg: the entry cannot be read (the run 3000 500 leaves" in "\n".join(result.lines)
    assert "0003.jpg" not in names["train"] + names["val"]
