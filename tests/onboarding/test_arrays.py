"""Arrays of images and masks: what training reads equals the arrays, value by value; axes, types, splits, refusals."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
from PIL import Image

from segapp.config import RunConfig
from segapp.errors import DataError
from segapp.onboarding.candidates import find_candidates
from segapp.onboarding.conversion import write_files
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.tree import survey_tree
from tests.support.drawn_folders import draw_image, proposed, samples_read, seeded
from tests.support.hostile_files import PYTHONS_WORDS

NUM, HEIGHT, WIDTH = 10, 40, 56
NAMES = [f"case{number:04}_slice{number % 3:03}" for number in range(NUM)]


def drawn(classes: int = 3, channels: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Images (N, H, W, C) of noise and masks (N, H, W) of stripes."""
    random = seeded(f"{classes}")
    images = random.integers(0, 255, (NUM, HEIGHT, WIDTH, channels), np.uint8)
    masks = (np.arange(WIDTH)[None, None] // 9 + np.arange(NUM)[:, None, None]) % classes
    return images, np.broadcast_to(masks, (NUM, HEIGHT, WIDTH)).astype(np.uint8)


def save(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def made(root: Path, tmp_path: Path, **request: Any) -> tuple[RunConfig, str]:
    config, result, _ = proposed(root, tmp_path / "made.yaml", **request)
    return config, "\n".join(result.lines)


def assert_read(config: RunConfig, images: np.ndarray, masks: np.ndarray) -> None:
    """Every image and target that training reads is that of the same number."""
    numbers = []
    for _, image, pixels, target in samples_read(config):
        number = int("".join(filter(str.isdigit, image.stem.split("_")[0])))
        numbers.append(number)
        assert (target == masks[number]).all()
        wanted = images[number] if images[number].shape[-1] == pixels.shape[-1] else images[number].repeat(3, -1)
        assert (pixels == wanted).all()
        assert pixels.dtype == images.dtype
    assert sorted(numbers) == list(range(len(masks)))


@pytest.mark.parametrize("axes", ["NHWC", "NHW"])
def test_one_array_of_images_and_one_of_masks(axes: str, tmp_path: Path) -> None:
    images, masks = drawn(channels=1 if axes == "NHW" else 3)
    stored = images if axes == "NHWC" else images[..., 0]
    save(tmp_path / "d" / "images.npy", stored)
    save(tmp_path / "d" / "masks.npy", masks[..., None] if axes == "NHWC" else masks)
    config, lines = made(tmp_path / "d", tmp_path)
    assert config.data.classes == ["class_0", "class_1", "class_2"]
    assert_read(config, images, masks)
    assert f"10 images in 2 files, such as images.npy {stored.shape} with masks.npy (10, 40, 56" in lines


def test_floats_keep_their_values_and_get_their_range(tmp_path: Path) -> None:
    _, masks = drawn()
    images = seeded("float").normal(0, 200, (NUM, HEIGHT, WIDTH, 1)).astype(np.float32)
    for number, name in enumerate(NAMES):
        save(tmp_path / "d" / "images" / f"{name}.npy", images[number, ..., 0].astype(np.float64))
        save(tmp_path / "d" / "labels" / f"{name}.npy", masks[number].astype(np.float32))
    config, _ = made(tmp_path / "d", tmp_path)
    assert (config.data.bands, config.data.dtype) == ((1,), "float32")
    assert config.data.value_range is not None
    low, high = config.data.value_range[0]
    assert np.allclose([low, high], np.percentile(images, [0.5, 99.5]), rtol=0.1)
    assert_read(config, images, masks)


def test_splits_in_the_names_of_the_arrays_are_used(tmp_path: Path) -> None:
    images, masks = drawn()
    for name, array in {"x_train": images[:7], "y_train": masks[:7], "x_val": images[7:], "y_val": masks[7:]}.items():
        save(tmp_path / "d" / f"{name}.npy", array)
    config, _ = made(tmp_path / "d", tmp_path)
    read = list(samples_read(config))
    assert [key for key, *_ in read] == ["train"] * 7 + ["val"] * 3
    for number, (_, _, pixels, target) in enumerate(read):
        assert (pixels == images[number]).all()
        assert (target == masks[number]).all()


def test_arrays_and_masks_in_files_of_one_name_are_pairs(tmp_path: Path) -> None:
    images, masks = drawn(classes=2)
    (tmp_path / "d" / "masks").mkdir(parents=True)
    for number, name in enumerate(NAMES):
        save(tmp_path / "d" / "images" / f"{name}.npy", images[number])
        Image.fromarray(masks[number]).save(tmp_path / "d" / "masks" / f"{name}.png")
    config, _ = made(tmp_path / "d", tmp_path)
    assert config.data.classes == ["background", "object"]
    assert_read(config, images, masks)


def test_array_that_is_the_mask_of_a_file_is_refused(tmp_path: Path) -> None:
    draw_image(tmp_path / "d" / "images" / "a.png", (HEIGHT, WIDTH))
    save(tmp_path / "d" / "masks" / "a.npy", drawn()[1][0])
    with pytest.raises(DataError, match="save it with") as refused:
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    advice = re.search(r"save it with (.*)", str(refused.value))
    assert advice is not None
    for mask in (np.array([[0, 3], [np.nan, 1]], np.float32), np.array([[0, 3], [255, 1]], np.int64)):
        exec(advice[1].replace("masks/a.png", str(tmp_path / "a.png")), {"mask": mask, "numpy": np, "PIL": PIL})
        assert PIL.Image.open(tmp_path / "a.png").tobytes() == bytes([0, 3, 255, 1])


@pytest.mark.parametrize(
    ("arrays", "problem"),
    [
        ({"images": np.zeros((4, 32, 32, 3)), "masks": np.zeros((5, 32, 32))}, r"images\.npy \(4, 32, 32, 3\).*agree"),
        ({"x": np.zeros((4, 3, 32, 32)), "y": np.zeros((4, 32, 32))}, r"channels of images last, such as np\.moveaxis"),
        ({"x": np.zeros((4, 32, 32, 3)), "y": np.zeros((4, 32, 32, 3))}, r"y\.npy.*save masks as ids"),
        ({"values": np.zeros((4, 32, 32))}, "npy.*name arrays for their contents"),
    ],
    ids=["axes", "channels first", "a channel for each class", "one array"],
)
def test_arrays_that_cannot_be_read_are_one_clear_error(
    arrays: dict[str, np.ndarray], problem: str, tmp_path: Path
) -> None:
    for name, array in arrays.items():
        save(tmp_path / "d" / f"{name}.npy", array)
    with pytest.raises(DataError, match=problem):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))


def changed(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Returns a function that changes bytes of a file, and keeps the length of its header."""

    def change(path: Path) -> None:
        data = path.read_bytes()
        assert old in data
        path.write_bytes(data.replace(old + b" " * (len(new) - len(old)), new.ljust(len(old)), 1))

    return change


def holding(value: Any, dtype: str = "float64") -> Callable[[Path], object]:
    """Returns a function that puts a value into an array."""

    def change(path: Path) -> None:
        array = np.load(path).astype(dtype)
        array[3, 5] = value
        np.save(path, array)

    return change


ODD_ARRAYS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "cut off": ("images", lambda path: path.write_bytes(path.read_bytes()[:4000]), "it is damaged, cut off"),
    "empty": ("masks", lambda path: path.write_bytes(b""), "it is damaged, cut off"),
    "another format": ("masks", changed(b"NUMPY", b"NUMPI"), "it is damaged, cut off"),
    "another version": ("masks", changed(b"\x01\x00", b"\x09\x00"), "its header is too large"),
    "no literal": ("masks", changed(b"{'descr'", b"['descr'"), "it is damaged, cut off"),
    "no shape": ("masks", changed(b"'shape'", b"'shade'"), "it is damaged, cut off"),
    "a negative shape": ("masks", changed(b"(40, 56), }", b"(-40, 56), }"), "it is damaged, cut off"),
    "a huge shape": ("masks", changed(b"(40, 56), }", b"(40, " + b"9" * 30 + b"), }"), "it is damaged, cut off"),
    "a shape of text": ("masks", changed(b"(40, 56), }", b"('a', 56), }"), "it is damaged, cut off"),
    "an unknown type": ("masks", changed(b"'|u1'", b"'|q9'"), "it is damaged, cut off"),
    "objects": ("masks", lambda path: np.save(path, np.array([{}], object)), "holds Python objects"),
    "no pixels": ("masks", lambda path: np.save(path, np.zeros((0, 56), np.uint8)), r"shape \(0, 56\) of uint8 has no"),
    "one axis": ("images", lambda path: np.save(path, np.zeros(9)), r"shape \(9,\) of float64 has no pixels"),
    "five axes": ("masks", lambda path: np.save(path, np.zeros((1, 1, 1, 2, 2))), "of float64 has no pixels"),
    "complex": ("masks", lambda path: np.save(path, np.zeros((40, 56), complex)), "of complex128 has no pixels"),
    "text": ("masks", lambda path: np.save(path, np.full((40, 56), "car")), "of <U3 has no pixels"),
    "beyond 8 bits": ("masks", holding(300, "int64"), "values from 0 to 300, which are not ids of 0 to 255"),
    "negative": ("masks", holding(-1, "int8"), "values from -1 to 2, which are not ids of 0 to 255"),
    "of 64 bits": ("masks", holding(2**63 + 5, "uint64"), "values from 0 to 9223372036854775813"),
    "a fraction": ("masks", holding(0.5), "the mask holds 0.5, and class ids are whole numbers"),
    "infinite": ("masks", holding(np.inf), "the mask holds inf, and class ids are whole numbers"),
    "huge": ("masks", holding(1e300), "the mask holds 1e\\+300, and class ids are whole"),
}


@pytest.mark.parametrize("case", ODD_ARRAYS)
def test_odd_array_is_named_and_the_others_read(case: str, tmp_path: Path) -> None:
    images, masks = drawn()
    for number, name in enumerate(NAMES[:5]):
        save(tmp_path / "d" / "images" / f"{name}.npy", images[number])
        save(tmp_path / "d" / "masks" / f"{name}.npy", masks[number])
    folder, change, problem = ODD_ARRAYS[case]
    change(path := tmp_path / "d" / folder / f"{NAMES[2]}.npy")
    layout = find_candidates(survey_tree(tmp_path / "d"))[0]
    kept, problems = write_files(layout, tmp_path / "made", tmp_path / "d")
    said = [line for line in (*kept.notes, *problems) if path.name in line]
    assert re.search(problem, " ".join(said)), (kept.notes, problems)
    assert not PYTHONS_WORDS.search(" ".join(said).replace("Python objects", "")), said
    read = {Path(pair.image).stem: np.asarray(Image.open(tmp_path / "made" / pair.mask)) for pair in kept.pairs}
    assert sorted(read) == sorted([*NAMES[:2], *NAMES[3:5]])
    for name, mask in read.items():
        np.testing.assert_array_equal(mask, masks[NAMES.index(name)])


def test_nan_in_an_array_of_masks_is_ignored(tmp_path: Path) -> None:
    images, masks = drawn()
    stored = masks.astype(np.float32)
    stored[1::2, 3, 5:9] = np.nan  # in half of the masks
    wanted = np.where(np.isnan(stored), 255, masks)
    save(tmp_path / "d" / "images.npy", images)
    save(tmp_path / "d" / "masks.npy", stored)
    config, _ = made(tmp_path / "d", tmp_path)
    assert config.data.classes == ["class_0", "class_1", "class_2"]
    assert_read(config, images, wanted)
