"""Prediction at work: tiles, rows written as they come, metadata, GeoTIFFs, huge pictures, threads that fail."""

from __future__ import annotations

import io
import json
import threading
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import cv2
import hypothesis
import numpy as np
import pytest
import tifffile
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from segapp.datasets.images.pixel_format import RGB8, PixelFormat
from segapp.datasets.images.tiff_tags import has_rasterio
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import ConfigError, OutOfMemoryError, StorageError
from segapp.inference.predict.outputs import PROBABILITY_SCALE, OutputPlan, PngWriter
from segapp.inference.predict.pipeline import ahead, predict_files
from segapp.inference.predict.polygons import PolygonPlan
from segapp.inference.predict.predictor import predict_strips
from segapp.inference.predict.reading import SAVED, Saved, find_images, read_picture
from segapp.inference.workspace import MIN_SIDE_PX, Workspace

SCHEME = ClassScheme(("dark", "red", "bright"), ((10, 20, 30), (200, 0, 0), (0, 0, 250)), {4: 0, 9: 1, 7: 2})


class Blur:
    """A predictor whose answer depends on the 5 x 5 pixels around each; holds what it was asked."""

    def __init__(self, capacity_px: int = 10**9, power: int = 1) -> None:
        self.power = power  # of a large one, no class is probable, as with several labels
        self.scheme, self.device = SCHEME, torch.device("cpu")
        self.pixels, self.threshold, self.needs_whole = RGB8, None, False
        self.capacity_px, self.align_corners = capacity_px, False
        self.asked: list[tuple[int, ...]] = []

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        self.asked.append(images.shape)
        if images[..., 0].size > self.capacity_px:
            raise torch.OutOfMemoryError("no room")
        smooth = np.stack([cv2.blur(image, (5, 5)) for image in images]).astype(np.float32)
        scores = torch.from_numpy(smooth.transpose(0, 3, 1, 2) / 25)
        return scores.softmax(1).numpy() ** self.power

    def labels(self, images: np.ndarray) -> np.ndarray:
        return self.probabilities(images).argmax(1).astype(np.uint8)


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 9), max(2, width // 9), 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)


def read(path: Path) -> np.ndarray:
    return np.array(Image.open(path))


@hypothesis.settings(max_examples=25)
@given(st.integers(1, 400), st.integers(1, 500), st.integers(MIN_SIDE_PX**2, 60_000))
def test_tiles_with_enough_margin_equal_the_whole_image(h: int, w: int, max_px: int) -> None:
    image = photo(h, w)
    predictor = Blur()
    strips = list(predict_strips(predictor, image, Workspace(max_px)))
    assert [strip.rows.start for strip in strips] == [0, *(strip.rows.stop for strip in strips[:-1])]
    assert np.array_equal(np.concatenate([strip.labels for strip in strips]), Blur().labels(image[None])[0])
    assert all(n * height * width <= max_px for n, height, width, _ in predictor.asked)


def test_tiles_may_be_smaller_than_what_fits() -> None:
    for height, width, sizes in ((701, 597, 60_000), (401, 498, 401 * 498)):
        predictor, image = Blur(), photo(height, width)
        strips = list(predict_strips(predictor, image, Workspace(200_000, tile_px=60_000)))
        assert np.array_equal(np.concatenate([strip.labels for strip in strips]), Blur().labels(image[None])[0])
        assert 0.5 * sizes < max(rows * columns for _, rows, columns, _ in predictor.asked) <= sizes


def test_blocks_shrunk_to_fit_give_the_same_prediction() -> None:
    """Memory may also become short when some rows are done."""

    class Shrinking(Blur):
        num_at_first = 0

        def probabilities(self, images: np.ndarray) -> np.ndarray:
            self.capacity_px = 10**9 if len(self.asked) < self.num_at_first else 60_000
            return super().probabilities(images)

    image = photo(701, 597)
    for num_at_first in (0, 3):
        predictor, workspace = Shrinking(), Workspace(200_000)
        predictor.num_at_first = num_at_first
        strips = list(predict_strips(predictor, image, workspace))
        assert np.array_equal(np.concatenate([strip.labels for strip in strips]), Blur().labels(image[None])[0])
        assert workspace.max_px <= 60_000
    with pytest.raises(OutOfMemoryError, match="does not fit into memory"):
        list(predict_strips(Blur(capacity_px=100), image, workspace))


@hypothesis.settings(max_examples=40)
@given(st.data())
def test_png_written_in_strips_is_read_back_equal(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    kind = data.draw(st.sampled_from(["grey", "grey16", "rgb", "photo", "palette"]))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    channels = 3 if kind in ("rgb", "photo") else 1
    dtype = np.uint16 if kind == "grey16" else np.uint8
    top = {"grey16": 65_536, "palette": 3}.get(kind, 256)
    shape = (height, width, 3) if channels == 3 else (height, width)
    picture = rng.integers(0, top, shape).astype(dtype)
    file = io.BytesIO()
    palette = SCHEME.palette if kind == "palette" else None
    writer = PngWriter(file, (height, width), dtype=dtype, channels=channels, palette=palette, is_photo=kind == "photo")
    row = 0
    while row < height:
        step = data.draw(st.integers(1, height))
        writer.write(picture[row : row + step])
        row += step
    writer.finish()
    opened = Image.open(io.BytesIO(file.getvalue()))
    opened.verify()
    decoded = cv2.imdecode(np.frombuffer(file.getvalue(), np.uint8), cv2.IMREAD_UNCHANGED)
    if kind == "palette":
        assert np.array_equal(np.array(Image.open(io.BytesIO(file.getvalue()))), picture)
        assert np.array_equal(decoded[..., ::-1], np.array(SCHEME.palette, np.uint8)[picture])
    else:
        assert np.array_equal(decoded[..., ::-1] if channels == 3 else decoded, picture)


def predict(source: Path, out: Path, kinds: Sequence[Saved], predictor: Any = None, **options: Any) -> Any:
    plan = OutputPlan(out, SCHEME, tuple(kinds), label_ids=options.pop("label_ids", False))
    options.setdefault("workspace", Workspace(10**9))
    return predict_files(predictor or Blur(), find_images([source])[0], plan, **options)


def test_output_files_of_tiles_equal_those_of_the_whole_image(tmp_path: Path) -> None:
    image = photo(401, 303)
    cv2.imwrite(str(tmp_path / "big.png"), image[..., ::-1])
    kinds: tuple[Saved, ...] = ("labels", "color", "overlay", "confidence", "probabilities")
    whole = predict(tmp_path / "big.png", tmp_path / "whole", kinds)
    tiles = predict(tmp_path / "big.png", tmp_path / "tiles", kinds, workspace=Workspace(30_000))
    assert (whole.num_images, whole.num_px, whole.notes) == (1, 401 * 303, [])
    assert tiles.notes[0].endswith("predicted in tiles of at most 0.0 Mpx")
    expected = Blur().probabilities(image[None])[0]
    labels = expected.argmax(0)
    color = np.array(SCHEME.palette, np.uint8)[labels]
    for out in (tmp_path / "whole", tmp_path / "tiles"):
        np.testing.assert_array_equal(read(out / "labels" / "big.png"), labels)
        np.testing.assert_array_equal(read(out / "color" / "big.png"), labels)  # an index of the palette
        np.testing.assert_array_equal(np.array(Image.open(out / "color" / "big.png").convert("RGB")), color)
        assert np.abs(read(out / "overlay" / "big.png") - (image.astype(int) + color) / 2).max() <= 1
        np.testing.assert_array_equal(read(out / "confidence" / "big.png"), np.rint(255 * expected.max(0)))
        with np.load(out / "probabilities" / "big.npz") as stored:
            assert stored["probabilities"].dtype == np.uint16
            found = stored["probabilities"] / PROBABILITY_SCALE
            np.testing.assert_allclose(found, expected.transpose(1, 2, 0), atol=0.51 / PROBABILITY_SCALE)
    for name, max_px in (("whole", 10**9), ("tiles", 30_000)):  # without the probabilities, other values are kept
        predict(tmp_path / "big.png", tmp_path / "alone" / name, ["confidence"], workspace=Workspace(max_px))
        found = read(tmp_path / "alone" / name / "confidence" / "big.png")
        np.testing.assert_array_equal(found, np.rint(255 * expected.max(0)))
    predict(tmp_path / "big.png", tmp_path / "ids", ["labels"], workspace=Workspace(30_000), label_ids=True)
    np.testing.assert_array_equal(read(tmp_path / "ids" / "labels" / "big.png"), np.array([4, 9, 7])[labels])
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize(
    ("batch", "workspace_px", "capacity_px", "together"),
    [(1, 10**9, 10**9, 1), (3, 10**9, 10**9, 3), (None, 10**9, 10**9, 1), (3, 1300, 10**9, 2), (3, 10**9, 700, 3)],
    ids=["alone", "three", "default", "two fit", "out of memory"],
)
def test_batch_of_mixed_sizes_gives_each_image_its_prediction(
    batch: int | None, workspace_px: int, capacity_px: int, together: int, tmp_path: Path
) -> None:
    sizes = [(20, 30), (20, 30), (20, 30), (20, 30), (30, 20), (20, 30), (8, 9)]
    (tmp_path / "in").mkdir()
    for number, size in enumerate(sizes):
        cv2.imwrite(str(tmp_path / "in" / f"{number}.png"), photo(*size, seed=number)[..., ::-1])
    predictor, done = Blur(capacity_px), []
    how = {"batch": batch, "workspace": Workspace(workspace_px), "label_ids": True, "progress": done.append}
    kinds: list[Saved] = ["labels"] if together == 1 else ["labels", "confidence"]
    tally = predict(tmp_path / "in", tmp_path / "out", kinds, predictor, **how)
    assert (tally.num_images, done[-1]) == (len(sizes), len(sizes))
    assert max(shape[0] for shape in predictor.asked) == together
    for number, size in enumerate(sizes):
        expected = Blur().probabilities(photo(*size, seed=number)[None])[0]
        by_hand = {"labels": np.array([4, 9, 7])[expected.argmax(0)], "confidence": np.rint(255 * expected.max(0))}
        for kind in kinds:
            np.testing.assert_array_equal(read(tmp_path / "out" / kind / f"{number}.png"), by_hand[kind])


def test_classes_with_similar_names_have_their_own_masks(tmp_path: Path) -> None:
    class Bits(Blur):
        def labels(self, images: np.ndarray) -> np.ndarray:
            return (1 << super().labels(images)).astype(np.uint8)

    scheme = replace(SCHEME, names=("sea ice", "sea_ice_2", "sea_ice"), multilabel="bits")
    predictor, image = Bits(), photo(40, 60)
    predictor.scheme, predictor.threshold = scheme, 0.5
    cv2.imwrite(str(tmp_path / "a.png"), image[..., ::-1])
    plan = OutputPlan(tmp_path, scheme, ("labels",), polygons=PolygonPlan("coco"))
    predict_files(predictor, find_images([tmp_path / "a.png"])[0], plan, workspace=Workspace(10**9))
    expected = Blur().labels(image[None])[0]
    areas = Counter[int]()
    for one in json.loads((tmp_path / "polygons" / "coco.json").read_text())["annotations"]:
        areas[one["category_id"] - 1] += one["area"]
    assert areas == Counter(expected.ravel().tolist())
    for number, folder in enumerate(("sea_ice", "sea_ice_2", "sea_ice_2_2")):
        np.testing.assert_array_equal(read(tmp_path / "labels" / folder / "a.png"), 255 * (expected == number))


def test_exif_is_applied_and_overlay_keeps_colour_profile(tmp_path: Path) -> None:
    upright = photo(40, 60)
    exif = Image.Exif()
    exif[0x0112] = 6  # turned to the right
    turned = Image.fromarray(np.ascontiguousarray(np.rot90(upright)))
    turned.save(tmp_path / "a.png", exif=exif, icc_profile=b"profile of a camera")
    predict(tmp_path / "a.png", tmp_path / "out", ["labels", "overlay"])
    labels, overlay = (
        Image.open(tmp_path / "out" / "labels" / "a.png"),
        Image.open(tmp_path / "out" / "overlay" / "a.png"),
    )
    assert labels.size == overlay.size == (60, 40)
    assert overlay.info["icc_profile"] == b"profile of a camera"
    assert "icc_profile" not in labels.info
    assert np.array_equal(np.array(labels), Blur().labels(upright[None])[0])


def test_unwritable_output_folder_ends_the_prediction(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(8):
        cv2.imwrite(str(tmp_path / "in" / f"{number}.png"), photo(20, 20))
    (tmp_path / "out").write_text("a file is in the way")
    with pytest.raises(StorageError, match="choose another --out"):
        predict(tmp_path / "in", tmp_path / "out", ["labels"])
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("predict")]


def test_results_come_in_order_within_the_queue_limit() -> None:
    begun: list[int] = []
    under_way: list[int] = []

    def call(number: int) -> int:
        begun.append(number)
        return number

    for found in ahead(((3, lambda n=n: call(n)) for n in range(20)), 2, limit=7):
        under_way.append(len(begun) - found - 1)
        assert found == len(under_way) - 1
    assert max(under_way) <= 2
    with pytest.raises(ZeroDivisionError):
        list(ahead([(1, lambda: 1 // 0)], 2))


geo = pytest.mark.skipif(not has_rasterio(), reason="the extra geo is not installed")
PIXELS = PixelFormat((4, 2, 1), "uint16", ((0.0, 4000.0),) * 3)
SCENE = (290, 307)


class Thresholds:
    """A predictor whose class is the number of its first band's thresholds that are passed; holds what it was asked."""

    scheme, pixels, device = SCHEME, PIXELS, torch.device("cpu")
    threshold, align_corners = None, False

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []

    def labels(self, images: NDArray[Any]) -> NDArray[np.uint8]:
        self.asked.append(images.shape)
        assert images.dtype == np.uint16
        return ((images[..., 0] > 1000).astype(np.uint8) + (images[..., 0] > 2500)).astype(np.uint8)


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, NDArray[np.uint16]]:
    rasterio = pytest.importorskip("rasterio")
    path = tmp_path_factory.mktemp("geo") / "scene.tif"
    ramp = 7 * (np.arange(SCENE[0], dtype=np.uint16)[:, None] + np.arange(SCENE[1], dtype=np.uint16))
    image = np.stack([ramp // 2, ramp[::-1], ramp[:, ::-1], ramp])
    where = rasterio.transform.Affine(0.5, 0.1, 500_000.0, 0.1, -0.5, 5_400_000.0)
    profile = {"driver": "GTiff", "height": SCENE[0], "width": SCENE[1], "count": 4, "dtype": "uint16", "tiled": True}
    with rasterio.open(
        path, "w", **profile, crs="EPSG:32632", transform=where, interleave="band", compress="deflate"
    ) as file:
        file.write(image)
    return path, image


@geo
def test_labels_colours_and_overlay_keep_place_and_ids(
    scene: tuple[Path, NDArray[np.uint16]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import rasterio

    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", SCENE[0] * SCENE[1])
    path, image = scene
    predictor = Thresholds()
    plan = OutputPlan(tmp_path, SCHEME, pixels=PIXELS)
    tally = predict_files(predictor, find_images([path])[0], plan, workspace=Workspace(4 * MIN_SIDE_PX**2))
    assert tally.problems == []
    assert tally.notes[-1].startswith(
        "scene: only bands [4, 2, 1] of 4 are used, as the model was trained on uint16 of 3"
    )
    assert max(height * width for _, height, width, _ in predictor.asked) <= 4 * MIN_SIDE_PX**2
    expected = (image[3] > 1000).astype(np.uint8) + (image[3] > 2500)
    with rasterio.open(path) as source:
        for kind in ("labels", "color", "overlay"):
            with rasterio.open(tmp_path / kind / "scene.tif") as written:
                assert (written.crs, written.transform, written.shape) == (source.crs, source.transform, source.shape)
                if kind != "overlay":
                    np.testing.assert_array_equal(written.read(1), expected)
                if kind == "color":
                    assert [written.colormap(1)[i][:3] for i in range(3)] == list(SCHEME.palette)
                if kind == "overlay":
                    assert written.count == 3


@geo
def test_large_scene_is_not_decoded_whole(
    scene: tuple[Path, NDArray[np.uint16]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, image = scene
    found = find_images([path])[0][0]
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", SCENE[0] * SCENE[1])
    monkeypatch.setattr("segapp.datasets.images.windows.read_with_nodata", None)
    picture = read_picture(found, PIXELS)
    assert picture.num_px == SCENE[0] * SCENE[1]
    assert picture.georeference is not None
    np.testing.assert_array_equal(picture.pixels[100:110, 7:9], np.moveaxis(image[[3, 1, 0], 100:110, 7:9], 0, -1))


@geo
@pytest.mark.parametrize(
    ("scheme", "label_ids", "nodata", "in_color"),
    [
        (SCHEME, False, 255, 255),
        (replace(SCHEME, ignore_index=1), False, 255, 255),
        (replace(SCHEME, ignore_index=7), False, 7, 7),
        (replace(SCHEME, ignore_index=4), True, 255, 4),
        (replace(SCHEME, label_map={255: 0, 7: 1, 9: 2}, ignore_index=-1), True, 254, 255),
        (
            replace(SCHEME, names=(*map(str, range(256)),), palette=((1, 2, 3),) * 256, ignore_index=300),
            False,
            300,
            None,
        ),
        (replace(SCHEME, multilabel="bits", ignore_index=-1), False, 254, None),
    ],
)
def test_results_of_geotiffs_declare_nodata(
    scheme: ClassScheme, label_ids: bool, nodata: int, in_color: int | None, scene: tuple[Path, NDArray[np.uint16]],
    tmp_path: Path,
) -> None:  # fmt: skip
    """Three areas without data, of which one is in all bands that are used."""
    import rasterio

    path, image = tmp_path / "s.tif", scene[1][:, 90:190, 110:243].copy()
    image[3, :20] = image[[0, 1], 30:40] = image[:, 50:70, 40:90] = 65535
    with rasterio.open(scene[0]) as source:
        profile = {**source.profile, "height": 100, "width": 133, "nodata": 65535}
    with rasterio.open(path, "w", **profile) as file:
        file.write(image)
    predictor = Thresholds()
    predictor.scheme, predictor.threshold = scheme, None if scheme.multilabel is None else 0.5
    plan = OutputPlan(
        tmp_path / "out", scheme, ("labels", "color", "overlay"), label_ids, PIXELS, PolygonPlan("geojson")
    )
    tally = predict_files(predictor, find_images([path])[0], plan, workspace=Workspace(10**9))
    assert tally.notes[-1] == "s: 7.5% of the pixels are nodata, and so in the results"
    hidden = np.zeros((100, 133), bool)
    hidden[50:70, 40:90] = True
    first = np.where(image[3] == 65535, 2000, image[3])  # the mean in the middle of the range
    labels = (first > 1000).astype(int) + (first > 2500)
    found = {}
    for file in sorted((tmp_path / "out").rglob("*.tif")):
        with rasterio.open(file) as written:
            found[file.relative_to(tmp_path / "out").as_posix()] = written.nodata, written.read()
    for number, name in enumerate(scheme.names[:3]):
        if scheme.multilabel is not None:
            expected, at = np.where(labels >> number & 1, 255, 0), f"labels/{name}/s.tif"
        else:
            expected, at = np.array(scheme.file_ids)[labels] if label_ids else labels, "labels/s.tif"
        assert found[at][0] == nodata
        np.testing.assert_array_equal(found[at][1][0], np.where(hidden, nodata, expected))
    for kind, own in ("overlay", None), ("color", in_color):
        assert found[f"{kind}/s.tif"][0] == own
        assert (found[f"{kind}/s.tif"][1][:, hidden] == (own or 0)).all()
    shapes = json.loads((tmp_path / "out" / "polygons" / "s.geojson").read_text())["features"]
    sizes = Counter[int]()
    for one in shapes:
        sizes[one["properties"]["class_id"]] += one["properties"]["area_px"]
    by_hand = [(labels >> c & 1 if scheme.multilabel else labels == c)[~hidden].sum() for c in range(3)]
    assert sizes == {c: n for c, n in enumerate(by_hand) if n and "background" not in scheme.names[c]}


@geo
@pytest.mark.parametrize(("power", "nodata"), [(1, 0), (40, 0), (40, None)])
def test_confidence_without_data_is_0_and_other_is_not(power: int, nodata: int | None, tmp_path: Path) -> None:
    """An 8-bit TIFF without a place, in tiles; a pixel that is black in one band has data."""
    import rasterio

    image = photo(160, 140).clip(1)
    image[40:90, 30:100], image[:20, :, 0] = 0, 0
    profile = {"driver": "GTiff", "height": 160, "width": 140, "count": 3, "dtype": "uint8", "photometric": "rgb"}
    with (
        pytest.warns(rasterio.errors.NotGeoreferencedWarning),
        rasterio.open(tmp_path / "s.tif", "w", **profile, nodata=nodata) as file,
    ):
        file.write(np.moveaxis(image, -1, 0))
    plan = OutputPlan(tmp_path, SCHEME, ("confidence", "probabilities"), polygons=PolygonPlan("coco"))
    predictor = Blur(power=power)
    tally = predict_files(predictor, find_images([tmp_path / "s.tif"])[0], plan, workspace=Workspace(MIN_SIDE_PX**2))
    said = "s: 15.6% of the pixels are nodata, and so in the results"
    assert (said in tally.notes) == (nodata is not None)
    hidden = np.zeros((160, 140), bool)
    hidden[40:90, 30:100] = nodata is not None
    filled = np.where(hidden[..., None], 128, image).astype(np.uint8)
    expected = predictor.probabilities(filled[None])[0]
    with rasterio.open(tmp_path / "confidence" / ("s.png" if nodata is None else "s.tif")) as written:
        assert written.nodata == nodata
        by_hand = np.rint(expected.max(0) * 255)
        assert ((by_hand == 0) & ~hidden).any() == (power == 40)
        by_hand = by_hand if nodata is None else by_hand.clip(1)
        np.testing.assert_array_equal(written.read(1), np.where(hidden, 0, by_hand))
    stored = np.load(tmp_path / "probabilities" / "s.npz")["probabilities"]
    np.testing.assert_array_equal(stored, np.where(hidden[..., None], 0, np.rint(np.moveaxis(expected, 0, -1) * 65535)))
    areas = Counter[int]()
    for one in json.loads((tmp_path / "polygons" / "coco.json").read_text())["annotations"]:
        areas[one["category_id"] - 1] += one["area"]
    labels = expected.argmax(0)[~hidden]
    assert areas == Counter(labels.tolist())


@geo
@pytest.mark.parametrize("large_px", [10**9, 1], ids=["in memory", "in windows"])
def test_tiffs_of_one_size_share_a_batch(large_px: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("segapp.datasets.images.tiff_tags.LARGE_PX", large_px)
    (tmp_path / "in").mkdir()
    for number in range(3):
        tifffile.imwrite(tmp_path / "in" / f"{number}.tif", photo(20, 30, seed=number), photometric="rgb")
    predictor = Blur()
    assert predict(tmp_path / "in", tmp_path / "out", ["labels"], predictor, batch=2).problems == []
    assert [shape[0] for shape in predictor.asked] == [2, 1]
    for number in range(3):
        found = read(tmp_path / "out" / "labels" / f"{number}.png")
        assert np.array_equal(found, Blur().labels(photo(20, 30, seed=number)[None])[0])


@geo
def test_nodata_of_a_turned_tiff_is_in_its_results(tmp_path: Path) -> None:
    image = photo(40, 60).clip(1)
    image[5:20, 30:50] = 0
    tags = [(274, "H", 1, 6, True), (42113, "s", 0, "0", True)]  # to be turned clockwise; 0 is nodata
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", extratags=tags)
    predict(tmp_path / "a.tif", tmp_path, ["labels"])
    hidden = np.rot90(image, -1).max(-1) == 0
    expected = Blur().labels(np.where(hidden[..., None], 128, np.rot90(image, -1)).astype(np.uint8)[None])[0]
    np.testing.assert_array_equal(read(tmp_path / "labels" / "a.tif"), np.where(hidden, 255, expected))


@geo
def test_place_that_results_cannot_tell_is_said(tmp_path: Path) -> None:
    """Before the work if GeoJSON cannot name a coordinate system, else as notes."""
    import rasterio
    from rasterio.control import GroundControlPoint

    own = rasterio.crs.CRS.from_proj4("+proj=laea +lat_0=12.3 +lon_0=45.6 +ellps=WGS84")
    points = [GroundControlPoint(y, x, 10.0 + x, 50.0 - y) for y, x in ((0, 0), (0, 30), (40, 0))]
    place = rasterio.transform.from_origin(0, 0, 2, 2)
    options = {"plain": {}, "points": {"gcps": points, "crs": "EPSG:4326"}}
    options |= {name: {"crs": own, "transform": place} for name in ("own a", "own b")}
    options["utm"] = {"crs": "EPSG:32632", "transform": place}
    for name, where in options.items():
        profile = {"driver": "GTiff", "height": 45, "width": 37, "count": 3, "dtype": "uint8"}
        with rasterio.open(tmp_path / f"{name}.tif", "w", **profile, **where) as file:
            file.write(np.moveaxis(photo(45, 37), -1, 0))
    predictor = Blur()
    plan = OutputPlan(tmp_path / "out", SCHEME, (), polygons=PolygonPlan("geojson"))
    with pytest.raises(ConfigError, match=r"^own a, own b: the coordinate system has no EPSG code.* --polygons gpkg"):
        predict_files(predictor, find_images([tmp_path])[0], plan, workspace=Workspace(10**6))
    assert (predictor.asked, (tmp_path / "out").exists()) == ([], False)
    plan = replace(plan, polygons=PolygonPlan("gpkg"))
    notes = predict_files(predictor, find_images([tmp_path])[0], plan, workspace=Workspace(10**6)).notes
    assert notes == [
        "plain, points: without a georeference, polygons are in columns and rows of pixels",
        "points: control points are not copied to the results: gdalwarp makes an image with a transform",
    ]


@pytest.mark.sampled(5)  # of the 20 cases, each kind of a file stays, with both numbers of classes and both sizes
@pytest.mark.parametrize("size", [(2100, 500), (500, 2100)], ids=["high", "wide"])
@pytest.mark.parametrize("num_classes", [3, 20])
@pytest.mark.parametrize("kinds", [["labels"], ["overlay"], ["confidence"], ["probabilities"], [*SAVED]], ids="+".join)
def test_memory_beside_a_picture_is_bounded(
    kinds: list[Saved], num_classes: int, size: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants, whatever the width, the classes and the files: docs/tasks/plan.md."""
    constants = {"predictor.STRIP_BYTES": 2**20, "outputs.WRITTEN_PX": 2**15, "pipeline.MAX_WAITING_BYTES": 2**20}
    for name, value in constants.items():
        monkeypatch.setattr(f"segapp.inference.predict.{name}", value)
    names = tuple(f"class {number}" for number in range(num_classes))
    colors = tuple((number, 2 * number, 3 * number) for number in range(num_classes))

    class Many(Blur):
        def probabilities(self, images: np.ndarray) -> np.ndarray:
            few = super().probabilities(images)
            return np.concatenate([few, np.zeros((len(few), num_classes - 3, *few.shape[2:]), np.float32)], axis=1)

    predictor = Many()
    predictor.align_corners = True
    predictor.scheme = ClassScheme(names, colors, {number: number for number in range(num_classes)})
    cv2.imwrite(str(tmp_path / "a.png"), photo(*size))
    plan = OutputPlan(tmp_path / "out", predictor.scheme, tuple(kinds))
    tracemalloc.start()
    files, workspace = find_images([tmp_path / "a.png"])[0], Workspace(MIN_SIDE_PX**2)
    tally = predict_files(cast(Any, predictor), files, plan, workspace=workspace)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "Mpx, whose borders may show" in tally.notes[0]
    tile_bytes = MIN_SIDE_PX**2 * (2 * 4 * num_classes + 60)  # what the predictor itself makes
    kept = num_classes if "probabilities" in kinds else 1 if "confidence" in kinds else 0
    strip_bytes = max(MIN_SIDE_PX * size[1] * (4 * kept + 1), 2**20)  # tiles cannot be lower
    written_bytes = max(30 * 2**15, 16 * size[1] * num_classes * 12 if "probabilities" in kinds else 0)
    for strip in predict_strips(cast(Any, predictor), photo(*size), Workspace(330**2), wanted=plan.wanted):
        assert strip.num_bytes - strip.labels.nbytes <= max(2**20, MIN_SIDE_PX * size[1] * 4 * kept)
    num_px = size[0] * size[1]
    assert peak_bytes < max(6 * num_px, 3 * num_px + tile_bytes + strip_bytes + written_bytes) + 2 * 2**20
