"""Large images in blocks: no pixel is in both splits, margins are kept, every pixel is counted; pixels and places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from segapp.config import load_config
from segapp.datasets.images.raster import Georeference, read_georeference
from segapp.errors import ConfigError, DataError
from segapp.onboarding.convert.blocks import choose_strip, margin_of, plan_cut
from segapp.onboarding.init import InitRequest, propose_config
from segapp.onboarding.survey.questions import OpenQuestionError
from tests.support.drawn_folders import samples_read, seeded


@given(st.integers(20, 300), st.integers(20, 300), st.integers(8, 120), st.data())
def test_blocks_share_no_pixel_and_keep_their_distance(
    height: int, width: int, block: int, data: st.DataObject
) -> None:
    length = max(height, width)
    first = data.draw(st.integers(0, length - 1))
    last = data.draw(st.integers(first + 1, length))
    cut = plan_cut((height, width), (first, last), block)
    owner = np.zeros((height, width), np.uint8)
    for number, windows in enumerate((cut.train, cut.val), start=1):
        for window in windows:
            assert not owner[window].any()
            owner[window] = number
    assert cut.unused_share == pytest.approx((owner == 0).mean())
    lines = owner.any(axis=0) if width > height else owner.any(axis=1)
    split = owner.max(axis=0 if width > height else 1)
    assert (owner == (split if width > height else split[:, None])).all()  # strips run across the whole image
    assert (split[first:last] == 2).all()
    trained = np.flatnonzero(split == 1)
    assert all(place < first - margin_of(block) or place >= last + margin_of(block) for place in trained)
    assert (~lines[np.r_[max(0, first - margin_of(block)) : first, last : min(length, last + margin_of(block))]]).all()
    sides = [side.stop - side.start for window in (*cut.train, *cut.val) for side in window]
    assert max(sides) <= 1.5 * block + 1


def test_strip_holds_each_class_if_that_is_possible() -> None:
    counts = np.zeros((100, 3), np.int64)
    counts[:, 0] = 100
    counts[60:90, 1] = 50  # a class in the right half alone
    counts[[5, 75], 2] = 40
    first, last = choose_strip(counts, 1000, 0.2, 50) or (0, 0)
    assert last - first == 200
    inside, outside = (
        counts[first // 10 : last // 10],
        np.delete(counts, np.s_[first // 10 - 5 : last // 10 + 5], axis=0),
    )
    assert (inside.sum(axis=0) > 0).all()
    assert (outside.sum(axis=0) > 0).all()
    assert choose_strip(counts, 100, 0.5, 60) is None


def scene(height: int, width: int, bands: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """An image of noise and a mask of vertical stripes, each class in many places."""
    top = 255 if dtype == "uint8" else 4000
    image = seeded("scene").integers(0, top, (height, width, bands)).astype(dtype)
    mask = np.broadcast_to(np.arange(width) // 37 % 3, (height, width)).astype(np.uint8)
    return image, mask


@pytest.mark.sampled(2)
@pytest.mark.parametrize("has_georeference", [True, False])
def test_one_geotiff_becomes_blocks_in_place(has_georeference: bool, tmp_path: Path) -> None:
    rasterio = pytest.importorskip("rasterio")
    image, mask = scene(400, 1200, 4, "uint16")
    (tmp_path / "d").mkdir()
    place = rasterio.Affine(0.5, 0, 300_000, 0, -0.5, 5_000_000) if has_georeference else None
    for name, pixels in (("area.tif", np.moveaxis(image, -1, 0)), ("area_mask.tif", mask[None])):
        with rasterio.open(
            tmp_path / "d" / name, "w", driver="GTiff", height=400, width=1200, count=len(pixels), dtype=pixels.dtype,
            crs="EPSG:32633" if has_georeference else None, transform=place,
        ) as file:  # fmt: skip
            file.write(pixels)
    with pytest.raises(OpenQuestionError, match=r"one image with a mask, of 1200 x 400 px.*--blocks 256") as caught:
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml"))
    assert [answer.value for answer in caught.value.answers] == ["256", "128"]
    result = propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", blocks=128))
    config = load_config(result.configs[0])
    assert config.data.bands == (1, 2, 3, 4)
    owner = np.zeros((400, 1200), np.uint8)
    for split, path, pixels, target in samples_read(config):
        row, column = map(int, path.stem.split("-"))
        window = np.s_[row : row + target.shape[0], column : column + target.shape[1]]
        assert (pixels == image[window]).all()
        assert (target == mask[window]).all()
        assert not owner[window].any()
        owner[window] = {"train": 1, "val": 2}[split]
        georeference = read_georeference(path)
        if has_georeference:
            assert isinstance(georeference, Georeference)
            assert georeference.transform == (0.5, 0, 300_000 + 0.5 * column, 0, -0.5, 5_000_000 - 0.5 * row)
        else:
            assert georeference is None
    assert (owner == 2).mean() == pytest.approx(0.2, abs=0.01)
    unused = f"{(owner == 0).mean():.1%} of the pixels are in the margins of 32 px"
    assert unused in "\n".join(result.lines)


@pytest.mark.slow
def test_two_large_pictures_with_coloured_masks_become_blocks(tmp_path: Path) -> None:
    colors = np.array([[0, 0, 0], [255, 0, 0], [0, 128, 255]], np.uint8)
    images = {}
    for name in ("one", "two"):
        image, mask = scene(700, 500, 3, "uint8")
        images[name] = image, mask
        for folder, pixels in (("images", image), ("masks", colors[mask])):
            (tmp_path / "d" / folder).mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(tmp_path / "d" / folder / f"{name}.png")
    result = propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", blocks=100))
    config = load_config(result.configs[0])
    palette = [tuple(color) for color in config.data.palette or []]
    splits = set()
    for split, path, pixels, target in samples_read(config):
        image, mask = images[path.parent.name]
        row, column = map(int, path.stem.split("-"))
        window = np.s_[row : row + target.shape[0], column : column + target.shape[1]]
        assert (pixels == image[window]).all()
        assert [palette[value] for value in target.ravel()] == [tuple(colors[value]) for value in mask[window].ravel()]
        splits.add((path.parent.name, split))
    assert splits == {(name, split) for name in images for split in ("train", "val")}


def test_blocks_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    image, mask = scene(300, 300, 3, "uint8")
    for folder, pixels in (("images", image), ("masks", mask)):
        (tmp_path / "d" / folder).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(tmp_path / "d" / folder / "a.png")
    with pytest.raises(DataError, match=r"300 x 300 px are too few.*--blocks 400"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", blocks=800))
    with pytest.raises(ConfigError, match="at least 64 px"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", blocks=10))
    with pytest.raises(ConfigError, match="--blocks and --folds"):
        propose_config(InitRequest(tmp_path / "d", tmp_path / "made.yaml", blocks=100, folds=3))
