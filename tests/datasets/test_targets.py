"""What the masks of a split teach, against the pixels that were drawn; `check` and a training give one answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segapp.datasets import targets as reading
from segapp.datasets.files import ImagePair
from segapp.datasets.inspection import examine
from segapp.datasets.layouts.formats import class_scheme
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.datasets.targets import absent_note, ignored_note, read_targets
from segapp.errors import DataError

BINARY = class_scheme("folder", classes=["background", "road"])


def write_masks(folder: Path, masks: Sequence[np.ndarray[Any, Any]]) -> list[ImagePair]:
    """Returns pairs of these masks, each with an image of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    pairs = []
    rng = np.random.default_rng(1)
    for number, mask in enumerate(masks):
        image, file = folder / f"{number}.jpg", folder / f"{number}.png"
        cv2.imwrite(str(image), rng.integers(0, 256, (*mask.shape, 3), dtype=np.uint8))
        cv2.imwrite(str(file), mask)
        pairs.append(ImagePair(image, file, str(number)))
    return pairs


def refused(pairs: Sequence[ImagePair], scheme: ClassScheme, *, is_training: bool = True) -> str:
    """Returns the reason of a refusal; it is the error of `check` too."""
    with pytest.raises(DataError) as raised:
        read_targets(pairs, "train", scheme, total_px=1, is_training=is_training)
    splits = {"train": pairs} if is_training else {"other": (), "train": pairs}
    reports = examine(splits, scheme, crop_px=(1, 1))
    (error,) = [each for report in reports for each in report.findings if each.severity == "error"]
    assert (error.kind, error.message) == ("class", str(raised.value))
    assert raised.value.key is not None
    assert raised.value.key in error.message
    return error.message


def test_black_and_white_masks_with_ignored_white_are_refused(tmp_path: Path) -> None:
    pairs = write_masks(tmp_path, [np.array([[0, 0, 0, 255]], np.uint8)] * 3)
    assert refused(pairs, BINARY) == (
        "in the 3 masks of split train only one class has pixels, background; 25.0% of all pixels are ignored: "
        "value 255 (data.ignore_index); if these are road, set data.label_map: {255: 1} and data.ignore_index: -1"
    )
    mended = class_scheme("folder", classes=["background", "road"], label_map={255: 1}, ignore_index=-1)
    targets = read_targets(pairs, "train", mended, total_px=1, is_training=True)
    assert targets.frequencies.pixels == (9, 3)


@pytest.mark.parametrize(
    ("masks", "options", "words"),
    [
        ([[0, 0]], {}, "only one class has pixels, a (value 0), and a model learns nothing from one class"),
        ([[255, 255]], {}, "every pixel is ignored: value 255 (data.ignore_index); check"),
        (
            [[1, 7]],
            {"label_map": {7: 255}},
            "ignored: values 7, 255 (mapped to data.ignore_index = 255); map the values",
        ),
        ([[1, 255]], {}, "such as {255: 0} for a, and set data.ignore_index: -1"),
        ([[3, 4]], {"label_map": {3: 2, 4: 2}}, "only one class has pixels, c (value 3)"),
    ],
)
def test_refusals_name_value_and_key(tmp_path: Path, masks: Any, options: dict[str, Any], words: str) -> None:
    scheme = class_scheme("folder", classes=["a", "b", "c"], **options)
    assert words in refused(write_masks(tmp_path, np.array(masks, np.uint8)[:, None]), scheme)


def test_a_validation_split_may_hold_one_class(tmp_path: Path) -> None:
    pairs = write_masks(tmp_path / "one", [np.array([[0, 255]], np.uint8)])
    targets = read_targets(pairs, "val", BINARY, total_px=1, is_training=False)
    assert absent_note(targets, BINARY) == "class without a pixel in the 1 mask of split val: road"
    ignored = write_masks(tmp_path / "none", [np.array([[255, 255]], np.uint8)])
    assert "every pixel is ignored" in refused(ignored, BINARY, is_training=False)


def test_several_classes_per_pixel_need_one_class_that_differs(tmp_path: Path) -> None:
    one = class_scheme("folder", classes=["cell"], multilabel="bits", ignore_index=255)
    two = class_scheme("folder", classes=["cell", "edge"], multilabel="bits")
    some, full, none = ([np.array([row], np.uint8)] for row in ([0, 1, 1, 255], [1, 1, 1, 255], [0, 0, 255, 255]))
    assert read_targets(write_masks(tmp_path / "a", some), "train", one, total_px=1, is_training=True).valid_px == 3
    assert "every valid pixel is cell" in refused(write_masks(tmp_path / "b", full), one)
    assert "no class has a pixel; 50.0% of all pixels are ignored: value 255 (data.ignore_index)" in refused(
        write_masks(tmp_path / "c", none), one
    )
    edge = write_masks(tmp_path / "d", [np.array([[0, 2]], np.uint8)])
    targets = read_targets(edge, "train", two, total_px=1, is_training=True)
    assert absent_note(targets, two) == "class without a pixel in the 1 mask of split train: cell"


def test_a_large_split_is_read_until_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masks = [np.zeros((1, 4), np.uint8) for _ in range(200)]
    masks[151][0, 0] = 1
    pairs = write_masks(tmp_path, masks)
    monkeypatch.setattr(reading, "CHEAP_PX", 40)
    found = read_targets(pairs, "train", BINARY, total_px=800, is_training=True)
    assert 10 < found.num_read <= 200
    assert found.frequencies.pixels[1] == 1
    three = class_scheme("folder", classes=["a", "b", "c"])
    monkeypatch.setattr(reading, "SEARCHED_PX", 400)
    found = read_targets(pairs, "train", three, total_px=800, is_training=True)
    assert 100 < found.num_read < 200
    note = absent_note(found, three)
    assert note is not None
    assert f"the {found.num_read} of 200 masks of split train that were read: " in note
    assert note.endswith("c")
    with_one = write_masks(tmp_path / "all", [np.zeros((1, 4), np.uint8)] * 200)
    with pytest.raises(DataError, match="in the 200 masks of split train only one class has pixels"):
        read_targets(with_one, "train", three, total_px=800, is_training=True)


def test_shades_that_are_ignored_are_named_with_their_share(tmp_path: Path) -> None:
    label_map = {255: 1, **dict.fromkeys(range(1, 61), -1)}
    scheme = class_scheme("folder", classes=["background", "road"], label_map=label_map, ignore_index=-1)
    mask = np.zeros((10, 100), np.uint8)
    mask[:, 50:] = 255
    mask[:, 48:53] = np.arange(50, dtype=np.uint8).reshape(10, 5) + 1
    pairs = write_masks(tmp_path, [mask])
    note = ignored_note(read_targets(pairs, "train", scheme, total_px=1, is_training=True), scheme)
    assert note is not None
    assert note.startswith("5.0% of the pixels of the 1 mask of split train are ignored: values 1, 2, 3, 4, 5, 6, 7, ")
    assert "8 and 52 more (mapped to data.ignore_index = -1)" in note
    assert "without smoothing" in note
    (report,) = examine({"train": pairs}, scheme, crop_px=(1, 1))
    assert report.ignored == note
    assert [(each.severity, each.message) for each in report.findings] == [("warning", note)]


@st.composite
def drawn_sets(draw: st.DrawFn) -> tuple[list[list[int]], list[str], dict[int, int] | None, int]:
    """Pixels of masks, class names, label map and ignore_index; every value has a class or is ignored."""
    num_classes = draw(st.integers(2, 4))
    ignore_index = draw(st.sampled_from([255, -1, 200]))
    mapped = draw(st.lists(st.sampled_from([0, 1, 2, 9, 128, 200, 255]), unique=True, max_size=4))
    targets = st.sampled_from([*range(num_classes), ignore_index])
    label_map = {value: draw(targets) for value in mapped} or None
    own = [*range(num_classes), *([ignore_index] if ignore_index >= 0 else []), *(label_map or {})]
    usable = draw(st.lists(st.sampled_from(sorted(set(own))), min_size=1, max_size=3, unique=True))
    masks = draw(st.lists(st.lists(st.sampled_from(usable), min_size=6, max_size=6), min_size=1, max_size=4))
    return masks, [f"class {number}" for number in range(num_classes)], label_map, ignore_index


@settings(max_examples=60)
@given(drawn_sets())
def test_refusal_alerts_and_shares_follow_from_the_pixels(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[list[list[int]], list[str], dict[int, int] | None, int]
) -> None:
    masks, names, label_map, ignore_index = drawn
    scheme = class_scheme("folder", classes=names, label_map=label_map, ignore_index=ignore_index)
    pairs = write_masks(tmp_path_factory.mktemp("drawn"), [np.array([mask], np.uint8) for mask in masks])
    trained = [(label_map or {}).get(value, value) for mask in masks for value in mask]
    taught = {each for each in trained if each != ignore_index}
    if len(taught) < 2:
        message = refused(pairs, scheme)
        ignored = {value for mask in masks for value in mask if (label_map or {}).get(value, value) == ignore_index}
        assert all(str(value) in message for value in ignored)
        assert not taught or names[min(taught)] in message
        return
    targets = read_targets(pairs, "train", scheme, total_px=1, is_training=True)
    absent = [name for number, name in enumerate(names) if number not in taught]
    note = absent_note(targets, scheme)
    assert ([] if note is None else note.partition(": ")[2].split(", ")) == absent
    num_ignored = trained.count(ignore_index)
    said = ignored_note(targets, scheme)
    assert (said is not None) == (num_ignored > 0.01 * len(trained))
    assert said is None or said.startswith(f"{num_ignored / len(trained):.1%} of the pixels")
    assert targets.frequencies.pixels == tuple(trained.count(number) for number in range(len(names)))
