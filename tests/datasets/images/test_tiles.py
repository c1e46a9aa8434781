"""Tiles that touch by their georeferences: by hand, and kept on one side of a division."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

rasterio = pytest.importorskip("rasterio", reason="the extra geo is not installed")

from rasterio.transform import Affine  # noqa: E402

from segapp.commands.check import check_data  # noqa: E402
from segapp.datasets.images.tiles import Tiles  # noqa: E402
from segapp.onboarding.division import Division, TilesOf, divided  # noqa: E402
from segapp.onboarding.layout import Pair  # noqa: E402
from tests.support.drawn_folders import proposed  # noqa: E402

HERE = Affine(10, 0, 500_000, 0, -10, 5_000_000)
SIZE = (37, 53)  # rows and columns


def write(path: Path, grid: Affine | None, size: tuple[int, int] = SIZE, crs: str | None = "EPSG:32632") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = {"driver": "GTiff", "height": size[0], "width": size[1], "count": 1, "dtype": "uint8"}
    with rasterio.open(path, "w", **kind, **({} if grid is None else {"transform": grid, "crs": crs})) as file:
        file.write(np.arange(size[0] * size[1], dtype=np.uint32).reshape(1, *size).astype(np.uint8) % 3)
    return path


def moved(columns: float, rows: float) -> Affine:
    return HERE @ Affine.translation(columns, rows)


@pytest.mark.parametrize(
    ("grid", "others", "touches"),
    [
        (moved(53, 0), {}, True),
        (moved(54, 0), {}, True),  # a gap of one pixel
        (moved(55, 0), {}, False),
        (moved(0, -38), {}, True),
        (moved(0, -39), {}, False),
        (moved(53, 37), {}, True),  # a corner
        (moved(55, 37), {}, False),
        (moved(20, -7), {"size": (7, 9)}, True),  # smaller, on the upper side
        (moved(20, -9.6), {"size": (7, 9)}, False),
        (moved(53, 5) @ Affine.scale(2), {"size": (11, 13)}, True),
        (moved(53, 74) @ Affine.scale(1, -1), {}, True),  # south-up: rows 37 to 74
        (moved(53, 76) @ Affine.scale(1, -1), {}, False),
        (moved(53, 37) @ Affine.rotation(45), {}, True),
        (moved(53, -20) @ Affine.rotation(45), {}, True),
        (moved(62, 29) @ Affine.rotation(45), {}, True),  # its side is 0.7 pixels from a corner
        (moved(65, 30) @ Affine.rotation(45), {}, False),  # 3.5 pixels, where bounding boxes overlap
        (moved(0, 0), {}, True),  # the same place
        (moved(53, 0), {"crs": "EPSG:32633"}, False),  # far away
        (moved(53, 0), {"crs": None}, False),  # unknown
        (None, {}, False),
    ],
)
def test_two_tiles_touch(grid: Affine | None, others: dict[str, Any], touches: bool, tmp_path: Path) -> None:
    paths = [tmp_path / "none.png", write(tmp_path / "a.tif", HERE), write(tmp_path / "b.tif", grid, **others)]
    for listed in (paths, paths[::-1]):
        tiles = Tiles.of(listed)
        groups = [path.stem for path in listed]
        assert tiles.joined(groups) == ([{"b": "a"}.get(one, one) if touches else one for one in groups], 2 * touches)
        assert {groups[each] for each in tiles.across(groups)} == ({"a", "b"} if touches else set())


def test_tiles_of_two_coordinate_systems_touch(tmp_path: Path) -> None:
    (x,), (y,) = rasterio.warp.transform("EPSG:32632", "EPSG:32633", [500_000 + 530], [5_000_000 - 100])
    for shift, touches in (
        (5, True),
        (-5, True),
        (40, False),
    ):  # to the right of the upper right corner, turned by 4 degrees
        paths = [
            write(tmp_path / "a.tif", HERE),
            write(
                tmp_path / "b.tif", Affine(10, 0, x + 10 * shift - (45 if touches else 0), 0, -10, y), crs="EPSG:32633"
            ),
        ]
        assert Tiles.of(paths).across("ab") == ({0, 1} if touches else set()), shift


def scene(rows: int, columns: int, left: float, top: float = 0, turn: float = 0) -> np.ndarray:
    """Return the corners of the tiles of a scene, row by row."""
    corner = [(0, 0), (1, 0), (1, 1), (0, 1)]
    tiles = np.array([np.add(corner, (column, row)) for row in range(rows) for column in range(columns)], float)
    cos, sin = np.cos(turn), np.sin(turn)
    return np.array(tiles * 640 @ np.array([[cos, sin], [-sin, cos]]) + (left, top))


def tiles_of(corners: np.ndarray, names: list[str]) -> TilesOf:
    def found(pairs: Sequence[Pair]) -> Tiles:
        return Tiles(corners[[names.index(pair.image) for pair in pairs]], np.full((len(pairs), 2), 64.0))

    return found


def division(corners: np.ndarray, names: list[str], seed: int, folds: int | None = None) -> Division:
    return divided([Pair(name, name) for name in names], None, None, folds, seed, tiles_of(corners, names))


def sides_of(found: Division, names: list[str]) -> list[str]:
    val = {pair.image for pair in found.val}
    assert val.isdisjoint(pair.image for pair in found.train)
    assert len(found.train) + len(found.val) == len(names)
    return ["val" if name in val else "train" for name in names]


@pytest.mark.parametrize("seed", range(6))
def test_scenes_stay_on_one_side(seed: int) -> None:
    scenes = [scene(2, 3, 0), scene(1, 2, 9000), scene(3, 1, 0, 9000, 0.6), scene(2, 1, 20_000), scene(1, 1, 30_000)]
    numbers = [number for number, own in enumerate(scenes) for _ in own]
    mixed = np.random.default_rng(seed).permutation(len(numbers))
    names = [f"{place:03}.tif" for place in range(len(numbers))]
    found = division(np.concatenate(scenes)[mixed], names, seed)
    sides = sides_of(found, names)
    by_scene = {
        number: {side for side, at in zip(sides, mixed, strict=True) if numbers[at] == number} for number in numbers
    }
    assert all(len(own) == 1 for own in by_scene.values())
    assert 1 <= sides.count("val") <= 5
    assert "tiles: 13 of 14 images touch another one by their georeferences, and stay on one side" in found.lines
    assert not any("warning" in line for line in found.lines)
    folds = division(np.concatenate(scenes)[mixed], names, seed, folds=3)
    of_fold = {pair.image: key for key, pairs in folds.lists.items() if "val" in key for pair in pairs}
    assert len({(of_fold[name], numbers[at]) for name, at in zip(names, mixed, strict=True)}) == len(scenes)


@pytest.mark.parametrize(
    ("rows", "columns", "turn", "names", "axis"),
    [
        (3, 5, 0, "{row}{column}.tif", 1),
        (5, 3, 0, "{row}{column}.tif", 0),
        (3, 5, 0.3, "{row}{column}.tif", 1),  # rotated
        (3, 5, 0, "town{column}_{row}.tif", 1),  # their groups are columns
        (1, 6, 0, "{column}.tif", 1),
    ],
)
def test_one_scene_is_cut_into_contiguous_parts(rows: int, columns: int, turn: float, names: str, axis: int) -> None:
    """At the other end with an odd seed; the groups of names stay whole."""
    corners, last = scene(rows, columns, 100, turn=turn), (rows - 1, columns - 1)[axis]
    places = [divmod(number, columns) for number in range(len(corners))]
    listed = [names.format(row=row, column=column) for row, column in places]
    across = min(rows, columns)
    for seed in (0, 1, 2):
        found = division(corners, listed, seed)
        expected = [place[axis] == (last if seed == 1 else 0) for place in places]
        assert [side == "val" for side in sides_of(found, listed)] == expected
        assert any(f"{len(corners)} images are one scene, which is cut into contiguous" in line for line in found.lines)
        assert any(f"{across} of {across} images of val touch one of train" in line for line in found.lines)


def test_folds_say_how_many_touch_in_all_of_them() -> None:
    """Columns 0 1, 2 3 4 and 5 of a row are the folds of a scene; the other scene, of one tile, touches nothing."""
    corners = np.concatenate([scene(1, 6, 0), scene(1, 1, 9000)])
    found = division(corners, [f"{number}.tif" for number in range(7)], 0, folds=3)
    (said,) = (line for line in found.lines if "warning" in line)
    assert said.startswith("warning: 4 of 7 images touch one of another fold by their georeferences: ")


def test_given_splits_and_groups_say_how_many_touch() -> None:
    corners, names = scene(4, 4, 0), [f"{number}.tif" for number in range(16)]
    places = tiles_of(corners, names)
    splits = [*["val"] * 6, "test", *["train"] * 9]  # a test image next to it does not count
    pairs = [Pair(name, name, split) for name, split in zip(names, splits, strict=True)]
    found = divided(pairs, None, None, None, 0, places)
    assert any("warning: 4 of 6 images of val touch one of train by" in line for line in found.lines)
    loose = [Pair(name, name) for name in names]
    by_user = divided(loose, None, ".+", None, 0, places)
    assert len(by_user.val) == 3
    assert any("of 3 images of val touch one of train by" in line for line in by_user.lines)


def test_init_divides_by_files_and_check_says_it_of_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tiles of three scenes, numbered across them: 0 3 6 9, 1 4 7 and 2 5."""
    grids = {number: moved(53 * (number // 3), 500 * (number % 3)) for number in (0, 1, 2, 3, 4, 5, 6, 7, 9)}
    for number, grid in grids.items():
        for role in ("images", "masks"):
            write(tmp_path / "loose" / role / f"{number:04}.tif", grid)
            write(tmp_path / "given" / role / ("val" if number in (2, 3, 7, 9) else "train") / f"{number:04}.tif", grid)
    config, result, names = proposed(tmp_path / "loose", tmp_path / "loose.yaml")
    scenes = {side: {int(name[:4]) % 3 for name in own} for side, own in names.items()}
    assert scenes["train"].isdisjoint(scenes["val"])
    assert any(line.startswith("tiles: 9 of 9 images touch") for line in result.lines)
    given, result, _ = proposed(tmp_path / "given", tmp_path / "given.yaml")
    said = "4 of 4 images of val touch one of train by their georeferences"
    assert any(said in line for line in result.lines)
    for own, expected in ((given, [said]), (config, [])):
        check_data(own, as_json=True)
        found = json.loads(capsys.readouterr().out)["findings"]
        messages = [one["message"] for one in found if one["kind"] == "group"]
        assert len(messages) == len(expected)
        assert all(words in message for words, message in zip(expected, messages, strict=True))
