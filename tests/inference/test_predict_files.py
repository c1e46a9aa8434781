"""Prediction at work: tiles, rows written as they come, metadata, threads that fail."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import cv2
import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import OutOfMemoryError, StorageError
from segapp.inference.predict.outputs import PROBABILITY_SCALE, OutputPlan, PngWriter
from segapp.inference.predict.pipeline import ahead, predict_files
from segapp.inference.predict.predictor import predict_strips
from segapp.inference.predict.reading import Saved, find_images
from segapp.inference.workspace import MIN_SIDE_PX, Workspace

SCHEME = ClassScheme(("dark", "red", "bright"), ((10, 20, 30), (200, 0, 0), (0, 0, 250)), {4: 0, 9: 1, 7: 2})


class Blur:
    """A predictor whose answer depends on the 5 x 5 pixels around each; holds what it was asked."""

    def __init__(self, capacity_px: int = 10**9) -> None:
        self.scheme, self.device = SCHEME, torch.device("cpu")
        self.pixels, self.threshold = RGB8, None
        self.capacity_px = capacity_px
        self.asked: list[tuple[int, ...]] = []

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        self.asked.append(images.shape)
        if images[..., 0].size > self.capacity_px:
            raise torch.OutOfMemoryError("no room")
        smooth = np.stack([cv2.blur(image, (5, 5)) for image in images]).astype(np.float32)
        scores = torch.from_numpy(smooth.transpose(0, 3, 1, 2) / 25)
        return scores.softmax(1).numpy()

    def labels(self, images: np.ndarray) -> np.ndarray:
        return self.probabilities(images).argmax(1).astype(np.uint8)


def photo(height: int, width: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (max(2, height // 9), max(2, width // 9), 3), dtype=np.uint8)
    return cv2.resize(coarse, (width, height), interpolation=cv2.INTER_LINEAR)


def read(path: Path) -> np.ndarray:
    return np.array(Image.open(path))


@hypothesis.settings(max_examples=40)
@given(st.integers(1, 500), st.integers(1, 500), st.integers(MIN_SIDE_PX**2, 60_000))
def test_tiles_with_enough_margin_equal_the_whole_image(h: int, w: int, max_px: int) -> None:
    image = photo(h, w)
    predictor = Blur()
    strips = list(predict_strips(predictor, image, Workspace(max_px)))
    assert [strip.rows.start for strip in strips] == [0, *(strip.rows.stop for strip in strips[:-1])]
    assert np.array_equal(np.concatenate([strip.labels for strip in strips]), Blur().labels(image[None])[0])
    assert all(n * height * width <= max_px for n, height, width, _ in predictor.asked)


def test_blocks_shrunk_to_fit_give_the_same_prediction() -> None:
    image = photo(700, 600)
    predictor, workspace = Blur(capacity_px=60_000), Workspace(400_000)
    labels = np.concatenate([strip.labels for strip in predict_strips(predictor, image, workspace)])
    assert np.array_equal(labels, Blur().labels(image[None])[0])
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


def test_lines_of_a_large_image_count_its_predicted_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[Any] = []
    said: list[str] = []

    @contextlib.contextmanager
    def lines_while(text: Any) -> Iterator[None]:
        texts.append(text)
        yield
        said.append(text())

    class Watched(Blur):
        def labels(self, images: np.ndarray) -> np.ndarray:
            said.extend(text() for text in texts)
            return super().labels(images)

    monkeypatch.setattr("segapp.inference.predict.pipeline.lines_while", lines_while)
    cv2.imwrite(str(tmp_path / "big.png"), photo(400, 300)[..., ::-1])
    predict(tmp_path / "big.png", tmp_path / "out", ["labels"], Watched(), workspace=Workspace(30_000))
    rows = [int(line.split()[1]) for line in said]
    assert rows[0] == 0 < rows[len(rows) // 2] < rows[-1] == 400
    assert rows == sorted(rows)
    assert said[-1] == "big: 400 of 400 rows are predicted"


@pytest.mark.parametrize("workspace", [Workspace(10**9), Workspace(30_000)])
def test_confidence_is_that_of_the_likeliest_class(tmp_path: Path, workspace: Workspace) -> None:
    image = photo(400, 300)
    cv2.imwrite(str(tmp_path / "big.png"), image[..., ::-1])
    predict(tmp_path / "big.png", tmp_path / "all", ("labels", "confidence"), workspace=workspace)
    predict(tmp_path / "big.png", tmp_path / "ids", ["labels"], workspace=workspace, label_ids=True)
    top = Blur().probabilities(image[None])[0].max(0)
    assert np.array_equal(read(tmp_path / "all" / "confidence" / "big.png"), np.rint(255 * top).astype(np.uint8))
    ids = np.array(SCHEME.file_ids)[read(tmp_path / "all" / "labels" / "big.png")]
    assert np.array_equal(read(tmp_path / "ids" / "labels" / "big.png"), ids)


def test_output_files_of_tiles_equal_those_of_the_whole_image(tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "big.png"), photo(400, 300)[..., ::-1])
    kinds: tuple[Saved, ...] = ("labels", "color", "overlay", "probabilities")
    whole = predict(tmp_path / "big.png", tmp_path / "whole", kinds)
    tiles = predict(tmp_path / "big.png", tmp_path / "tiles", kinds, workspace=Workspace(30_000))
    assert (whole.num_images, whole.num_px, whole.notes) == (1, 120_000, [])
    assert "predicted in tiles" in tiles.notes[0]
    for kind in kinds[:3]:
        assert np.array_equal(read(tmp_path / "whole" / kind / "big.png"), read(tmp_path / "tiles" / kind / "big.png"))
    expected = Blur().probabilities(photo(400, 300)[None])[0].transpose(1, 2, 0)
    for name in ("whole", "tiles"):
        with np.load(tmp_path / name / "probabilities" / "big.npz") as stored:
            assert stored["probabilities"].dtype == np.uint16
            np.testing.assert_allclose(
                stored["probabilities"] / PROBABILITY_SCALE, expected, atol=0.51 / PROBABILITY_SCALE
            )
    assert not list(tmp_path.rglob(".tmp-*"))


@pytest.mark.parametrize("batch", [1, 3, None])
def test_batch_of_mixed_sizes_gives_each_image_its_prediction(tmp_path: Path, batch: int | None) -> None:
    sizes = [(20, 30), (20, 30), (20, 30), (20, 30), (30, 20), (20, 30), (8, 9)]
    (tmp_path / "in").mkdir()
    for number, size in enumerate(sizes):
        cv2.imwrite(str(tmp_path / "in" / f"{number}.png"), photo(*size, seed=number)[..., ::-1])
    predictor, done = Blur(), []
    tally = predict(
        tmp_path / "in", tmp_path / "out", ["labels"], predictor, batch=batch, label_ids=True, progress=done.append
    )
    assert (tally.num_images, done[-1]) == (len(sizes), len(sizes))
    assert max(shape[0] for shape in predictor.asked) == (batch or 1)
    for number, size in enumerate(sizes):
        labels = Blur().labels(photo(*size, seed=number)[None])[0]
        assert np.array_equal(read(tmp_path / "out" / "labels" / f"{number}.png"), np.array([4, 9, 7])[labels])


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
    with pytest.raises(StorageError, match="choose another --out") as error:
        predict(tmp_path / "in", tmp_path / "out", ["labels"])
    assert error.tb  # it holds the frames of the prediction
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


def test_calls_that_are_made_one_by_one_keep_to_the_limit() -> None:
    most, now, lock = 0, 0, threading.Lock()

    def work() -> None:
        nonlocal now
        with lock:
            now -= 4

    def calls() -> Iterator[tuple[int, Callable[[], None]]]:
        nonlocal most, now
        for _ in range(50):
            with lock:
                now += 4
                most = max(most, now)
            yield 4, work

    assert len(list(ahead(calls(), 2, limit=10))) == 50
    assert (now, most <= 12) == (0, True)
