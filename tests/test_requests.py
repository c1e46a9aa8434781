"""No command sends a request that the user did not ask for, whatever is in the files that it reads."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
import yaml

from segapp.cli import app
from tests.support import ROOT
from tests.support.fault_runs import finished_run
from tests.support.network import Network, network
from tests.support.programs import segapp

COMMANDS: dict[str, list[str]] = {
    "train": ["train", "--plain", "--resume", "stranger", "train.epochs=2"],
    "launch": ["launch", "--", "train", "--run", "launched", "--config", "config.yaml"],
    "sweep": ["sweep", "seeds", "--config", "config.yaml", "seed=1"],
    "attach": ["attach", "stranger"],
    "ctl": ["ctl", "stranger", "pause"],
    "eval": ["eval", "stranger"],
    "predict": ["predict", "stranger", ".", "--out", "out"],
    "export": ["export", "stranger", "--out", "model.onnx"],
    "check": ["check", "--config", "config.yaml"],
    "doctor": ["doctor"],
    "init": ["init", "maps", "--out", "maps.yaml"],
    "report": ["report", "stranger"],
    "compare": ["compare", "stranger", "stranger"],
    "suspects": ["suspects", "stranger"],
    "ls": ["ls", "."],
    "status": ["status", "stranger"],
    "schema": ["schema"],
    "plan": ["plan", "--config", "config.yaml", "--gpus", "1x4000MiB", "model.weights_backbone=imagenet"],
    "models": ["models", "resnet18"],
    "check-part": ["check-part", "./own_parts.py:BrierLoss", "--as", "loss"],
    "docs": ["docs", "train"],
    "ckpt": ["ckpt", "verify", "stranger"],
}
"""Command -> its words in the folder of `place`."""

FREQUENT = ("train", "predict", "init", "report")

ENDS = {"attach": 2, "ctl": 1, "predict": 3, "init": 3}
"""Exit codes other than 0: no terminal, a run that has ended, files that are refused."""


@pytest.fixture
def seen(tmp_path: Path) -> Iterator[Network]:
    with network(tmp_path / "network") as seen:
        yield seen


def write_map(path: Path) -> None:
    """A GeoTIFF."""
    rasterio = pytest.importorskip("rasterio")
    from rasterio.transform import from_origin

    path.parent.mkdir(parents=True, exist_ok=True)
    profile = {"driver": "GTiff", "width": 40, "height": 30, "count": 3, "dtype": "uint8", "crs": "EPSG:32632"}
    with rasterio.open(path.absolute(), "w", **profile, transform=from_origin(500000, 5000030, 1, 1)) as file:
        file.write(np.random.default_rng(0).integers(0, 255, (3, 30, 40), np.uint8))


def write_hostile_files(folder: Path, address: str) -> None:
    """Images whose content or name is an address."""
    write_map(folder / f"http:{address}?map.tif")
    wide = np.zeros((20, 30, 5), np.float32)
    pytest.importorskip("tifffile").imwrite(folder / f"http:{address}?wide.tif", wide)
    vrt = '<VRTDataset rasterXSize="20" rasterYSize="20"><VRTRasterBand dataType="Byte" band="1"><SimpleSource>'
    vrt += (
        f"<SourceFilename>/vsicurl/http://{address}/a.tif</SourceFilename></SimpleSource></VRTRasterBand></VRTDataset>"
    )
    (folder / "virtual.tif").write_text(vrt)


@pytest.fixture(scope="module")
def stranger(tiny_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run."""
    return finished_run(tmp_path_factory.mktemp("stranger"), tiny_root)


@pytest.fixture
def place(seen: Network, stranger: Path, tiny_root: Path, tmp_path: Path) -> Path:
    """A folder with files of a stranger whose contents and names are addresses of `seen`."""
    place = tmp_path / "place"
    place.mkdir()
    shutil.copytree(stranger, place / "stranger")
    with_trackers(place / "stranger", mlflow=f"http://{seen.address}", wandb="stranger")
    shutil.copyfile(stranger / "../config.yaml", place / "config.yaml")
    write_hostile_files(place, seen.address)
    write_map(place / "maps" / "a.tif")
    shutil.copyfile(ROOT / "segapp/docs/examples/own_parts.py", place / "own_parts.py")
    return place


def with_trackers(run: Path, **trackers: str) -> None:
    """Writes trackers into the config of a run."""
    raw = yaml.safe_load((run / "config.yaml").read_text())
    raw["log"] |= trackers
    (run / "config.yaml").write_text(yaml.safe_dump(raw))


def test_every_command_has_words() -> None:
    command: Any = typer.main.get_command(app)
    assert {*COMMANDS} == {*command.commands}, "a new command belongs here"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FREQUENT else pytest.mark.slow) for n in COMMANDS])
def test_no_command_sends_a_request(name: str, seen: Network, place: Path) -> None:
    done = segapp(*COMMANDS[name], cwd=place, **seen.env)
    assert seen.take() == []
    assert done.returncode == ENDS.get(name, 0), done.stderr


PYTHON = {
    "child": "import os, sys; os.execl(sys.executable, 'python', '-c', 'import socket; socket.getfqdn(\"192.0.2.1\"); "
    'socket.getaddrinfo("segapp.invalid", 9)\')',
    "GDAL of a name": "import rasterio, pathlib; rasterio.open(pathlib.Path('http:ADDRESS?map.tif'))",
    "PROJ": "from rasterio.crs import CRS; CRS.from_user_input('http://ADDRESS/crs')",
}
"""Programs that send a request, each in another way."""


@pytest.mark.parametrize("name", PYTHON)
def test_requests_are_seen(name: str, seen: Network, tmp_path: Path) -> None:
    code = PYTHON[name].replace("ADDRESS", seen.address)
    environ = {**os.environ, **seen.env}
    subprocess.run([sys.executable, "-c", code], env=environ, cwd=tmp_path, capture_output=True, timeout=60)
    assert seen.take() != []
    subprocess.run([sys.executable, "-c", "import socket; socket.getaddrinfo('localhost', 9)"], env=environ, check=True)
    assert seen.take() == []
