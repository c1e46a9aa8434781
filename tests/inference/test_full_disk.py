"""Files of predictions on a disk of k blocks: each is whole, or it is not there and the error names it."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from segapp.datasets.images import raster
from segapp.datasets.images.pixel_format import RGB8
from segapp.datasets.images.tiff_tags import has_rasterio
from segapp.datasets.layouts.schemes import ClassScheme
from segapp.errors import StorageError
from segapp.inference.predict import outputs
from segapp.inference.predict.outputs import OutputPlan
from segapp.inference.predict.pipeline import predict_files
from segapp.inference.predict.polygons import PolygonFormat, PolygonPlan
from segapp.inference.predict.reading import SAVED, Saved, find_images
from segapp.inference.workspace import Workspace
from tests.support import ROOT
from tests.support.disk import BLOCK_BYTES, disk_of
from tests.support.programs import segapp, start
from tests.support.runs import merged, train

SCHEME = ClassScheme(("dark", "red", "bright"), ((10, 20, 30), (200, 0, 0), (0, 0, 250)), {4: 0, 9: 1, 7: 2})
SIZE_PX = {"raster": (187, 311), "polygons": (31, 53)}


class Noisy:
    """A predictor of noise, which hardly compresses and has many outlines."""

    def __init__(self, scheme: ClassScheme) -> None:
        self.scheme, self.device, self.pixels, self.threshold = scheme, torch.device("cpu"), RGB8, None
        self.needs_whole, self.align_corners, self.capacity_px = False, False, 10**9

    def probabilities(self, images: NDArray[Any]) -> NDArray[np.float32]:
        rng = np.random.default_rng(images.shape[1])
        return rng.dirichlet([1.0, 1.0, 1.0], images.shape[:3]).transpose(0, 3, 1, 2).astype(np.float32)

    def labels(self, images: NDArray[Any]) -> NDArray[Any]:
        found = self.probabilities(images).argmax(1)
        return (found if self.scheme.multilabel is None else found + 1).astype(np.uint8)


def write_image(path: Path, size_px: tuple[int, int]) -> Path:
    pixels = np.random.default_rng(1).integers(0, 256, (*size_px, 3), np.uint8)
    if path.suffix == ".png":
        cv2.imwrite(str(path), pixels)
        return path
    import rasterio
    from rasterio.transform import from_origin

    profile = {"driver": "GTiff", "count": 3, "dtype": "uint8", "crs": "EPSG:32632"}
    place = from_origin(500_000, 5_000_000, 0.5, 0.5)
    with rasterio.open(path, "w", height=size_px[0], width=size_px[1], transform=place, **profile) as file:
        file.write(np.moveaxis(pixels, -1, 0))
    return path


KINDS = [*SAVED, "masks of classes", "geojson", "gpkg", "coco"]


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.sampled(3)
@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("kind", KINDS)
def test_prediction_is_whole_or_not_there(
    kind: str, suffix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if not has_rasterio() and (suffix == ".tif" or kind in ("geojson", "gpkg")):
        pytest.skip("rasterio is not installed")
    scheme = replace(SCHEME, multilabel=("dark", "red", "bright")) if kind == "masks of classes" else SCHEME
    polygons = PolygonPlan(cast(PolygonFormat, kind)) if kind in ("geojson", "gpkg", "coco") else None
    size_px = SIZE_PX["raster" if polygons is None else "polygons"]
    files, _ = find_images([write_image(tmp_path / f"scene{suffix}", size_px)])
    kinds = () if polygons else ("labels",) if kind == "masks of classes" else (cast(Saved, kind),)

    def written(out: Path) -> dict[str, bytes]:
        plan = OutputPlan(out, scheme, kinds, polygons=polygons)
        predict_files(cast(Any, Noisy(scheme)), files, plan, workspace=Workspace(30_000))
        return {str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*") if path.is_file()}

    whole = written(tmp_path / "whole")
    needed = max(map(len, whole.values()))
    last = (needed - 1) // BLOCK_BYTES
    for k in sorted(
        {*range(1, min(last, 4)), min(last, 11), last, (needed - 1) / BLOCK_BYTES}
    ):  # the last one lacks one byte
        out = tmp_path / f"{k} blocks"
        with pytest.raises(StorageError) as error, disk_of(int(k * BLOCK_BYTES)):
            written(out)
        named = {str(out / name) for name, content in whole.items() if len(content) > k * BLOCK_BYTES}
        assert any(name in str(error.value) for name in named), (k, str(error.value))
        left = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
        assert left <= {name for name, content in whole.items() if len(content) <= k * BLOCK_BYTES}, k
    said = capfd.readouterr()
    assert "ERROR" not in said.out + said.err, "printed by GDAL"
    with disk_of(needed + (BLOCK_BYTES if kind == "gpkg" else 0)):
        assert written(tmp_path / "enough").keys() == whole.keys()


def test_file_that_lacks_bytes_gets_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file system whose close succeeds although the last block is lost."""
    files, _ = find_images([write_image(tmp_path / "scene.png", SIZE_PX["raster"])])
    plan = OutputPlan(tmp_path / "out", SCHEME, ("overlay",))
    close = outputs._PictureFile.finish

    def lossy(writer: Any) -> None:
        close(writer)
        writer.file.flush()
        with open(writer._temporary, "r+b") as file:
            file.truncate(writer.file.tell() - 1)

    monkeypatch.setattr(outputs._PictureFile, "finish", lossy)
    with pytest.raises(StorageError, match=r"scene.png cannot be written: the file on .* was written: free space or"):
        predict_files(cast(Any, Noisy(SCHEME)), files, plan, workspace=Workspace(10**6))
    assert [path for path in tmp_path.joinpath("out").rglob("*") if path.is_file()] == []


@pytest.mark.skipif(not has_rasterio(), reason="rasterio is not installed")
@pytest.mark.parametrize("place", ["first", "middle", "colors"])
def test_geotiff_is_read_back(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever bytes are lost, as if GDAL had reported no error."""
    files, _ = find_images([write_image(tmp_path / "scene.tif", SIZE_PX["raster"])])
    plan = OutputPlan(tmp_path / "out", SCHEME, ("color",))
    opened = raster.opened

    @contextlib.contextmanager
    def damaged(path: Path, page: int | None = None) -> Iterator[Any]:
        if path.name.startswith(".tmp-"):
            content = bytearray(path.read_bytes())
            at = {"first": 3000, "middle": len(content) // 2, "colors": len(content) - 1}[place]
            content[at - 64 : at] = bytes(64)
            path.write_bytes(content if place != "colors" else content[:-600])
        with opened(path, page) as source:
            yield source

    monkeypatch.setattr(raster, "opened", damaged)
    with pytest.raises(StorageError, match=r"color/scene.tif cannot be written: the file on the disk differs"):
        predict_files(cast(Any, Noisy(SCHEME)), files, plan, workspace=Workspace(30_000))
    assert [path for path in tmp_path.joinpath("out").rglob("*") if path.is_file()] == []


@pytest.mark.sampled(2)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_stopped_prediction_leaves_whole_files(number: signal.Signals, tiny: dict[str, Any], tmp_path: Path) -> None:
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{number.name} is ignored by the program that started the tests, such as nohup")
    write_image(tmp_path / "small.png", (40, 50))
    write_image(tmp_path / "scene.png", (2100, 4200))
    model = {"library": "python", "name": "tests.support.own_parts:Net"}
    assert train(merged({**tiny, "model": model}, train={"steps": 1}), tmp_path / "run") == 0
    out = tmp_path / "out"
    images = (tmp_path / "small.png", tmp_path / "scene.png")
    words = ("predict", "--trust-parts", tmp_path / "run", *images, "--out", out, "--save", "labels,probabilities")
    program = start(*words, cwd=ROOT, logs=tmp_path)
    deadline_s = time.monotonic() + 120
    while (sizes := [path.stat().st_size for path in out.rglob(".tmp-*")]) == [] or max(sizes) < 2**20:
        assert program.returncode is None, program.stderr
        assert time.monotonic() < deadline_s, program.stderr
        time.sleep(0.02)
    program.send(number)
    assert program.wait(60) == (-number if number == signal.SIGKILL else 128 + number)
    assert (f"stopped by {number.name}" in program.stderr) == (number != signal.SIGKILL)
    names = [path.name for path in out.rglob("*") if path.is_file() and not path.name.startswith(".tmp-")]
    assert sorted(names) == ["small.npz", "small.png"]
    assert len([*out.rglob(".tmp-*")]) == (2 if number == signal.SIGKILL else 0)
    if number == signal.SIGKILL:
        done = segapp(*words[:4], *words[5:], cwd=ROOT)
        assert done.returncode == 0, done.stderr
        assert [*out.rglob(".tmp-*")] == []
