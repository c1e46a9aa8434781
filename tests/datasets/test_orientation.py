"""Masks on photos with an EXIF orientation: sizes that tell are followed, and what is assumed is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from segapp.assembly.data import build_dataset
from segapp.assembly.pairs import build_scheme
from segapp.commands.check import check_data
from segapp.config import RunConfig, load_config
from segapp.datasets.files import ImagePair, check_pairs, read_header
from segapp.datasets.orientation import Turns, fit_of
from segapp.errors import ConfigError, DataError
from segapp.onboarding.init import InitRequest, propose_config
from tests.support.drawn_folders import exif_of, save, targets_read, with_orientation

SIZE = (33, 46)
NUMBERS = ["0031", "0004", "0017", "0008", "0023", "0012"]


def truth(number: str, size: tuple[int, int] = SIZE) -> np.ndarray[Any, Any]:
    """A mask that no turn and no mirror maps to itself."""
    rng = np.random.default_rng(int(number))
    mask = np.zeros(size, np.uint8)
    mask[3:9, 2 : 20 + int(rng.integers(8))] = 1
    mask[9:28, 2 : 5 + int(rng.integers(3))] = 2
    return mask


def photo(path: Path, mask: np.ndarray[Any, Any], orientation: int) -> None:
    pixels = np.array([[60, 90, 60], [220, 60, 50], [60, 60, 220]], np.uint8)[mask]
    save(path, with_orientation(pixels, orientation), exif=exif_of(orientation), quality=95, subsampling=0)


def folder(root: Path, orientations: list[int], *, drawn: str = "raw", size: tuple[int, int] = SIZE) -> None:
    """Pairs whose masks were drawn on the raw or the upright photo."""
    for number, orientation in zip(NUMBERS, orientations, strict=True):
        mask = truth(number, size)
        photo(root / "images" / f"{number}.jpg", mask, orientation)
        save(root / "masks" / f"{number}.png", with_orientation(mask, orientation if drawn == "raw" else 1))


def proposed(root: Path, **request: Any) -> tuple[RunConfig, str]:
    result = propose_config(InitRequest(root, root.parent / "made.yaml", group=".+", force=True, **request))
    return load_config(result.configs[0]), "\n".join(result.lines)


def findings(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    check_data(config, as_json=True)
    return [one for one in json.loads(capsys.readouterr().out)["findings"] if one["kind"] == "orientation"]


def assert_true(config: RunConfig, size: tuple[int, int] = SIZE) -> None:
    targets = targets_read(config)
    assert targets.keys() == set(NUMBERS)
    for number, target in targets.items():
        np.testing.assert_array_equal(target, truth(number, size), err_msg=number)


def test_masks_of_the_stored_size_are_turned_and_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two photos lie; the mask of a third was drawn on the upright photo, and that of a half-turned one, too."""
    folder(tmp_path / "d", [6, 1, 8, 1, 5, 3])
    for number in ("0023", "0012"):
        save(tmp_path / "d" / "masks" / f"{number}.png", truth(number))
    config, said = proposed(tmp_path / "d")
    assert_true(config)
    assert "sizes agree in 5 of 5 pairs" in said
    assert "2 of 6 photos have the size of their mask or annotation only before their EXIF orientation is" in said
    assert "1 of 6 photos have an EXIF orientation; masks are taken to be drawn on the upright photo" in said
    lying, assumed = (
        [one for one in findings(config, capsys) if ("taken" in one["message"]) is has] for has in (False, True)
    )
    assert [Path(one["image"]).stem for one in assumed] == ["0012"]
    assert sum(int(one["message"].split()[0]) for one in lying) == 2
    for one in lying:
        number = Path(one["image"]).stem
        assert number in {"0031", "0017"}
        assert one["mask"].endswith(f"masks/{number}.png")
        assert f"{number}.jpg: these are read so, and turned upright" in one["message"]
        assert one["severity"] == "warning"
    notes = "\n".join(
        note
        for split in ("train", "val")
        for note in build_dataset(config.data, build_scheme(config.data), split, is_training=False, seed=0).notes
    )
    assert notes.count("only before their EXIF orientation is applied") == len(lying)


@pytest.mark.parametrize(("size", "orientations"), [(SIZE, [3, 1, 2, 4, 1, 3]), ((46, 46), [6, 1, 8, 5, 1, 7])])
def test_turn_that_no_size_tells_is_said_and_can_be_chosen(
    size: tuple[int, int], orientations: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder(tmp_path / "d", orientations, size=size)
    config, said = proposed(tmp_path / "d")
    assert config.data.mask_orientation is None
    assert "4 of 6 photos have an EXIF orientation; masks are taken to be drawn on the upright photo, because" in said
    assert "if one is turned or mirrored, add --mask-orientation raw (data.mask_orientation: raw)" in said
    train = next(one for one in findings(config, capsys) if one["split"] == "train")
    assert "if one is turned or mirrored, set data.mask_orientation: raw" in train["message"]
    assert orientations[NUMBERS.index(Path(train["image"]).stem)] != 1
    assert (targets_read(config)["0031"] != truth("0031", size)).any()
    config, said = proposed(tmp_path / "d", mask_orientation="raw")
    assert config.data.mask_orientation == "raw"
    assert_true(config, size)
    assert "taken to be drawn" not in said
    assert not findings(config, capsys)


def test_sizes_that_tell_outrank_the_chosen_orientation(tmp_path: Path) -> None:
    folder(tmp_path / "d", [6, 8, 1, 5, 7, 1], drawn="upright")
    config, said = proposed(tmp_path / "d", mask_orientation="raw")
    assert_true(config)
    assert "photos have" not in said
    with pytest.raises(ConfigError, match="--mask-orientation sideways: choose upright or raw"):
        proposed(tmp_path / "d", mask_orientation="sideways")


def test_mask_with_its_own_orientation_is_read_upright(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also with the choice raw: its own orientation has turned it already."""
    folder(tmp_path / "d", [3, 1, 1, 6, 1, 1])
    for number, orientation in (("0031", 3), ("0008", 6)):
        stored = with_orientation(truth(number), orientation)
        save(tmp_path / "d" / "masks" / f"{number}.png", stored, exif=exif_of(orientation))
    for choice in (None, "raw"):
        config, said = proposed(tmp_path / "d", mask_orientation=choice)
        assert_true(config)
        assert "photos have" not in said
        assert not findings(config, capsys)


def test_header_check_refuses_sizes_that_fit_neither(tmp_path: Path) -> None:
    """A mask of the raw size passes; one with swapped sides on a photo without an orientation does not."""
    for name, orientation, mask in (("a", 6, truth("0004").T), ("b", 1, truth("0004").T), ("c", 8, np.zeros((46, 34)))):
        photo(tmp_path / f"{name}.jpg", truth("0004"), orientation)
        save(tmp_path / f"{name}.png", np.ascontiguousarray(mask).astype(np.uint8))
    header = read_header(tmp_path / "c.jpg")
    assert (header.size_px, header.raw_px, header.orientation) == (SIZE, SIZE[::-1], 8)
    pairs = [ImagePair(tmp_path / f"{name}.jpg", tmp_path / f"{name}.png", name) for name in "abc"]
    turns = Turns()
    assert check_pairs(pairs[:1], turns=turns) == (SIZE,)
    assert dict(turns.names) == {"raw": [str(tmp_path / "a.jpg")]}
    with pytest.raises(DataError, match=r"b\.png: the mask has 33x46 .* 46x33 \(the EXIF orientation of one is lost\)"):
        check_pairs(pairs[1:2])
    with pytest.raises(
        DataError, match=r"c\.png: the mask has 34x46 pixels, its image .* has 46x33 \(another ratio of"
    ):
        check_pairs(pairs[2:])


def test_size_fits_exactly_before_its_ratio_does(tmp_path: Path) -> None:
    """Of a photo that is nearly square, both sizes have nearly the same ratio."""
    photo(tmp_path / "a.jpg", np.zeros((60, 61), np.uint8), 6)
    image = read_header(tmp_path / "a.jpg")
    sizes = {(60, 61): "upright", (61, 60): "raw", (120, 121): "either", (60, 90): "neither"}
    assert {size: fit_of(image, size, may_scale=True) for size in sizes} == sizes
    Image.new("RGB", (96, 64)).save(tmp_path / "b.png")
    ratios = {(20, 32): "neither", (20, 30): "either", (21, 31): "either", (21, 34): "neither"}
    assert {size: fit_of(read_header(tmp_path / "b.png"), size, may_scale=True) for size in ratios} == ratios
    assert [fit_of(image, size) for size in ((120, 122), (61, 60), None)] == ["neither", "raw", "either"]
